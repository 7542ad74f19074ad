"""Calibration at the start: times of steps, rows and drafts as the cost model gets them, without one-time costs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from engine.config.model import parse_model_config
from engine.runner import calibration
from engine.runner.calibration import PASSES_MAX, PASSES_MAX_S, MeasuredSpeed, PassTiming
from engine.runner.token_spans import TokenSpan
from engine.scheduling.limits import SchedulerLimits
from engine.scheduling.step_time import StepTimeModel
from engine.simulator.models import CONFIGS

LIMITS = SchedulerLimits(max_num_seqs=64, max_num_batched_tokens=512, max_model_len=4096, block_size=16)


class FakeDecoder:
    """A decoder with its own clock, whose passes take `times_s` in turn and then the last of them each."""

    def __init__(self, *times_s: float) -> None:
        self.times_s = list(times_s)
        self.now_s = 0.0
        self.count = 0
        self.kv_caches = [SimpleNamespace(is_cuda=False, itemsize=2)]

    def forward_spans(self, rows: object) -> object:
        return rows

    def logits(self, hidden: object) -> None:
        self.now_s += self.times_s[min(self.count, len(self.times_s) - 1)]
        self.count += 1

    def measured_s(self, monkeypatch: pytest.MonkeyPatch) -> float:
        monkeypatch.setattr(calibration, "time", SimpleNamespace(perf_counter=lambda: self.now_s))
        decoder = cast("Any", self)
        return calibration._pass_s(decoder, decoder.forward_spans, [])


def test_the_first_pass_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = FakeDecoder(3.2, 0.002, 0.001, 0.003)
    assert decoder.measured_s(monkeypatch) == pytest.approx(0.001)
    assert decoder.count == 1 + PASSES_MAX


def test_a_slow_model_is_timed_only_once_after_its_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = FakeDecoder(40.0, 2 * PASSES_MAX_S)
    assert decoder.measured_s(monkeypatch) == pytest.approx(2 * PASSES_MAX_S)
    assert decoder.count == 2


def test_a_decode_step_is_timed_as_the_engine_runs_it_and_chunks_as_forward_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = FakeDecoder(0.008)
    decoder.kv_caches[0].device = torch.device("cpu")

    class RecordedSteps:
        chunks = decoder.forward_spans

        def decode(self, num_rows: int) -> None:
            decoder.now_s += 0.0043

    monkeypatch.setattr(calibration, "time", SimpleNamespace(perf_counter=lambda: decoder.now_s))
    config = parse_model_config(CONFIGS["llama-3.1-8b"], {})

    def measured(steps: Any) -> StepTimeModel:
        models = cast("Any", decoder), None
        return calibration.measure_speed(config, steps, *models, LIMITS, weight_bytes=2.0, max_draft_tokens=0).step_times

    found = measured(RecordedSteps())
    assert found.weights_s(1) == pytest.approx(0.0043)
    assert 64 * (found.token_s + found.sampled_row_s) == pytest.approx(0.008)
    plain = measured(PassTiming(cast("Any", decoder), None, LIMITS))
    assert plain.weights_s(1) == pytest.approx(0.008), "the plain way's decodes are passes"


def test_a_draft_model_adds_to_the_time_of_a_step_and_has_a_time_per_draft_step(monkeypatch: pytest.MonkeyPatch) -> None:
    target, small = FakeDecoder(0.008), FakeDecoder(0.001)
    for each in (target, small):
        each.kv_caches[0].device = torch.device("cpu")
    clock = SimpleNamespace(perf_counter=lambda: target.now_s + small.now_s)
    monkeypatch.setattr(calibration, "time", clock)
    config = parse_model_config(CONFIGS["llama-3.1-8b"], {})
    models = cast("Any", target), cast("Any", small)

    def measured(steps: Any) -> MeasuredSpeed:
        return calibration.measure_speed(config, steps, *models, LIMITS, weight_bytes=2.0, max_draft_tokens=64)

    found = measured(PassTiming(*models, LIMITS))
    times = found.step_times
    assert times.weights_s(1) == pytest.approx(0.009)
    assert 64 * (times.token_s + times.sampled_row_s) == pytest.approx(0.009)
    assert times.draft_step_s == pytest.approx(0.001)
    assert found.speculation is not None
    assert found.speculation.times[0] == 1.0

    class RecordedSteps:
        chunks = target.forward_spans

        def decode(self, num_rows: int) -> None:
            target.now_s += 0.009

        def draft_decode(self) -> None:
            small.now_s += 0.0004

    over_slots = measured(RecordedSteps()).step_times
    assert over_slots.weights_s(1) == pytest.approx(0.009)
    assert over_slots.draft_step_s == pytest.approx(0.0004), "as the steps over slots take it"


def test_a_draft_step_is_a_share_of_a_step_of_one_row_which_reads_few_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0

    def run(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    target = FakeDecoder(0.0)
    target.kv_caches[0].device = torch.device("cpu")
    steps = SimpleNamespace(decode=lambda _: run(0.004), draft_decode=lambda: run(0.001), chunks=target.forward_spans)
    monkeypatch.setattr(calibration, "time", SimpleNamespace(perf_counter=lambda: now_s))
    mixture = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2}
    found = calibration.measure_speed(
        parse_model_config({**CONFIGS["llama-3.1-8b"], **mixture}, {}), cast("Any", steps), cast("Any", target),
        cast("Any", target), LIMITS, weight_bytes=2.0, max_draft_tokens=64,
    )  # fmt: skip
    assert found.step_times.draft_step_s == pytest.approx(0.001)


class HostBoundDecoder(FakeDecoder):
    """A pass takes 5 ms to launch, or 10 µs per row if that is longer."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.kv_caches[0].device = torch.device("cuda")
        self.passes: list[list[TokenSpan]] = []

    def forward_spans(self, rows: list[TokenSpan]) -> object:  # type: ignore[override]
        self.passes.append(rows)
        return rows

    def logits(self, hidden: object) -> None:
        self.now_s += max(0.005, 1e-5 * sum(len(row.token_ids) for row in self.passes[-1]))


