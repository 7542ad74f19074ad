"""A step with chunks of prompts beside decodes as a function of buffers that stay where they are: what a graph captures.

    host    slots, tokens, positions, places, lengths ─► one copy ┐
    slots   last tokens and block tables of the decodes ──────────┴─► layers ─► hidden states of the rows that sample

Launched kernel by kernel, a step of 32 layers costs the host some 350 launches, which on an H200 took 21 to 38 ms beside 17 ms
of the device's; captured it costs one, and a few for the choice of tokens behind it.

A graph is made for a number of tokens and a number of chunks, both rounded up, and for nothing else: tokens of decodes come
first, those of chunks follow at once, then padding, and where one ends and the next begins are numbers on the device. Attention
of decodes is launched for as many as there may be, and that of chunks overwrites what it left in place of theirs. Padding is a
chunk of its own, whose tokens write nothing, read whatever its table names, and are nobody's.

Steps that verify guesses, those of more tokens or chunks than any graph has, and those of sizes that are seldom met are
launched kernel by kernel (`SlotRunner`). On a CPU nothing is captured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from engine.runner.cuda_graphs import Calls
from engine.runner.input_rows import InputRow
from engine.runner.paged_decoder import PagedDecoder
from engine.runner.rows import UNKNOWN
from engine.runner.slots import NOTHING, SlotState
from engine.runner.staging import Staging
from engine.step_sizes import CHUNK_GRAPHS, CHUNKS_MAX, chunks_size
from kernels import ops


class ChunkShape(NamedTuple):
    """What a graph is made for, and its key: `num_tokens` in all, at most `num_decodes` of them, `num_chunks` with padding."""

    group: str
    num_tokens: int
    num_decodes: int
    num_chunks: int

    @property
    def pieces(self) -> dict[str, slice]:
        """Where each kind of number stands among those of a step; those in front of the tokens are narrow."""
        tokens, decodes, chunks = self.num_tokens, self.num_decodes, self.num_chunks
        sizes = {
            "slots": decodes,  # of decodes, NOTHING for no decode
            "lens": decodes + chunks,  # of contexts
            "starts": chunks + 1,  # of chunks among the tokens
            "unused": 1,  # so that those behind it begin on 16 bytes, for which kernels are compiled
            "tokens": tokens,  # below 0: in the slot
            "positions": tokens,
            "places": tokens,  # in the cache
            "wanted": decodes,  # the tokens behind which one is chosen
        }
        ends = [*accumulate(sizes.values(), initial=0)]
        return dict(zip(sizes, map(slice, ends, ends[1:]), strict=True))


class ChunkStep:
    """The pass of one model, or of a draft model and the one that is served, over up to `max_tokens` tokens."""

    def __init__(
        self, decoders: Sequence[PagedDecoder], state: SlotState, *, max_tokens: int, block_size: int, device: torch.device
    ) -> None:
        """decoders: in their order; hidden states are those of the last one. A request holds `max_tokens` at least."""
        num_slots, max_blocks = state.tables.shape
        assert max_tokens <= max_blocks * block_size, "padding is attended like one request"
        self.max_tokens = max_tokens
        self._decoders = decoders
        self._state = state
        self._block_size = block_size
        self._device = device
        self._num_decodes = min(max_tokens, num_slots)
        largest = self.shape(max_tokens, CHUNKS_MAX[-1] + 1)
        self._numbers = torch.zeros(largest.pieces["wanted"].stop, dtype=torch.int64, device=device)
        self._tables = torch.zeros(largest.num_chunks, max_blocks, dtype=torch.int32, device=device)
        self._hidden: torch.Tensor | None = None  # [num_decodes, hidden], outside the memory of graphs
        self._staging = Staging(device)

    def shape(self, num_tokens: int, num_chunks: int) -> ChunkShape:
        """The shape of so many tokens and chunks, padding among both."""
        return ChunkShape(CHUNK_GRAPHS, num_tokens, min(num_tokens, self._num_decodes), num_chunks)

    def hidden(self, num_rows: int) -> torch.Tensor:
        """What the last step left of its first rows that sample, until the next one: [num_rows, hidden]"""
        assert self._hidden is not None, "no step was computed"
        return self._hidden[:num_rows]

    def write(self, rows: Sequence[InputRow], slots: Mapping[int, int], shape: ChunkShape) -> None:
        """Write a step of `rows`, of which those in `slots` sample. Those of one token among them are decodes, and their slots
        are current."""
        pieces = shape.pieces
        numbers = np.zeros(pieces["wanted"].stop, dtype=np.int64)
        at = {name: numbers[piece] for name, piece in pieces.items()}
        at["slots"][:] = at["places"][:] = NOTHING
        firsts = dict.fromkeys(index for index in slots if len(rows[index].token_ids) == 1)
        chunks = [index for index in range(len(rows)) if index not in firsts]
        self._write_decodes(at, [rows[index] for index in firsts], [slots[index] for index in firsts])
        ends = [*accumulate((len(rows[index].token_ids) for index in chunks), initial=len(firsts))]
        places = dict(zip([*firsts, *chunks], [*range(len(firsts)), *ends], strict=False))
        for index in chunks:
            self._write_chunk(at, rows[index], places[index])
        num_padded = shape.num_tokens - ends[-1]
        at["starts"][: len(ends)], at["starts"][len(ends) : -1], at["starts"][-1] = ends, ends[-1], shape.num_tokens
        lens = at["lens"][shape.num_decodes :]
        lens[: len(chunks)] = [rows[index].start + len(rows[index].token_ids) for index in chunks]
        lens[-1] = num_padded
        at["wanted"][: len(slots)] = [places[index] + rows[index].outputs[0] for index in slots]
        self._staging.send(numbers, into=self._numbers[: len(numbers)])
        if chunks:
            self._write_tables([rows[index].block_table for index in chunks], lens[: len(chunks)].tolist())

    def _write_decodes(self, at: Mapping[str, np.ndarray], rows: Sequence[InputRow], slots: Sequence[int]) -> None:
        block_size, num_rows = self._block_size, len(rows)
        starts = at["positions"][:num_rows] = [row.start for row in rows]
        at["slots"][:num_rows] = slots
        at["lens"][:num_rows] = [start + 1 for start in starts]
        at["tokens"][:num_rows] = [NOTHING if row.token_ids is UNKNOWN else row.token_ids[0] for row in rows]
        blocks = [row.block_table[row.start // block_size] for row in rows]
        at["places"][:num_rows] = [block * block_size + start % block_size for block, start in zip(blocks, starts, strict=True)]

    def _write_chunk(self, at: Mapping[str, np.ndarray], row: InputRow, first: int) -> None:
        num_tokens = len(row.token_ids)
        here, positions = slice(first, first + num_tokens), np.arange(row.start, row.start + num_tokens)
        at["tokens"][here], at["positions"][here] = row.token_ids, positions
        blocks = np.asarray(row.block_table)[positions // self._block_size]
        at["places"][here] = blocks * self._block_size + positions % self._block_size

    def _write_tables(self, tables: Sequence[Sequence[int]], lens: Sequence[int]) -> None:
        counts = [-(-length // self._block_size) for length in lens]
        numbers = np.zeros((len(tables), max(counts)), dtype=np.int64)
        for line, table, count in zip(numbers, tables, counts, strict=True):
            line[:count] = table[:count]
        self._tables[: len(tables), : numbers.shape[1]].copy_(self._staging.send(numbers))

    def __call__(self, shape: ChunkShape) -> None:
        """Compute what was written, as far as `hidden`. Makes no decision by anything on the device."""
        at = shape.pieces
        narrow = self._numbers[: at["starts"].stop].to(torch.int32)
        tokens, positions, places, wanted = (self._numbers[at[name]] for name in ("tokens", "positions", "places", "wanted"))
        slots, decodes = narrow[at["slots"]].clamp_min(0), slice(shape.num_decodes)
        token_ids = tokens.clone()
        known, last = tokens[decodes], self._state.last_tokens.index_select(0, slots)
        token_ids[decodes] = torch.where(known < 0, last, known)
        tables = torch.cat([self._state.tables.index_select(0, slots), self._tables[: shape.num_chunks]])
        plan = partial(
            ops.PagedPlan,
            num_decodes=shape.num_decodes,
            block_tables=tables,
            context_lens=narrow[at["lens"]],
            query_starts=narrow[at["starts"]],
            max_query_len=shape.num_tokens,
            counts_all=True,
        )
        for decoder in self._decoders:
            hidden = decoder.forward(decoder.inputs(token_ids, positions, places, plan, sampled_rows=wanted))
        if self._hidden is None:  # in the run before the first capture
            self._hidden = hidden.new_empty(self._num_decodes, hidden.shape[1])
        self._hidden[decodes].copy_(hidden)


class ChunkSteps:
    """Runs steps with chunks by shape, each captured before it first runs."""

    def __init__(self, step: ChunkStep, calls: Calls) -> None:
        self._step = step
        self._calls = calls

    def run(self, rows: Sequence[InputRow], slots: Mapping[int, int]) -> torch.Tensor | None:
        """Hidden states that choose tokens, of the rows in `slots` and in their order, until the next step:
        [len(slots), hidden]. None for a step that is to be launched in another way. Raises `CaptureFailed`."""
        shape = self._shape(rows, slots)
        if shape is None or not self._calls.admits(shape):
            return None
        self.make_ready(shape)
        self._step.write(rows, slots, shape)
        self._calls.run(shape, partial(self._step, shape))
        return self._step.hidden(len(slots))

    def warm_up(self) -> None:
        """Have the largest step captured: smaller ones take no memory beside its own."""
        self.make_ready(self._step.shape(self._step.max_tokens, CHUNKS_MAX[0] + 1))

    def make_ready(self, shape: ChunkShape) -> None:
        """Capture the steps of this shape, unless that is done."""
        if not self._calls.is_ready(shape):  # captured with nothing but padding: the step changes nothing
            self._step.write((), {}, shape)
            self._calls.make_ready(shape, partial(self._step, shape))

    def _shape(self, rows: Sequence[InputRow], slots: Mapping[int, int]) -> ChunkShape | None:
        num_tokens = sum(len(row.token_ids) for row in rows)
        num_chunks = len(rows) - sum(len(rows[index].token_ids) == 1 for index in slots)
        most = next((most for most in CHUNKS_MAX if num_chunks <= most), None)
        if most is None or num_tokens > self._step.max_tokens:
            return None
        return self._step.shape(chunks_size(num_tokens, self._step.max_tokens), most + 1)
