"""Decisions between kernels: which is the fastest, which is wrong, and the file that keeps them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
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
from engine.runner.kernel_trials import KernelFault, KernelTrials, Mark, TrialsImpossible
from engine.switches import EARLY_LAUNCH
from kernels.alternatives import GEMV, PRODUCTS, TILES, put_in_force
from kernels.variants import KernelCache

CHOICE = PRODUCTS[16, 1]
BY_TILES = KernelChoice(name=CHOICE.name, serves=TILES, us={GEMV: 4200.0, TILES: 3900.0})


class Timing:
    """Stands in for `KernelTiming`."""

    def run(self, _: KernelTrials) -> list[KernelChoice]:
        return [BY_TILES]


def choices_in(path: Path, *, decides: bool = True) -> KernelChoices:
    return KernelChoices(path, trials_beside(path), decides=decides)


def trials_beside(path: Path) -> KernelTrials:
    return KernelTrials(path.parent / "trials", "start", torch.device("cpu"))


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
    first = choices_in(path)
    assert first.needs_timing
    decide(first)
    put_in_force({})
    second = choices_in(path)
    assert second.chosen == [BY_TILES]
    assert not second.needs_timing
    assert CHOICE.serving(GEMV, TILES) == TILES
    assert os.listdir(path.parent) == [path.name]


def test_an_engine_without_decisions_withdraws_those_of_another_one(tmp_path: Path) -> None:
    put_in_force({CHOICE.name: TILES})
    KernelChoices(None)
    assert CHOICE.serving(GEMV, TILES) == GEMV


@pytest.mark.parametrize("error", [CaptureFailed("no room"), torch.OutOfMemoryError("no room"), TrialsImpossible("no room")])
def test_where_nothing_can_be_tried_the_oldest_serve_and_nothing_is_kept(
    error: Exception, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing:
        def run(self, _: KernelTrials) -> list[KernelChoice]:
            put_in_force({CHOICE.name: GEMV})
            raise error

    choices = choices_in(tmp_path / "choices.json")
    choices.decide(Failing())  # type: ignore[arg-type]
    assert "no room: the oldest kernels serve" in caplog.text
    assert CHOICE.serving(GEMV, TILES) == TILES
    assert choices.chosen == []
    assert choices.are_oldest
    assert not any(tmp_path.iterdir())


def test_the_oldest_serve_until_there_is_a_decision(tmp_path: Path) -> None:
    choices_in(tmp_path / "choices.json")
    assert CHOICE.serving(GEMV, TILES) == TILES


def test_of_two_first_starts_the_first_that_has_decided_decides_for_both(tmp_path: Path) -> None:
    class Later(Timing):
        def run(self, _: KernelTrials) -> list[KernelChoice]:
            return [KernelChoice(name=CHOICE.name, serves=GEMV, us={GEMV: 4200.0, TILES: 4300.0})]

    first, second = choices_in(tmp_path / "choices.json"), choices_in(tmp_path / "choices.json")
    decide(first)
    second.decide(Later())  # type: ignore[arg-type]
    assert second.chosen == [BY_TILES]
    assert CHOICE.serving(GEMV, TILES) == TILES
    assert os.listdir(tmp_path) == ["choices.json"]


def test_a_decision_is_kept_on_a_file_system_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", mock.Mock(side_effect=PermissionError("operation not permitted")))
    decide(choices_in(tmp_path / "choices.json"))
    assert choices_in(tmp_path / "choices.json").chosen == [BY_TILES]
    assert os.listdir(tmp_path) == ["choices.json"]


@pytest.fixture
def by_gemv(tmp_path: Path) -> Path:
    """A decision of a start that was ended while this alternative served, as its mark says."""
    path = tmp_path / "choices.json"
    path.write_bytes(msgspec.json.encode([KernelChoice(name=CHOICE.name, serves=GEMV, us={GEMV: 1.0, TILES: 2.0})]))
    mark = Mark(start="start", choice=CHOICE.name, alternative=GEMV)
    (tmp_path / "trials").mkdir()
    (tmp_path / "trials" / "mark-1").write_bytes(msgspec.json.encode(mark))
    return path


def test_a_decision_is_made_again_if_the_start_that_made_it_was_ended(by_gemv: Path, caplog: pytest.LogCaptureFixture) -> None:
    choices = choices_in(by_gemv)
    assert choices.needs_timing
    assert "kernels are timed anew" in caplog.text
    assert CHOICE.serving(GEMV, TILES) == TILES
    decide(choices)
    assert choices_in(by_gemv).chosen == [BY_TILES]


def test_an_engine_that_decides_nothing_leaves_a_decision_that_it_does_not_use(by_gemv: Path) -> None:
    assert choices_in(by_gemv, decides=False).chosen == []
    assert by_gemv.exists()


class Steps:
    """Timing of two alternatives, of which `failing` raises `error` when it runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failing: str, error: Exception) -> None:
        def capture(_: KernelTiming, key: tuple[str, str], num_rows: int) -> Callable[[], None]:
            assert num_rows == 1
            if key == (CHOICE.name, failing):
                raise error
            return lambda: None

        monkeypatch.setattr(KernelTiming, "_fill_contexts", lambda *_: None)
        monkeypatch.setattr(KernelTiming, "_num_rows", lambda *_: 1)
        monkeypatch.setattr(KernelTiming, "_captured", capture)
        monkeypatch.setattr(kernel_timing, "interleaved_s", lambda replays: dict.fromkeys(replays, 1.0))
        target = SimpleNamespace(dtype=torch.float32, has_experts=False, vocab_size=5)
        decodes = SimpleNamespace(step=SimpleNamespace(logits=lambda _: torch.arange(5.0)[None]))
        state = SimpleNamespace(write=lambda _: None)
        steps = SimpleNamespace(calls=DirectCalls(), target=target, decodes=decodes, state=state)
        self.timing = KernelTiming(steps)  # type: ignore[arg-type]
        self.timing._alternatives = {CHOICE: [GEMV, TILES]}


