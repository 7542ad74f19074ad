"""The passes that are timed at the start: what only the first one takes is no price of a token."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.runner import calibration
from engine.runner.calibration import PASSES, PASSES_S


class Passes:
    """A decoder whose passes take the times given, the last one again and again, on a clock of its own."""

    def __init__(self, *times_s: float) -> None:
        self.times_s = list(times_s)
        self.now_s = 0.0
        self.count = 0
        self.kv_caches = [SimpleNamespace(is_cuda=False)]

    def prepare(self, rows: object) -> object:
        return rows

    def forward(self, inputs: object) -> object:
        return inputs

    def logits(self, hidden: object) -> None:
        self.now_s += self.times_s[min(self.count, len(self.times_s) - 1)]
        self.count += 1

    def measured_s(self, monkeypatch: pytest.MonkeyPatch) -> float:
        monkeypatch.setattr(calibration, "time", SimpleNamespace(perf_counter=lambda: self.now_s))
        return calibration._pass_s(cast("Any", self), 1, 1, 16)


def test_a_first_pass_that_compiles_counts_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = Passes(3.2, 0.002, 0.001, 0.003)
    assert passes.measured_s(monkeypatch) == pytest.approx(0.001)
    assert passes.count == 1 + PASSES


def test_a_slow_model_is_timed_once_after_it_has_warmed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = Passes(40.0, 2 * PASSES_S)
    assert passes.measured_s(monkeypatch) == pytest.approx(2 * PASSES_S)
    assert passes.count == 2