@pytest.mark.parametrize(("max_tokens", "max_rows"), [(8192, 2048), (1000, 1000)])
@pytest.mark.parametrize("max_draft_tokens", [0, 64])
@pytest.mark.parametrize("max_len", [300, 100])
def test_the_cost_of_a_row_on_a_gpu_excludes_launch_overhead(
    max_tokens: int, max_rows: int, max_len: int, max_draft_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    host_bound = HostBoundDecoder()
    monkeypatch.setattr(calibration, "time", SimpleNamespace(perf_counter=lambda: host_bound.now_s))
    decoder = cast("Any", host_bound)
    limits = SchedulerLimits(max_num_seqs=256, max_num_batched_tokens=max_tokens, max_model_len=max_len, block_size=16)
    found = calibration.measure_speed(
        parse_model_config(CONFIGS["llama-3.1-8b"], {}), PassTiming(decoder, None, limits), decoder, None, limits,
        weight_bytes=2.0, max_draft_tokens=max_draft_tokens,
    )  # fmt: skip
    times = found.step_times
    assert max_rows * times.token_s + 256 * times.sampled_row_s == pytest.approx(1e-5 * max_rows)
    longest = max(row.start + len(row.token_ids) for rows in host_bound.passes for row in rows)
    assert longest == min(256, max_len), "a context holds them"
    logits = max(sum(len(row.outputs) for row in rows) for rows in host_bound.passes)
    assert logits == 256 + max_draft_tokens, "memory is planned for their logits"
    assert max_draft_tokens == 0 if found.speculation is None else found.speculation.rows[-1] == 256 + max_draft_tokens


@pytest.mark.parametrize(("device", "rows"), [("cpu", (1, 2, 4, 16, 64)), ("cuda", (1, 2, 4, 16, 80))])
def test_the_cost_of_drafts_is_that_of_the_steps_that_verify_them(
    device: str, rows: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0

    def run(num_rows: int) -> None:
        nonlocal now_s
        now_s += 0.5 + (num_rows > 1) + num_rows / 2

    monkeypatch.setattr(calibration, "time", SimpleNamespace(perf_counter=lambda: now_s))
    costs = calibration._speculation_costs(cast("Any", SimpleNamespace(decode=run)), 80, device, has_draft=False)
    assert costs.rows == rows
    assert costs.times == tuple(1.0 if number == 1 else 1.5 + number / 2 for number in rows)
