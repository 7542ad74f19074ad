"""Timing of GPU calls, with a clock that the calls advance; needs no GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

from bench.gpu import calibration, layer, timing
from bench.gpu.context import Context
from bench.gpu.targets import LAYER_ROWS
from kernels.triton.launching import early_launch

CARD = torch.device("cuda")


class Card:
    """Runs calls at once. `stretches`: how many replays were timed in a row, in order; `clock_s`: what all calls took."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock_s = 0.0
        self.stretches: list[tuple[int, float]] = []
        self.captured = 0
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
        monkeypatch.setattr(timing, "_captured", self._capture)
        monkeypatch.setattr(timing, "_elapsed", self._elapsed)

    def call(self, taken_s: float) -> Callable[[], None]:
        def run() -> None:
            self.clock_s += taken_s

        return run

    def _capture(self, calls: list[Callable[[], object]]) -> Callable[[], object]:
        self.captured += 1
        return lambda: [call() for call in calls]

    def _elapsed(self, replay: Callable[[], object], repeats: int) -> float:
        self.stretches.append((repeats, self.clock_s))
        for _ in range(repeats):
            replay()
        return self.clock_s - self.stretches[-1][1]


@pytest.mark.parametrize("taken_s", [2e-5, 1e-3, 0.03, 0.2])
def test_the_gpu_is_kept_busy_before_the_first_sample(taken_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch)
    found = timing.seconds([card.call(taken_s)], CARD, samples=3)
    assert found == [pytest.approx(taken_s)] * 3
    _, first_sample_s = card.stretches[-3]
    warmed_s = first_sample_s - card.stretches[0][1]
    assert warmed_s * (1 + 1e-9) >= timing.WARM_S
    assert warmed_s < timing.WARM_S + 2 * taken_s + 1e-9, "no longer than it has to: hundreds of rows are timed"
    assert all(repeats == max(1, round(timing.SAMPLE_S / taken_s)) for repeats, _ in card.stretches[-3:])


def test_the_number_of_replays_per_sample_is_chosen_on_the_warm_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch)
    taken = iter([1e-3, 1e-3])  # the first ones, on a cold clock

    def call() -> None:
        card.clock_s += next(taken, 1e-4)

    timing.seconds([call], CARD, samples=1)
    assert card.stretches[-1][0] == pytest.approx(timing.SAMPLE_S / 1e-4, rel=0.05)


@pytest.mark.parametrize("fast", ["row by row", "transposed"])
def test_the_matmul_baseline_is_the_faster_of_two_layouts(fast: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(calls: list[Callable[[], torch.Tensor]], _: torch.device) -> list[float]:
        with mock.patch.object(torch, "mm") as product:
            calls[0]()
        layout = "row by row" if product.call_args.args[1].is_contiguous() else "transposed"
        return [1e-3 if layout == fast else 2e-3] * 3

    told: list[dict[str, Any]] = []
    monkeypatch.setattr(calibration, "seconds", seconds)
    context = Context(torch.device("cpu"), True, {}, told.append, 1000.0, clock=lambda: 0.0)
    calibration._matmul(context)
    (row,) = (line["row"] for line in told if "row" in line)
    assert context.flops == pytest.approx(2 * 64**3 / 1e-3)
    assert row["facts"][fast] == pytest.approx(row["value"])
    assert len(row["facts"]) == 2


def test_layers_are_compiled_together_in_each_way_that_they_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: dict[str, set[tuple[str, int, int, str | None]]] = {"compiled": set(), "timed": set()}
    stage = ["timed"]

    def make_layer(_: Context, model: str, rows: int) -> tuple[Callable[[], None], int]:
        def run() -> None:
            launches[stage[0]].add((model, rows, early_launch.EARLY_ROWS_MAX, os.environ.get(early_launch.VARIABLE)))

        return run, 1

    @contextmanager
    def compiling(_: str) -> Iterator[None]:
        stage[0] = "compiled"
        yield
        stage[0] = "timed"

    monkeypatch.setattr(layer, "make_layer", make_layer)
    monkeypatch.setattr(layer, "compiling", compiling)
    monkeypatch.setattr(layer, "compiles_at_first_use", lambda _: True)
    layer.measure_layers(Context(torch.device("cpu"), False, {}, lambda _: None, 1000.0, clock=lambda: 0.0))
    assert len(launches["timed"]) == 2 * sum(map(len, LAYER_ROWS.values()))
    assert launches["compiled"] == launches["timed"]


@pytest.mark.parametrize(("graph_s", "plain_s", "kernel_s"), [(2e-3, 1e-3, 3e-3), (1e-3, 2e-3, 3e-3), (2e-3, 2e-3, 1e-3)])
def test_the_bandwidth_baseline_is_the_best_of_driver_copies_and_a_kernel_copy(
    graph_s: float, plain_s: float, kernel_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seconds(calls: list[Callable[[], torch.Tensor]], device: torch.device, *, captured: bool = True) -> list[float]:
        assert device.type == "cpu"
        with mock.patch.object(torch.Tensor, "copy_", autospec=True) as copied:
            for call in calls:
                call()
        return [(graph_s if captured else plain_s) if copied.called else kernel_s] * 3

    told: list[dict[str, Any]] = []
    monkeypatch.setattr(calibration, "seconds", seconds)
    context = Context(torch.device("cpu"), True, {}, told.append, 1000.0, clock=lambda: 0.0)
    calibration._copy(context, 1, [])
    (row,) = (line["row"] for line in told if "row" in line)
    num_bytes = 2 * 4 * 4096
    assert context.bandwidth == num_bytes / 1e-3
    assert row["value"] == pytest.approx(num_bytes / 1e-3 / 1e9)
    assert row["samples"] == [pytest.approx(row["value"])] * 3
    assert row["facts"] == {
        "captured": pytest.approx(num_bytes / graph_s / 1e9),
        "plain": pytest.approx(num_bytes / plain_s / 1e9),
        "kernel": pytest.approx(num_bytes / kernel_s / 1e9),
    }
