"""One decode step from slots to tokens as a function of buffers that stay where they are: what a graph captures.

    slots ─► inputs (last tokens, positions, places, blocks) ─► layers ─► logits ─► tokens ─► slots, and out

It takes its rows from `rows`, where the host writes the slots of the step, and leaves their tokens in `sampled`, and what was
asked about them in `scores`. A row below 0 is padding: it reads no context, writes no key, and changes no slot, so a step of
nothing but padding changes nothing.

A step in which requests verify guesses of speculative decoding (`choosing_rows`) is one of the same kind with several rows of a
slot. The host, which knows all of their tokens, writes the inputs (`write_inputs`), and what the step leaves in such a slot is
worth nothing: how far the guesses got is seen on the host, and sent with a later step.

Where a row waits for a mask that depends on the token before, or the step's kind has no graph of its own, the graph ends with
the logits, and `choose` follows by itself.
On a CPU the operations of a step are recorded instead (`runner.recorded_step`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from engine.runner.batch_inputs import BatchInputs
from engine.runner.paged_decoder import PagedDecoder
from engine.runner.recorded_step import RecordedSteps
from engine.runner.slots import NOTHING, SlotState
from engine.runner.staging import Staging
from engine.sampling import scores
from engine.sampling.columns import ColumnSampler, Kind
from engine.sampling_params import TOP_LOGPROBS_MAX
from kernels import ops

EVERY = 8

PADDING = (NOTHING, 0, 0, NOTHING, 0)
"""Slot, token, position, place in the cache and length of context of a row that changes nothing."""


def step_size(num_rows: int, max_rows: int) -> int:
    """To how many rows a step is rounded up: 1, 2, 4, every eighth, and the largest."""
    rounded = -(-num_rows // EVERY) * EVERY if num_rows > 4 else 4 if num_rows > 2 else num_rows
    return min(rounded, max_rows)


def guesses_size(num_rows: int, max_rows: int) -> int:
    """To how many rows a step with guesses is rounded up. Powers of two, because the number is another one in each step, and
    for few different sizes there are graphs at a time."""
    return min(1 << (num_rows - 1).bit_length(), max_rows)


class DecodeStep:
    """The step of one model for up to `max_rows` rows."""

    def __init__(
        self,
        decoder: PagedDecoder,
        state: SlotState,
        sampler: ColumnSampler,
        *,
        max_rows: int,
        block_size: int,
        device: torch.device,
        is_recorded: bool = False,
    ) -> None:
        """`is_recorded`: as one call of the decoder's operations, where they can be recorded."""
        num_rows, num_columns = max_rows, state.tables.shape[1]
        self.rows = torch.full((num_rows,), NOTHING, dtype=torch.int32, device=device)
        self.sampled = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.host_sampled = self.sampled.numpy() if device.type == "cpu" else None  # the same memory
        self.scores = torch.zeros(num_rows, scores.width(TOP_LOGPROBS_MAX), dtype=torch.int64, device=device)
        self._logits: torch.Tensor | None = None  # [max_rows, V], of steps whose rows wait for masks
        self._token_ids = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._positions = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._slot_mapping = torch.full((num_rows,), NOTHING, dtype=torch.int64, device=device)
        self._context_lens = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self._block_tables = torch.zeros(num_rows, num_columns, dtype=torch.int32, device=device)
        self._decoder = decoder
        self._greedy_head = decoder.greedy_head
        self._state = state
        self._sampler = sampler
        self._block_size = block_size
        self._staging = Staging(device)
        self._ops = ops.operations(device, decoder.dtype)
        sequence = decoder.sequence if is_recorded else None
        self._recorded = RecordedSteps(sequence, partial(self._run, prepares=True), num_rows)
        self._recorded_guesses = RecordedSteps(sequence, partial(self._run, prepares=False), num_rows)
        self._workspaces = decoder.keep_workspaces(num_rows, num_columns)

    def __call__(self, size: int, kind: Kind | None, *, has_guesses: bool = False) -> None:
        """Compute the first `size` of `rows`, None as far as their logits. Makes no decision by anything on the device.
        `has_guesses`: as `write_inputs` has left them, not from the slots."""
        logits = (self._recorded_guesses if has_guesses else self._recorded)(size, kind)
        if logits is None:
            return
        if self._logits is None:  # in the run before the first capture, so that it lies outside the memory of graphs
            self._logits = logits.new_empty(self.rows.shape[0], logits.shape[1])
        self._logits[:size].copy_(logits)

    def make_ready(self, kind: Kind | None, *, has_guesses: bool = False) -> None:
        """Have steps of this kind recorded, where they can be."""
        (self._recorded_guesses if has_guesses else self._recorded).make_ready(kind)

    def write_inputs(self, columns: Sequence[Sequence[int]], size: int) -> None:
        """columns: slots, tokens, positions, places in the cache and lengths of contexts of up to `size` rows; what is left
        of them is padding."""
        num_padded = size - len(columns[0])
        table = np.array([[*column, *[value] * num_padded] for column, value in zip(columns, PADDING, strict=True)])
        inputs = self.rows, self._token_ids, self._positions, self._slot_mapping, self._context_lens
        if self._state.host_tables is not None:
            for target, values in zip(inputs, table, strict=True):
                target.numpy()[:size] = values
            self._block_tables.numpy()[:size] = self._state.host_tables[table[0]]
            return
        sent = self._staging.send(table)
        for target, column in zip(inputs, sent, strict=True):
            target[:size].copy_(column)
        self._block_tables[:size].copy_(self._state.tables.index_select(0, sent[0].clamp_min(0)))

    def choose(self, size: int, kind: Kind, masks: torch.Tensor | None = None) -> None:
        """The rest of a step that was computed as far as its logits. masks: [size, ceil(V / 32)] int32, where rows have some"""
        assert self._logits is not None, "no step ended with its logits"
        self._choose(self._logits[:size], size, kind, masks)

    def _run(
        self, size: int, kind: Kind | None, before_layer: Callable[[], None] | None, *, prepares: bool
    ) -> torch.Tensor | None:
        """Operation by operation; logits [size, V] where no kind is given. `prepares`: the inputs, from the slots."""
        if prepares:
            self._prepare(size)
        hidden = self._decoder.forward(self._inputs(size), before_layer)
        if kind is not None and kind.greedy and self._greedy_head is not None and size <= ops.FUSED_ROWS_MAX:
            self._state.advance(self.rows[:size], self._greedy_head(hidden), out=self.sampled[:size])
            return None
        logits = self._decoder.logits(hidden, wide=False)
        if kind is None:
            return logits
        self._choose(logits, size, kind, None)
        return None

    def _prepare(self, size: int) -> None:
        self._ops.prepare_decode(
            self.rows[:size],
            self._state.last_tokens,
            self._state.num_tokens,
            self._state.tables,
            block_size=self._block_size,
            token_ids=self._token_ids[:size],
            positions=self._positions[:size],
            slot_mapping=self._slot_mapping[:size],
            context_lens=self._context_lens[:size],
            block_tables=self._block_tables[:size],
        )

    def _choose(self, logits: torch.Tensor, size: int, kind: Kind, masks: torch.Tensor | None) -> None:
        rows = self.rows[:size]
        out = self.scores[:size, : scores.width(kind.num_top)] if kind.num_top else None
        chosen = self._sampler.choose(logits, rows, self._context_lens[:size], kind, masks, scores_out=out)
        self._state.advance(rows, chosen.tokens, out=self.sampled[:size])

    def _inputs(self, size: int) -> BatchInputs:
        positions, tables, lens = self._positions[:size], self._block_tables[:size], self._context_lens[:size]
        invariant = self._decoder.batch_invariant
        return BatchInputs(
            token_ids=self._token_ids[:size],
            positions=positions,
            rotations=tuple(rotary.at(positions) for rotary in self._decoder.rotaries),
            slot_mapping=self._slot_mapping[:size],
            sampled_rows=None,
            attention=tuple(
                ops.PagedPlan(shape, size, tables, lens, workspace=workspace, is_row_invariant=invariant)
                for shape, workspace in zip(self._decoder.attention_shapes, self._workspaces, strict=True)
            ),
        )
