"""What the overview shows: the latest sample, derived values, today's totals, the latest requests. Knows no page and no markup.

It is built once per sample for all viewers; the ledger is queried every few seconds, not for every sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import TYPE_CHECKING

from appliance.console.charts import Segment, stack
from appliance.console.formatting import duration_s, size
from appliance.console.request_lines import RequestLine, past_line
from appliance.console.tenant_names import tenant_names
from appliance.console.totals import UsageTotals, totals_today
from appliance.telemetry.gpu import NO_GPU, GpuReading
from appliance.tenancy.access import WHOLE_APPLIANCE

if TYPE_CHECKING:
    from appliance.serving.services import Services
    from appliance.telemetry.readings import EngineReading, SystemSnapshot, TenantReading
    from engine.protocol import EngineStatus, MemoryPart

LEDGER_REFRESH_S = 4.0
RECENT_ROWS = 8
TENANT_ROWS = 6
_MEMORY_LABELS = {
    "weights": "Weights",
    "activations": "Activations",
    "graphs": "Graphs",
    "slots": "Slots",
    "rotary_tables": "Rotary tables",
    "device_context": "Device context",
    "kv_cache": "KV cache",
    "other_models": "Other models",
}
_SILENT = "not ready"
_TONES = {"ready": "ok", _SILENT: "warn", "loading": "warn", "restarting": "warn", "failed": "bad", "stopped": "bad"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantsView:
    """Tenants with running or waiting requests on an engine: the largest as rows, the others added up."""

    rows: list[TenantReading]
    num_running: int
    num_waiting: int
    more: int
    more_running: int
    more_waiting: int
    more_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineView:
    """The card of one engine: its reading and derived values. Histories hold one value per sample, oldest first.

    `draft_rate` is the share of draft tokens that were accepted. `memory` lists the parts of non-zero size with their labels.
    """

    reading: EngineReading
    state: str
    tone: str
    reason: str | None
    details: list[str]
    tokens_in_per_s: float
    out_history: list[float]
    in_history: list[float]
    step_s: float | None
    hit_rate: float | None
    draft_rate: float | None
    plain_steps: dict[str, int]
    memory: list[tuple[str, MemoryPart]]
    tenants: TenantsView


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuView:
    """The card of one GPU; its memory is broken down as far as the engines report their shares."""

    reading: GpuReading
    segments: list[Segment]
    legend: list[tuple[str, str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class OverviewView:
    """Everything on the overview at one time: the snapshot, derived values, and figures from the ledger."""

    snapshot: SystemSnapshot
    tokens_in_per_s: float
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    today: UsageTotals
    engines: list[EngineView]
    gpus: list[GpuView]
    gpu_absent: bool
    engine_device: str | None
    recent: list[RequestLine]


class LatestOverview:
    """Builds the view of the newest sample and caches it, so that a hundred viewers cost as much as one."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._view: OverviewView | None = None
        self._totals = UsageTotals()
        self._recent: list[RequestLine] = []
        self._read_at_s: float | None = None

    async def view(self) -> OverviewView:
        """Return the view of the newest sample."""
        snapshot = self._services.sampler.latest
        if self._view is None or self._view.snapshot.at != snapshot.at:
            await self._refresh()
            self._view = overview_view(snapshot, list(self._services.sampler.history), self._totals, self._recent)
        return self._view

    async def _refresh(self) -> None:
        now_s = self._services.clock.monotonic_s()
        if self._read_at_s is not None and now_s - self._read_at_s < LEDGER_REFRESH_S:
            return
        self._read_at_s = now_s
        self._totals = await totals_today(self._services, access=WHOLE_APPLIANCE)
        page = await self._services.past_requests.page(RECENT_ROWS, access=WHOLE_APPLIANCE)
        names = await tenant_names(self._services, WHOLE_APPLIANCE)
        self._recent = [past_line(row, names) for row in page.data]


def overview_view(
    snapshot: SystemSnapshot, history: Sequence[SystemSnapshot], today: UsageTotals, recent: list[RequestLine]
) -> OverviewView:
    """Return the view of `snapshot`; `history` holds the samples up to and including it, oldest first."""
    engines = [engine_view(engine, history, snapshot.at) for engine in snapshot.engines]
    devices = {engine.info.device_name for engine in snapshot.engines if engine.info is not None}
    return OverviewView(
        snapshot=snapshot,
        tokens_in_per_s=sum(engine.tokens_in_per_s for engine in engines),
        ttft_p50_s=_max_or_none([engine.ttft_p50_s for engine in snapshot.engines]),
        ttft_p95_s=_max_or_none([engine.ttft_p95_s for engine in snapshot.engines]),
        today=today,
        engines=engines,
        gpus=[gpu_view(gpu, snapshot) for gpu in snapshot.gpus],
        gpu_absent=snapshot.gpu_error in (None, NO_GPU),
        engine_device=devices.pop() if len(devices) == 1 else None,
        recent=recent,
    )


