"""The idle share of a GPU, from traces and steps with known results; faulty measurements never pass."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from bench.gpu import traffic
from bench.gpu.idle import WORK, Idle, StepSpan, TracedSteps, growth_s, idle_from_trace
from bench.gpu.step_parts import REST, WAIT, step_parts
from bench.host_step import make_engine, submit
from engine.runner.token_return import CudaFetch
from engine.scheduling.scheduler import Scheduler

GRAPH = [(0.0, 40.0), (45.0, 30.0), (77.0, 20.0)]
"""Begin and duration of three kernels of a step of 100 µs in turn, 10 of which nothing runs."""


def trace(kernels: list[tuple[float, float]], num_steps: int, step_us: float = 100.0) -> Idle:
    events: list[dict[str, Any]] = [
        {"ts": step * step_us + begin, "dur": taken, "cat": "kernel", "name": "k"}
        for step in range(num_steps)
        for begin, taken in kernels
    ]
    return idle_from_trace(events, WORK)


def traced(**changed: Any) -> TracedSteps:
    found = TracedSteps(trace(GRAPH, 16), 16, served_s=95e-6, in_turn_s=100e-6, waits=0.0)
    return replace(found, **changed)


def test_the_idle_time_of_a_step_is_its_duration_minus_the_serial_kernel_time() -> None:
    found = traced()
    assert found.busy_us == pytest.approx(90.0)
    assert found.idle == pytest.approx(1 - 90 / 95)
    assert found.problem == ""
    assert traced(served_s=90e-6).idle == pytest.approx(0.0, abs=1e-12)


def test_gaps_between_serialised_kernels_are_not_idle_time_of_a_served_step() -> None:
    found = traced(served_s=91e-6)
    assert found.trace.share > 0.08
    assert found.idle == pytest.approx(1 / 91)


@pytest.mark.parametrize("served_s", [80e-6, 90e-6, 95e-6])
def test_a_wait_for_the_host_counts_regardless_of_overlap_by_early_launches(served_s: float) -> None:
    assert traced(served_s=served_s, waits=0.2).idle == pytest.approx(0.2)


def test_a_trace_with_overlapping_waiting_kernels_does_not_pass() -> None:
    early = [(0.0, 40.0), (5.0, 70.0), (50.0, 47.0)]
    found = traced(trace=trace(early, 16))
    assert found.trace.overlap > 0.4
    assert "its kernels were not launched in turn" in found.problem


def test_kernels_longer_under_the_profiler_than_the_step_without_it_do_not_pass() -> None:
    longer = [(begin * 2, taken * 1.2) for begin, taken in GRAPH]
    found = traced(trace=trace(longer, 16, step_us=200.0))
    assert found.idle == 0.0
    assert "these are not their durations" in found.problem


def test_a_trace_with_lost_kernels_shows_more_idle_time() -> None:
    assert traced(trace=trace(GRAPH[:2], 16)).idle > traced().idle


def test_the_duration_of_a_step_is_extrapolated_to_the_position_of_the_trace() -> None:
    def stretch(at: int, *, disturbed: int | None = None) -> StepSpan:
        return StepSpan(at, [0.010 + 2e-6 * (at + step) + (0.005 if step == disturbed else 0.0) for step in range(64)])

    earlier, later = stretch(0, disturbed=60), stretch(100)
    growth = growth_s(earlier, later)
    assert growth == pytest.approx(2e-6)
    assert later.step_at(175.0, growth) == pytest.approx(0.010 + 2e-6 * 175)
    cut_short = StepSpan(100, [0.001, *later.step_s[1:]])
    assert cut_short.step_at(175.0, growth) == later.step_at(175.0, growth), "its first step began before anybody asked"
    assert growth_s(StepSpan(0, later.step_s), StepSpan(100, earlier.step_s)) == 0.0, "requests do not shrink"


def test_host_times_are_counted_once_and_the_hooks_removed() -> None:
    engine, _ = make_engine(4)
    before = Scheduler.__dict__["advance"], Scheduler.__dict__["settle"]
    with step_parts() as taken_s:
        engine, _ = make_engine(4)
        submit(engine, 0, 4)
        while engine.has_requests:
            engine.step()
    assert {label for label, taken in taken_s.items() if taken > 0} >= {"plan", "book", "launch", "fetch", "settle"}
    assert all(taken >= 0 for taken in taken_s.values())
    assert REST not in taken_s
    assert (Scheduler.__dict__["advance"], Scheduler.__dict__["settle"]) == before


def test_time_between_two_steps_counts_as_that_of_the_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = make_engine(4)
    submit(engine, 0, 40)
    now_s = [0.0]
    monkeypatch.setattr(traffic, "time", mock.Mock(perf_counter=lambda: now_s[0], thread_time=lambda: 0.0))

    def two_steps(window: traffic.Window) -> bool:
        now_s[0] += 1.0
        return len(window.step_s) >= 2

    assert traffic.steps(engine, two_steps).step_s == [1.0, 1.0]


def test_time_spent_spinning_for_tokens_is_not_host_work() -> None:
    engine, _ = make_engine(4)
    submit(engine, 0, 40)
    step, fetch, wait_s = engine.step_in_columns, mock.Mock(spec=CudaFetch), 0.02

    def awake(_: CudaFetch) -> None:
        until_s = time.thread_time() + wait_s
        while time.thread_time() < until_s:
            pass

    def step_that_waits() -> Any:
        CudaFetch.wait(fetch)
        return step()

    engine.step_in_columns = step_that_waits  # type: ignore[method-assign]
    with mock.patch.object(CudaFetch, "wait", awake), step_parts() as taken_s:
        window = traffic.steps(engine, lambda window: len(window.step_s) >= 8)
    assert min(window.step_s) > wait_s > sorted(window.cpu_s)[4]
    assert taken_s[WAIT] >= 8 * wait_s
