"""The report of a simulation: hand-computed figures of small cases, and bounds on cache hits."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from engine.errors import EngineConfigError
from engine.simulator.cache_bounds import cache_bounds
from engine.simulator.models import find_gpu, find_model
from engine.simulator.recorder import NUM_GAP_BUCKETS, Recorder, gap_bucket, gap_of_bucket
from engine.simulator.replay import Replay, Setup
from engine.simulator.report import Objective, flatten, jain, make_report
from engine.simulator.trace import HASH_BLOCK_TOKENS, TracedRequest
from engine.simulator.workload import Workload


def requests_with_blocks(*chains: tuple[int, ...], tenant: str = "alice") -> list[TracedRequest]:
    return [TracedRequest(float(i), tenant, HASH_BLOCK_TOKENS * len(chain), 1, chain) for i, chain in enumerate(chains)]


def report_of(requests: list[TracedRequest], **options: Any) -> dict[str, Any]:
    replay = Replay(Setup(model=find_model("llama-3.1-8b"), gpu=find_gpu("h200"), **options), Workload("made", requests))
    replay.run()
    return make_report(replay, Objective())


@pytest.mark.parametrize(
    ("outcome", "is_met"),
    [((1.0, 0.025), True), ((1.001, 0.025), False), ((1.0, 0.0251), False), ((0.1, None), True), ((2.0, None), False)],
)
def test_a_request_is_good_if_it_meets_both_targets(outcome: tuple[float, float | None], is_met: bool) -> None:
    assert Objective(ttft_s=1.0, tpot_s=0.025).is_met(outcome) is is_met


def test_a_target_may_be_omitted() -> None:
    assert Objective(ttft_s=None, tpot_s=0.1).is_met((100.0, 0.1))
    assert Objective(ttft_s=1.0, tpot_s=None).is_met((1.0, 100.0))


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_an_invalid_target_is_named(value: float) -> None:
    with pytest.raises(EngineConfigError) as caught:
        Objective(ttft_s=value)
    assert caught.value.option == "slo_ttft_ms"


def test_jains_index_is_one_for_equal_shares_and_one_nth_for_a_single_one() -> None:
    assert jain([3.0, 3.0, 3.0]) == 1.0
    assert jain([5.0, 0.0, 0.0, 0.0]) == 0.25
    assert jain([0.0, 0.0]) == 1.0


@pytest.mark.parametrize("gap_s", [0.00001, 0.0001, 0.0049, 0.025, 1.0, 99.0])
def test_the_upper_edge_of_a_gap_bucket_exceeds_the_gap_by_at_most_one_per_cent(gap_s: float) -> None:
    edge_s = gap_of_bucket(gap_bucket(gap_s))
    assert max(gap_s, 1e-4) <= edge_s * (1 + 1e-9)
    assert edge_s <= max(gap_s, 1e-4) * 1.0101


def test_gaps_beyond_the_last_bucket_are_counted_in_it() -> None:
    assert gap_bucket(1e6) == NUM_GAP_BUCKETS - 1


def test_fairness_windows_contain_tenants_with_a_backlog_throughout() -> None:
    recorder = Recorder()
    always, other, short = (recorder.tenant(name, weight) for name, weight in (("always", 1), ("other", 2), ("short", 1)))
    for tenant in (always, other):
        tenant.queue(0.0)
    short.queue(4.0)
    always.service_ns, other.service_ns, short.service_ns = 1e9, 4e9, 9e9
    recorder.advance_to(10.0)
    assert recorder.windows[0].services_s == [1.0, 2.0]


def test_the_service_gap_starts_at_zero_with_a_new_backlog() -> None:
    recorder = Recorder()
    one, other = recorder.tenant("one", 1), recorder.tenant("other", 1)
    one.queue(0.0)
    other.queue(0.0)
    recorder.advance_to(1.0)
    one.service_ns = 3e9
    recorder.advance_to(2.0)
    assert recorder.service_gap_ns == 3e9
    other.unqueue()
    recorder.advance_to(3.0)
    one.service_ns = 50e9
    other.queue(4.0)
    recorder.advance_to(5.0)
    recorder.advance_to(6.0)
    assert recorder.service_gap_ns == 3e9


def test_the_clairvoyant_bound_keeps_blocks_that_lru_evicts() -> None:
    requests = requests_with_blocks((1,), (2,), (3,), (1,), (4,), (5,), (1,))
    bounds = cache_bounds(requests, 2 * HASH_BLOCK_TOKENS)
    assert bounds is not None
    assert bounds.lru_tokens == 0
    assert bounds.clairvoyant_tokens == bounds.unbounded_tokens == 2 * (HASH_BLOCK_TOKENS - 1)


def test_the_lru_bound_evicts_a_chain_from_its_end() -> None:
    bounds = cache_bounds(requests_with_blocks((1, 2, 3), (7,), (1, 2, 3)), 3 * HASH_BLOCK_TOKENS)
    assert bounds is not None
    assert bounds.lru_tokens == 2 * HASH_BLOCK_TOKENS


def test_cache_bounds_do_not_share_between_tenants() -> None:
    requests = requests_with_blocks((1,)) + requests_with_blocks((1,), tenant="bob")
    bounds = cache_bounds(requests, 10 * HASH_BLOCK_TOKENS)
    assert bounds is not None
    assert bounds.unbounded_tokens == 0


def test_requests_without_block_ids_have_no_cache_bounds() -> None:
    assert cache_bounds([TracedRequest(0.0, "alice", 10, 1)], 10_000) is None


def test_the_report_is_json_with_all_parts() -> None:
    report = report_of(requests_with_blocks((1, 2), (1, 3)))
    assert json.loads(json.dumps(report)) == report
    assert {"setup", "load", "goodput", "ttft_ms", "tpot_ms", "gap_ms", "fairness", "cache", "kv", "throughput"} <= set(report)
    assert report["cache"]["of_clairvoyant"] == 1.0
    assert report["tpot_ms"]["p99"] is None
    assert flatten(report)["setup.policy"] == "fair"


@pytest.mark.parametrize("prompt_tokens", range(512, 4608, 512))
def test_percentiles_do_not_exceed_the_maximum(prompt_tokens: int) -> None:
    report = report_of([TracedRequest(0.0, "alice", prompt_tokens, 20)])
    for figures in (report["gap_ms"], report["tenants"][0]["gap_ms"], report["throughput"]["step_ms"]):
        assert 0 < figures["p50"] <= figures["p90"] <= figures["p99"] <= figures["max"]


def test_only_the_fair_policy_has_a_bound_on_the_service_gap() -> None:
    assert report_of(requests_with_blocks((1,)))["fairness"]["service_gap_bound_s"] > 0
    assert report_of(requests_with_blocks((1,)), policy="vtc")["fairness"]["service_gap_bound_s"] is None


def test_little_cache_is_wasted_when_all_seats_are_taken() -> None:
    requests = [TracedRequest(0.0, "alice", 400 + i, 500) for i in range(256)]
    report = report_of(requests)
    assert report["throughput"]["running_max"] == 256
    assert report["kv"]["waste"] < 0.04
