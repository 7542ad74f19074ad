"""An engine on an emulated card times kernels that can replace each other when it starts, and serves by the fastest."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from engine.errors import EngineBroken
from engine.loop import Engine
from engine.options import EngineOptions
from engine.protocol import EngineInfo
from engine.runner import device_waits, kernel_timing, kernel_trials
from engine.runner.device_waits import watch_steps
from engine.runner.kernel_trials import DEATHS_MAX, DeviceHangs, KernelFault
from engine.runner.text_models import load_text_model
from engine.switches import GRAPHS, MEASURED_KERNELS
from kernels.alternatives import (
    CHOICES,
    FEW_ROWS_ATTENTION,
    GEMV,
    LONE_ATTENTION,
    ONE_LAUNCH,
    PRODUCTS,
    ROTATION_BEFORE,
    ROTATION_INSIDE,
    SPLITS,
    TILES,
    put_in_force,
)
from kernels.triton.attention import rotated_decode
from kernels.triton.attention.lone_decode import lone_decode
from kernels.variants import CompilationFailed
from tests.support.engines import generation_request, run_to_end, small_engine, tokens
from tests.support.rehearsal import Schedule, rehearsal
from tests.support.rehearsal.card import Card, current_card
from tests.support.rehearsal.table import replace_triton_operations

SMALL: dict[str, Any] = {"max_num_seqs": 2, "max_model_len": 32, "num_kv_blocks": 8, "max_num_batched_tokens": 32}
ROW_PRODUCTS = PRODUCTS[16, 1]
DEFAULTS = {choice.name: choice.alternatives[0] for choice in (ROW_PRODUCTS, LONE_ATTENTION, FEW_ROWS_ATTENTION)}
FAST = {TILES, SPLITS}
DEADLINE_S = 120


@pytest.fixture(autouse=True)
def defaults_afterwards() -> Iterator[None]:
    yield
    put_in_force({})


def timed_by(fast: set[str]) -> Callable[[Mapping[str, Callable[[], None]]], dict[str, float]]:
    """Replaces timing: the alternatives in `fast` take 0.9 ms, the others 1."""

    def interleaved_s(replays: Mapping[str, Callable[[], None]]) -> dict[str, float]:
        return {name: 0.0009 if name in fast else 0.001 for name in replays}

    return interleaved_s


@contextmanager
def starting(cache: Path, fast: set[str] = FAST) -> Iterator[Card]:
    """A card on which engines time their kernels and keep the decisions in `cache`."""
    with (
        rehearsal(Schedule.EARLY, times_kernels=True) as card,
        mock.patch.object(kernel_timing, "interleaved_s", timed_by(fast)),
        mock.patch.dict("os.environ", TRITON_CACHE_DIR=str(cache)),
    ):
        yield card


def engine_of(model: Path, **options: Any) -> Engine:
    return small_engine(model, **({"device": "cuda", "dtype": "float16"} | SMALL | options))


def in_force() -> list[str]:
    """The alternative of each choice that serves launches which all of them support."""
    return [choice.serving(*choice.alternatives) for choice in CHOICES]


@dataclass
class Started:
    """What an engine said when it started, and what it answered."""

    info: EngineInfo
    log: str
    answer: list[int]
    graph_bytes: int
    num_captures: int

    @property
    def serving(self) -> dict[str, str]:
        return {choice.name: choice.serves for choice in self.info.kernel_choices}


def started(model: Path, cache: Path, fast: set[str] = FAST, **options: Any) -> Started:
    records: list[str] = []

    class Notes(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(f"{record.levelname} {record.getMessage()}")

    logger, notes = logging.getLogger("gatehouse.engine"), Notes()
    level = logger.level
    logger.addHandler(notes)
    logger.setLevel(logging.INFO)
    try:
        with starting(cache, fast) as card:
            engine = engine_of(model, **options)
            graph_bytes, num_captures = card.graph_bytes, card.num_captures
            found = run_to_end(engine, [generation_request("a", [5, 6, 7], max_tokens=4)])
            return Started(engine.info, "\n".join(records), tokens(found["a"]), graph_bytes, num_captures)
    finally:
        logger.removeHandler(notes)
        logger.setLevel(level)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def first(llama: Path, cache: Path) -> Started:
    return started(llama, cache)


@pytest.fixture(scope="module")
def second(llama: Path, cache: Path, first: Started) -> Started:
    """The next start, when something else would be faster."""
    with mock.patch.object(kernel_timing, "KernelTiming", side_effect=AssertionError("nothing is to be timed")):
        return started(llama, cache, fast={ROTATION_BEFORE})


def test_the_fastest_alternatives_serve(first: Started) -> None:
    assert first.serving == {**DEFAULTS, ROW_PRODUCTS.name: TILES, LONE_ATTENTION.name: SPLITS}


def test_every_alternative_has_its_figure(first: Started) -> None:
    figures = {choice.name: choice.us for choice in first.info.kernel_choices}
    assert figures == {
        ROW_PRODUCTS.name: {GEMV: 1000.0, TILES: 900.0},
        LONE_ATTENTION.name: {ONE_LAUNCH: 1000.0, SPLITS: 900.0, ROTATION_BEFORE: 1000.0},
        FEW_ROWS_ATTENTION.name: {ROTATION_INSIDE: 1000.0, ROTATION_BEFORE: 1000.0},
    }


def test_one_line_of_the_log_says_what_serves_and_why(first: Started) -> None:
    expected = "kernels chosen=now 16-bit products of one row: tiles (GEMV 1000.0 µs, tiles 900.0 µs); attention of one row"
    assert first.log.count(expected) == 1


def test_none_of_the_right_alternatives_is_refused(first: Started) -> None:
    assert [choice.refused for choice in first.info.kernel_choices] == [{}, {}, {}]
    assert "ERROR" not in first.log


def test_the_description_of_the_engine_names_what_serves_instead_of_a_default(first: Started) -> None:
    assert first.info.kernels.endswith("16-bit products of one row by tiles, attention of one row by splits and merge")


def test_the_next_start_serves_by_the_same_kernels_without_timing_them(first: Started, second: Started) -> None:
    assert second.serving == first.serving
    assert "kernels chosen=earlier" in second.log


def test_the_next_start_gives_the_same_tokens(first: Started, second: Started) -> None:
    assert second.answer == first.answer


def test_no_graph_of_an_alternative_is_left(first: Started, second: Started) -> None:
    """The second start has captured nothing but the steps that serve."""
    assert first.graph_bytes == second.graph_bytes


def test_a_first_start_captures_each_alternative_and_again_the_largest_step_if_it_is_one_of_few_rows(
    first: Started, second: Started
) -> None:
    num_alternatives = sum(len(choice.us) for choice in first.info.kernel_choices)
    assert first.num_captures == second.num_captures + num_alternatives + 1


def test_graphs_that_were_dropped_are_not_in_the_measured_memory(first: Started, second: Started) -> None:
    parts = [next(part for part in each.info.memory if part.name == "graphs") for each in (first, second)]
    assert parts[0].measured_bytes == parts[1].measured_bytes


def test_a_kernel_with_wrong_results_does_not_serve_though_it_is_the_fastest(llama: Path, tmp_path: Path) -> None:
    def wrong(qkv: torch.Tensor, *args: Any, **options: Any) -> None:
        lone_decode(qkv, *args, **options)
        args[-1].mul_(-1.0)  # out

    with mock.patch.object(rotated_decode, "lone_decode", wrong):
        found = started(llama, tmp_path, fast={ONE_LAUNCH})
    attention = next(choice for choice in found.info.kernel_choices if choice.name == LONE_ATTENTION.name)
    assert (attention.serves, attention.refused) == (SPLITS, {ONE_LAUNCH: "wrong results"})
    assert "ERROR attention of one row by one launch does not serve: wrong results" in found.log
    assert "attention of one row by splits and merge (one launch refused: wrong results)" in found.info.kernels


@contextmanager
def one_launch_as(function: Callable[..., None]) -> Iterator[None]:
    """Within the block this function runs instead of the alternative, but not where its kernel is only to be compiled."""

    def launched(*args: Any, **options: Any) -> None:
        if not current_card().only_compiles:
            function(*args, **options)

    with mock.patch.object(rotated_decode, "lone_decode", launched):
        yield


def test_a_kernel_that_reads_before_its_input_is_written_does_not_serve(llama: Path, tmp_path: Path) -> None:
    """It finds what an earlier step has left there, which is right where that was the same step."""
    left: dict[int, torch.Tensor] = {}

    def early(qkv: torch.Tensor, rotation: Any, kv_cache: torch.Tensor, *args: Any, **options: Any) -> None:
        found = left.setdefault(kv_cache.data_ptr(), qkv.clone())
        lone_decode(found, rotation, kv_cache, *args, **options)
        found.copy_(qkv)

    with one_launch_as(early):
        found = started(llama, tmp_path, fast={ONE_LAUNCH})
    attention = next(choice for choice in found.info.kernel_choices if choice.name == LONE_ATTENTION.name)
    assert (attention.serves, attention.refused) == (SPLITS, {ONE_LAUNCH: "wrong results"})


def marked(cache: Path) -> set[str]:
    """The alternatives that marks say are running."""
    return {json.loads(path.read_bytes())["alternative"] for path in cache.rglob("mark-*")}


def test_a_kernel_that_has_not_run_yet_runs_only_while_a_mark_says_so(llama: Path, tmp_path: Path) -> None:
    runs: list[bool] = []

    def noted(*args: Any, **options: Any) -> None:
        runs.append(ONE_LAUNCH in marked(tmp_path))
        lone_decode(*args, **options)

    with starting(tmp_path, fast={ONE_LAUNCH}), one_launch_as(noted):
        engine_of(llama)
    assert runs
    assert all(runs)
    assert marked(tmp_path) == set()


def test_a_kernel_that_loses_the_card_is_refused_by_all_later_starts(llama: Path, tmp_path: Path) -> None:
    def illegal(*_: object, **__: object) -> None:
        current_card().broken = RuntimeError("illegal access")

    with one_launch_as(illegal):
        with pytest.raises(KernelFault, match="attention of one row by one launch: the GPU failed"):
            started(llama, tmp_path, fast={ONE_LAUNCH})
        second, third = started(llama, tmp_path, fast={ONE_LAUNCH}), started(llama, tmp_path)
    for later, told in ((second, "does not serve"), (third, "does not serve since an earlier start")):
        attention = next(choice for choice in later.info.kernel_choices if choice.name == LONE_ATTENTION.name)
        assert attention.refused[ONE_LAUNCH].startswith("the GPU failed: ")
        assert f"ERROR attention of one row by one launch {told}: the GPU failed: " in later.log
    assert second.answer == third.answer


def test_a_fault_after_the_decision_refuses_what_was_decided(llama: Path, tmp_path: Path) -> None:
    def illegal(*_: object, **__: object) -> None:
        current_card().broken = RuntimeError("illegal access")
        raise RuntimeError("illegal access")

    with mock.patch("engine.build.measure_speed", illegal), pytest.raises(KernelFault):
        started(llama, tmp_path, fast={ONE_LAUNCH, ROTATION_INSIDE})
    second = started(llama, tmp_path)
    refused = {choice.name: [*choice.refused] for choice in second.info.kernel_choices}
    assert refused == {ROW_PRODUCTS.name: [GEMV], LONE_ATTENTION.name: [ONE_LAUNCH], FEW_ROWS_ATTENTION.name: [ROTATION_INSIDE]}
    assert second.serving == {ROW_PRODUCTS.name: TILES, LONE_ATTENTION.name: SPLITS, FEW_ROWS_ATTENTION.name: ROTATION_BEFORE}


def lose_the_card_in_service(model: Path, cache: Path, fast: set[str]) -> None:
    with starting(cache, fast) as card:
        engine = engine_of(model)
        engine.submit(generation_request("a", [5, 6, 7], max_tokens=8))
        engine.step()
        card.broken = RuntimeError("illegal access")
        with pytest.raises(EngineBroken):
            [engine.step() for _ in range(3)]


class ProcessEnds(BaseException):
    """What `os._exit` would do."""


def hang_in_service(model: Path, cache: Path, fast: set[str]) -> None:
    """A step never ends on the card, until the thread that watches the waits has noted that and ends the process."""
    noted = threading.Event()

    def never_end() -> None:
        assert noted.wait(DEADLINE_S)
        card.broken = RuntimeError("its process has ended")  # what is freed later waits for nothing
        raise ProcessEnds

    with starting(cache, fast) as card:
        engine = engine_of(model)

        def note(error: DeviceHangs) -> None:
            with mock.patch.object(kernel_trials, "is_lost", side_effect=AssertionError("it would wait for the card")):
                engine.note_failure(error)
            noted.set()

        engine.submit(generation_request("a", [5, 6, 7], max_tokens=8))
        engine.step()
        card.schedule = Schedule.LATE
        card.stream.add(never_end)
        with mock.patch.multiple(device_waits, HANG_POLLS=3, POLL_S=0.001):
            watch_steps(note)
            with pytest.raises(ProcessEnds):
                [engine.step() for _ in range(3)]


def test_kernels_that_served_when_the_card_was_lost_and_when_it_hung_are_replaced_by_the_others(
    llama: Path, tmp_path: Path
) -> None:
    fast, failures = {ONE_LAUNCH, ROTATION_INSIDE}, [lose_the_card_in_service, hang_in_service]
    assert len(failures) == DEATHS_MAX
    for fail in failures:
        fail(llama, tmp_path, fast)
    third = started(llama, tmp_path, fast)
    assert third.serving == {ROW_PRODUCTS.name: TILES, LONE_ATTENTION.name: SPLITS, FEW_ROWS_ATTENTION.name: ROTATION_BEFORE}
    told = "ERROR attention of one row by one launch does not serve: the GPU failed 2 times within a day while it served"
    assert told in third.log
    assert started(llama, tmp_path, fast).serving == third.serving, "that holds for later starts"


def test_alternatives_that_cannot_be_compiled_leave_the_oldest_ones_serving(llama: Path, tmp_path: Path) -> None:
    with mock.patch.object(kernel_timing.KernelTiming, "compile", side_effect=CompilationFailed("no such instruction")):
        found = started(llama, tmp_path)
    assert "ERROR no such instruction: the oldest kernels serve" in found.log
    assert in_force() == [choice.oldest for choice in CHOICES]


WITHOUT_GRAPHS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "launched one by one": ({}, {GRAPHS: "0"}),
    "plain steps": ({"enforce_eager": True}, {}),
}


@pytest.mark.parametrize(("options", "variables"), WITHOUT_GRAPHS.values(), ids=WITHOUT_GRAPHS)
def test_engines_without_graphs_serve_by_what_one_with_graphs_decided_and_decide_nothing(
    options: dict[str, Any], variables: dict[str, str], llama: Path, cache: Path, first: Started, tmp_path: Path
) -> None:
    with (
        mock.patch.dict("os.environ", variables),
        mock.patch.object(kernel_timing, "KernelTiming", side_effect=AssertionError("nothing is to be timed")),
    ):
        decided, undecided = started(llama, cache, **options), started(llama, tmp_path, **options)
    assert (decided.serving, decided.answer) == (first.serving, first.answer)
    assert undecided.serving == {}
    assert not [*tmp_path.rglob("*.json")]
    assert in_force() == [choice.oldest for choice in CHOICES]


OFF: dict[str, tuple[dict[str, Any], dict[str, str], list[str]]] = {
    "on a CPU": ({"device": "cpu", "dtype": "float32"}, {}, [choice.alternatives[0] for choice in CHOICES]),
    "batch-invariant": ({"batch_invariant": True}, {}, [choice.alternatives[0] for choice in CHOICES]),
    "switched off": ({}, {MEASURED_KERNELS: "0"}, [choice.oldest for choice in CHOICES]),
}


@pytest.mark.parametrize(("options", "variables", "serving"), OFF.values(), ids=OFF)
def test_nothing_is_timed_or_read(
    options: dict[str, Any],
    variables: dict[str, str],
    serving: list[str],
    llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put_in_force({choice.name: choice.alternatives[1] for choice in CHOICES})  # by an earlier engine of the process
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    used = mock.Mock(side_effect=AssertionError("kernels are not to be timed"))
    monkeypatch.setattr("engine.runner.slot_warm_up.KernelTiming", used)
    monkeypatch.setattr("kernels.ops.kernel_cache", used)
    with starting(tmp_path), replace_triton_operations():
        engine = engine_of(llama, **options)
    assert engine.info.kernel_choices == []
    assert in_force() == serving


def test_a_model_for_embeddings_serves_by_the_oldest_kernels(llama: Path) -> None:
    with rehearsal(), replace_triton_operations():
        load_text_model(EngineOptions(model=llama, device="cuda", dtype="float16", threads=1))
    assert in_force() == [choice.oldest for choice in CHOICES]
