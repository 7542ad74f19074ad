"""Steps over slots without requests, run to be timed: what `calibration` measures of an engine that launches them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from engine.runner.cuda_graphs import CaptureFailed
from engine.runner.decode_step import DecodeShape, DecodeSteps
from engine.runner.slot_steps import SlotSteps
from engine.runner.slots import NOTHING, SlotWrites
from engine.runner.token_spans import TokenSpan
from engine.sampling.columns import Kind

ONE_SLOT = [0]
ONE_SLOT_WRITES = SlotWrites(slots=ONE_SLOT, last_tokens=[0], num_tokens=[1])


class SlotTiming:
    """Each method runs one step to its end. What it leaves in slot 0 and block 0 is overwritten before it is used."""

    def __init__(self, steps: SlotSteps) -> None:
        self._steps = steps

    @torch.inference_mode()
    def decode(self, num_rows: int) -> None:
        """Run a step as far as its tokens: a decode if it has one row, else a step with drafts. Its rows are not padding, for
        which a mixture would read no experts."""
        if num_rows == 1:
            self._decode_one_row(self._steps.decodes)
            return
        steps = self._steps
        shape = steps.decodes.shape(num_rows, Kind(), has_drafts=True)
        run = self._make_ready(steps.decodes, shape)
        no_slots, zeros = [NOTHING] * num_rows, [0] * num_rows
        tokens = [row % steps.sampler.vocab_size for row in range(num_rows)]
        slot_mapping = [row % steps.limits.block_size for row in range(num_rows)]
        steps.inputs.write_columns([no_slots, tokens, zeros, slot_mapping, zeros], shape.size)
        run()
        self._synchronise()

    @torch.inference_mode()
    def chunks(self, spans: Sequence[TokenSpan]) -> torch.Tensor:
        """Hidden states of the outputs of chunks, computed as in a step with them. With a draft model it is the pass of the
        target alone."""
        steps = self._steps
        hidden = steps.chunks.run_for_timing(spans) if steps.chunks is not None and steps.draft_steps is None else None
        return steps.target.forward_spans(spans) if hidden is None else hidden

    @torch.inference_mode()
    def draft_decode(self) -> None:
        """As `decode` of one row, by the draft model."""
        assert self._steps.draft_steps is not None, "there is no draft model"
        self._decode_one_row(self._steps.draft_steps.decodes)

    def _decode_one_row(self, decodes: DecodeSteps) -> None:
        shape = decodes.shape(1, Kind())
        run = self._make_ready(decodes, shape)
        self._steps.state.write(ONE_SLOT_WRITES)
        self._steps.inputs.write_slots(ONE_SLOT, shape.size)
        run()
        self._synchronise()

    def _make_ready(self, decodes: DecodeSteps, shape: DecodeShape) -> Callable[[], None]:
        """What runs a step of this shape: its graph, or where it could not be captured its kernels one by one."""
        try:
            decodes.make_ready(shape)
        except CaptureFailed:
            return partial(decodes.step, shape.size, shape.kind, has_drafts=shape.has_drafts)
        return partial(decodes.run, shape)

    def _synchronise(self) -> None:
        """Wait for what was launched; its tokens are not fetched."""
        self._steps.token_return.mark_unfetched()
        if self._steps.device.type == "cuda":
            torch.cuda.current_stream(self._steps.device).synchronize()
