"""Launches steps over slots and does not wait for them. Steps that it cannot launch, or that must be repeated, go to the plain
runner.

A step whose every row is one token that yields the next is a `DecodeStep`, replayed from a CUDA graph on a GPU. A step with
chunks of prompts is a `ChunkStep`, two graphs: up to hidden states, and up to tokens. Where no graph is large enough it is a
plain forward pass over spans made on the host, in which the tokens known only on the device are filled in. Either way the
sampled tokens go into the slots on the device, and to the host's memory.

A step in which requests verify drafts (`runner.scheduled_rows`) is one or the other, with a row for each draft token. The next
step is not launched before it is settled. A draft model proposes them just before, over the same slots (`draft_steps`). It runs
in every step, because it has a KV cache of its own.

A row that needs the mask of a grammar (`row_masks`) must wait for the token before its own, and the sampling of the whole step
waits with it. The layers do not wait: the step is launched ahead as far as its logits. `LaunchedStep.complete` begins the
sampling when the step before has been settled, while the device still computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from engine.protocol import PlainReason
from engine.runner.chunk_step import ChunkRows, SamplingInputs
from engine.runner.decode_step import DecodeShape
from engine.runner.launched_step import LaunchedStep, PendingSampling
from engine.runner.model_runner import ModelRunner
from engine.runner.paged_decoder import PlacedTokens
from engine.runner.row_masks import FillMasks, RowMasks
from engine.runner.scheduled_rows import SlotStepRows, device_token_indices, draft_token_indices, scored_positions, token_span
from engine.runner.slot_steps import SlotSteps
from engine.runner.slots import EMPTY_INT64, Int64Array, SlotTable, SlotWrites
from engine.runner.token_return import Fetch
from engine.sampling.columns import Kind, SamplingNeeds
from engine.scheduling.scheduled_batch import BlockMoves, ScheduledBatch, ScheduledRequest, StepOutput

SampleTokens = Callable[[torch.Tensor | None], Fetch]
"""Samples the tokens of a step whose logits were launched. Takes masks, [R, ceil(V / 32)] int32, or None to allow all
tokens."""


class SlotRunner:
    """Launches steps over slots; `plain` computes the others."""

    def __init__(self, plain: ModelRunner, steps: SlotSteps) -> None:
        self.plain = plain
        self.steps = steps
        self.target = steps.target
        self._sampler = steps.sampler
        self._masks = RowMasks(plain.masks, steps.device, fills_at_launch=steps.is_synchronous)
        self._slots = SlotTable(steps.state, steps.sampler)
        self._needs = SamplingNeeds(Kind(), [], [])  # of the last decode step
        self._needs_slots = EMPTY_INT64  # the slots of that step
        self._decodes: Sequence[ScheduledRequest] = []  # of the last step, mostly those of the next one too
        self._inference = torch.inference_mode()  # used by every launch: making one costs as much as entering it

    @property
    def is_synchronous(self) -> bool:
        """Whether `launch` returns only when the step is over."""
        return self.steps.is_synchronous

    @property
    def stage(self) -> str:
        """What the plain runner is doing: only its failures are reported to callers."""
        return self.plain.stage

    @property
    def chunk_sizes(self) -> list[int]:
        """Tokens to which steps with chunks are rounded up where padding costs time, in ascending order."""
        return [] if self.steps.chunks is None else self.steps.chunks.padded_sizes

    def move(self, moves: BlockMoves) -> None:
        """Move blocks, in order with the steps."""
        self.plain.move(moves)

    def run(self, items: Sequence[ScheduledRequest]) -> list[StepOutput]:
        """Compute a step in the plain way. What it does to its requests is sent to their slots when they are launched again."""
        self._slots.invalidate([item.request for item in items])
        return self.plain.run(items)

    def invalidate_slots(self) -> None:
        """Send the state of all slots again with the next step."""
        self._slots.clear()
        self.steps.token_return.mark_unfetched()

    def plain_reason(self, batch: ScheduledBatch) -> PlainReason | None:
        """Why this step must be computed in the plain way, None if it need not: a request in it needs log-probabilities of its
        prompt, or something that no slot can hold."""
        for item in self._slots.items_without_slot(batch.prefills if batch.decodes is self._decodes else batch.items):
            reason = PlainReason.PROMPT_LOGPROBS if scored_positions(item) else self._sampler.refusal(item.request)
            if reason is not None:
                return reason
        return None

    def launch(self, batch: ScheduledBatch) -> LaunchedStep:
        """Begin a step. Where some rows verify drafts, all before it is settled."""
        with self._inference:
            self.steps.token_return.begin_step()
            if not batch.num_draft_tokens:
                self._decodes = batch.decodes
                return self._launch_decodes(batch) if _has_no_chunks(batch) else self._launch_chunks(batch)
            if _has_no_chunks(batch):
                return self._launch_verification(batch.items)
            return self._launch_verification_with_chunks(batch)

    @property
    def is_recorded(self) -> bool:
        """Whether decode steps are one recorded call."""
        return self.steps.decodes.step.is_recorded

    def _launch_decodes(self, batch: ScheduledBatch) -> LaunchedStep:
        items, slots = batch.items, self._slots.update(batch, batch.prefills)
        if slots is not self._needs_slots:
            self._needs_slots, self._needs = slots, self._sampler.needs(slots)
        shape = self.steps.decodes.select_shape(len(slots), self._needs)
        self.steps.inputs.write_slots(slots, shape.size)
        launched = LaunchedStep(len(items), len(items), scored=self._needs.scored)
        return self._run_step(items, shape, self._needs, launched)

    def _launch_verification(self, items: Sequence[ScheduledRequest]) -> LaunchedStep:
        rows = SlotStepRows.of(items, self._slots.update_for_verification(items, sends_tokens=self.steps.draft_steps is None))
        draft_ids = self._propose(rows)
        needs = self._sampler.needs(rows.slots)
        shape = self.steps.decodes.select_shape(len(rows.slots), needs, has_drafts=True)
        self.steps.inputs.write_columns(rows.input_columns(self.steps.limits.block_size), shape.size)
        if draft_ids is not None:
            self.steps.inputs.put_tokens(rows.draft_rows, draft_ids)
        host_inputs = rows.tokens if draft_ids is None else None
        launched = LaunchedStep(len(items), len(rows.slots), scored=needs.scored, depths=rows.depths, inputs=host_inputs)
        return self._run_step(rows.items, shape, needs, launched)

    def _run_step(
        self, rows: Sequence[ScheduledRequest], shape: DecodeShape, needs: SamplingNeeds, launched: LaunchedStep
    ) -> LaunchedStep:
        """Launch a decode step whose inputs are written; `rows[i]` is the item of row i."""
        fill = self._masks.begin(rows, needs)
        self.steps.decodes.run(shape)
        sends_inputs = shape.has_drafts and launched.inputs is None

        def sample(masks: torch.Tensor | None) -> Fetch:
            if shape.kind is None:
                self.steps.decodes.step.sample(shape.size, needs.kind, masks)
            return self.steps.fetch_decodes(len(rows), needs.kind, sends_inputs=sends_inputs)

        return self._begin_sampling(launched, sample, shape.size, fill)

    def _launch_chunks(self, batch: ScheduledBatch) -> LaunchedStep:
        """Launch a step with chunks of prompts: as one graph, or as the plain forward pass computes it."""
        items, sampling_rows = batch.items, _sampling_rows(batch)
        ending = [item for item in batch.prefills if item.samples]
        writes = SlotWrites()
        slots = self._slots.update(batch, ending, unsent=writes)
        words, positions = self.steps.state.packed(writes), self._slots.positions()
        needs = self._sampler.needs(slots)
        fill = self._masks.begin(batch.decodes + ending, needs)
        launched = LaunchedStep(len(items), len(sampling_rows), rows=sampling_rows, scored=needs.scored)
        chunks = self.steps.chunks
        if chunks is not None and chunks.run(ChunkRows.of(batch.prefills, slots, positions, words)):
            tokens = chunks.sample(len(slots), needs.kind) if fill is None and len(slots) else None
            if tokens is not None:
                launched.fetch = self.steps.token_return.fetch(tokens)
                return launched
            sampling_inputs = chunks.sampling_inputs(len(slots))
        else:
            self.steps.state.words.write(*words)
            hidden = self._forward_spans(items, dict(zip(sampling_rows, slots.tolist(), strict=True)), None)
            sampling_inputs = self._make_sampling_inputs(hidden, slots, positions)
        return self._sample_chunks(launched, sampling_inputs, needs.kind, fill)

    def _launch_verification_with_chunks(self, batch: ScheduledBatch) -> LaunchedStep:
        """As `_launch_chunks`, a step in which some rows verify drafts: as the plain forward pass computes it."""
        items, sampling_rows = batch.items, _sampling_rows(batch)
        sampling_items = [items[row] for row in sampling_rows]
        slots = self._slots.update_for_verification(sampling_items, sends_tokens=self.steps.draft_steps is None)
        rows = SlotStepRows.of(sampling_items, slots)
        needs = self._sampler.needs(rows.slots)
        fill = self._masks.begin(rows.items, needs)
        draft_ids = self._propose(rows)
        hidden = self._forward_spans(items, dict(zip(sampling_rows, slots, strict=True)), draft_ids)
        sampling_inputs = self._make_sampling_inputs(hidden, rows.slots, rows.positions)
        if draft_ids is not None:
            tokens = self.steps.staging.send(rows.tokens).index_copy_(0, self.steps.staging.send(rows.draft_rows), draft_ids)
            sampling_inputs = sampling_inputs._replace(tokens=tokens)
        launched = LaunchedStep(
            len(items),
            len(rows.slots),
            rows=sampling_rows,
            scored=needs.scored,
            depths=rows.depths,
            inputs=rows.tokens if draft_ids is None else None,
        )
        return self._sample_chunks(launched, sampling_inputs, needs.kind, fill)

    def _make_sampling_inputs(
        self, hidden: torch.Tensor, slots: Sequence[int] | Int64Array, positions: Sequence[int] | Int64Array
    ) -> SamplingInputs:
        where = self.steps.staging.send(np.array([slots, positions], dtype=np.int64))
        return SamplingInputs(hidden, where[0].to(torch.int32), where[1])

    def _sample_chunks(self, launched: LaunchedStep, rows: SamplingInputs, kind: Kind, fill: FillMasks | None) -> LaunchedStep:
        """Launch the sampling of a step with chunks, if any request in it samples."""
        if not launched.num_sampled:
            launched.fetch = self.steps.token_return.fetch_end()
            return launched
        logits = self.target.logits(rows.hidden, wide=False)
        sample = partial(self._sample_rows, logits, rows, kind)
        return self._begin_sampling(launched, sample, len(logits), fill)

    def _propose(self, rows: SlotStepRows) -> torch.Tensor | None:
        """The tokens of the draft model for requests whose slots are current: [Σ depths] int64. None without one: the host has
        then drafted, and its drafts are among the tokens of `rows`."""
        if self.steps.draft_steps is None:
            return None
        return self.steps.draft_steps.propose([rows.slots[first] for first in rows.depths], [*rows.depths.values()])

    def _forward_spans(
        self, items: Sequence[ScheduledRequest], slots: dict[int, int], draft_ids: torch.Tensor | None
    ) -> torch.Tensor:
        """Hidden states of the plain forward pass, in which tokens known only on the device are filled in: those of a
        draft model, or else the last tokens in the slots of items that sample. With drafts, the host knows the last tokens."""
        spans = [token_span(item) for item in items]
        unknown: PlacedTokens | None = None
        if draft_ids is not None:
            unknown = self.steps.staging.send(draft_token_indices(items, spans)), draft_ids
        elif unknown_tokens := device_token_indices(spans):
            sent = self.steps.staging.send([[*unknown_tokens], [slots[row] for row in unknown_tokens.values()]])
            unknown = sent[0], self.steps.state.last_tokens.index_select(0, sent[1])
        for decoder in self.steps.decoders:
            hidden = decoder.forward_spans(spans, unknown)
        return hidden

    def _sample_rows(self, logits: torch.Tensor, rows: SamplingInputs, kind: Kind, masks: torch.Tensor | None) -> Fetch:
        """logits: [R, V]"""
        chosen = self._sampler.choose(logits, rows.slots, rows.positions, kind, masks)
        self.steps.state.advance(rows.slots, chosen.tokens, host=self.steps.token_return.host)
        return self.steps.token_return.fetch(chosen.tokens, chosen.scores, inputs=rows.tokens)

    def _begin_sampling(
        self, launched: LaunchedStep, sample: SampleTokens, num_rows: int, fill: FillMasks | None
    ) -> LaunchedStep:
        """Sample the tokens of a step: now, or, if rows wait for masks, when the step is completed."""
        if fill is None:
            launched.fetch = sample(None)
        else:
            launched.begin_sampling = partial(self._sample_masked, sample, num_rows, fill)
        return launched

    @torch.inference_mode()
    def _sample_masked(self, sample: SampleTokens, num_rows: int, fill: FillMasks) -> PendingSampling:
        masks, errors = fill(num_rows)
        return sample(masks), errors


def _has_no_chunks(batch: ScheduledBatch) -> bool:
    """Whether every prefill of a step is a single token that yields the next one, as a decode is."""
    return all(item.samples and item.num_tokens == 1 for item in batch.prefills)


def _sampling_rows(batch: ScheduledBatch) -> list[int]:
    """Rows of a step that choose a token: all decodes, and the chunks with which a prompt ends."""
    num_decodes = len(batch.decodes)
    return [*range(num_decodes), *(row for row, item in enumerate(batch.prefills, num_decodes) if item.samples)]
