"""The runner whose steps the host only launches. What it cannot do so, and every repetition, the plain one beneath it does.

A step in which every row is one token that yields another is `DecodeStep`, replayed from a graph on a GPU. A step with chunks
of prompts is the plain forward pass over rows made on the host, with the tokens put in that only the device knows. Either way
tokens go from slot to slot on the device, and a copy of them reaches the host while the next step runs.

A step in which requests verify guesses (`choosing_rows`) is one or the other, with a row for each guess. Nothing is launched
behind it before it is settled.

Rows that need a mask from the host (a grammar) wait for the token before theirs. The others of their step do not wait for more
than that: the step is launched ahead as far as its logits, and `LaunchedStep.complete` begins the choice of all tokens, when
the step before it has been settled and while the device still computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from engine.grammar.masks import StepMasks
from engine.grammar.spec import GrammarError
from engine.runner.batch_inputs import InputRow, forward_order
from engine.runner.choosing_rows import ChoosingRows
from engine.runner.cuda_graphs import Calls
from engine.runner.decode_step import DecodeStep, guesses_size, step_size
from engine.runner.embedder import TextModel
from engine.runner.launched_step import Choosing, LaunchedStep
from engine.runner.model_runner import ModelRunner
from engine.runner.paged_decoder import PagedDecoder
from engine.runner.slots import NOTHING, SlotState, SlotTable
from engine.runner.staging import Fetch, FetchedAtOnce, Staging, TokenReturn
from engine.runner.step_rows import FIRST, NONE, scored_positions
from engine.runner.warm_up import compiles_at_first_use, compiling
from engine.sampling import scores
from engine.sampling.columns import ColumnSampler, Kind, Wants
from engine.sampling.host_masks import HostMasks
from engine.sampling.logits_rules import SampledRow
from engine.sampling_params import TOP_LOGPROBS_MAX
from engine.scheduling.scheduled_batch import BlockMoves, ScheduledRequest, StepOutput

NO_ROWS: list[int] = []
NO_INPUTS: list[list[int]] = [[]] * 5

Begun = Callable[[], StepMasks]
"""Masks that are being filled."""

KINDS = (Kind(), Kind(greedy=True), Kind(weighs=True), Kind(counts=True), Kind(num_top=1))
"""What steps do in their own kernels, one way at a time: whatever else they do are these together."""

WARM_ROWS = (1, 2, 4, 8)
"""Steps that are captured before the first request: what few requests need at once. The others take some tens of milliseconds
each, when so many run for the first time."""


class SlotRunner:
    """Launches steps over slots; `plain` computes the others."""

    def __init__(
        self,
        plain: ModelRunner,
        target: PagedDecoder,
        sampler: ColumnSampler,
        masks: HostMasks,
        calls: Calls,
        *,
        max_num_seqs: int,
        max_guesses: int,
        num_columns: int,
        block_size: int,
        device: torch.device,
        lands_at_once: bool = False,
    ) -> None:
        """`max_guesses`: of all requests of a step, 0 if none are made. `num_columns`: blocks of the longest request.
        `lands_at_once`: a step is over when it was launched, and is recorded instead of rounded up to one of the sizes of
        graphs."""
        self.plain = plain
        self._target = target
        self._sampler = sampler
        self._masks = masks
        self._calls = calls
        self._max_rows = max_num_seqs
        self._max_guesses = max_guesses
        self._block_size = block_size
        self.lands_at_once = lands_at_once
        self._device = device
        self._state = SlotState(max_num_seqs, num_columns, device=device, dtype=target.dtype)
        self._slots = SlotTable(self._state, sampler)
        self._step = DecodeStep(
            target,
            self._state,
            sampler,
            max_rows=max_num_seqs + max_guesses,
            block_size=block_size,
            device=device,
            is_recorded=lands_at_once,
        )
        self._staging = Staging(device)
        self._return = TokenReturn(max_num_seqs + max_guesses, scores.width(TOP_LOGPROBS_MAX), device=device)
        self._rows: list[int] = []  # what stands in `DecodeStep.rows`
        self._wants = Wants(Kind(), [], [])
        self._decodes: Sequence[ScheduledRequest] = []  # of the last step of one token each: mostly those of the next one

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
        self._slots.leave_out([item.request for item in items])
        return self.plain.run(items)

    def forget(self) -> None:
        """Send everything again with the next step."""
        self._slots.forget()

    def launches(self, items: Sequence[ScheduledRequest]) -> bool:
        """Whether nothing in this step needs the plain way: the scores of prompts do, and whatever no slot can hold."""
        if items == self._decodes:
            return True
        holds, accepts = self._slots.holds, self._sampler.accepts
        return all(holds(item.request) or (accepts(item.request) and not scored_positions(item)) for item in items)

    @torch.inference_mode()
    def launch(self, items: Sequence[ScheduledRequest]) -> LaunchedStep:
        """Begin a step."""
        if items == self._decodes:
            return self._launch_decodes(items)
        if all(item.num_tokens == 1 and item.samples for item in items):
            self._decodes = items
            return self._launch_decodes(items)
        return self._launch_rows(items)

    @torch.inference_mode()
    def launch_guesses(self, items: Sequence[ScheduledRequest]) -> LaunchedStep:
        """Begin a step in which some rows verify guesses; all before it is settled."""
        if all(item.samples and item.num_tokens == 1 + item.num_draft_tokens for item in items):
            return self._launch_guesses(items)
        return self._launch_rows(items, has_guesses=True)

    @torch.inference_mode()
    def make_ready(self, num_rows: int, kind: Kind | None, *, has_guesses: bool = False) -> int:
        """Have the decode step of so many rows captured, None as far as its logits; the size that it is rounded up to."""
        return self._ready(num_rows, kind, has_guesses=has_guesses)

    def _ready(self, num_rows: int, kind: Kind | None, *, has_guesses: bool = False) -> int:
        size = self._size(num_rows, has_guesses=has_guesses)
        key = size, kind, has_guesses
        if not self._calls.is_ready(key):  # captured with nothing but padding: the step changes nothing
            if has_guesses:
                self._write_inputs(NO_INPUTS, size)
            else:
                self._write_rows(NO_ROWS, size)
            self._calls.make_ready(key, lambda: self._step(size, kind, has_guesses=has_guesses))
        return size

    def _size(self, num_rows: int, *, has_guesses: bool) -> int:
        if self.lands_at_once:
            return num_rows
        if has_guesses:
            return guesses_size(num_rows, self._max_rows + self._max_guesses)
        return step_size(num_rows, self._max_rows)

    @torch.inference_mode()
    def run_padding(self, num_rows: int) -> None:
        """A step in which nobody takes part, from its inputs to its tokens: a decode if of one row, else one with guesses."""
        has_guesses = num_rows > 1
        size = self._ready(num_rows, Kind(), has_guesses=has_guesses)
        if has_guesses:
            self._write_inputs(NO_INPUTS, size)
        self._calls.run((size, Kind(), has_guesses), lambda: self._step(size, Kind(), has_guesses=has_guesses))
        self._fetch(size, Kind()).tokens()

    def warm_up(self) -> None:
        """Have the steps of the fewest rows ready; larger ones are captured when they are first needed."""
        if compiles_at_first_use(self._device):
            with compiling("choices"):
                self._compile_choices()
        self._warm_up([num_rows for num_rows in WARM_ROWS if num_rows <= self._max_rows], has_guesses=False)
        if self._max_guesses:
            self._warm_up(WARM_ROWS[1:], has_guesses=True)

    def _warm_up(self, sizes: Sequence[int], *, has_guesses: bool) -> None:
        for kind in (Kind(), Kind(greedy=True)):
            self._step.make_ready(kind, has_guesses=has_guesses)
            for num_rows in sizes:
                self.make_ready(num_rows, kind, has_guesses=has_guesses)

    @torch.inference_mode()
    def _compile_choices(self) -> None:
        """Choose a token in every way, after a decode and after a chunk, with and without masks: for a row of padding."""
        self._write_rows(NO_ROWS, 1)
        self._step(1, None)
        logits = self._target.logits(
            self._target.forward(self._target.prepare([InputRow(UNKNOWN, 0, (0,), FIRST)])), wide=False
        )
        masks = torch.full((1, -(-logits.shape[1] // 32)), -1, dtype=torch.int32, device=self._device)
        where = self._staging.send([[NOTHING], [0]])
        for kind in KINDS:
            self._step(1, kind)
            self._step.choose(1, kind, masks)
            for filled in (None, masks):
                slots = where[0].to(torch.int32)
                self._state.advance(slots, self._sampler.choose(logits, slots, where[1], kind, filled).tokens)

    def _launch_decodes(self, items: Sequence[ScheduledRequest]) -> LaunchedStep:
        slots = self._slots.update(items)
        if slots is not self._rows:
            self._wants = self._sampler.wants(slots)
        size, kind = self._graph(len(slots), self._wants)
        if slots is not self._rows:
            self._write_rows(slots, size)
        return self._run_step(items, size, kind, self._wants, LaunchedStep(len(items), len(items)))

    def _launch_guesses(self, items: Sequence[ScheduledRequest]) -> LaunchedStep:
        rows = ChoosingRows.of(items, self._slots.update_beside_guesses(items))
        wants = self._sampler.wants(rows.slots)
        size, kind = self._graph(len(rows.slots), wants, has_guesses=True)
        self._write_inputs(rows.inputs(self._block_size), size)
        launched = LaunchedStep(len(items), len(rows.slots), guesses=rows.guesses)
        return self._run_step(rows.items, size, kind, wants, launched)

    def _graph(self, num_rows: int, wants: Wants, *, has_guesses: bool = False) -> tuple[int, Kind | None]:
        """Of a step: the size that it is rounded up to, and its kind, None if it is computed as far as its logits, which all
        kinds of a size have in common."""
        size = self._size(num_rows, has_guesses=has_guesses)
        kind = None if wants.masked or not self._calls.admits((size, wants.kind, has_guesses)) else wants.kind
        return self._ready(num_rows, kind, has_guesses=has_guesses), kind

    def _run_step(
        self, rows: Sequence[ScheduledRequest], size: int, kind: Kind | None, wants: Wants, launched: LaunchedStep
    ) -> LaunchedStep:
        """A decode step whose buffers are written; `rows`: whose they are."""
        has_guesses = bool(launched.guesses)
        masked = _masked_rows(rows, wants) if wants.masked else []
        begun = self._begin_masks(masked)
        self._calls.run((size, kind, has_guesses), lambda: self._step(size, kind, has_guesses=has_guesses))
        launched.scored = wants.scored
        if wants.masked:
            launched.choice = partial(self._choose_decodes, len(rows), size, wants, masked, begun)
        else:
            if kind is None:
                self._step.choose(size, wants.kind)
            launched.fetch = self._fetch(len(rows), wants.kind)
        return launched

    def _write_inputs(self, inputs: Sequence[Sequence[int]], size: int) -> None:
        self._step.write_inputs(inputs, size)
        self._rows = NO_ROWS

    def _write_rows(self, slots: list[int], size: int) -> None:
        padded = slots + [NOTHING] * (size - len(slots))
        self._step.rows[:size].copy_(self._staging.send(padded))
        self._rows = slots

    @torch.inference_mode()
    def _choose_decodes(
        self, num_rows: int, size: int, wants: Wants, rows: Sequence[SampledRow], begun: Begun | None
    ) -> Choosing:
        """The rest of a step that ends with its logits."""
        masks, errors = self._fill(size, wants.masked, rows, begun)
        self._step.choose(size, wants.kind, masks)
        return self._fetch(num_rows, wants.kind), errors

    def _fetch(self, num_rows: int, kind: Kind) -> Fetch:
        """What the decode step leaves."""
        if self._step.host_sampled is not None and not kind.num_top:
            return FetchedAtOnce(self._step.host_sampled[:num_rows].tolist())
        table = self._step.scores[:num_rows, : scores.width(kind.num_top)] if kind.num_top else None
        return self._return.send(self._step.sampled[:num_rows], table)

    def _launch_rows(self, items: Sequence[ScheduledRequest], *, has_guesses: bool = False) -> LaunchedStep:
        """A step with chunks of prompts, computed by the plain forward pass."""
        sampling = [row for row, item in enumerate(items) if item.samples]
        chosen = [items[row] for row in sampling]
        update = self._slots.update_beside_guesses if has_guesses else self._slots.update
        slots = update(chosen) if chosen else NO_ROWS
        choosing = ChoosingRows.of(chosen, slots)
        wants = self._sampler.wants(choosing.slots)
        masked = _masked_rows(choosing.items, wants) if wants.masked else []
        begun = self._begin_masks(masked)
        rows = [_input_row(item) for item in items]
        inputs = self._target.prepare(rows)
        self._put_in(rows, dict(zip(sampling, slots, strict=True)), inputs.token_ids)
        hidden = self._target.forward(inputs)
        launched = LaunchedStep(len(items), len(choosing.slots), sampling, guesses=choosing.guesses)
        if not sampling:
            return launched
        where = self._staging.send([choosing.slots, choosing.positions])
        choose = partial(self._choose_rows, self._target.logits(hidden, wide=False), where, wants.kind)
        launched.scored = wants.scored
        if masked:
            launched.choice = partial(self._choose_masked, choose, len(choosing.slots), wants.masked, masked, begun)
        else:
            launched.fetch = choose(None)
        return launched

    def _choose_rows(self, logits: torch.Tensor, where: torch.Tensor, kind: Kind, masks: torch.Tensor | None) -> Fetch:
        """logits: [R, V]; where: [2, R], slots and positions"""
        slots = where[0].to(torch.int32)
        chosen = self._sampler.choose(logits, slots, where[1], kind, masks)
        self._state.advance(slots, chosen.tokens)
        return self._return.send(chosen.tokens, chosen.scores)

    @torch.inference_mode()
    def _choose_masked(
        self,
        choose: Callable[[torch.Tensor], Fetch],
        num_rows: int,
        masked: Sequence[int],
        rows: Sequence[SampledRow],
        begun: Begun | None,
    ) -> Choosing:
        masks, errors = self._fill(num_rows, masked, rows, begun)
        return choose(masks), errors

    def _begin_masks(self, rows: Sequence[SampledRow]) -> Begun | None:
        """Where steps land at once, the tokens that masks depend on are known when a step is launched: they are filled while it
        is computed, and nobody ends meanwhile."""
        return self._masks.begin(rows) if rows and self.lands_at_once else None

    def _fill(
        self, size: int, masked: Sequence[int], rows: Sequence[SampledRow], begun: Begun | None
    ) -> tuple[torch.Tensor, dict[int, GrammarError]]:
        """Masks of `size` rows: `rows` stand at `masked`, the others may choose anything. And why there are none."""
        live = [index for index, row in enumerate(rows) if not row.request.is_finished]
        filled = self._masks.fill([rows[index] for index in live]) if begun is None else begun()
        masks = torch.full((size, filled.rows.shape[1]), -1, dtype=torch.int32, device=self._device)
        if live:
            places = self._staging.send([masked[index] for index in live])
            pinned = filled.rows.pin_memory() if self._device.type == "cuda" else filled.rows
            masks.index_copy_(0, places, pinned.to(self._device, non_blocking=True))
        return masks, {masked[live[index]]: error for index, error in filled.errors.items()}

    def _put_in(self, rows: Sequence[InputRow], slots: dict[int, int], token_ids: torch.Tensor) -> None:
        """Write the tokens that only the device knows to their places in the pass, which is ordered by `forward_order`."""
        order = forward_order(rows)
        places = [place for place, row in enumerate(order) if rows[row].token_ids == UNKNOWN]
        if places:
            sent = self._staging.send([places, [slots[order[place]] for place in places]])
            token_ids.index_copy_(0, sent[0], self._state.last_tokens.index_select(0, sent[1]))


def _masked_rows(items: Sequence[ScheduledRequest], wants: Wants) -> list[SampledRow]:
    """The rows that wait for masks, as the step was planned: its items move on."""
    return [SampledRow(items[row].request, items[row].start + items[row].num_tokens) for row in wants.masked]


UNKNOWN = (0,)
"""Stands for one token that the device puts in: token 0, which every vocabulary has. A known token 0 is a list."""


def _input_row(item: ScheduledRequest) -> InputRow:
    request, start, end = item.request, item.start, item.start + item.num_tokens
    token_ids: Sequence[int] = request.token_ids[start:end]
    outputs = NONE
    if item.samples:
        if item.num_tokens == 1:
            return InputRow(UNKNOWN if token_ids[0] < 0 else token_ids, start, request.block_table, FIRST)
        if item.num_draft_tokens:
            token_ids = [*token_ids, *item.draft_token_ids]
        outputs = range(item.num_tokens - item.num_draft_tokens - 1, item.num_tokens)
    return InputRow(token_ids, start, request.block_table, outputs)
