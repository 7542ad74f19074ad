"""A decode step, from slots to tokens, as a function of buffers at fixed addresses: what a CUDA graph captures.

    slots ─► inputs (last tokens, positions, slot mapping, blocks) ─► layers ─► logits ─► tokens ─► slots, and out

The host writes the slots of a step to `DecodeInputBuffers.slots`. The step leaves the sampled tokens in `sampled` and in host
memory (`token_return`), and their log-probabilities, where requested, in `scores`. A row with a negative slot is padding: it
reads no context, writes no key, and changes no slot, so a step of nothing but padding changes nothing.

A step in which requests verify draft tokens (`runner.scheduled_rows`) has several rows per slot. The host writes its inputs,
and what the step leaves in such a slot is not used: the host determines how many drafts were accepted, and sends the slot again
with a later step.

A draft model runs in every step too, because it has a KV cache of its own.

Where a row waits for a mask that depends on the previous token, or the step's kind has no graph of its own, the graph ends with
the logits, and `sample` runs after it. On a CPU the operations of a step are recorded (`runner.recorded_step`).

`DecodeStep` computes a step; `DecodeSteps` has it captured for each shape before it first runs, and runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from engine.runner.cuda_graphs import Calls
from engine.runner.decode_input_buffers import DecodeInputBuffers
from engine.runner.paged_decoder import PagedDecoder
from engine.runner.recorded_step import RecordedSteps
from engine.runner.slots import SlotState
from engine.sampling import scores
from engine.sampling.columns import ColumnSampler, Kind, SamplingNeeds
from engine.sampling_params import TOP_LOGPROBS_MAX
from engine.step_sizes import logits_size, sizes, step_size, verify_size
from kernels import ops

NO_ROWS: list[int] = []
NO_INPUTS: list[list[int]] = [[]] * 5


class DecodeShape(NamedTuple):
    """What a graph is made for, and its key: `size` rows of the model called `name`, padding included. Without a `kind` it ends
    with the logits; all kinds of a size have that one in common."""

    name: str
    size: int
    kind: Kind | None
    has_drafts: bool


class DecodeStep:
    """The step of one model, or of a draft model and the one that is served, for the rows of `inputs`."""

    def __init__(
        self,
        decoders: Sequence[PagedDecoder],
        inputs: DecodeInputBuffers,
        state: SlotState,
        sampler: ColumnSampler,
        *,
        should_record: bool,
        host: ops.HostTokens | None,
    ) -> None:
        """decoders: in their order; tokens are those of the last one. `should_record`: run as one recorded call, where all
        operations can be recorded. `host`: the host memory that tokens are written to, if any."""
        (max_rows, max_blocks), device = inputs.block_tables.shape, inputs.block_tables.device
        self.sampled = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.host_sampled = self.sampled.numpy() if device.type == "cpu" else None  # the same memory
        self.scores = torch.zeros(max_rows, scores.width(TOP_LOGPROBS_MAX), dtype=torch.int64, device=device)
        self._logits: torch.Tensor | None = None  # [max_rows, V], of steps whose rows wait for masks
        decoder = decoders[-1]
        self._decoders, self._decoder = decoders, decoder
        self._greedy_head = decoder.greedy_head
        self._inputs = inputs
        self._state = state
        self._sampler = sampler
        self._host = host
        self._recorded = RecordedSteps(decoder.new_record if should_record else None, self._run, max_rows)
        decoder.allocate_workspaces(max_rows, max_blocks)

    def __call__(self, size: int, kind: Kind | None, *, has_drafts: bool = False) -> None:
        """Compute the first `size` rows up to their tokens, or, without a kind, their logits. The host reads no value of the
        device, so it can be captured. `has_drafts`: from the inputs that the host has written, not from the slots."""
        logits = self._recorded(size, kind, has_drafts=has_drafts)
        if logits is None:
            return
        if self._logits is None:  # in the run before the first capture, so that it lies outside the memory of graphs
            self._logits = logits.new_empty(self._inputs.max_rows, logits.shape[1])
        self._logits[:size].copy_(logits)

    @property
    def is_recorded(self) -> bool:
        """Whether steps are recorded, judged by a greedy one: if an operation of a model, or of its draft model, cannot be
        recorded, no step is."""
        return self._recorded.record(Kind(greedy=True)) is not None

    def record(self, kind: Kind | None, *, has_drafts: bool = False) -> None:
        """Have steps of this kind recorded, where they can be."""
        self._recorded.record(kind, has_drafts=has_drafts)

    def logits(self, size: int) -> torch.Tensor:
        """The first `size` rows of logits, [size, V], of a step that was computed up to them; overwritten by the next one."""
        assert self._logits is not None, "no step ended with its logits"
        return self._logits[:size]

    def sample(self, size: int, kind: Kind, masks: torch.Tensor | None = None) -> None:
        """Sample the tokens of a step that was computed up to its logits. masks: [size, ceil(V / 32)] int32, if any"""
        self._sample(self.logits(size), size, kind, masks)

    def _run(
        self, size: int, kind: Kind | None, has_drafts: bool, before_layer: Callable[[], None] | None
    ) -> torch.Tensor | None:
        """Operation by operation; logits [size, V] where no kind is given."""
        if not has_drafts:
            self._inputs.fill_from_slots(size)
        # Inputs of both models come first: a record keeps what is before all layers.
        inputs = [self._inputs.forward_inputs(decoder, size, has_drafts=has_drafts) for decoder in self._decoders]
        for decoder, its_inputs in zip(self._decoders, inputs, strict=True):
            hidden = decoder.forward(its_inputs, before_layer)
        if kind is not None and kind.greedy and self._greedy_head is not None and size <= ops.FUSED_ROWS_MAX:
            self._advance(self._inputs.slots[:size], self._greedy_head(hidden))
            return None
        logits = self._decoder.logits(hidden, wide=False)
        if kind is None:
            return logits
        self._sample(logits, size, kind, None)
        return None

    def _sample(self, logits: torch.Tensor, size: int, kind: Kind, masks: torch.Tensor | None) -> None:
        rows, lens = self._inputs.slots[:size], self._inputs.context_lens[:size]
        out = self.scores[:size, : scores.width(kind.num_top)] if kind.num_top else None
        chosen = self._sampler.choose(logits, rows, lens, kind, masks, scores_out=out)
        self._advance(rows, chosen.tokens)

    def _advance(self, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        self._state.advance(rows, tokens, out=self.sampled[: len(rows)], host=self._host)


class DecodeSteps:
    """Runs the step of one model by shape."""

    def __init__(
        self, name: str, step: DecodeStep, inputs: DecodeInputBuffers, calls: Calls, *, max_num_seqs: int, is_synchronous: bool
    ) -> None:
        """`name`: distinguishes the model's graphs from others of `calls`. `max_num_seqs`: rows of a step without drafts.
        `is_synchronous`: a step is recorded instead of rounded up to one of the sizes of graphs."""
        self.step = step
        self._name = name
        self._inputs = inputs
        self._calls = calls
        self._max_num_seqs = max_num_seqs
        self._is_synchronous = is_synchronous

    @property
    def verify_sizes(self) -> list[int]:
        """The sizes of verification steps."""
        return sizes(verify_size, self._inputs.max_rows, fewest=2)

    def shape(self, num_rows: int, kind: Kind | None, *, has_drafts: bool = False) -> DecodeShape:
        """The shape of a step of so many rows, rounded up to a size that there are graphs of."""
        if self._is_synchronous:
            size = num_rows
        elif has_drafts:
            size = verify_size(num_rows, self._inputs.max_rows)
        else:
            size = (logits_size if kind is None else step_size)(num_rows, self._max_num_seqs)
        return DecodeShape(self._name, size, kind, has_drafts)

    def select_shape(self, num_rows: int, needs: SamplingNeeds, *, has_drafts: bool = False) -> DecodeShape:
        """The shape to compute a step in, made ready: of the step's own kind, or of none where rows wait for masks or its kind
        is too rare for a graph. Write the inputs after this call, which may capture the graph."""
        shape = self.shape(num_rows, needs.kind, has_drafts=has_drafts)
        if needs.masked or not self._calls.admits(shape):
            shape = self.shape(num_rows, None, has_drafts=has_drafts)
        self.make_ready(shape)
        return shape

    def make_ready(self, shape: DecodeShape) -> None:
        """Capture the steps of this shape, unless they are."""
        if not self._calls.is_ready(shape):  # captured with nothing but padding: the step changes nothing
            if shape.has_drafts:
                self._inputs.write_columns(NO_INPUTS, shape.size)
            else:
                self._inputs.write_slots(NO_ROWS, shape.size)
            self._calls.make_ready(shape, self._step_call(shape))

    def run(self, shape: DecodeShape) -> None:
        """Compute a step of a shape that is ready, whose inputs are written."""
        self._calls.run(shape, self._step_call(shape))

    def _step_call(self, shape: DecodeShape) -> Callable[[], None]:
        return partial(self.step, shape.size, shape.kind, has_drafts=shape.has_drafts)
