"""The runner whose steps the host only launches. Those that it cannot launch or that must be repeated go to the plain runner.

A step in which every row is one token that yields another is `DecodeStep`, replayed from a CUDA graph on a GPU. One with chunks
of prompts is `ChunkStep` and a choice of tokens behind it; where no graph is large enough it is the plain forward pass over
rows made on the host, where the tokens that only the device knows are filled in. Either way tokens go from slot to slot on the
device, and a copy of them is sent to the host behind the step.

A step in which requests verify guesses (`runner.rows`) is one or the other, with a row for each guess. The next step is not
launched before it is settled. A draft model writes its guesses just before, over the same slots (`draft_steps`); it runs in
every step, because it has a KV cache of its own.

Rows that need a mask (of a grammar: `row_masks`) wait for the token before theirs, and the choice of tokens of the whole step
waits with them. Its layers do not: the step is launched ahead as far as its logits. `LaunchedStep.complete` begins the choice
when the step before it has been settled, while the device still computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter

import torch

from engine.grammar.masks import allow_all
from engine.protocol import PlainReason
from engine.runner.chunk_step import ChunkStep, ChunkSteps, ToChoose
from engine.runner.cuda_graphs import Calls
from engine.runner.decode_step import DecodeStep
from engine.runner.draft_steps import DraftSteps
from engine.runner.embedder import TextModel
from engine.runner.input_rows import InputRow
from engine.runner.launched_step import Choosing, LaunchedStep
from engine.runner.model_runner import ModelRunner
from engine.runner.paged_decoder import PagedDecoder, PlacedTokens
from engine.runner.ready_steps import NO_INPUTS, NO_ROWS, ReadySteps
from engine.runner.row_masks import FillMasks, RowMasks
from engine.runner.rows import FIRST, UNKNOWN, SampledRows, guess_places, input_row, scored_positions, unknown_places
from engine.runner.slots import NOTHING, SlotState, SlotTable, SlotWrites
from engine.runner.staging import Fetch, FetchedAtOnce, Staging, TokenReturn
from engine.runner.step_inputs import StepInputs
from engine.runner.warm_up import STEP_SIZES, compiles_at_first_use, compiling
from engine.sampling import scores
from engine.sampling.columns import ColumnSampler, Kind, SamplingNeeds
from engine.sampling.host_masks import HostMasks
from engine.sampling_params import TOP_LOGPROBS_MAX
from engine.scheduling.limits import SchedulerLimits
from engine.scheduling.scheduled_batch import BlockMoves, ScheduledRequest, StepOutput

Choose = Callable[[torch.Tensor | None], Fetch]
"""Chooses the tokens of a step whose logits are launched, as far as masks allow: [R, ceil(V / 32)] int32, None for all."""

KINDS = (Kind(), Kind(greedy=True), Kind(weighs=True), Kind(counts=True), Kind(num_top=1))
"""What steps do in their own kernels, one way at a time: whatever else they do are these together."""

TIMED_SLOTS = [0]
TIMED_WRITES = SlotWrites(slots=TIMED_SLOTS, last_tokens=[0], num_tokens=[1])
_size_of = attrgetter("num_tokens", "samples")

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
        limits: SchedulerLimits,
        *,
        max_guesses: int,
        device: torch.device,
        chunk_rows: int = 0,
        is_synchronous: bool = False,
        draft: PagedDecoder | None = None,
    ) -> None:
        """`max_guesses`: of all requests of a step, 0 if none are made. `chunk_rows`: of the largest step with chunks that is
        captured, 0 if none is. `is_synchronous`: a step is over when it was launched, and is recorded instead of rounded up to
        one of the sizes of graphs. `draft`: the model that guesses; without one the host does."""
        max_num_seqs, block_size = limits.max_num_seqs, limits.block_size
        self.plain = plain
        self._target = target
        self._decoders = [target] if draft is None else [draft, target]
        self._sampler = sampler
        self._masks = RowMasks(masks, device, begins_early=is_synchronous)
        self._max_num_seqs = max_num_seqs
        self.calls = calls
        self._has_guesses = max_guesses > 0
        self._block_size = block_size
        self.is_synchronous = is_synchronous
        self._device = device
        max_blocks = -(-limits.max_model_len // block_size)
        self._state = SlotState(max_num_seqs, max_blocks, device=device, dtype=target.dtype)
        self._slots = SlotTable(self._state, sampler)
        max_rows = max_num_seqs + max_guesses
        self._inputs = StepInputs(self._state, target, max_rows=max_rows, block_size=block_size, device=device)
        over_slots = self._inputs, self._state, sampler
        make_step = partial(DecodeStep, device=device, is_recorded=is_synchronous)
        make_ready = partial(
            ReadySteps, inputs=self._inputs, calls=calls, max_num_seqs=max_num_seqs, is_synchronous=is_synchronous
        )
        self._drafts: DraftSteps | None = None
        draft_step = None
        if draft is not None:
            draft_step = make_step(draft, *over_slots)
            self._drafts = DraftSteps(make_ready("draft", draft_step), self._inputs, sampler, device)
        self._step = make_step(target, *over_slots, draft=draft_step)
        self._steps = make_ready("decode", self._step)
        self._chunks: ChunkSteps | None = None
        if chunk_rows:
            chunk_step = ChunkStep(self._decoders, self._state, max_tokens=chunk_rows, block_size=block_size, device=device)
            self._chunks = ChunkSteps(chunk_step, calls)
        self._sampled = self._step.sampled  # of as many rows as the last step had
        self._staging = Staging(device)
        self._return = TokenReturn(max_rows, scores.width(TOP_LOGPROBS_MAX), device=device)
        self._needs_of: list[int] = []  # the slots that need this:
        self._needs = SamplingNeeds(Kind(), [], [])
        self._decodes: Sequence[ScheduledRequest] = []  # of the last step of one token each: mostly those of the next one
        self._inference = torch.inference_mode()  # of every launch: to make one costs a step as much as to enter it

    @property
    def stage(self) -> str:
        """What the plain runner is doing: only its failures are told to callers."""
        return self.plain.stage

    @property
    def chunk_sizes(self) -> list[int]:
        """Tokens to which steps with chunks are rounded up where padding costs time, in ascending order."""
        return [] if self._chunks is None else self._chunks.padded_sizes

    @property
    def text_model(self) -> TextModel:
        """The model for whole texts, which are embedded beside the steps."""
        return self.plain.text_model

    def move(self, moves: BlockMoves) -> None:
        """Move blocks, in order with the steps."""
        self.plain.move(moves)

    def run(self, items: Sequence[ScheduledRequest]) -> list[StepOutput]:
        """Compute a step in the plain way. What it does to its requests is sent to their slots when they are launched again."""
        self._slots.invalidate([item.request for item in items])
        return self.plain.run(items)

    def forget(self) -> None:
        """Send the state of all slots again with the next step."""
        self._slots.forget()

    def plain_reason(self, items: Sequence[ScheduledRequest]) -> PlainReason | None:
        """What in this step needs the plain way, None if nothing does: the scores of prompts do, and whatever no slot holds."""
        if self._are_decodes(items):
            return None
        for item in self._slots.newcomers(items):
            reason = PlainReason.PROMPT_LOGPROBS if scored_positions(item) else self._sampler.refusal(item.request)
            if reason is not None:
                return reason
        return None

    def launch(self, items: Sequence[ScheduledRequest]) -> LaunchedStep:
        """Begin a step."""
        with self._inference:
            if self._are_decodes(items):
                return self._launch_decodes(items)
            if {*map(_size_of, items)} == {(1, True)}:
                self._decodes = items
                return self._launch_decodes(items)
            return self._launch_rows(items)

    def _are_decodes(self, items: Sequence[ScheduledRequest]) -> bool:
        """Whether these are those of the last step of one token each."""
        return items is self._decodes or items == self._decodes

    @torch.inference_mode()
    def launch_guesses(self, items: Sequence[ScheduledRequest]) -> LaunchedStep:
        """Begin a step in which some rows verify guesses; all before it is settled."""
        if all(item.samples and item.num_tokens == 1 + item.num_draft_tokens for item in items):
            return self._launch_guesses(items)
        return self._launch_rows(items, has_guesses=True)

    @torch.inference_mode()
    def make_ready(self, num_rows: int, kind: Kind | None, *, has_guesses: bool = False) -> int:
        """Have the decode step of so many rows captured, as far as its logits if `kind` is None. → the size it is rounded to"""
        return self._steps.make_ready(num_rows, kind, has_guesses=has_guesses)

    @torch.inference_mode()
    def run_for_timing(self, num_rows: int) -> None:
        """Run a step without requests, as far as its tokens: a decode if it has one row, else a step with guesses.

        Its rows are not padding, for which a mixture would read no experts. What it leaves in slot 0 and block 0 is
        overwritten before it is used.
        """
        has_guesses = num_rows > 1
        size = self.make_ready(num_rows, Kind(), has_guesses=has_guesses)
        if has_guesses:
            no_slots, zeros = [NOTHING] * num_rows, [0] * num_rows
            tokens = [row % self._sampler.vocab_size for row in range(num_rows)]
            places = [row % self._block_size for row in range(num_rows)]
            self._inputs.write([no_slots, tokens, zeros, places, zeros], size)
        else:
            self._state.write(TIMED_WRITES)
            self._inputs.write_rows(TIMED_SLOTS, size)
        self._steps.run(size, Kind(), has_guesses=has_guesses)
        self._fetch(size, Kind()).tokens()

    @torch.inference_mode()
    def hidden_for_timing(self, rows: Sequence[InputRow]) -> torch.Tensor:
        """Hidden states of the outputs of chunks, computed as in a step with them. With a draft model it is the pass of the
        target alone."""
        hidden = self._chunks.run_for_timing(rows) if self._chunks is not None and self._drafts is None else None
        return self._target.pass_over(rows) if hidden is None else hidden

    @torch.inference_mode()
    def run_draft_for_timing(self) -> None:
        """As `run_for_timing`, a decode of the draft model."""
        assert self._drafts is not None, "there is no draft model"
        size = self._drafts.steps.make_ready(1, Kind())
        self._state.write(TIMED_WRITES)
        self._inputs.write_rows(TIMED_SLOTS, size)
        self._drafts.steps.run(size, Kind())
        self._return.send(self._drafts.steps.step.sampled[:1]).tokens()

    @property
    @torch.inference_mode()
    def is_recorded(self) -> bool:
        """Whether decode steps are one recorded call."""
        return self._step.is_recorded

    def warm_up(self) -> None:
        """Make the steps of few rows ready; larger ones are captured when they are first needed.

        The largest step that draws is captured first, though it costs the start one more capture: graphs reuse memory of
        earlier ones only for tensors that fit into it, so that captured in growing order each would hold logits of its own.
        """
        if compiles_at_first_use(self._device):
            with compiling("choices"):
                self._compile_choices()
        with torch.inference_mode():
            self._steps.make_ready(self._inputs.max_rows, Kind(), has_guesses=self._has_guesses)
        sizes = [num_rows for num_rows in reversed(WARM_ROWS) if num_rows <= self._max_num_seqs]
        self._warm_up(self._steps, sizes)
        if self._drafts is not None:
            self._warm_up(self._drafts.steps, sizes)
        if self._has_guesses:
            self._warm_up(self._steps, WARM_ROWS[:0:-1], has_guesses=True)
        if self._chunks is not None:
            self._chunks.warm_up()

    @torch.inference_mode()
    def _warm_up(self, steps: ReadySteps, sizes: Sequence[int], *, has_guesses: bool = False) -> None:
        kinds = Kind(), Kind(greedy=True)
        for kind in kinds:
            steps.step.make_ready(kind, has_guesses=has_guesses)
        for num_rows in sizes:
            for kind in kinds:
                steps.make_ready(num_rows, kind, has_guesses=has_guesses)

    @torch.inference_mode()
    def _compile_choices(self) -> None:
        """Ask for the kernels that choose tokens: for a row of padding, in every way, after a decode and after a chunk, with
        and without masks. Before that, for those of steps as far as their logits, in all sizes that make a difference."""
        for size in self._steps.guess_sizes if self._has_guesses else ():
            self._inputs.write(NO_INPUTS, size)
            self._step(size, None, has_guesses=True)
        for size in reversed([size for size in STEP_SIZES if size <= self._max_num_seqs]):
            self._inputs.write_rows(NO_ROWS, size)
            self._step(size, None)
        logits = self._target.logits(self._target.pass_over([InputRow(UNKNOWN, 0, (0,), FIRST)]), wide=False)
        masks = allow_all(1, logits.shape[1], self._device)
        where = self._staging.send([[NOTHING], [0]])
        for kind in KINDS:
            self._step(1, kind)
            self._step.choose(1, kind, masks)
            for filled in (None, masks):
                slots = where[0].to(torch.int32)
                self._state.advance(slots, self._sampler.choose(logits, slots, where[1], kind, filled).tokens)

    def _launch_decodes(self, items: Sequence[ScheduledRequest]) -> LaunchedStep:
        slots = self._slots.update(items)
        if slots is not self._needs_of:
            self._needs_of, self._needs = slots, self._sampler.needs(slots)
        size, kind = self._steps.choose_graph(len(slots), self._needs)
        self._inputs.write_rows(slots, size)
        return self._run_step(items, size, kind, self._needs, LaunchedStep(len(items), len(items)))

    def _launch_guesses(self, items: Sequence[ScheduledRequest]) -> LaunchedStep:
        rows = SampledRows.of(items, self._slots.update_beside_guesses(items, sends_tokens=self._drafts is None))
        guesses = self._guess(rows)
        needs = self._sampler.needs(rows.slots)
        size, kind = self._steps.choose_graph(len(rows.slots), needs, has_guesses=True)
        self._inputs.write(rows.inputs(self._block_size), size)
        if guesses is not None:
            self._inputs.put_in(rows.guessing, guesses)
        known = rows.tokens if guesses is None else None
        launched = LaunchedStep(len(items), len(rows.slots), depths=rows.depths, inputs=known)
        return self._run_step(rows.items, size, kind, needs, launched)

    def _run_step(
        self, rows: Sequence[ScheduledRequest], size: int, kind: Kind | None, needs: SamplingNeeds, launched: LaunchedStep
    ) -> LaunchedStep:
        """Launch a decode step whose inputs are written; `rows[i]` is the item of row i."""
        fill = self._masks.begin(rows, needs)
        self._steps.run(size, kind, has_guesses=bool(launched.depths))
        launched.scored = needs.scored
        sends_inputs = bool(launched.depths) and launched.inputs is None

        def choose(masks: torch.Tensor | None) -> Fetch:
            if kind is None:
                self._step.choose(size, needs.kind, masks)
            return self._fetch(len(rows), needs.kind, sends_inputs=sends_inputs)

        return self._begin_choice(launched, choose, size, fill)

    def _fetch(self, num_rows: int, kind: Kind, *, sends_inputs: bool = False) -> Fetch:
        """Send the tokens of a decode step to the host, with their scores, and with its inputs if only the device has them."""
        if self._step.host_sampled is not None and not kind.num_top and not sends_inputs:
            return FetchedAtOnce(self._step.host_sampled[:num_rows].tolist())
        table = self._step.scores[:num_rows, : scores.width(kind.num_top)] if kind.num_top else None
        inputs = self._inputs.token_ids[:num_rows] if sends_inputs else None
        if len(self._sampled) != num_rows:
            self._sampled = self._step.sampled[:num_rows]
        return self._return.send(self._sampled, table, inputs=inputs)

    def _launch_rows(self, items: Sequence[ScheduledRequest], *, has_guesses: bool = False) -> LaunchedStep:
        """Launch a step with chunks of prompts: as one graph, or as the plain forward pass computes it."""
        sampling = [row for row, item in enumerate(items) if item.samples]
        chosen = [items[row] for row in sampling]
        if has_guesses:
            slots = self._slots.update_beside_guesses(chosen, sends_tokens=self._drafts is None)
        else:
            slots = self._slots.update(chosen) if chosen else NO_ROWS
        rows, slot_of = SampledRows.of(chosen, slots), dict(zip(sampling, slots, strict=True))
        needs = self._sampler.needs(rows.slots)
        fill = self._masks.begin(rows.items, needs)
        guesses = self._guess(rows) if has_guesses else None
        to_choose = self._chunks.run(items, slot_of) if self._chunks is not None and not has_guesses else None
        hidden = self._pass_over(items, slot_of, guesses) if to_choose is None else to_choose.hidden
        known = rows.tokens if guesses is None else None
        launched = LaunchedStep(len(items), len(rows.slots), sampling, needs.scored, rows.depths, known)
        if not sampling:
            return launched
        inputs = None
        if guesses is not None:
            inputs = self._staging.send(rows.tokens).index_copy_(0, self._staging.send(rows.guessing), guesses)
        if to_choose is None:
            where = self._staging.send([rows.slots, rows.positions])
            to_choose = ToChoose(hidden, where[0].to(torch.int32), where[1])
        logits = self._target.logits(hidden, wide=False)
        choose = partial(self._choose_rows, logits, to_choose, inputs, needs.kind)
        return self._begin_choice(launched, choose, len(logits), fill)

    def _guess(self, rows: SampledRows) -> torch.Tensor | None:
        """The guesses of a draft model for requests whose slots are current: [Σ depths] int64. None without one: then the host
        has guessed, and they are among the tokens of `rows`."""
        if self._drafts is None:
            return None
        return self._drafts.guess([rows.slots[first] for first in rows.depths], [*rows.depths.values()])

    def _pass_over(
        self, items: Sequence[ScheduledRequest], slots: dict[int, int], guesses: torch.Tensor | None
    ) -> torch.Tensor:
        """Hidden states of the plain forward pass, with the tokens that only the device knows put in: guesses of a draft model,
        or else last ones, from the slots of the items that sample. Where there are guesses, the host knows the last ones."""
        rows = [input_row(item) for item in items]
        unknown: PlacedTokens | None = None
        if guesses is not None:
            unknown = self._staging.send(guess_places(items, rows)), guesses
        elif places := unknown_places(rows):
            sent = self._staging.send([[*places], [slots[row] for row in places.values()]])
            unknown = sent[0], self._state.last_tokens.index_select(0, sent[1])
        for decoder in self._decoders:
            hidden = decoder.pass_over(rows, unknown)
        return hidden

    def _choose_rows(
        self, logits: torch.Tensor, rows: ToChoose, inputs: torch.Tensor | None, kind: Kind, masks: torch.Tensor | None
    ) -> Fetch:
        """logits: [R, V]; inputs: [R], if the host does not know them"""
        chosen = self._sampler.choose(logits, rows.slots, rows.positions, kind, masks)
        self._state.advance(rows.slots, chosen.tokens)
        return self._return.send(chosen.tokens, chosen.scores, inputs=inputs)

    def _begin_choice(self, launched: LaunchedStep, choose: Choose, num_rows: int, fill: FillMasks | None) -> LaunchedStep:
        """Choose the tokens of a step: now, or, if rows wait for masks, when the step is completed."""
        if fill is None:
            launched.fetch = choose(None)
        else:
            launched.choice = partial(self._choose_masked, choose, num_rows, fill)
        return launched

    @torch.inference_mode()
    def _choose_masked(self, choose: Choose, num_rows: int, fill: FillMasks) -> Choosing:
        masks, errors = fill(num_rows)
        return choose(masks), errors
