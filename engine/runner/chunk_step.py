"""A step with chunks of prompts beside decodes, as a function of buffers at fixed addresses: what a CUDA graph captures.

    host    slots of decodes; tokens, places, lengths of chunks ─► one copy ┐
    slots   last tokens, lengths, block tables of decodes ──────────────────┴─► layers ─► hidden states of rows that sample

Launched kernel by kernel, a step of 32 layers costs the host some 350 launches. On an H200 these took 21 to 38 ms where the
device computed for 17 ms. Captured it costs one launch, and a few for the sampling behind it.

A graph depends on nothing but a number of tokens and a number of chunks, both rounded up. Tokens of decodes come first, those
of chunks follow, then padding; where each part ends is a number on the device. Decode attention is launched for as many tokens
as could be decodes; chunk attention runs after it and overwrites the results of those that were not. Padding is a chunk of its
own: its tokens write no keys, read whatever blocks its table names, and nobody reads their results.

Steps that verify guesses and those of more tokens or chunks than any graph has are launched kernel by kernel (`SlotRunner`).
On a CPU nothing is captured.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache, partial
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from engine.runner.cuda_graphs import Calls, CaptureFailed
from engine.runner.input_rows import InputRow
from engine.runner.paged_decoder import PagedDecoder
from engine.runner.rows import input_row
from engine.runner.slots import NO_NUMBERS, NOTHING, Numbers, SlotState
from engine.runner.staging import Staging
from engine.scheduling.scheduled_batch import ScheduledRequest
from engine.step_sizes import CHUNK_ROWS_FEW, chunk_shapes
from kernels import ops

log = logging.getLogger("gatehouse.engine")


class ChunkShape(NamedTuple):
    """What a graph is made for, and its key: `num_tokens` in all, at most `num_decodes` of them of decodes; `num_chunks`
    chunks, that of padding included."""

    name: str
    num_tokens: int
    num_decodes: int
    num_chunks: int

    @property
    @cache  # noqa: B019 - of the few shapes that graphs are made for, asked for several times a step
    def pieces(self) -> dict[str, slice]:
        """The place of each piece among the numbers of a step, at a multiple of 16 bytes. Pieces before "tokens" are read as
        32-bit numbers."""
        tokens, decodes, chunks = self.num_tokens, self.num_decodes, self.num_chunks
        sizes = {
            "slots": decodes,  # of decodes, NOTHING for no decode
            "lens": chunks,  # of their contexts
            "starts": chunks + 1,  # among the tokens
            "tokens": tokens,  # NOTHING for a decode
            "positions": tokens,
            "places": tokens,  # in the cache
            "wanted": decodes,  # the tokens behind which one is chosen
            "positions of chosen": decodes,
            "slots of chosen": -(-decodes // 2),  # of 32 bits
        }
        firsts = accumulate((_even(size) for size in sizes.values()), initial=0)
        return {name: slice(first, first + size) for (name, size), first in zip(sizes.items(), firsts, strict=False)}

    @property
    def num_numbers(self) -> int:
        """The length of all pieces together."""
        return _even(self.pieces["slots of chosen"].stop)


def _even(size: int) -> int:
    return size + size % 2


class ChunkRows(NamedTuple):
    """A step, whose decodes are the first of all its tokens: their slots, the chunks, and which tokens (`wanted`) another one
    is chosen behind. Of each chosen one the slot, and its index in prompt plus output. Arrays are of int64."""

    slots: Numbers
    chunks: Sequence[InputRow]
    wanted: Numbers
    slots_of_chosen: Numbers
    positions_of_chosen: Numbers

    @classmethod
    def of(cls, prefills: Sequence[ScheduledRequest], slots: Numbers, positions: Numbers) -> ChunkRows:
        """slots, positions: of all that sample, in the order of the step, in which decodes come before `prefills`. One of these
        that samples behind a single token is a decode as well."""
        chosen = [item for item in prefills if item.samples]
        chunks = [item for item in prefills if item.num_tokens > 1 or not item.samples]
        num_decodes = len(slots) - len(chosen)
        row = num_decodes  # of the next one of a single token
        end = num_decodes + len(prefills) - len(chunks)  # behind all decodes, then behind each chunk
        wanted = np.arange(len(slots))
        is_decode = wanted < num_decodes
        lasts: list[int] = []
        for item in prefills:
            if item.num_tokens == 1 and item.samples:
                is_decode[num_decodes + len(lasts)] = True
                lasts.append(row)
                row += 1
            else:
                end += item.num_tokens
                if item.samples:
                    lasts.append(end - 1)
        wanted[num_decodes:] = lasts
        return cls(slots[is_decode], [input_row(item) for item in chunks], wanted, slots, positions)

    @property
    def num_tokens(self) -> int:
        return len(self.slots) + sum(len(row.token_ids) for row in self.chunks)


NOBODY = ChunkRows(NO_NUMBERS, (), NO_NUMBERS, NO_NUMBERS, NO_NUMBERS)
"""A step of nothing but padding, which changes nothing."""


class ToChoose(NamedTuple):
    """What a step leaves of R rows that choose a token, until the next one: hidden states [R, hidden], slots [R] int32, and the
    index of the chosen token in prompt plus output [R] int64."""

    hidden: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor


class ChunkStep:
    """The pass of one model, or of a draft model and the one that is served, over up to `max_tokens` tokens."""

    def __init__(self, decoders: Sequence[PagedDecoder], state: SlotState, *, max_tokens: int, block_size: int) -> None:
        """decoders: in their order; hidden states are those of the last one. A request holds `max_tokens` at least."""
        (num_slots, max_blocks), device = state.tables.shape, state.tables.device
        assert max_tokens <= max_blocks * block_size, "padding is attended like one request"
        self._max_tokens = max_tokens
        self._decoders = decoders
        self._state = state
        self._block_size = block_size
        self._num_decodes = min(max_tokens, num_slots)
        largest = self.shapes[-1]
        self._num_numbers, size = largest.num_numbers, largest.num_chunks * max_blocks
        self._sent = torch.zeros(self._num_numbers + -(-size // 2), dtype=torch.int64, device=device)
        self._tables = self._sent[self._num_numbers :].view(torch.int32)[:size].view(-1, max_blocks)  # of chunks
        self._hidden: torch.Tensor | None = None  # [num_decodes, hidden], outside the memory of graphs
        self._staging = Staging(device, len(self._sent))
        self._ops = ops.operations(device, decoders[0].dtype)

    @property
    def shapes(self) -> list[ChunkShape]:
        """The shapes that graphs are made for, the largest last."""
        return [
            ChunkShape("chunks", num_tokens, min(num_tokens, self._num_decodes), num_chunks + 1)
            for num_tokens, num_chunks in chunk_shapes(self._max_tokens)
        ]

    def to_choose(self, num_rows: int, shape: ChunkShape) -> ToChoose:
        """What the last step, of this shape, left of its first rows that sample."""
        assert self._hidden is not None, "no step was computed"
        numbers, at = self._numbers(shape), shape.pieces
        slots = numbers[at["slots of chosen"]].view(torch.int32)[:num_rows]
        return ToChoose(self._hidden[:num_rows], slots, numbers[at["positions of chosen"]][:num_rows])

    def _numbers(self, shape: ChunkShape) -> torch.Tensor:
        """[num_numbers] int64, which end where the tables begin: both are sent together, and the tables stay where they are."""
        return self._sent[self._num_numbers - shape.num_numbers : self._num_numbers]

    def write(self, rows: ChunkRows, shape: ChunkShape) -> None:
        """Write a step, the slots of whose decodes are current; what is left of its shape is padding."""
        size = shape.num_numbers
        tables = self._flat_tables(rows.chunks)
        numbers = np.zeros(size + -(-len(tables) // 2), dtype=np.int64)
        numbers[size:].view(np.int32)[: len(tables)] = tables
        at = {name: numbers[piece] for name, piece in shape.pieces.items()}
        num_decodes, num_chunks = len(rows.slots), len(rows.chunks)
        at["slots"][:] = at["places"][:] = NOTHING
        at["slots"][:num_decodes], at["tokens"][:num_decodes] = rows.slots, NOTHING
        num_chosen = len(rows.slots_of_chosen)
        at["wanted"][: len(rows.wanted)] = rows.wanted
        at["positions of chosen"][:num_chosen] = rows.positions_of_chosen
        at["slots of chosen"].view(np.int32)[:num_chosen] = rows.slots_of_chosen
        first = num_decodes
        for index, row in enumerate(rows.chunks):
            end, context_len = first + len(row.token_ids), row.start + len(row.token_ids)
            here, positions = slice(first, end), np.arange(row.start, context_len)
            at["tokens"][here], at["positions"][here] = row.token_ids, positions
            blocks = np.asarray(row.block_table)[positions // self._block_size]
            at["places"][here] = blocks * self._block_size + positions % self._block_size
            at["starts"][index], at["lens"][index] = first, context_len
            first = end
        at["starts"][num_chunks:-1], at["starts"][-1], at["lens"][-1] = first, shape.num_tokens, shape.num_tokens - first
        self._staging.send(numbers, into=self._sent[self._num_numbers - size :][: len(numbers)])

    def _flat_tables(self, chunks: Sequence[InputRow]) -> np.ndarray:
        """The blocks that chunks read, int32: each chunk's begin with its row of `_tables`, and nothing follows the last."""
        columns, lines = self._tables.shape[1], []
        for row in chunks:
            num_blocks = -(-(row.start + len(row.token_ids)) // self._block_size)
            lines.append(row.block_table[:num_blocks])
        flat = np.zeros((len(lines) - 1) * columns + len(lines[-1]) if lines else 0, dtype=np.int32)
        for index, line in enumerate(lines):
            flat[index * columns :][: len(line)] = line
        return flat

    def __call__(self, shape: ChunkShape) -> None:
        """Compute what was written, as far as `hidden`. Looks at no value on the device, so that it can be captured."""
        numbers, at, decodes = self._numbers(shape), shape.pieces, slice(shape.num_decodes)
        narrow = numbers[: at["tokens"].start].to(torch.int32)
        lens = torch.cat([narrow.new_empty(shape.num_decodes), narrow[at["lens"]]])
        tables = torch.cat([self._tables.new_empty(shape.num_decodes, self._tables.shape[1]), self._tables[: shape.num_chunks]])
        given = [numbers[at[name]] for name in ("tokens", "positions", "places")]
        made = [torch.empty_like(each) for each in given]
        self._ops.prepare_decode(
            narrow[at["slots"]],
            self._state.last_tokens,
            self._state.num_tokens,
            self._state.tables,
            block_size=self._block_size,
            token_ids=made[0][decodes],
            positions=made[1][decodes],
            slot_mapping=made[2][decodes],
            context_lens=lens[decodes],
            block_tables=tables[decodes],
        )
        is_decode = given[0] < 0
        # Kernels and no copies: what is launched behind them may be launched early, which is defined behind kernels alone.
        tokens, positions, places = (torch.where(is_decode, *each) for each in zip(made, given, strict=True))
        plan = partial(
            ops.PagedPlan,
            num_decodes=shape.num_decodes,
            block_tables=tables,
            context_lens=lens,
            query_starts=narrow[at["starts"]],
            max_query_len=shape.num_tokens,
            counts_all=True,
        )
        for decoder in self._decoders:
            inputs = decoder.inputs(tokens, positions, places, plan, sampled_rows=numbers[at["wanted"]])
            hidden = decoder.forward(inputs)
        if self._hidden is None:  # in the run before the first capture
            self._hidden = hidden.new_empty(self._num_decodes, hidden.shape[1])
        self._hidden[decodes].copy_(hidden)


class ChunkSteps:
    """Runs steps with chunks by shape, each captured before the first request."""

    def __init__(self, step: ChunkStep, calls: Calls) -> None:
        self._step = step
        self._calls = calls
        self._shapes = step.shapes  # from few tokens to many
        self.failure = ""
        """Why some shapes have no graph; empty where all have one."""

    def run(self, prefills: Sequence[ScheduledRequest], slots: Numbers, positions: Numbers) -> ToChoose | None:
        """Compute a step (`ChunkRows.of`), as far as what chooses its tokens. None for one that is to be launched in another
        way. Raises `CaptureFailed`."""
        return self._computed(ChunkRows.of(prefills, slots, positions))

    def run_for_timing(self, chunks: Sequence[InputRow]) -> torch.Tensor | None:
        """Hidden states of all outputs of `chunks`; None as of `run`. What it leaves in the cache is overwritten before it is
        used."""
        firsts = accumulate((len(row.token_ids) for row in chunks), initial=0)
        wanted = [first + output for first, row in zip(firsts, chunks, strict=False) for output in row.outputs]
        computed = self._computed(NOBODY._replace(chunks=chunks, wanted=np.array(wanted, dtype=np.int64)))
        return None if computed is None else computed.hidden

    @property
    def padded_sizes(self) -> list[int]:
        """Numbers of tokens from which on padding takes time, in ascending order."""
        return sorted({shape.num_tokens for shape in self._shapes if shape.num_tokens >= CHUNK_ROWS_FEW[-1]})

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Have the steps of all shapes captured, the largest first: the others take no memory beside its own. Shapes whose
        capture fails, and those that come after, are launched kernel by kernel."""
        ready: list[ChunkShape] = []
        for shape in reversed(self._shapes):
            try:
                self._make_ready(shape)
            except CaptureFailed as error:
                self.failure = str(error)
                log.error("steps with chunks of prompts have %d of %d graphs: %s", len(ready), len(self._shapes), error)
                break
            ready.append(shape)
        self._shapes = ready[::-1]

    def _computed(self, rows: ChunkRows) -> ToChoose | None:
        num_tokens, num_chunks = rows.num_tokens, len(rows.chunks) + 1
        fitting = (shape for shape in self._shapes if num_tokens <= shape.num_tokens and num_chunks <= shape.num_chunks)
        shape = next(fitting, None)
        if shape is None:
            return None
        self._make_ready(shape)
        self._step.write(rows, shape)
        self._calls.run(shape, partial(self._step, shape))
        return self._step.to_choose(len(rows.wanted), shape)

    def _make_ready(self, shape: ChunkShape) -> None:
        """Capture the steps of this shape, unless that is done."""
        if not self._calls.is_ready(shape):  # captured with nothing but padding: the step changes nothing
            self._step.write(NOBODY, shape)
            self._calls.make_ready(shape, partial(self._step, shape), is_kept=True)
