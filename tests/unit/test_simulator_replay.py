"""Replays of the scheduler under a virtual clock, compared with hand-computed results, and unusual traffic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from engine.errors import EngineConfigError
from engine.simulator.models import find_gpu, find_model
from engine.simulator.replay import POLICIES, Replay, Setup
from engine.simulator.report import Objective, make_report
from engine.simulator.trace import TracedRequest
from engine.simulator.workload import Workload

LLAMA, H200 = find_model("llama-3.1-8b"), find_gpu("h200")


def run_replay(requests: Sequence[TracedRequest], **options: Any) -> Replay:
    setup = Setup(model=LLAMA, gpu=H200, **options)
    replay = Replay(setup, Workload("made", sorted(requests, key=lambda request: request.arrival_s)))
    replay.run()
    replay.scheduler.check_invariants()
    return replay


def report_of(requests: Sequence[TracedRequest], **options: Any) -> dict[str, Any]:
    return make_report(run_replay(requests, **options), Objective())


def chat_request(arrival_s: float, *, tenant: str = "alice", prompt: int = 100, answer: int = 20) -> TracedRequest:
    return TracedRequest(arrival_s, tenant, prompt, answer)


def test_a_single_request_takes_the_time_of_the_step_model() -> None:
    replay = run_replay([chat_request(5.0, prompt=1000, answer=11)], token_budget=8192)
    model = replay.setup.step_time()
    prefill_s = model.step_s(num_tokens=1000, num_rows=1, context_tokens=0, attention_pairs=500_000)
    decodes_s = [model.step_s(num_tokens=1, num_rows=1, context_tokens=1000 + i, attention_pairs=0) for i in range(10)]
    [(ttft_s, tpot_s)] = replay.recorder.tenants["alice"].outcomes
    assert ttft_s == pytest.approx(prefill_s)
    assert tpot_s == pytest.approx(sum(decodes_s) / 10)
    assert replay.clock.now_s == pytest.approx(5.0 + prefill_s + sum(decodes_s))


def test_every_token_of_a_trace_is_computed_once() -> None:
    requests = [chat_request(i / 50, tenant=f"tenant-{i % 3}", prompt=10 + 37 * i, answer=1 + i) for i in range(60)]
    replay = run_replay(requests)
    totals = replay.scheduler.totals
    assert totals.generation_tokens == sum(request.output_tokens for request in requests)
    assert totals.prompt_tokens == sum(request.input_tokens for request in requests)
    assert totals.prefix_cache_hit_tokens == 0
    assert sum(len(tenant.outcomes) for tenant in replay.recorder.tenants.values()) == 60


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("token_budget", [None, 512])
def test_every_policy_serves_all_requests(policy: str, token_budget: int | None) -> None:
    requests = [
        chat_request(i / 100, tenant=f"tenant-{i % 5}", prompt=1 + 211 * (i % 9), answer=1 + i % 40) for i in range(150)
    ]
    report = report_of(requests, policy=policy, token_budget=token_budget, max_num_seqs=32)
    assert sum(tenant["requests"] for tenant in report["tenants"]) == 150
    assert report["ttft_ms"]["max"] is not None
    assert report["throughput"]["running_max"] <= 32


def test_vtc_serves_more_tenants_than_it_scans_per_step() -> None:
    requests = [chat_request(i / 1000, tenant=f"tenant-{i % 40}", prompt=3000, answer=1 + i % 7) for i in range(400)]
    assert report_of(requests, policy="vtc")["throughput"]["running_max"] > 1


def test_a_static_batch_starts_when_the_previous_one_has_ended() -> None:
    replay = run_replay([chat_request(0.0, answer=100), chat_request(0.01, answer=5)], policy="static")
    first, second = replay.recorder.tenants["alice"].outcomes
    assert second[0] > 99 * 0.004
    assert first[0] < 0.02


def test_a_static_budget_bounds_the_tokens_of_a_step() -> None:
    report = report_of([chat_request(0.0, prompt=10_000, answer=2)], token_budget=500)
    assert report["throughput"]["steps"] == 21


def test_steps_beside_decodes_stay_within_the_inter_token_target() -> None:
    requests = [chat_request(i * 0.02, prompt=3000, answer=60) for i in range(40)]
    report = report_of(requests, inter_token_target_s=0.02)
    assert report["gap_ms"]["max"] <= 20.001
    assert report["throughput"]["step_ms"]["max"] <= 24.001


def test_equal_seeds_give_equal_reports() -> None:
    requests = [chat_request(i / 40, tenant=f"tenant-{i % 4}", prompt=500 + i, answer=30) for i in range(80)]
    assert report_of(requests) == report_of(requests)


def test_equal_prefixes_of_any_length_are_cached() -> None:
    def turn(arrival_s: float, *ids: int, last: int = 512) -> TracedRequest:
        return TracedRequest(arrival_s, "alice", 512 * (len(ids) - 1) + last, 4, ids)

    replay = run_replay([turn(0, 1, 2), turn(10, 1, 2), turn(20, 1, 2, 3, last=16), turn(30, 1, 9), turn(40, 7)])
    assert replay.scheduler.totals.prefix_cache_hit_tokens == (1024 - 16) + 1024 + 512


def test_the_cache_is_not_shared_between_tenants() -> None:
    replay = run_replay([TracedRequest(i * 10.0, tenant, 512, 2, (1,)) for i, tenant in enumerate(("alice", "bob"))])
    assert replay.scheduler.totals.prefix_cache_hit_tokens == 0


def test_a_prompt_beyond_the_context_is_refused_and_counted() -> None:
    report = report_of([chat_request(0.0), chat_request(0.0, prompt=LLAMA.config.max_position_len)])
    assert report["goodput"]["refused"] == 1
    assert report["goodput"]["good_share"] == 0.5


def test_an_answer_ends_at_the_context_length() -> None:
    replay = run_replay([chat_request(0.0, prompt=LLAMA.config.max_position_len - 3, answer=50)])
    assert replay.scheduler.totals.generation_tokens == 3


def test_requests_that_arrive_at_once_have_no_rate_and_fill_the_batch() -> None:
    report = report_of([chat_request(0.0, tenant=f"tenant-{i % 7}", prompt=50, answer=60) for i in range(600)])
    assert report["load"]["req_per_s"] is None
    assert report["throughput"]["running_max"] == 256


def test_a_thousand_tenants_are_all_reported() -> None:
    report = report_of([chat_request(i / 500, tenant=f"tenant-{i}", prompt=64, answer=3) for i in range(1000)])
    assert len(report["tenants"]) == 1000


def test_concurrency_is_limited_by_the_inter_token_target() -> None:
    requests = [chat_request(i * 0.05, tenant=f"tenant-{i % 3}", prompt=6000, answer=150) for i in range(150)]
    report = report_of(requests, inter_token_target_s=0.015)
    assert report["gap_ms"]["p99"] <= 15.2
    assert report["throughput"]["running_max"] < 120
    assert report_of(requests, token_budget=8192)["throughput"]["running_max"] > 130


def test_a_giant_prompt_does_not_delay_the_tokens_of_others() -> None:
    requests = [chat_request(0.0, tenant="giant", prompt=120_000, answer=5)]
    requests += [chat_request(i * 0.1, prompt=80, answer=60) for i in range(100)]
    report = report_of(requests)
    alice = next(tenant for tenant in report["tenants"] if tenant["tenant"] == "alice")
    assert alice["gap_ms"]["max"] <= 25.001
    assert alice["ttft_ms"]["p99"] < 200


def test_requests_beyond_the_cache_are_preempted_and_finish() -> None:
    requests = [chat_request(i * 0.01, prompt=900, answer=900) for i in range(24)]
    replay = run_replay(requests, num_kv_blocks=512, max_tokens=1000)
    assert replay.scheduler.totals.generation_tokens == 24 * 900
    assert replay.recorder.kv_blocks_max <= 512


def test_the_host_tier_finds_evicted_prefixes() -> None:
    requests = [TracedRequest(i * 2.0, "alice", 4096, 2, tuple(range(8 * (i % 4), 8 * (i % 4) + 8))) for i in range(8)]
    without = run_replay(requests, num_kv_blocks=600, max_tokens=64)
    beside = run_replay(requests, num_kv_blocks=600, max_tokens=64, host_cache_gib=8)
    assert without.scheduler.totals.prefix_cache_hit_tokens == 0
    assert beside.scheduler.totals.prefix_cache_hit_tokens >= 3 * 4000
    assert beside.clock.now_s < without.clock.now_s


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"policy": "best"}, "policy"),
        ({"kv_cache_dtype": "int1"}, "kv_cache_dtype"),
        ({"token_budget": 0}, "token_budget"),
        ({"token_budget": 100, "max_num_seqs": 101}, "token_budget"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"host_cache_gib": -1}, "host_cache_gib"),
        ({"inter_token_target_s": 0}, "slo_tpot_ms"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_an_invalid_setting_is_named(options: dict[str, Any], name: str) -> None:
    with pytest.raises(EngineConfigError) as caught:
        run_replay([chat_request(0.0)], **options)
    assert caught.value.option == name
