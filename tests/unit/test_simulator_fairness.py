"""Fairness bounds in simulations of short adversarial traffic: floods, long answers, little memory."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from engine.simulator.models import find_gpu, find_model
from engine.simulator.replay import Replay, Setup
from engine.simulator.report import Objective, make_report
from engine.simulator.trace import TracedRequest
from engine.simulator.workload import Workload, make_scenario

LLAMA, H200 = find_model("llama-3.1-8b"), find_gpu("h200")
JAIN_MIN = 0.95
WITHOUT_TOKEN_MAX_S = 5.0


def simulated_report(requests: Sequence[TracedRequest], **options: Any) -> dict[str, Any]:
    replay = Replay(
        Setup(model=LLAMA, gpu=H200, **options), Workload("made", sorted(requests, key=lambda request: request.arrival_s))
    )
    replay.run()
    replay.scheduler.check_invariants()
    return make_report(replay, Objective())


def make_traffic(
    tenant: str, count: int, *, until_s: float, prompt: int, answer: int, from_s: float = 0.0
) -> list[TracedRequest]:
    rng = random.Random(tenant)
    lengths = [(rng.randint(prompt // 2, 2 * prompt), rng.randint(answer // 2, 2 * answer)) for _ in range(count)]
    times = sorted(rng.uniform(from_s, until_s) for _ in range(count))
    return [TracedRequest(time_s, tenant, *length) for time_s, length in zip(times, lengths, strict=True)]


def assert_fairness_bounds(report: dict[str, Any]) -> None:
    fairness = report["fairness"]
    assert fairness["windows"]
    assert fairness["jain_min"] >= JAIN_MIN
    assert fairness["service_gap_max_s"] <= fairness["service_gap_bound_s"]
    assert fairness["longest_without_token_s"] <= WITHOUT_TOKEN_MAX_S


def test_tenants_with_a_backlog_of_different_requests_get_equal_service() -> None:
    requests = make_traffic("many small", 1200, until_s=20, prompt=200, answer=40)
    requests += make_traffic("few large", 150, until_s=20, prompt=4000, answer=100)
    requests += make_traffic("long answers", 150, until_s=20, prompt=100, answer=600)
    assert_fairness_bounds(simulated_report(requests))


def test_a_tenant_with_long_answers_keeps_receiving_tokens_when_others_arrive() -> None:
    requests = make_traffic("hog", 250, until_s=6, prompt=100, answer=1500)
    for number in range(4):
        requests += make_traffic(f"tenant-{number}", 30, from_s=5, until_s=16, prompt=2500, answer=300)
    report = simulated_report(requests)
    assert report["kv"]["preemptions"] > 0
    assert_fairness_bounds(report)


def test_tenants_beside_a_noisy_neighbour_keep_low_latencies() -> None:
    workload = make_scenario("noisy-prefill", seed=2)
    requests = [request for request in workload.requests if request.arrival_s < 15]
    beside = simulated_report(requests)
    victims = [tenant for tenant in beside["tenants"] if tenant["tenant"] in workload.victims]
    assert max(tenant["ttft_ms"]["p90"] for tenant in victims) < 500
    assert max(tenant["gap_ms"]["p99"] for tenant in victims) <= 35
    assert beside["fairness"]["longest_without_token_s"] <= WITHOUT_TOKEN_MAX_S


def test_the_fair_policy_costs_little_throughput() -> None:
    requests = make_traffic("hog", 200, until_s=2, prompt=600, answer=300) + make_traffic(
        "other", 60, until_s=8, prompt=600, answer=100
    )
    fair, fcfs = (simulated_report(requests, policy=policy)["throughput"]["makespan_s"] for policy in ("fair", "fcfs"))
    assert fair <= 1.03 * fcfs
