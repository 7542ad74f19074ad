"""How fast the loaded model runs on this device: a few passes timed at start, and the step-time model that fits them.

A step with one row takes as long as reading the weights, one with many rows as long as multiplying with them. These two give
the bandwidth and the FLOP rate that the step-time model needs, with the overheads of this implementation. Sizes between them
show when draft tokens are worth the rows that verify them.

    one row        the decode step as it will be run: captured, recorded or, without slots, the pass; including a draft
                   model's part in it, and the transfer of its token to the host
    many rows      the pass that computes chunks of prompts, captured where it will be, and a draft model's
    draft tokens   the steps that will verify them, and those of the draft model

Steps over slots are timed by `runner.slot_timing`, those of the plain runner by `PassTiming`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Protocol

import torch

from engine.config.model import ModelConfig
from engine.runner.paged_decoder import PagedDecoder
from engine.runner.token_spans import TokenSpan
from engine.scheduling.limits import SchedulerLimits
from engine.scheduling.step_time import DeviceSpeed, Efficiency, ModelShape, StepTimeModel
from engine.speculation.adaptive_drafter import SpeculationCosts

MANY_ROWS = {"cpu": 64, "cuda": 2048}
"""Rows of a pass in which products take longer than reading the weights and, on a GPU, than launching the kernels of a small
model one by one."""

CHUNK_ROWS = 256
"""Rows of one request in a pass, so that attention has no part in the price of products."""

VERIFY_ROW_COUNTS = (4, 16)
"""Rows of the verification steps that are timed as well with speculative decoding."""

PASSES_MAX = 3
PASSES_MAX_S = 0.25
"""A pass is repeated for up to this time, at least once; the fastest counts, because other work on the machine can only slow a
pass down. One pass before them is not counted: it compiles or loads kernels, which takes seconds where a pass takes less than a
millisecond."""

STEPS_MAX = 20
"""The most steps of a size that are timed; small ones take less than a millisecond."""

MEASURED = Efficiency(bandwidth=1.0, flops=1.0, host_s=0.0)
"""The speeds are those that whole steps reached, with what the host adds to them."""

LINK_BANDWIDTH = {"cuda": 25e9, "cpu": 5e9}
"""Bytes per second between device and host tier: PCIe with page-locked memory, and copying within main memory."""

HiddenOf = Callable[[Sequence[TokenSpan]], torch.Tensor]
"""Hidden states of the outputs of spans: [R, hidden]."""


class TimedSteps(Protocol):
    """Steps as the engine will run them, without requests. Each call runs one step; decodes wait for its end."""

    def decode(self, num_rows: int) -> None:
        """A decode if it has one row, else a step that verifies drafts; including a draft model's part in it."""
        ...

    def draft_decode(self) -> None:
        """A decode of one row by the draft model."""
        ...

    def chunks(self, spans: Sequence[TokenSpan]) -> torch.Tensor:
        """Hidden states of the outputs of chunks of prompts."""
        ...


class PassTiming:
    """Steps of the plain runner: passes of the draft model, if there is one, and of the target. What they leave in the cache
    belongs to no request."""

    def __init__(self, target: PagedDecoder, draft: PagedDecoder | None, limits: SchedulerLimits) -> None:
        self._target, self._draft, self._limits = target, draft, limits

    def decode(self, num_rows: int) -> None:
        if self._draft is not None:
            self.draft_decode()
        num_rows = min(num_rows, self._limits.max_num_batched_tokens)  # no step has more
        _run_pass(self._target, self._target.forward_spans, _spans(num_rows, num_rows, self._limits))

    def draft_decode(self) -> None:
        assert self._draft is not None, "there is no draft model"
        _run_pass(self._draft, self._draft.forward_spans, _spans(1, 1, self._limits))

    def chunks(self, spans: Sequence[TokenSpan]) -> torch.Tensor:
        return self._target.forward_spans(spans)


@dataclass(frozen=True, slots=True)
class MeasuredSpeed:
    """The step-time model of the engine, and the costs of speculative decoding, None without it."""

    step_times: StepTimeModel
    speculation: SpeculationCosts | None


