"""Fairness bounds on short traffic of the kinds that would break them: floods, long answers, too little memory."""

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
SILENCE_MAX_S = 5.0


def report_of(requests: Sequence[TracedRequest], **options: Any) -> dict[str, Any]:
    replay = Replay(
        Setup(model=LLAMA, gpu=H200, **options), Workload("made", sorted(requests, key=lambda request: request.arrival_s))
    )
    replay.run()
    replay.scheduler.check_invariants()
    return make_report(replay, Objective())


def traffic(tenant: str, count: int, *, until_s: float, prompt: int, answer: int, from_s: float = 0.0) -> list[TracedRequest]:
    numbers = random.Random(tenant)
    lengths = [(numbers.randint(prompt // 2, 2 * prompt), numbers.randint(answer // 2, 2 * answer)) for _ in range(count)]
    times = sorted(numbers.uniform(from_s, until_s) for _ in range(count))
    return [TracedRequest(time_s, tenant, *length) for time_s, length in zip(times, lengths, strict=True)]


def check_bars(report: dict[str, Any]) -> None:
    fairness = report["fairness"]
    assert fairness["windows"]
    assert fairness["jain_min"] >= JAIN_MIN
    assert fairness["service_gap_max_s"] <= fairness["service_gap_bound_s"]
    assert fairness["longest_without_token_s"] <= SILENCE_MAX_S


def test_tenants_that_flood_the_engine_get_equal_shares() -> None:
    requests = traffic("many small", 1200, until_s=20, prompt=200, answer=40)
    requests += traffic("few large", 150, until_s=20, prompt=4000, answer=100)
    requests += traffic("long answers", 150, until_s=20, prompt=100, answer=600)
    check_bars(report_of(requests))


def test_a_tenant_of_long_answers_is_slowed_and_not_silenced_when_others_come() -> None:
    requests = traffic("hog", 250, until_s=6, prompt=100, answer=1500)
    for number in range(4):
        requests += traffic(f"tenant-{number}", 30, from_s=5, until_s=16, prompt=2500, answer=300)
    report = report_of(requests)
    assert report["kv"]["preemptions"] > 0
    check_bars(report)


def test_victims_of_a_noisy_neighbour_hardly_notice_it() -> None:
    workload = make_scenario("noisy-prefill", seed=2)
    requests = [request for request in workload.requests if request.arrival_s < 15]
    beside = report_of(requests)
    victims = [tenant for tenant in beside["tenants"] if tenant["tenant"] in workload.victims]
    assert max(tenant["ttft_ms"]["p90"] for tenant in victims) < 500
    assert max(tenant["gap_ms"]["p99"] for tenant in victims) <= 35
    assert beside["fairness"]["longest_without_token_s"] <= SILENCE_MAX_S


def test_fairness_costs_little_throughput() -> None:
    requests = traffic("hog", 200, until_s=2, prompt=600, answer=300) + traffic("other", 60, until_s=8, prompt=600, answer=100)
    fair, fcfs = (report_of(requests, policy=policy)["throughput"]["makespan_s"] for policy in ("fair", "fcfs"))
    assert fair <= 1.03 * fcfs
