"""The runner whose steps the host only launches. What it cannot do so, and every repetition, the plain one beneath it does.

A step in which every row is one token that yields another is `DecodeStep`, replayed from a graph on a GPU. A step with chunks
of prompts is the plain forward pass over rows made on the host, with the tokens put in that only the device knows. Either way
tokens go from slot to slot on the device, and a copy of them reaches the host while the next step runs.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from engine.runner.batch_inputs import InputRow, forward_order
from engine.runner.cuda_graphs import Calls
from engine.runner.decode_step import DecodeStep, step_size
from engine.runner.embedder import TextModel
from engine.runner.model_runner import ModelRunner
from engine.runner.paged_decoder import PagedDecoder
from engine.runner.slot_sampler import SlotSampler
from engine.runner.slots import NOTHING, SlotState, SlotTable
from engine.runner.staging import Fetch, Staging, TokenReturn
from engine.runner.step_rows import FIRST, NONE
from engine.sampling.sampler import NO_TOKEN
from engine.scheduling.scheduled_batch import BlockMoves, RowResult, ScheduledRequest, StepOutput

NO_ROWS: list[int] = []

WARM_ROWS = (1, 2, 4, 8)
"""Steps that are captured before the first request: what few requests need at once. The others take some tens of milliseconds
each, when so many run for the first time."""


@dataclass(slots=True)
class LaunchedStep:
    """Where the tokens of a step will arrive: `rows[i]` is the item that token i belongs to, all of them in order if None."""

    fetch: Fetch | None
    num_items: int
    num_sampled: int
    rows: list[int] | None

    def outputs(self) -> list[RowResult]:
        """One per item, None where no token could be drawn."""
        tokens: list[RowResult] = [*self.fetch.tokens()[: self.num_sampled]] if self.fetch is not None else []
        if NO_TOKEN in tokens:
            tokens = [None if token == NO_TOKEN else token for token in tokens]
        if self.rows is None:
            return tokens
        outputs: list[RowResult] = [StepOutput() for _ in range(self.num_items)]
        for row, token in zip(self.rows, tokens, strict=True):
            outputs[row] = token
        return outputs


class SlotRunner:
    """Launches steps over slots; `plain` computes the others."""

    def __init__(
        self,
        plain: ModelRunner,
        target: PagedDecoder,
        sampler: SlotSampler,
        calls: Calls,
        *,
        max_num_seqs: int,
        num_columns: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        """`num_columns`: blocks of the longest request."""
        self.plain = plain
        self._target = target
        self._sampler = sampler
        self._calls = calls
        self._max_rows = max_num_seqs
        self._device = device
        self._state = SlotState(max_num_seqs, num_columns, device=device)
        self._slots = SlotTable(self._state, sampler.place)
        self._step = DecodeStep(target, self._state, sampler, block_size=block_size, device=device)
        self._staging = Staging(device)
        self._return = TokenReturn(max_num_seqs, device=device)
        self._rows: list[int] = []  # what stands in `DecodeStep.rows`
        self._kind: Hashable = None

    @property
    def stage(self) -> str:
        """What the plain runner is doing: only its failures are told to callers."""
        return self.plain.stage

    @property
    def text_model(self) -> TextModel:
        """For work beside the steps."""
        return self.plain.text_model

    def move(self, moves: BlockMoves) -> None:
        """Move blocks, in order with the steps."""
        self.plain.move(moves)

    def run(self, items: Sequence[ScheduledRequest]) -> list[StepOutput]:
        """Compute a step in the plain way. What it does to its requests is sent to their slots when they are launched again."""
        self._slots.leave_out()
        return self.plain.run(items)

    def forget(self) -> None:
        """Send everything again with the next step."""
        self._slots.forget()

    def launches(self, items: Sequence[ScheduledRequest]) -> bool:
        """Whether nothing in this step needs the host."""
        holds, accepts = self._slots.holds, self._sampler.accepts
        return all(holds(item.request) or accepts(item.request) for item in items)

    @torch.inference_mode()
    def launch(self, items: Sequence[ScheduledRequest]) -> LaunchedStep:
        """Begin a step."""
        if all(item.num_tokens == 1 and item.samples for item in items):
            return self._launch_decodes(items)
        return self._launch_rows(items)

    @torch.inference_mode()
    def make_ready(self, num_rows: int, kind: Hashable) -> int:
        """Have the decode step of so many rows captured; the size that it is rounded up to."""
        size = step_size(num_rows, self._max_rows)
        key = size, kind
        if not self._calls.is_ready(key):
            self._write_rows(NO_ROWS, size)  # of nothing but padding: the step changes nothing
            self._calls.make_ready(key, lambda: self._step(size, kind))
        return size

    def warm_up(self) -> None:
        """Have the steps of the fewest rows ready; larger ones are captured when they are first needed."""
        for num_rows in WARM_ROWS:
            if num_rows <= self._max_rows:
                self.make_ready(num_rows, self._sampler.kind(NO_ROWS))

    def _launch_decodes(self, items: Sequence[ScheduledRequest]) -> LaunchedStep:
        slots = self._slots.update(items)
        if slots is not self._rows:
            self._kind = self._sampler.kind(slots)
        size = self.make_ready(len(slots), self._kind)
        if slots is not self._rows:
            self._write_rows(slots, size)
        kind = self._kind
        self._calls.run((size, kind), lambda: self._step(size, kind))
        fetch = self._return.send(self._step.sampled[: len(slots)])
        return LaunchedStep(fetch, len(items), len(items), None)

    def _write_rows(self, slots: list[int], size: int) -> None:
        padded = slots + [NOTHING] * (size - len(slots))
        self._step.rows[:size].copy_(self._staging.send(padded))
        self._rows = slots

    def _launch_rows(self, items: Sequence[ScheduledRequest]) -> LaunchedStep:
        """A step with chunks of prompts, computed by the plain forward pass."""
        sampling = [row for row, item in enumerate(items) if item.samples]
        slots = self._slots.update([items[row] for row in sampling]) if sampling else NO_ROWS
        rows = [_input_row(item) for item in items]
        inputs = self._target.prepare(rows)
        self._put_in(rows, dict(zip(sampling, slots, strict=True)), inputs.token_ids)
        hidden = self._target.forward(inputs)
        if not sampling:
            return LaunchedStep(None, len(items), 0, sampling)
        where = self._staging.send([slots, [items[row].start + items[row].num_tokens for row in sampling]])
        chosen = where[0].to(torch.int32)
        tokens = self._sampler.choose(self._target.logits(hidden, wide=False), chosen, where[1], self._sampler.kind(slots))
        self._state.advance(chosen, tokens)
        return LaunchedStep(self._return.send(tokens), len(items), len(sampling), sampling)

    def _put_in(self, rows: Sequence[InputRow], slots: dict[int, int], token_ids: torch.Tensor) -> None:
        """Write the tokens that only the device knows to their places in the pass, which is ordered by `forward_order`."""
        order = forward_order(rows)
        places = [place for place, row in enumerate(order) if rows[row].token_ids == UNKNOWN]
        if places:
            sent = self._staging.send([places, [slots[order[place]] for place in places]])
            token_ids.index_copy_(0, sent[0], self._state.last_tokens.index_select(0, sent[1]))


UNKNOWN = (0,)
"""Stands for one token that the device puts in: token 0, which every vocabulary has. A known token 0 is a list."""


def _input_row(item: ScheduledRequest) -> InputRow:
    request, start, end = item.request, item.start, item.start + item.num_tokens
    token_ids: Sequence[int] = request.token_ids[start:end]
    outputs = NONE
    if item.samples:
        if item.num_tokens == 1:
            return InputRow(UNKNOWN if token_ids[0] < 0 else token_ids, start, request.block_table, FIRST)
        outputs = range(item.num_tokens - 1, item.num_tokens)
    return InputRow(token_ids, start, request.block_table, outputs)
