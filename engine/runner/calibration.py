"""How fast the loaded model runs on this device: a few passes timed at start, and the step-time model that fits them.

A step with one row takes as long as reading the weights, one with many rows as long as multiplying with them. These two give
the bandwidth and the FLOP rate that the step-time model needs, with the overheads of this implementation. Sizes between them
tell when guesses are worth the rows that verify them.

    one row        the decode step as it will be run: captured, recorded or, without slots, the pass; a draft model's part
                   in it, and the way of its token to the host included
    many rows      the pass that computes chunks of prompts, captured where it will be, and a draft model's
    guesses        the steps that will verify them, and those of the draft model; without slots, passes
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

ROW_COUNTS = {"cpu": (1, 64), "cuda": (1, 256, 2048)}
"""Numbers of rows that are timed. With the last one, products take longer than reading the weights and, on a GPU, than
launching the kernels of a small model one by one. Where tokens are guessed, the second one is also how many rows of a pass are
sampled at most."""

CHUNK_ROWS = 256
"""Rows of one request in a pass, so that attention has no part in the price of products."""

GUESS_ROW_COUNTS = (4, 16)
"""Timed as well when the engine is to guess tokens, in the passes or in the steps that will verify them."""

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


class TimedSteps(Protocol):
    """Steps as the engine will run them, without requests. Each call runs one step and waits for its end."""

    def decode(self, num_rows: int) -> None:
        """A decode if it has one row, else a step that verifies guesses."""
        ...

    def draft_decode(self) -> None:
        """A decode of one row by the draft model."""
        ...

    def chunks(self, spans: Sequence[TokenSpan]) -> torch.Tensor:
        """Hidden states of the outputs of chunks of prompts."""
        ...


@dataclass(frozen=True, slots=True)
class MeasuredSpeed:
    """The step-time model of the engine, and what guessing tokens costs: see `speculation.adaptive_drafter`."""

    step_times: StepTimeModel
    speculation: SpeculationCosts


@torch.inference_mode()
def measure_speed(
    config: ModelConfig,
    target: PagedDecoder,
    draft: PagedDecoder | None,
    limits: SchedulerLimits,
    *,
    weight_bytes: float,
    max_guesses: int,
    steps: TimedSteps | None = None,
) -> MeasuredSpeed:
    """Time passes of the models over their empty caches; what they leave there belongs to no request.

    No pass is larger than the steps that memory was planned for: the rows that `limits` allow, and logits of one for each
    request, or of the guesses. `weight_bytes` is the mean of all weights, `max_guesses` the most rows of a step for guesses.
    `steps`: how steps are run if not as passes.
    """
    cache, block_size = target.kv_caches[0], limits.block_size
    device, guesses_in_passes = cache.device.type, max_guesses > 0 and steps is None
    rows = _row_counts(device, limits, has_guesses=guesses_in_passes)
    most_rows = rows[-1]
    max_sampled = min(most_rows, ROW_COUNTS[device][1] if guesses_in_passes else limits.max_num_seqs)
    one_row_s = _pass_s(target, 1, 1, block_size) if steps is None else _fastest_s(partial(steps.decode, 1), STEPS_MAX)
    hidden_of = None if steps is None else steps.chunks
    passes_s = [_pass_s(target, num_rows, min(num_rows, max_sampled), block_size, hidden_of=hidden_of) for num_rows in rows[1:]]
    times = _never_falling([one_row_s, *passes_s])
    draft_s = draft_most_s = 0.0
    if draft is not None:
        draft_s, draft_most_s = (_pass_s(draft, num_rows, 1, block_size) for num_rows in (1, most_rows))
    shape = ModelShape.of(config)
    speed = _device_speed(
        shape,
        times[0] + (draft_s if steps is None else 0.0),
        (times[-1] + draft_most_s) / most_rows,
        weight_bytes=weight_bytes,
        sampled_share=max_sampled / most_rows,
        link_bandwidth=LINK_BANDWIDTH[device],
    )
    step_times = StepTimeModel(
        shape, speed, weight_bytes=weight_bytes, kv_bytes=cache.itemsize, block_size=block_size, efficiency=MEASURED
    )
    if steps is not None and max_guesses:
        costs = _measured_guesses(steps, limits.max_num_seqs + max_guesses, device, has_draft=draft is not None)
    else:
        if len(rows) == 1:  # in so short a context, another row costs as much as the first
            rows, times = [1, 2], [times[0], 2 * times[0]]
        costs = _costs(rows, [time_s + draft_s for time_s in times], draft_s)
    step_times.draft_step_s = costs.draft_step * step_times.weights_s(1)
    return MeasuredSpeed(step_times, costs)


def _row_counts(device: str, limits: SchedulerLimits, *, has_guesses: bool) -> list[int]:
    """Numbers of rows of the passes that are timed, in ascending order, as far as steps within `limits` have so many."""
    counts = [*ROW_COUNTS[device], *(GUESS_ROW_COUNTS if has_guesses else ())]
    fitting = [num_rows for num_rows in counts if min(num_rows, CHUNK_ROWS) <= limits.max_model_len]
    return sorted({min(num_rows, limits.max_num_batched_tokens) for num_rows in fitting})


def _measured_guesses(steps: TimedSteps, max_rows: int, device: str, *, has_draft: bool) -> SpeculationCosts:
    """What guesses cost where they are verified over slots, in steps of up to `max_rows` rows."""
    rows = sorted({1, 2, *GUESS_ROW_COUNTS, max_rows if device == "cuda" else min(ROW_COUNTS["cpu"][-1], max_rows)})
    times = _never_falling([_fastest_s(partial(steps.decode, num_rows), STEPS_MAX) for num_rows in rows])
    return _costs(rows, times, _fastest_s(steps.draft_decode, STEPS_MAX) if has_draft else 0.0)


def _never_falling(times: Sequence[float]) -> list[float]:
    """More rows never take less time, whatever was measured."""
    return list(accumulate(times, max))


def _costs(rows: Sequence[int], times: Sequence[float], draft_s: float) -> SpeculationCosts:
    """times: seconds of steps with so many rows; draft_s: of one guess of a draft model"""
    one_s = times[0]
    return SpeculationCosts(rows=tuple(rows), times=tuple(time_s / one_s for time_s in times), draft_step=draft_s / one_s)


def _pass_s(
    decoder: PagedDecoder,
    num_rows: int,
    num_sampled: int,
    block_size: int,
    *,
    hidden_of: Callable[[Sequence[TokenSpan]], torch.Tensor] | None = None,
) -> float:
    """Seconds of a pass of `num_rows` rows, the last `num_sampled` of which are sampled. `hidden_of`: what computes it up to
    the hidden states; None is the decoder's own pass."""
    spans: list[TokenSpan] = []
    for first in range(0, num_rows, CHUNK_ROWS):
        length = min(CHUNK_ROWS, num_rows - first)
        num_unsampled = min(length, max(0, num_rows - num_sampled - first))
        spans.append(TokenSpan([0] * length, 0, range(-(-length // block_size)), range(num_unsampled, length)))

    def run() -> None:
        decoder.logits((hidden_of or decoder.forward_spans)(spans))
        if decoder.kv_caches[0].is_cuda:
            torch.cuda.synchronize()

    return _fastest_s(run)


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
