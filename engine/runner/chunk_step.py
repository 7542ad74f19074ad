"""A step with chunks of prompts beside decodes, as a function of buffers at fixed addresses: what a CUDA graph captures.

    host    changes of slots; slots of decodes; tokens, slot mapping, lengths of chunks ─► one copy ┐
    slots   last tokens, lengths, block tables of decodes, changed first ───────────────────────────┴─► layers ─► hidden states

Launched kernel by kernel, a step of 32 layers costs the host some 350 launches. On an H200 these took 21 to 38 ms where the
device computed for 17 ms. Captured it costs one launch, and choosing its tokens another one.

A graph depends on nothing but a number of tokens and a number of chunks, both rounded up. Tokens of decodes come first, those
of chunks follow, then padding; where each part ends is a number on the device. Decode attention is launched for as many tokens
as could be decodes; chunk attention runs after it and overwrites the results of those that were not. Padding is a chunk of its
own: its tokens write no keys, read whatever blocks its table names, and their results are not used.

The rows that sample are at the same addresses whatever the shape, padded with rows that have no slot. So what comes after the
hidden states needs a graph only for each number of such rows: logits, tokens, slots, and out. It serves greedy and drawn tokens
alike; another one weighs the whole vocabulary as well, for a top-p without a top-k. What counts penalties, scores tokens or
waits for masks is launched kernel by kernel.

Steps that verify drafts and those of more tokens or chunks than any graph has are launched kernel by kernel (`SlotRunner`).
On a CPU nothing is captured.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from engine.runner.cuda_graphs import Calls, CaptureFailed
from engine.runner.paged_decoder import PagedDecoder
from engine.runner.scheduled_rows import token_span
from engine.runner.slots import EMPTY_INT64, NOTHING, Int64Array, SlotState
from engine.runner.staging import Staging
from engine.runner.token_spans import TokenSpan, cache_slots
from engine.sampling.columns import ColumnSampler, Kind
from engine.scheduling.scheduled_batch import ScheduledRequest
from engine.step_sizes import CHUNK_ROWS_FEW, chunk_shapes, logits_size, sampled_shapes
from kernels import ops

WORDS_MAX = 1024
"""Words of slots that are changed within a step: some 30 for each request that is admitted and one for each block."""

log = logging.getLogger("gatehouse.engine")


class ChunkShape(NamedTuple):
    """The shape of a graph, and its key: `num_tokens` in all, at most `num_decodes` of them of decodes; `num_chunks` chunks,
    that of padding included. `num_slots`: the most rows that sample in any shape."""

    name: str
    num_tokens: int
    num_slots: int
    num_chunks: int

    @property
    def num_decodes(self) -> int:
        return min(self.num_tokens, self.num_slots)

    @property
    @cache  # noqa: B019 - of the few shapes that graphs are made for, used several times a step
    def layout(self) -> dict[str, slice]:
        """Where each input is among the packed numbers of a step, at a multiple of 16 bytes. Those before "tokens" are read
        as 32-bit numbers. The last two are equally long in all shapes."""
        tokens, decodes, chunks = self.num_tokens, self.num_decodes, self.num_chunks
        sizes = {
            "slots": decodes,  # of decodes, NOTHING for no decode
            "lens": chunks,  # of their contexts
            "starts": chunks + 1,  # among the tokens
            "tokens": tokens,  # NOTHING for a decode
            "positions": tokens,
            "slot_mapping": tokens,  # in the cache
            "sampled_rows": decodes,  # the tokens after which one is sampled
            "word_places": WORDS_MAX,  # of slots that change
            "words": WORDS_MAX // 2,  # of 32 bits
            "sampled_positions": self.num_slots,
            "sampled_slots": -(-self.num_slots // 2),  # of 32 bits, NOTHING for no row
        }
        firsts = accumulate((_even(size) for size in sizes.values()), initial=0)
        return {name: slice(first, first + size) for (name, size), first in zip(sizes.items(), firsts, strict=False)}

    @property
    def layout_len(self) -> int:
        """The length of all inputs together."""
        return _even(self.layout["sampled_slots"].stop)


def _even(size: int) -> int:
    return size + size % 2


class SampledShape(NamedTuple):
    """The shape of a graph that chooses tokens, and its key: `size` rows, padding included. `weighs`: see `Kind`."""

    size: int
    weighs: bool


class ChunkRows(NamedTuple):
    """One step. The tokens of its decodes come first.

    `slots`: those of the decodes. `chunks`: the spans of prompt tokens after them. `sampled_rows`: the rows after which a
    token is sampled; `sampled_slots` and `sampled_positions`: the slot of each and the index of its sampled token in prompt
    plus output. Arrays are int64. `words`: what changes in slots before all that."""

    slots: Int64Array
    chunks: Sequence[TokenSpan]
    sampled_rows: Int64Array
    sampled_slots: Int64Array
    sampled_positions: Int64Array
    words: ops.Words = ops.NO_WORDS

    @classmethod
    def of(
        cls,
        prefills: Sequence[ScheduledRequest],
        slots: Int64Array,
        positions: Int64Array,
        words: ops.Words = ops.NO_WORDS,
    ) -> ChunkRows:
        """slots, positions: of all that sample, in the order of the step, in which decodes come before `prefills`. A prefill of
        a single token that samples counts as a decode as well."""
        sampled = [item for item in prefills if item.samples]
        singles = [item for item in sampled if item.num_tokens == 1]
        chunks = [item for item in prefills if item.num_tokens > 1 or not item.samples]
        num_decodes = end = len(slots) - len(sampled)
        last_rows: dict[ScheduledRequest, int] = {}
        for item in (*singles, *chunks):
            end += item.num_tokens
            last_rows[item] = end - 1
        sampled_rows, is_decode = np.arange(len(slots)), np.ones(len(slots), dtype=bool)
        sampled_rows[num_decodes:] = [last_rows[item] for item in sampled]
        is_decode[num_decodes:] = [item.num_tokens == 1 for item in sampled]
        return cls(slots[is_decode], [token_span(item) for item in chunks], sampled_rows, slots, positions, words)

    @property
    def num_tokens(self) -> int:
        return len(self.slots) + sum(len(span.token_ids) for span in self.chunks)


PADDING_ONLY = ChunkRows(EMPTY_INT64, (), EMPTY_INT64, EMPTY_INT64, EMPTY_INT64)
"""A step of nothing but padding, which changes nothing."""


class SamplingInputs(NamedTuple):
    """The inputs of sampling for R rows, valid until the next step: hidden states [R, hidden], slots [R] int32, and the index
    of the sampled token in prompt plus output [R] int64. `tokens`: the input token of each row [R] int64, if drafts among
    them are known only on the device."""

    hidden: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    tokens: torch.Tensor | None = None


class ChunkStep:
    """The pass of one model, or of a draft model and the one that is served, over up to `max_tokens` tokens."""

    def __init__(
        self,
        decoders: Sequence[PagedDecoder],
        state: SlotState,
        sampler: ColumnSampler,
        *,
        max_tokens: int,
        block_size: int,
        host: ops.HostTokens | None,
    ) -> None:
        """decoders: in their order; hidden states are those of the last one. A request holds `max_tokens` at least. `host`: the
        host memory that tokens are written to, if any."""
        (num_slots, max_blocks), device = state.tables.shape, state.tables.device
        assert max_tokens <= max_blocks * block_size, "padding is attended like one request"
        self._max_tokens = max_tokens
        self._decoders = decoders
        self._state = state
        self._sampler = sampler
        self._host = host
        self._block_size = block_size
        self.max_sampled = min(max_tokens, num_slots)
        """The most rows that sample in a step."""
        largest = self.shapes[-1]
        self._max_layout_len, size = largest.layout_len, largest.num_chunks * max_blocks
        self._buffer = torch.zeros(self._max_layout_len + -(-size // 2), dtype=torch.int64, device=device)
        self._narrow_buffer = self._buffer.view(torch.int32)  # the same memory
        self._tables = self._narrow_buffer[2 * self._max_layout_len :][:size].view(-1, max_blocks)  # of chunks
        self._sampled_positions = self._buffer[largest.layout["sampled_positions"]]
        self._sampled_slots = self._buffer[largest.layout["sampled_slots"]].view(torch.int32)
        self._hidden: torch.Tensor | None = None  # [max_sampled, hidden], outside the memory of graphs
        self.sampled = torch.zeros(self.max_sampled, dtype=torch.int64, device=device)
        """The tokens that `sample` has chosen."""
        self._staging = Staging(device, len(self._buffer))
        self._ops = ops.operations(device, decoders[0].dtype)

    @property
    def shapes(self) -> list[ChunkShape]:
        """The shapes that graphs are made for, the largest last."""
        return [
            ChunkShape("chunks", num_tokens, self.max_sampled, num_chunks + 1)
            for num_tokens, num_chunks in chunk_shapes(self._max_tokens)
        ]

    def sampling_inputs(self, num_rows: int) -> SamplingInputs:
        """The first `num_rows` rows that sample in the last step, at the same addresses for each step."""
        assert self._hidden is not None, "no step was computed"
        return SamplingInputs(self._hidden[:num_rows], self._sampled_slots[:num_rows], self._sampled_positions[:num_rows])

    def _step_numbers(self, shape: ChunkShape) -> torch.Tensor:
        """[layout_len] int64, which end where the tables begin: both are sent together, and keep the addresses of the tables
        and of the rows that sample."""
        return self._buffer[self._max_layout_len - shape.layout_len : self._max_layout_len]

    def write(self, rows: ChunkRows, shape: ChunkShape) -> None:
        """Write the inputs of a step. The slots of its decodes must be current but for `rows.words`; the rest of the shape is
        padding."""
        size = shape.layout_len
        tables = self._flat_tables(rows.chunks)
        numbers = np.zeros(size + -(-len(tables) // 2), dtype=np.int64)
        numbers[size:].view(np.int32)[: len(tables)] = tables
        fields = {name: numbers[piece] for name, piece in shape.layout.items()}
        num_decodes, num_chunks = len(rows.slots), len(rows.chunks)
        fields["slots"][:] = fields["slot_mapping"][:] = NOTHING
        fields["slots"][:num_decodes], fields["tokens"][:num_decodes] = rows.slots, NOTHING
        num_sampled = len(rows.sampled_slots)
        fields["sampled_slots"][:] = NOTHING
        fields["sampled_rows"][: len(rows.sampled_rows)] = rows.sampled_rows
        fields["sampled_positions"][:num_sampled] = rows.sampled_positions
        fields["sampled_slots"].view(np.int32)[:num_sampled] = rows.sampled_slots
        first = num_decodes
        for index, span in enumerate(rows.chunks):
            end, context_len = first + len(span.token_ids), span.start + len(span.token_ids)
            # numpy takes three times as long for a list
            struct.pack_into(f"{end - first}q", fields["tokens"].data, 8 * first, *span.token_ids)
            fields["positions"][first:end] = np.arange(span.start, context_len)
            fields["slot_mapping"][first:end] = cache_slots(span.block_table, span.start, context_len, self._block_size)
            fields["starts"][index], fields["lens"][index] = first, context_len
            first = end
        fields["starts"][num_chunks:-1], fields["starts"][-1] = first, shape.num_tokens
        fields["lens"][-1] = shape.num_tokens - first
        self._write_words(fields, rows.words)
        self._staging.send(numbers, into=self._buffer[self._max_layout_len - size :][: len(numbers)])

    def _write_words(self, fields: Mapping[str, Int64Array], words: ops.Words) -> None:
        """Have the step change these words of slots, or change them before it where they are too many."""
        if len(words[0]) > WORDS_MAX:
            self._state.words.write(*words)
            words = ops.NO_WORDS
        places, values = words
        fields["word_places"][: len(places)] = places
        fields["word_places"][len(places) :] = self._state.words.first("unread")
        fields["words"].view(np.int32)[: len(values)] = values

    def _flat_tables(self, chunks: Sequence[TokenSpan]) -> np.ndarray:
        """The block tables of chunks as rows of `_tables`, flattened, int32, without what follows the last table."""
        columns, tables = self._tables.shape[1], []
        for span in chunks:
            num_blocks = -(-(span.start + len(span.token_ids)) // self._block_size)
            tables.append(span.block_table[:num_blocks])
        flat = np.zeros((len(tables) - 1) * columns + len(tables[-1]) if tables else 0, dtype=np.int32)
        for index, table in enumerate(tables):
            flat[index * columns :][: len(table)] = table
        return flat

    def __call__(self, shape: ChunkShape) -> None:
        """Compute the hidden states of what was written. The host reads no value of the device, so it can be captured."""
        numbers, layout, decodes = self._step_numbers(shape), shape.layout, slice(shape.num_decodes)
        self._state.words.write_sent(numbers[layout["word_places"]], numbers[layout["words"]].view(torch.int32))
        narrow = numbers[: layout["tokens"].start].to(torch.int32)
        lens = torch.cat([narrow.new_empty(shape.num_decodes), narrow[layout["lens"]]])
        tables = torch.cat([self._tables.new_empty(shape.num_decodes, self._tables.shape[1]), self._tables[: shape.num_chunks]])
        host_values = [numbers[layout[name]] for name in ("tokens", "positions", "slot_mapping")]
        slot_values = [torch.empty_like(values) for values in host_values]
        self._ops.prepare_decode(
            narrow[layout["slots"]],
            self._state.last_tokens,
            self._state.num_tokens,
            self._state.tables,
            block_size=self._block_size,
            token_ids=slot_values[0][decodes],
            positions=slot_values[1][decodes],
            slot_mapping=slot_values[2][decodes],
            context_lens=lens[decodes],
            block_tables=tables[decodes],
        )
        is_decode = host_values[0] < 0
        # Kernels and no copies: what is launched after them may be launched early, which is defined after kernels alone.
        tokens, positions, slot_mapping = (torch.where(is_decode, *pair) for pair in zip(slot_values, host_values, strict=True))
        plan = partial(
            ops.PagedPlan,
            num_decodes=shape.num_decodes,
            block_tables=tables,
            context_lens=lens,
            query_starts=narrow[layout["starts"]],
            max_query_len=shape.num_tokens,
            counts_all=True,
        )
        for decoder in self._decoders:
            inputs = decoder.device_inputs(tokens, positions, slot_mapping, plan, sampled_rows=numbers[layout["sampled_rows"]])
            hidden = decoder.forward(inputs)
        if self._hidden is None:  # in the run before the first capture
            self._hidden = hidden.new_empty(self.max_sampled, hidden.shape[1])
        self._hidden[decodes].copy_(hidden)

    def sample(self, size: int, *, weighs: bool) -> None:
        """Choose the tokens of the first `size` rows that sample in the step just computed, those without a slot being padding.
        It can be captured."""
        hidden, slots, positions, _ = self.sampling_inputs(size)
        chosen = self._sampler.choose(self._decoders[-1].logits(hidden, wide=False), slots, positions, Kind(weighs))
        self._state.advance(slots, chosen.tokens, out=self.sampled[:size], host=self._host)


class ChunkSteps:
    """Runs steps with chunks by shape, each captured before the first request."""

    def __init__(self, step: ChunkStep, calls: Calls) -> None:
        self._step = step
        self._calls = calls
        self._shapes = step.shapes  # from few tokens to many
        self.failure = ""
        """Why some shapes have no graph; empty where all have one."""

    def run(self, rows: ChunkRows) -> bool:
        """Compute a step up to the hidden states of the rows that sample. False if it fits no shape; its words are not written
        then. Raises `CaptureFailed`."""
        num_tokens, num_chunks = rows.num_tokens, len(rows.chunks) + 1
        fitting = (shape for shape in self._shapes if num_tokens <= shape.num_tokens and num_chunks <= shape.num_chunks)
        shape = next(fitting, None)
        if shape is None:
            return False
        self._capture_shape(shape)
        self._step.write(rows, shape)
        self._calls.run(shape, partial(self._step, shape))
        return True

    def sampling_inputs(self, num_rows: int) -> SamplingInputs:
        """The rows that sample in the step just computed."""
        return self._step.sampling_inputs(num_rows)

    def sample(self, num_rows: int, kind: Kind) -> torch.Tensor | None:
        """The tokens of the step just computed, which no row's mask restricts: [num_rows] int64. None where there is no graph
        that chooses them."""
        shape = SampledShape(logits_size(num_rows, self._step.max_sampled), kind.weighs)
        if kind.counts or kind.num_top or not self._calls.is_ready(shape):
            return None
        self._calls.run(shape, self._sampling_call(shape))
        return self._step.sampled[:num_rows]

    def run_for_timing(self, chunks: Sequence[TokenSpan]) -> torch.Tensor | None:
        """Hidden states of all outputs of `chunks`; None if they fit no shape. What it leaves in the cache is overwritten
        before it is used."""
        firsts = accumulate((len(span.token_ids) for span in chunks), initial=0)
        sampled_rows = [first + output for first, span in zip(firsts, chunks, strict=False) for output in span.outputs]
        is_run = self.run(PADDING_ONLY._replace(chunks=chunks, sampled_rows=np.array(sampled_rows, dtype=np.int64)))
        return self.sampling_inputs(len(sampled_rows)).hidden if is_run else None

    @property
    def padded_sizes(self) -> list[int]:
        """Numbers of tokens from which on padding takes time, in ascending order."""
        return sorted({shape.num_tokens for shape in self._shapes if shape.num_tokens >= CHUNK_ROWS_FEW[-1]})

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Have the steps of all shapes captured, and the choice of tokens, the largest first: the others take no memory beside
        its own. What could not be captured, and what comes after, is launched kernel by kernel."""
        shapes = self._shapes[::-1]
        captures: list[Callable[[], None]] = [partial(self._capture_shape, shape) for shape in shapes]
        for sampled in reversed(sampled_shapes(self._step.max_sampled)):
            captures.append(partial(self._capture_sampling, SampledShape(*sampled)))
        for num_ready, capture in enumerate(captures):
            try:
                capture()
            except CaptureFailed as error:
                self.failure = str(error)
                log.error("steps with chunks of prompts have %d of %d graphs: %s", num_ready, len(captures), error)
                self._shapes = shapes[:num_ready][::-1]
                break

    def _capture_shape(self, shape: ChunkShape) -> None:
        """Capture the steps of this shape, unless they are."""
        if not self._calls.is_ready(shape):  # captured with nothing but padding: the step changes nothing
            self._step.write(PADDING_ONLY, shape)
            self._calls.make_ready(shape, partial(self._step, shape), is_kept=True)

    def _capture_sampling(self, shape: SampledShape) -> None:
        """Capture the choice of tokens after a step of padding, the last one that was captured: it changes nothing."""
        if not self._calls.is_ready(shape):
            self._calls.make_ready(shape, self._sampling_call(shape), is_kept=True)

    def _sampling_call(self, shape: SampledShape) -> Callable[[], None]:
        return partial(self._step.sample, shape.size, weighs=shape.weighs)
