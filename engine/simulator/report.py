"""The results of a replay as plain numbers: for a table, for JSON, for a row of results. Knows no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import EngineConfigError
from engine.scheduling.fair_policy import FairPolicy
from engine.simulator.cache_bounds import cache_bounds
from engine.simulator.models import BLOCK_SIZE
from engine.simulator.recorder import TenantRecord, gap_of_bucket
from engine.simulator.replay import Replay

PERCENTILES = (50, 90, 99)
Outcome = tuple[float, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """When a request counts as good: first token within `ttft_s`, then on average one token per `tpot_s`. None: no
    condition."""

    ttft_s: float | None = 1.0
    tpot_s: float | None = 0.025

    def __post_init__(self) -> None:
        for option in ("ttft_s", "tpot_s"):
            value = getattr(self, option)
            if value is not None and not 0 < value <= 1e6:
                raise EngineConfigError(
                    f"slo_{option.removesuffix('_s')}_ms", f"must be a positive number, not {value * 1e3:g}"
                )

    def is_met(self, outcome: Outcome) -> bool:
        ttft_s, tpot_s = outcome
        if self.ttft_s is not None and ttft_s > self.ttft_s:
            return False
        return self.tpot_s is None or tpot_s is None or tpot_s <= self.tpot_s


def make_report(replay: Replay, objective: Objective) -> dict[str, Any]:
    """The whole report; every duration has its unit in its name, shares are between 0 and 1."""
    recorder, workload = replay.recorder, replay.workload
    tenants = sorted(recorder.tenants.values(), key=lambda tenant: tenant.name)
    report = {
        "trace": workload.name,
        **workload.notes,
        "setup": _setup(replay),
        "load": _load(replay),
        "goodput": _goodput(tenants, objective, workload.duration_s),
        "ttft_ms": _percentiles([ttft_s for tenant in tenants for ttft_s, _ in tenant.outcomes]),
        "tpot_ms": _percentiles([tpot_s for tenant in tenants for _, tpot_s in tenant.outcomes if tpot_s is not None]),
        "gap_ms": _gap_percentiles(tenants),
        "fairness": _fairness(replay, tenants),
        "cache": _cache(replay),
        "kv": _kv(replay),
        "throughput": _throughput(replay),
        "tenants": [_tenant(tenant, objective) for tenant in tenants],
    }
    if workload.victims:
        report["victims"] = _group([tenant for tenant in tenants if tenant.name in workload.victims], objective)
    return report


def _setup(replay: Replay) -> dict[str, Any]:
    setup = replay.setup
    return {
        "model": setup.model.name,
        "gpu": setup.gpu.name,
        "policy": setup.policy,
        "max_num_seqs": setup.seats,
        "token_budget": setup.token_budget or "adaptive",
        "inter_token_target_ms": setup.inter_token_target_s * 1000,
        "quantization": setup.model.quantization,
        "kv_cache_dtype": setup.kv_cache_dtype,
        "kv_blocks": setup.blocks,
        "kv_tokens": setup.blocks * BLOCK_SIZE,
        "host_cache_gib": setup.host_cache_gib,
        "max_model_len": setup.max_model_len,
    }


def _load(replay: Replay) -> dict[str, Any]:
    requests, duration_s = replay.workload.requests, replay.workload.duration_s
    return {
        "requests": len(requests),
        "duration_s": _rounded(duration_s),
        "req_per_s": _rounded(len(requests) / duration_s) if duration_s else None,
        "input_tokens": sum(request.input_tokens for request in requests),
        "output_tokens": sum(request.output_tokens for request in requests),
    }


def _goodput(tenants: Sequence[TenantRecord], objective: Objective, duration_s: float) -> dict[str, Any]:
    num_good = sum(objective.is_met(outcome) for tenant in tenants for outcome in tenant.outcomes)
    num_requests = sum(tenant.num_requests for tenant in tenants)
    return {
        "slo_ttft_ms": None if objective.ttft_s is None else objective.ttft_s * 1000,
        "slo_tpot_ms": None if objective.tpot_s is None else objective.tpot_s * 1000,
        "good_share": _rounded(num_good / num_requests),
        "good_req_per_s": _rounded(num_good / duration_s) if duration_s else None,
        "refused": sum(tenant.num_refused for tenant in tenants),
    }


def _tenant(tenant: TenantRecord, objective: Objective) -> dict[str, Any]:
    return {
        "tenant": tenant.name,
        "weight": tenant.weight,
        "service_s": _rounded(tenant.service_ns / 1e9),
        **_group([tenant], objective),
    }


def _group(tenants: Sequence[TenantRecord], objective: Objective) -> dict[str, Any]:
    outcomes = [outcome for tenant in tenants for outcome in tenant.outcomes]
    num_requests = sum(tenant.num_requests for tenant in tenants)
    return {
        "requests": num_requests,
        "good_share": _rounded(sum(map(objective.is_met, outcomes)) / num_requests) if num_requests else None,
        "ttft_ms": _percentiles([ttft_s for ttft_s, _ in outcomes]),
        "tpot_ms": _percentiles([tpot_s for _, tpot_s in outcomes if tpot_s is not None]),
        "gap_ms": _gap_percentiles(tenants),
    }


def _fairness(replay: Replay, tenants: Sequence[TenantRecord]) -> dict[str, Any]:
    recorder = replay.recorder
    by_time = [jain(window.services_s) for window in recorder.windows]
    by_tokens = [jain(window.services_tokens) for window in recorder.windows]
    return {
        "windows": len(recorder.windows),
        "jain_min": _rounded(min(by_time, default=None)),
        "jain_mean": _rounded(_mean(by_time)),
        "jain_tokens_min": _rounded(min(by_tokens, default=None)),
        "service_gap_max_s": _rounded(recorder.service_gap_ns / 1e9),
        "service_gap_bound_s": _rounded(_service_gap_bound_s(replay)),
        "longest_without_token_s": _rounded(max((tenant.gap_max_s for tenant in tenants), default=0.0)),
    }


def _service_gap_bound_s(replay: Replay) -> float | None:
    """2(U + Q) of docs/fairness.md, with the longest step as the largest service in one step; None for other policies."""
    policy = replay.scheduler.policy
    if not isinstance(policy, FairPolicy):
        return None
    settings, longest_step_ps = policy.settings, replay.recorder.step_max_s * 1e12
    return 2 * (settings.cap_ps + longest_step_ps + policy.recovery_max_ps + settings.quantum_ps) / 1e12


def jain(values: Sequence[float]) -> float:
    """Jain's index: 1 when all are equal, 1/n when one has everything (Jain, Chiu and Hawe, DEC-TR-301, 1984)."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def _cache(replay: Replay) -> dict[str, Any]:
    totals, requests = replay.scheduler.totals, replay.workload.requests
    prompt_tokens = sum(request.input_tokens for request in requests)
    report = {
        "hit_tokens": totals.prefix_cache_hit_tokens,
        "hit_share": _rounded(totals.prefix_cache_hit_tokens / prompt_tokens),
    }
    bounds = cache_bounds(requests, (replay.setup.blocks + replay.setup.num_host_blocks) * BLOCK_SIZE)
    if bounds is None:
        return report
    return report | {
        "lru_share": _rounded(bounds.lru_tokens / prompt_tokens),
        "clairvoyant_share": _rounded(bounds.clairvoyant_tokens / prompt_tokens),
        "unbounded_share": _rounded(bounds.unbounded_tokens / prompt_tokens),
        "of_lru": _ratio(totals.prefix_cache_hit_tokens, bounds.lru_tokens),
        "of_clairvoyant": _ratio(totals.prefix_cache_hit_tokens, bounds.clairvoyant_tokens),
    }