def test_an_alternative_that_cannot_run_is_refused_and_the_others_are_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    steps = Steps(monkeypatch, GEMV, CaptureFailed("out of resources"))
    [chosen] = steps.timing.run(trials_beside(tmp_path / "choices.json"))
    assert chosen == KernelChoice(
        name=CHOICE.name, serves=TILES, us={TILES: 1e6}, refused={GEMV: "it cannot run: CaptureFailed: out of resources"}
    )
    assert "16-bit products of one row by GEMV does not serve: it cannot run" in caplog.text


@pytest.mark.parametrize(
    ("failing", "error"),
    [(TILES, CaptureFailed("the oldest fails")), (GEMV, torch.OutOfMemoryError("no room")), (GEMV, KernelFault("illegal"))],
)
def test_what_is_not_the_fault_of_an_alternative_ends_the_timing(
    failing: str, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(monkeypatch, failing, error)
    with pytest.raises(type(error)):
        steps.timing.run(trials_beside(tmp_path / "choices.json"))


def test_an_alternative_that_ended_earlier_starts_does_not_run(
    by_gemv: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mark = by_gemv.parent / "trials" / "mark-1"
    (mark.parent / "mark-2").write_bytes(mark.read_bytes())
    steps = Steps(monkeypatch, GEMV, AssertionError("it must not run"))
    [chosen] = steps.timing.run(trials_beside(by_gemv))
    assert (chosen.serves, chosen.refused) == (TILES, {GEMV: "2 starts ended while it ran"})
    assert "16-bit products of one row by GEMV does not serve: 2 starts ended" in caplog.text


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
        b"[1]",
        b'[{"name": 5}]',
        b'[{"name": "16-bit products of one row", "serves": "tiles", "us": {"tiles": "few"}}]',
        b'[{"name": "16-bit products of one row", "serves": "tiles", "us": [1.0]}]',
        b'[{"name": "16-bit products of one row", "serves": "abacus", "us": {"abacus": 1.0}}]',
        b'[{"name": "16-bit products of one row", "serves": "tiles"}]',
    ],
)
def test_a_broken_file_is_told_and_replaced(content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "choices.json"
    path.write_bytes(content)
    choices = choices_in(path)
    assert choices.needs_timing
    assert f"kernels are timed anew: {path} is not used" in caplog.text
    decide(choices)
    assert not choices_in(path).needs_timing


def test_a_file_that_cannot_be_written_is_told_and_the_decisions_serve(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "choices.json"
    choices = choices_in(path)
    decide(choices)
    assert f"the next start times kernels again: {path} cannot be written" in caplog.text
    assert choices.chosen == [BY_TILES]


def test_what_serves_is_logged_with_the_figures_and_described_where_it_is_not_the_default(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    choices = choices_in(tmp_path / "choices.json")
    decide(choices)
    choices.log_decisions()
    assert "kernels chosen=now 16-bit products of one row: tiles (GEMV 4200.0 µs, tiles 3900.0 µs)" in caplog.text
    assert choices.described() == "16-bit products of one row by tiles"
    assert choices.are_oldest


def test_what_an_earlier_start_refused_is_an_error_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    refusal = KernelChoice(name=CHOICE.name, serves=TILES, us={TILES: 3900.0}, refused={GEMV: "wrong results"})
    first = choices_in(tmp_path / "choices.json")
    first.chosen = [refusal]
    first._store(tmp_path / "choices.json")
    later = choices_in(tmp_path / "choices.json")
    later.log_decisions()
    [record] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.getMessage().startswith(
        "16-bit products of one row by GEMV does not serve since an earlier start: wrong results"
    )
    assert later.described() == "16-bit products of one row by tiles (GEMV refused: wrong results)"


def test_tolerances_are_of_every_format_that_models_compute_in() -> None:
    assert set(kernel_timing.TOLERANCE) == {torch.float32, torch.float16, torch.bfloat16}