def _max_or_none(values: Sequence[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def engine_view(engine: EngineReading, history: Sequence[SystemSnapshot], now: datetime) -> EngineView:
    """Return the card of one engine."""
    status, prompt_rates = engine.status_or_zeros, prompt_history(engine.model, history)
    state = _SILENT if engine.state == "ready" and engine.problem is not None else engine.state
    return EngineView(
        reading=engine,
        state=state,
        tone=_TONES.get(state, ""),
        reason=_reason(engine),
        details=_details(engine, now),
        tokens_in_per_s=prompt_rates[-1] if prompt_rates else 0.0,
        out_history=[reading.tokens_per_second for snapshot in history for reading in _readings_of(engine.model, snapshot)],
        in_history=prompt_rates,
        step_s=None if engine.status is None else status.step_ms / 1000,
        hit_rate=_hit_rate(status),
        draft_rate=_draft_rate(status),
        plain_steps={reason: steps for reason, steps in status.plain_steps_total.items() if steps},
        memory=[] if engine.info is None else _labelled_parts(engine.info.memory),
        tenants=tenants_view(engine.tenants),
    )


def _labelled_parts(parts: Sequence[MemoryPart]) -> list[tuple[str, MemoryPart]]:
    """Return the parts of non-zero size with their labels, in the order reported by the engine."""
    non_empty = [part for part in parts if part.predicted_bytes or part.measured_bytes]
    return [(_MEMORY_LABELS.get(part.name, part.name), part) for part in non_empty]


def _hit_rate(status: EngineStatus) -> float | None:
    if not status.prompt_tokens_total:
        return None
    return min(status.prefix_cache_hit_tokens_total / status.prompt_tokens_total, 1.0)


def _draft_rate(status: EngineStatus) -> float | None:
    if not status.draft_tokens_total:
        return None
    return status.accepted_draft_tokens_total / status.draft_tokens_total


def tenants_view(tenants: Sequence[TenantReading]) -> TenantsView:
    """Return the first tenants, which hold most blocks, as rows, and the sum of the others."""
    rows, others = list(tenants[:TENANT_ROWS]), tenants[TENANT_ROWS:]
    return TenantsView(
        rows=rows,
        num_running=sum(tenant.requests_running for tenant in tenants),
        num_waiting=sum(tenant.requests_waiting for tenant in tenants),
        more=len(others),
        more_running=sum(tenant.requests_running for tenant in others),
        more_waiting=sum(tenant.requests_waiting for tenant in others),
        more_blocks=sum(tenant.kv_blocks for tenant in others),
    )


def _readings_of(model: str, snapshot: SystemSnapshot) -> list[EngineReading]:
    return [engine for engine in snapshot.engines if engine.model == model]


def prompt_history(model: str, history: Sequence[SystemSnapshot]) -> list[float]:
    """Return prompt tokens per second between consecutive samples, without probes. A restarted engine, whose totals start from
    zero, counts as idle."""
    counts = [
        (snapshot.at, reading.status.prompt_tokens_total - reading.probe_prompt_tokens)
        for snapshot in history
        for reading in _readings_of(model, snapshot)
        if reading.status is not None
    ]
    rates = []
    for (before_at, before), (after_at, after) in pairwise(counts):
        elapsed_s = (after_at - before_at).total_seconds()
        rates.append(max(after - before, 0) / elapsed_s if elapsed_s > 0 else 0.0)
    return rates


def _reason(engine: EngineReading) -> str | None:
    if engine.state == "loading" and engine.load_fraction is not None:
        return f"Loading the model, {engine.load_fraction:.0%}."
    return engine.problem if engine.state == "ready" else engine.error


def _details(engine: EngineReading, now: datetime) -> list[str]:
    details = []
    if engine.info is not None:
        info = engine.info
        details += [info.device_name, f"{info.num_parameters / 1e6:,.1f} M parameters", info.dtype]
        quantised = f" in {info.quantization}".removeprefix(" in none")
        rounded = f" in {info.kv_cache_dtype}" if info.kv_cache_dtype.startswith("fp8") else ""
        details += [f"weights {size(info.weights_bytes)}{quantised}", f"KV {size(info.kv_bytes)}{rounded}"]
        details += [f"context {info.max_model_len:,} tokens"]
    if engine.default_max_tokens is not None:
        details.append(f"max_tokens {engine.default_max_tokens:,} by default")
    if engine.started_at is not None:
        age = duration_s(max(int((now - engine.started_at).total_seconds()), 1))
        details.append(f"up {age}" if engine.state == "ready" else f"started {age} ago")
    details.append(f"{engine.restarts} {'restart' if engine.restarts == 1 else 'restarts'}")
    return details


def gpu_view(gpu: GpuReading, snapshot: SystemSnapshot) -> GpuView:
    """Return the card of one GPU. With several GPUs the engines' shares are unknown, so only the used memory is shown."""
    parts = _memory_parts(gpu, snapshot)
    return GpuView(
        reading=gpu,
        segments=stack(parts, gpu.memory_total_bytes),
        legend=[
            *((name, label, size(amount)) for name, label, amount in parts),
            ("track", "free", size(gpu.memory_total_bytes - gpu.memory_used_bytes)),
        ],
    )


def _memory_parts(gpu: GpuReading, snapshot: SystemSnapshot) -> list[tuple[str, str, int]]:
    infos = [engine.info for engine in snapshot.engines if engine.info is not None and engine.info.device.startswith("cuda")]
    if len(snapshot.gpus) != 1 or not infos:
        return [("used", "used", gpu.memory_used_bytes)]
    weights, kv = sum(info.weights_bytes for info in infos), sum(info.kv_bytes for info in infos)
    other = max(gpu.memory_used_bytes - weights - kv, 0)
    return [("weights", "weights", weights), ("kv", "KV", kv), ("other", "other", other)]
