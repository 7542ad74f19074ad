"""Workloads from traces and scenarios: speed, cuts, samples, tenants, rates; all determined by the seed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.errors import EngineConfigError, TraceError
from engine.simulator.workload import Workload, WorkloadOptions, load_workload, make_scenario

HEADER = "arrival_s,input_tokens,output_tokens\n"


@pytest.fixture
def steady(tmp_path: Path) -> Path:
    """A hundred requests, one per second, without tenants."""
    path = tmp_path / "steady.csv"
    path.write_text(HEADER + "".join(f"{second},10,{second + 1}\n" for second in range(100)))
    return path


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """Forty conversations of five turns that all begin with the same block."""
    path = tmp_path / "chats.jsonl"
    rows = []
    for turn in range(5):
        for chat in range(40):
            ids = [0, *range(1000 * (chat + 1), 1000 * (chat + 1) + turn + 1)]
            rows.append({"timestamp": turn * 1000 + chat, "input_length": 512 * len(ids), "output_length": 9, "hash_ids": ids})
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def tenants_by_chat(workload: Workload) -> dict[int, list[str]]:
    tenants: dict[int, list[str]] = {}
    for request in workload.requests:
        tenants.setdefault(request.block_ids[1], []).append(request.tenant)
    return tenants


def test_speed_scales_times_before_the_cut(steady: Path) -> None:
    workload = load_workload(steady, WorkloadOptions(speed=2, start_s=10, duration_s=5))
    assert [r.arrival_s for r in workload.requests] == [i / 2 for i in range(10)]
    assert [r.output_tokens for r in workload.requests] == list(range(21, 31))


def test_a_sample_keeps_conversations_whole(chats: Path) -> None:
    kept = tenants_by_chat(load_workload(chats, WorkloadOptions(sample=0.3, seed=4)))
    assert 4 <= len(kept) <= 20
    assert all(len(turns) == 5 for turns in kept.values())


def test_a_split_assigns_each_conversation_to_one_tenant(chats: Path) -> None:
    tenants = tenants_by_chat(load_workload(chats, WorkloadOptions(tenants=4)))
    assert all(len(set(turns)) == 1 for turns in tenants.values())
    assert {turns[0] for turns in tenants.values()} == {f"tenant-{i}" for i in range(4)}


def test_options_that_contradict_the_trace_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "named.csv"
    path.write_text("arrival_s,tenant,input_tokens,output_tokens\n0,alice,1,1\n1,bob,1,1\n")
    with pytest.raises(EngineConfigError, match="tenants is for traces without tenants"):
        load_workload(path, WorkloadOptions(tenants=9))
    with pytest.raises(EngineConfigError, match="rate is for traces without arrival times"):
        load_workload(path, WorkloadOptions(rate=9))


def test_the_seed_determines_the_workload(chats: Path) -> None:
    options = [WorkloadOptions(sample=0.5, tenants=3, seed=seed) for seed in (1, 1, 2)]
    first, again, other = (load_workload(chats, option).requests for option in options)
    assert first == again
    assert first != other


def test_a_trace_of_lengths_needs_a_rate_and_arrives_at_it(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("input_tokens,output_tokens\n" + "5,6\n" * 4000)
    with pytest.raises(EngineConfigError, match="rate must be given"):
        load_workload(path, WorkloadOptions())
    workload = load_workload(path, WorkloadOptions(rate=20))
    assert len(workload.requests) / workload.duration_s == pytest.approx(20, rel=0.05)


def test_dropped_and_sorted_rows_are_noted(tmp_path: Path) -> None:
    path = tmp_path / "odd.csv"
    path.write_text(HEADER + "5,1,1\n2,1,0\n1,1,1\n")
    assert load_workload(path, WorkloadOptions()).notes == {"empty_rows": 1, "sorted_here": True}


def test_a_cut_without_requests_is_refused(steady: Path) -> None:
    with pytest.raises(TraceError, match="no request within"):
        load_workload(steady, WorkloadOptions(start_s=1000))


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"speed": 0}, "speed"), ({"speed": float("nan")}, "speed"), ({"duration_s": -1}, "duration"), ({"rate": 0}, "rate"),
        ({"start_s": -1}, "start"), ({"sample": 0}, "sample"), ({"sample": 1.1}, "sample"), ({"tenants": 0}, "tenants"),
    ],
    ids=lambda value: str(value)[:50],
)  # fmt: skip
def test_an_invalid_option_is_named(options: dict[str, float], name: str) -> None:
    with pytest.raises(EngineConfigError) as caught:
        WorkloadOptions(**options)  # type: ignore[arg-type]
    assert caught.value.option == name


def test_the_noisy_neighbour_scenario_has_the_documented_rates_and_lengths() -> None:
    workload = make_scenario("noisy-decode", seed=3)
    hog = [r for r in workload.requests if r.tenant == "hog"]
    assert len(hog) == pytest.approx(2000, rel=0.1)
    assert {(r.input_tokens, r.output_tokens) for r in hog} == {(512, 1500)}
    victims = [r for r in workload.requests if r.tenant in workload.victims]
    assert len(workload.victims) == 4
    assert len(victims) == pytest.approx(480, rel=0.15)
    assert sorted(r.arrival_s for r in workload.requests) == [r.arrival_s for r in workload.requests]


def test_victims_requests_do_not_depend_on_their_neighbour() -> None:
    alone, beside = make_scenario("noisy-none", seed=3), make_scenario("noisy-prefill", seed=3)
    assert alone.requests == [r for r in beside.requests if r.tenant in beside.victims]


def test_lengths_of_victims_may_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("input_tokens,output_tokens\n11,12\n")
    assert {(r.input_tokens, r.output_tokens) for r in make_scenario("noisy-none", seed=0, lengths=path).requests} == {(11, 12)}


def test_default_lengths_have_the_median_of_the_sample() -> None:
    lengths = sorted(r.input_tokens for seed in range(8) for r in make_scenario("noisy-none", seed=seed).requests)
    assert lengths[len(lengths) // 2] == pytest.approx(36, rel=0.2)
    assert lengths[-1] <= 22837


def test_an_unknown_scenario_is_refused_with_the_known_names() -> None:
    with pytest.raises(EngineConfigError, match="noisy-prefill, noisy-decode, noisy-none"):
        make_scenario("quiet", seed=0)