@torch.inference_mode()
def measure_speed(
    config: ModelConfig,
    steps: TimedSteps,
    target: PagedDecoder,
    draft: PagedDecoder | None,
    limits: SchedulerLimits,
    *,
    weight_bytes: float,
    max_draft_tokens: int,
) -> MeasuredSpeed:
    """Time steps of the models, as `steps` runs them, over their empty caches.

    No step is larger than those that memory was planned for: the rows that `limits` allow, and logits of one for each request
    and each draft token. `weight_bytes` is the mean of all weights, `max_draft_tokens` the most of a step, 0 without any.
    """
    cache, device = target.kv_caches[0], target.kv_caches[0].device.type
    num_rows = min(MANY_ROWS[device], limits.max_num_batched_tokens)
    num_sampled = min(num_rows, limits.max_num_seqs)
    one_row_s = _fastest_s(partial(steps.decode, 1), STEPS_MAX)
    many_rows_s = _pass_s(target, steps.chunks, _spans(num_rows, num_sampled, limits))
    if draft is not None:
        many_rows_s += _pass_s(draft, draft.forward_spans, _spans(num_rows, 1, limits))
    shape = ModelShape.of(config)
    speed = _device_speed(
        shape,
        one_row_s,
        max(one_row_s, many_rows_s) / num_rows,
        weight_bytes=weight_bytes,
        sampled_share=num_sampled / num_rows,
        link_bandwidth=LINK_BANDWIDTH[device],
    )
    step_times = StepTimeModel(
        shape, speed, weight_bytes=weight_bytes, kv_bytes=cache.itemsize, block_size=limits.block_size, efficiency=MEASURED
    )
    if not max_draft_tokens:
        return MeasuredSpeed(step_times, None)
    costs = _speculation_costs(steps, limits.max_num_seqs + max_draft_tokens, device, has_draft=draft is not None)
    step_times.draft_step_s = costs.draft_step * step_times.weights_s(1)
    return MeasuredSpeed(step_times, costs)


def _speculation_costs(steps: TimedSteps, max_rows: int, device: str, *, has_draft: bool) -> SpeculationCosts:
    """The costs of draft tokens, verified in steps of up to `max_rows` rows. More rows never take less time, whatever was
    measured."""
    rows = sorted({1, 2, *VERIFY_ROW_COUNTS, max_rows if device == "cuda" else min(MANY_ROWS["cpu"], max_rows)})
    times = [*accumulate((_fastest_s(partial(steps.decode, num_rows), STEPS_MAX) for num_rows in rows), max)]
    draft_s, one_s = _fastest_s(steps.draft_decode, STEPS_MAX) if has_draft else 0.0, times[0]
    return SpeculationCosts(rows=tuple(rows), times=tuple(time_s / one_s for time_s in times), draft_step=draft_s / one_s)


def _spans(num_rows: int, num_sampled: int, limits: SchedulerLimits) -> list[TokenSpan]:
    """Chunks of `num_rows` rows, the last `num_sampled` of which are sampled."""
    spans: list[TokenSpan] = []
    size = min(CHUNK_ROWS, limits.max_model_len)
    for first in range(0, num_rows, size):
        length = min(size, num_rows - first)
        num_unsampled = min(length, max(0, num_rows - num_sampled - first))
        spans.append(TokenSpan([0] * length, 0, range(-(-length // limits.block_size)), range(num_unsampled, length)))
    return spans


def _run_pass(decoder: PagedDecoder, hidden_of: HiddenOf, spans: Sequence[TokenSpan]) -> None:
    """Compute the logits of a pass over `spans` and wait for them. `hidden_of` computes it up to the hidden states."""
    decoder.logits(hidden_of(spans))
    if decoder.kv_caches[0].is_cuda:
        torch.cuda.synchronize()


def _pass_s(decoder: PagedDecoder, hidden_of: HiddenOf, spans: Sequence[TokenSpan]) -> float:
    return _fastest_s(partial(_run_pass, decoder, hidden_of, spans))


def _fastest_s(run: Callable[[], None], max_runs: int = PASSES_MAX) -> float:
    def timed_s() -> float:
        started_s = time.perf_counter()
        run()
        return time.perf_counter() - started_s

    timed_s()
    times = [timed_s()]
    while len(times) < max_runs and sum(times) < PASSES_MAX_S:
        times.append(timed_s())
    return min(times)


def _device_speed(
    shape: ModelShape,
    one_row_s: float,
    per_row_s: float,
    *,
    weight_bytes: float,
    sampled_share: float,
    link_bandwidth: float,
) -> DeviceSpeed:
    """The speed at which the step-time model predicts a pass with one row, and one with many, of which `sampled_share` were
    multiplied with the head as well. Attention and swaps are priced by the same bandwidth."""
    head = shape.head_params
    active = shape.num_layers * (shape.attention_params + shape.num_chosen_experts * shape.expert_params) + head
    return DeviceSpeed(
        bandwidth=weight_bytes * active / one_row_s,
        flops=2 * (active - (1 - sampled_share) * head) / per_row_s,
        link_bandwidth=link_bandwidth,
    )