def _kv(replay: Replay) -> dict[str, Any]:
    recorder, blocks, totals = replay.recorder, replay.setup.blocks, replay.scheduler.totals
    return {
        "used_mean": _ratio(recorder.kv_block_seconds, recorder.busy_s * blocks),
        "used_max": _rounded(recorder.kv_blocks_max / blocks),
        "waste": _ratio(recorder.wasted_slots, recorder.sampled_slots) or 0.0,
        "preemptions": totals.preemptions,
        "recomputed_tokens": totals.recomputed_tokens,
        "swapped_in_blocks": replay.scheduler.kv.num_swapped_in,
        "swapped_out_blocks": replay.scheduler.kv.num_swapped_out,
    }


def _throughput(replay: Replay) -> dict[str, Any]:
    recorder, totals, end_s = replay.recorder, replay.scheduler.totals, replay.clock.now_s
    return {
        "makespan_s": _rounded(end_s),
        "busy_share": _ratio(recorder.busy_s, end_s),
        "output_tokens_per_s": _rounded(totals.generation_tokens / end_s),
        "total_tokens_per_s": _rounded((totals.prompt_tokens + totals.generation_tokens) / end_s),
        "steps": recorder.num_steps,
        "step_ms": _histogram_percentiles(recorder.steps_s, recorder.step_max_s),
        "tokens_per_step": _ratio(recorder.num_tokens, recorder.num_steps),
        "running_mean": _ratio(recorder.running_seconds, recorder.busy_s),
        "running_max": recorder.running_max,
    }


def _percentiles(values_s: list[float]) -> dict[str, float | None]:
    """In milliseconds, by nearest rank."""
    ordered = sorted(values_s)
    percentiles: dict[str, float | None] = {"mean": _milliseconds(_mean(ordered))}
    for percent in PERCENTILES:
        percentiles[f"p{percent}"] = _milliseconds(ordered[-(-len(ordered) * percent // 100) - 1]) if ordered else None
    percentiles["max"] = _milliseconds(ordered[-1]) if ordered else None
    return percentiles


def _gap_percentiles(tenants: Sequence[TenantRecord]) -> dict[str, float | None]:
    counts: Counter[int] = Counter()
    for tenant in tenants:
        counts.update(tenant.gaps)
    return _histogram_percentiles(counts, max((tenant.gap_max_s for tenant in tenants), default=0.0))


def _histogram_percentiles(counts: Mapping[int, int], max_s: float) -> dict[str, float | None]:
    """Upper edges of the buckets of the percentiles: at most one per cent too high, and never above `max_s`."""
    total, named = sum(counts.values()), dict[str, float | None]()
    for percent in PERCENTILES:
        rank, cumulative, reached = -(-total * percent // 100), 0, 0
        for bucket in sorted(counts):
            reached, cumulative = bucket, cumulative + counts[bucket]
            if cumulative >= rank:
                break
        named[f"p{percent}"] = _milliseconds(min(gap_of_bucket(reached), max_s)) if total else None
    return {**named, "max": _milliseconds(max_s)}


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _milliseconds(value_s: float | None) -> float | None:
    return _rounded(None if value_s is None else value_s * 1000)


def _ratio(part: float, whole: float) -> float | None:
    return _rounded(part / whole) if whole else None


def _rounded(value: float | None) -> float | None:
    """Five significant digits: more would suggest a precision that a model of time does not have."""
    return None if value is None else float(f"{value:.5g}")


def flatten(report: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The report's figures by dotted name, without the rows of individual tenants."""
    figures: dict[str, Any] = {}
    for name, value in report.items():
        if isinstance(value, Mapping):
            figures |= flatten(value, f"{prefix}{name}.")
        elif not isinstance(value, list):
            figures[prefix + name] = value
    return figures
