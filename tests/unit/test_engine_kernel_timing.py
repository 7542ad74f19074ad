"""Decisions between kernels: which is the fastest, which is wrong, and the file that keeps them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.protocol import KernelChoice
from engine.runner import kernel_timing
from engine.runner.cuda_graphs import CaptureFailed, DirectCalls
from engine.runner.kernel_choices import FOLDER, KernelChoices
from engine.runner.kernel_timing import (
    MARGIN,
    ROUNDS_MAX,
    ROUNDS_MIN,
    KernelTiming,
    fastest,
    interleaved_s,
    tolerance,
    wrong_results,
)
from engine.switches import EARLY_LAUNCH
from kernels.alternatives import GEMV, PRODUCTS, TILES, put_in_force
from kernels.variants import KernelCache

CHOICE = PRODUCTS[16, 1]
BY_TILES = KernelChoice(name=CHOICE.name, serves=TILES, us={GEMV: 4200.0, TILES: 3900.0})


class Timing:
    """Stands in for `KernelTiming`."""

    def run(self) -> list[KernelChoice]:
        return [BY_TILES]


def decide(choices: KernelChoices) -> None:
    choices.decide(Timing())  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def defaults() -> Any:
    yield
    put_in_force({})


@pytest.mark.parametrize(
    ("times_s", "expected"),
    [
        ({"default": 1.0, "other": 1 - 1.5 * MARGIN}, "other"),
        ({"default": 1.0, "other": 1 - 0.5 * MARGIN}, "default"),
        ({"default": 1.0, "other": 0.9, "third": 0.8}, "third"),
        ({"default": 1.0}, "default"),
    ],
)
def test_an_alternative_serves_if_it_is_faster_by_more_than_chance(times_s: dict[str, float], expected: str) -> None:
    assert fastest(times_s) == expected


def test_logits_that_rounding_explains_are_right_and_others_wrong() -> None:
    expected = torch.randn(2, 500, generator=torch.Generator().manual_seed(0)) + 100.0
    unlike = torch.randn(2, 500, generator=torch.Generator().manual_seed(1)) + 100.0
    rounded = expected + 0.02 * (unlike - 100.0)
    nan = expected.clone()
    nan[1, 7] = float("nan")
    assert wrong_results({"rounded": rounded, "unlike": unlike, "nan": nan, "oldest": expected}, 0.1) == ["unlike", "nan"]


def test_a_mixture_that_rounding_sends_to_another_expert_is_right_and_other_logits_wrong() -> None:
    expected, noise, unlike = torch.randn(3, 1, 5000, generator=torch.Generator().manual_seed(0)).unbind()
    logits = {"another expert": expected + 0.35 * noise, "unlike": unlike, "oldest": expected}
    assert wrong_results(logits, tolerance(torch.bfloat16, has_experts=True)) == ["unlike"]
    assert wrong_results(logits, tolerance(torch.bfloat16, has_experts=False)) == ["another expert", "unlike"]


def test_the_oldest_alternative_is_refused_if_only_its_logits_are_not_finite() -> None:
    logits = torch.arange(5.0)[None]
    assert wrong_results({"new": logits, "old": logits / 0.0}, 0.1) == ["old"]


def test_all_are_refused_if_none_is_finite() -> None:
    logits = torch.full((1, 5), float("inf"))
    assert wrong_results({"new": logits, "old": logits}, 0.1) == ["new", "old"]


class Clock:
    """A device on which every run takes a given time; replaces `torch.cuda.Event`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ms = 0.0
        self.order: list[str] = []
        clock = self

        class Event:
            def __init__(self, **_: Any) -> None:
                self.at_ms = 0.0

            def record(self) -> None:
                self.at_ms = clock.now_ms

            def synchronize(self) -> None:
                """All has passed."""

            def elapsed_time(self, end: Event) -> float:
                return end.at_ms - self.at_ms

        monkeypatch.setattr(torch.cuda, "Event", Event)

    def run(self, name: str, *times_ms: float) -> Callable[[], None]:
        remaining = [*times_ms]

        def run() -> None:
            self.order.append(name)
            self.now_ms += remaining.pop(0) if len(remaining) > 1 else remaining[0]

        return run


