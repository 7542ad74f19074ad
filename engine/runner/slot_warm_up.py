"""Prepares steps over slots before the first request: compiles their kernels, and captures graphs of the sizes that few
requests need. The kernels of plain forward passes are asked for in `runner.warm_up`."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from engine.grammar.masks import allow_all
from engine.runner.cuda_graphs import CaptureFailed
from engine.runner.decode_step import NO_INPUTS, NO_ROWS, DecodeShape, DecodeSteps
from engine.runner.kernel_choices import KernelChoices
from engine.runner.kernel_timing import KernelTiming
from engine.runner.scheduled_rows import DEVICE_TOKEN, FIRST_OUTPUT
from engine.runner.slot_steps import SlotSteps
from engine.runner.slots import NOTHING
from engine.runner.token_spans import TokenSpan
from engine.runner.warm_up import STEP_SIZES, compiles_at_first_use, compiling
from engine.sampling.columns import Kind
from kernels import ops

log = logging.getLogger("gatehouse.engine")

KINDS = (Kind(), Kind(greedy=True), Kind(weighs=True), Kind(counts=True), Kind(num_top=1))
"""Kinds of steps that each call kernels which the others do not. Any other kind calls those of several of these."""

COMMON_KINDS = KINDS[:2]
"""What few requests mostly need; also the kinds of a draft model's own variants, which leave no tokens for the host."""

WARM_ROWS = (1, 2, 4, 8)
"""Steps that are captured before the first request: what few requests need at once. The others take some tens of milliseconds
each, when so many run for the first time."""


@torch.inference_mode()
def warm_up(steps: SlotSteps, choices: KernelChoices) -> None:
    """Make the steps of few rows ready; larger ones are captured when they are first needed. `choices`: decided here, if
    they are not yet.

    The largest step that draws is captured first, though it costs the start one more capture: graphs reuse memory of earlier
    ones only for tensors that fit into it, so that captured in growing order each would hold logits of its own.
    """
    timing = KernelTiming(steps) if choices.needs_timing else None
    if compiles_at_first_use(steps.device):
        with compiling("sampling"):
            _compile_sampling(steps)
    if timing is not None and not _compile_alternatives(timing):
        timing = None
    largest = steps.decodes.shape(steps.inputs.max_rows, Kind(), has_drafts=steps.has_drafts)
    _capture(steps.decodes, largest)
    if timing is not None:
        choices.decide(timing)  # its graphs fit into the memory of the largest one
    sizes = [num_rows for num_rows in reversed(WARM_ROWS) if num_rows <= steps.limits.max_num_seqs]
    _prepare(steps.decodes, sizes)
    if steps.draft_steps is not None:
        _prepare(steps.draft_steps.decodes, sizes)
    if steps.has_drafts:
        _prepare(steps.decodes, WARM_ROWS[:0:-1], has_drafts=True)
    if steps.chunks is not None:
        steps.chunks.warm_up()
    if timing is not None and not choices.are_oldest and largest.size <= ops.FUSED_ROWS_MAX:
        steps.calls.discard(largest)  # captured before the decision
        _capture(steps.decodes, largest)


def _compile_alternatives(timing: KernelTiming) -> bool:
    """Compile what is timed. Where that fails the oldest kernels serve, which have been compiled, and the next start tries
    again."""
    try:
        with compiling("alternatives"):
            timing.compile()
    except ops.CompilationFailed as error:
        log.error("%s: the oldest kernels serve", error)
        return False
    return True


def _prepare(steps: DecodeSteps, sizes: Sequence[int], *, has_drafts: bool = False) -> None:
    for kind in COMMON_KINDS:
        steps.step.record(kind, has_drafts=has_drafts)
    for num_rows in sizes:
        for kind in COMMON_KINDS:
            _capture(steps, steps.shape(num_rows, kind, has_drafts=has_drafts))


def _capture(steps: DecodeSteps, shape: DecodeShape) -> None:
    """Capture the steps of this shape. Where that fails they will be computed in the plain way, as where it fails later."""
    try:
        steps.make_ready(shape)
    except CaptureFailed as error:
        log.error("%s: such steps are computed in the plain way", error)


def _compile_sampling(steps: SlotSteps) -> None:
    """Ask for the kernels that choose tokens (within `compiling` nothing runs, and what is asked for is compiled): for a row of
    padding, in every way, after a decode and after a chunk, with and without masks. Before that, for those of steps as far as
    their logits, in all sizes that make a difference."""
    step, inputs, target = steps.decodes.step, steps.inputs, steps.target
    for size in steps.decodes.verify_sizes if steps.has_drafts else ():
        inputs.write_columns(NO_INPUTS, size)
        step(size, None, has_drafts=True)
    for size in reversed([size for size in STEP_SIZES if size <= steps.limits.max_num_seqs]):
        inputs.write_slots(NO_ROWS, size)
        step(size, None)
    if steps.draft_steps is not None:
        for kind in COMMON_KINDS:
            steps.draft_steps.decodes.step(1, kind)
    logits = target.logits(target.forward_spans([TokenSpan(DEVICE_TOKEN, 0, (0,), FIRST_OUTPUT)]), wide=False)
    masks = allow_all(1, logits.shape[1], steps.device)
    where = steps.staging.send([[NOTHING], [0]])
    for kind in KINDS:
        step(1, kind)
        step.sample(1, kind, masks)
        for filled in (None, masks):
            slots = where[0].to(torch.int32)
            chosen = steps.sampler.choose(logits, slots, where[1], kind, filled)
            steps.state.advance(slots, chosen.tokens, host=steps.token_return.host)