def test_runs_take_turns_and_their_medians_count_without_the_first_round(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    times_s = interleaved_s({"a": clock.run("a", 500.0, 4.0, 90.0, 4.0), "b": clock.run("b", 5.0)})
    assert clock.order == ["a", "b"] * (1 + ROUNDS_MIN)
    assert times_s == pytest.approx({"a": 0.004, "b": 0.005})


@pytest.mark.parametrize(("step_ms", "num_rounds"), [(0.1, ROUNDS_MAX), (1000.0, ROUNDS_MIN)])
def test_short_steps_are_timed_more_often_than_long_ones(
    step_ms: float, num_rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    interleaved_s({"a": clock.run("a", step_ms), "b": clock.run("b", step_ms)})
    assert len(clock.order) == 2 * (1 + num_rounds)


def test_decisions_are_in_force_and_in_the_file_for_the_next_start(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "choices.json"
    first = KernelChoices(path)
    assert first.needs_timing
    decide(first)
    put_in_force({})
    second = KernelChoices(path)
    assert second.chosen == [BY_TILES]
    assert not second.needs_timing
    assert CHOICE.serving(GEMV, TILES) == TILES
    assert os.listdir(path.parent) == [path.name]


def test_an_engine_without_decisions_withdraws_those_of_another_one(tmp_path: Path) -> None:
    put_in_force({CHOICE.name: TILES})
    KernelChoices(None)
    assert CHOICE.serving(GEMV, TILES) == GEMV


def test_where_a_step_cannot_be_captured_the_defaults_serve_and_nothing_is_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing:
        def run(self) -> list[KernelChoice]:
            put_in_force({CHOICE.name: TILES})
            raise CaptureFailed("no room")

    choices = KernelChoices(tmp_path / "choices.json")
    choices.decide(Failing())  # type: ignore[arg-type]
    assert "no room: the default kernels serve" in caplog.text
    assert CHOICE.serving(GEMV, TILES) == GEMV
    assert choices.chosen == []
    assert choices.are_defaults
    assert not any(tmp_path.iterdir())


def test_a_kernel_that_fails_while_it_is_timed_is_named_with_the_switch_that_avoids_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def capture(_: KernelTiming, key: tuple[str, str], num_rows: int) -> Callable[[], None]:
        assert num_rows == 1
        if key == (CHOICE.name, TILES):
            raise RuntimeError("an illegal memory access")
        return lambda: None

    monkeypatch.setattr(KernelTiming, "_fill_contexts", lambda *_: None)
    monkeypatch.setattr(KernelTiming, "_num_rows", lambda *_: 1)
    monkeypatch.setattr(KernelTiming, "_captured", capture)
    timing = KernelTiming(SimpleNamespace(calls=DirectCalls()))  # type: ignore[arg-type]
    timing._alternatives = {CHOICE: [GEMV, TILES]}
    with pytest.raises(RuntimeError, match="illegal memory access"):
        timing.run()
    assert "16-bit products of one row by tiles cannot be timed; GATEHOUSE_MEASURED_KERNELS=0" in caplog.text


def path_for(monkeypatch: pytest.MonkeyPatch, facts: dict[str, object], revision: str = "1") -> Path:
    monkeypatch.setattr("kernels.ops.kernel_cache", lambda: KernelCache(Path("cache"), revision))
    path = KernelChoices.of(torch.device("cpu"), facts)._path
    assert path is not None
    return path


def test_engines_with_the_same_facts_share_a_file_beside_the_compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert path_for(monkeypatch, {"model": "llama"}) == path_for(monkeypatch, {"model": "llama"})
    assert path_for(monkeypatch, {"model": "llama"}).parent == Path("cache") / FOLDER


@pytest.mark.parametrize("change", ["model", "revision", "torch", "switch"])
def test_what_may_change_a_decision_has_kernels_timed_anew(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = path_for(monkeypatch, {"model": "llama"})
    if change == "torch":
        monkeypatch.setattr(torch, "__version__", "0")
    elif change == "switch":
        monkeypatch.setenv(EARLY_LAUNCH, "0")
    model, revision = "qwen" if change == "model" else "llama", "2" if change == "revision" else "1"
    assert path_for(monkeypatch, {"model": model}, revision) != before


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b'[{"name": 5}]',
        b'[{"name": "16-bit products of one row", "serves": "abacus", "us": {"abacus": 1.0}}]',
        b'[{"name": "16-bit products of one row", "serves": "tiles"}]',
    ],
)
def test_a_broken_file_is_told_and_replaced(content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "choices.json"
    path.write_bytes(content)
    choices = KernelChoices(path)
    assert choices.needs_timing
    assert f"kernels are timed anew: {path} cannot be read" in caplog.text
    decide(choices)
    assert not KernelChoices(path).needs_timing


def test_a_file_that_cannot_be_written_is_told_and_the_decisions_serve(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "choices.json"
    choices = KernelChoices(path)
    decide(choices)
    assert f"the next start times kernels again: {path} cannot be written" in caplog.text
    assert choices.chosen == [BY_TILES]


def test_what_serves_is_logged_with_the_figures_and_described_where_it_is_not_the_default(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    choices = KernelChoices(tmp_path / "choices.json")
    decide(choices)
    choices.log_decisions()
    assert "kernels chosen=now 16-bit products of one row: tiles (GEMV 4200.0 µs, tiles 3900.0 µs)" in caplog.text
    assert choices.described() == "16-bit products of one row by tiles"
    assert not choices.are_defaults


def test_what_an_earlier_start_refused_is_an_error_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    refusal = KernelChoice(name=CHOICE.name, serves=TILES, us={TILES: 3900.0}, refused=[GEMV])
    first = KernelChoices(tmp_path / "choices.json")
    first.chosen = [refusal]
    first._write(tmp_path / "choices.json")
    later = KernelChoices(tmp_path / "choices.json")
    later.log_decisions()
    [record] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.getMessage().startswith("16-bit products of one row by GEMV: wrong results")
    assert later.described() == "16-bit products of one row by tiles (GEMV refused: wrong results)"


def test_tolerances_are_of_every_format_that_models_compute_in() -> None:
    assert set(kernel_timing.TOLERANCE) == {torch.float32, torch.float16, torch.bfloat16}
