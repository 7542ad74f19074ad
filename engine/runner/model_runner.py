"""Runs one scheduled batch on the device: inputs, guesses, forward pass, sampling. Keeps weights and cache; decides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import torch

from engine.grammar.masks import GrammarMasks, StepMasks
from engine.memory.shape import LOGITS_ELEMENTS_MAX
from engine.protocol import TokenLogprob
from engine.runner.draft_model import DraftModel
from engine.runner.kv_cache import BlockMover
from engine.runner.paged_decoder import PagedDecoder
from engine.runner.rows import PlainStepRows
from engine.sampling.acceptance import accept_by_rejection, accept_equal
from engine.sampling.logits_filters import is_greedy
from engine.sampling.logits_rules import SampledRow
from engine.sampling.logprobs import prompt_logprobs
from engine.sampling.sampler import SampledToken, Sampler
from engine.scheduling.request import Request
from engine.scheduling.scheduled_batch import BlockMoves, ScheduledRequest, StepOutput


class ModelRunner:
    """The device half behind two calls. Running the same items twice writes the same cache slots and draws the same tokens:
    a step may be repeated. `stage` is what it is doing, for the message when that fails.
    """

    def __init__(
        self,
        target: PagedDecoder,
        sampler: Sampler,
        mover: BlockMover,
        masks: GrammarMasks,
        *,
        draft: PagedDecoder | None = None,
        guesses_are_equal: bool = False,
    ) -> None:
        """`guesses_are_equal`: guesses become tokens by equality alone, as in the steps over slots beside these."""
        self.stage = "prepare"
        self.target = target
        self._sampler = sampler
        self.mover = mover
        self.masks = masks
        self._batch_invariant = target.batch_invariant
        self._guesses_are_equal = guesses_are_equal or target.batch_invariant
        self.draft = draft
        self._draft_model = None if draft is None else DraftModel(draft, sampler, self._by_rejection)
        self._slice_rows = max(1, LOGITS_ELEMENTS_MAX // target.vocab_size)

    @property
    def decoders(self) -> list[PagedDecoder]:
        """The model that is served, and the draft model if there is one."""
        return [self.target] if self.draft is None else [self.target, self.draft]

    @torch.inference_mode()
    def move(self, moves: BlockMoves) -> None:
        """Move blocks before the step that needs them; harmless when repeated."""
        self.stage = "move"
        self.mover.move(moves)

    @torch.inference_mode()
    def run(self, items: Sequence[ScheduledRequest]) -> list[StepOutput]:
        """Compute `items`; one output per item, in their order."""
        guesses_from: list[torch.Tensor | None] = [None] * len(items)
        if self._draft_model is not None:
            self.stage = "draft"
            guesses_from = self._draft_model.propose(items)
        self.stage = "prepare"
        rows = PlainStepRows.of(items)
        masks = self.masks.fill([row.request for row in rows.sampled])
        inputs = self.target.prepare(rows.inputs)
        self.stage = "run"
        hidden = self.target.forward(inputs)
        self.stage = "sample"
        outputs = self._choose(items, rows, hidden, guesses_from, masks)
        for index, scored in enumerate(rows.scored):
            if scored:
                outputs[index].prompt_logprobs = self._score(items[index].request, hidden, scored, rows.scored_from[index])
        return outputs

    def _choose(
        self,
        items: Sequence[ScheduledRequest],
        rows: PlainStepRows,
        hidden: torch.Tensor,
        guesses_from: Sequence[torch.Tensor | None],
        masks: Future[StepMasks] | None,
    ) -> list[StepOutput]:
        """Tokens of all items; hidden: [R, hidden], guesses_from: per item [k, V] where it is verified by rejection."""
        outputs = [StepOutput() for _ in items]
        drawing: list[int] = []
        for index, item in enumerate(items):
            distributions = guesses_from[index]
            if distributions is None:
                drawing += rows.choosing[index]
            else:
                outputs[index] = self._verify(item, rows, rows.choosing[index], hidden, distributions)
        drawn = self._draw(rows, drawing, hidden, None if masks is None else masks.result())
        for index, item in enumerate(items):
            if item.samples and guesses_from[index] is None:
                outputs[index] = accept_equal([drawn[row] for row in rows.choosing[index]], item.draft_token_ids)
        return outputs

    def _draw(
        self, rows: PlainStepRows, chosen: Sequence[int], hidden: torch.Tensor, masks: StepMasks | None
    ) -> dict[int, SampledToken]:
        """Tokens of the sampled rows `chosen`, by row."""
        drawn: dict[int, SampledToken] = {}
        for first in range(0, len(chosen), self._slice_rows):
            part = chosen[first : first + self._slice_rows]
            logits = self._logits(hidden, [rows.places[row] for row in part])
            part_masks = None if masks is None else masks.rows[list(part)]
            tokens = self._sample(logits, [rows.sampled[row] for row in part], part_masks)
            drawn.update(zip(part, tokens, strict=True))
        for row, error in (masks.errors if masks is not None else {}).items():
            drawn[row] = SampledToken(error=str(error), error_param=error.param)
        return drawn

    def _sample(self, logits: torch.Tensor, rows: Sequence[SampledRow], masks: torch.Tensor | None) -> list[SampledToken]:
        """The tokens of rows of logits. For batch invariance a lone row is computed twice: a reduction over a single row is
        split between threads, one over several is not."""
        if not self._batch_invariant or len(rows) > 1:
            return self._sampler.sample(logits, rows, masks)
        twice = None if masks is None else masks.expand(2, -1)
        return self._sampler.sample(logits.expand(2, -1).clone(), [*rows, *rows], twice)[:1]

    def _logits(self, hidden: torch.Tensor, places: Sequence[int]) -> torch.Tensor:
        """Logits of rows of `hidden`, without a gather where all of them are meant: [len(places), V]"""
        if len(places) == hidden.shape[0]:
            return self.target.logits(hidden)
        return self.target.logits(hidden.index_select(0, torch.tensor(places, dtype=torch.int64).to(hidden.device)))

    def _verify(
        self, item: ScheduledRequest, rows: PlainStepRows, chosen: range, hidden: torch.Tensor, guesses_from: torch.Tensor
    ) -> StepOutput:
        request = item.request
        logits = self._logits(hidden, [rows.places[row] for row in chosen])
        wanted = self._sampler.distributions(logits, [rows.sampled[row] for row in chosen])
        seed = request.sampling.seed
        assert seed is not None, f"request {request.request_id} has no seed"
        return accept_by_rejection(wanted, guesses_from, item.draft_token_ids, seed=seed, position=request.num_tokens)

    def _by_rejection(self, request: Request) -> bool:
        """Whether the guesses of a request are verified by rejection. Equality is the rule where log-probabilities are asked
        for, and where tokens must not depend on the batch, because the number of guesses does."""
        sampling = request.sampling
        return not (self._guesses_are_equal or is_greedy(sampling) or sampling.logprobs is not None)

    def _score(self, request: Request, hidden: torch.Tensor, scored: range, scored_from: int) -> list[TokenLogprob]:
        """Log-probabilities of prompt tokens from position `scored_from` on, one per row of `scored`."""
        entries: list[TokenLogprob] = []
        for first in range(0, len(scored), self._slice_rows):
            part = scored[first : first + self._slice_rows]
            token_ids = request.token_ids[scored_from + first : scored_from + first + len(part)]
            logits = self.target.logits(hidden[part.start : part.stop])
            entries += prompt_logprobs(logits, token_ids, request.sampling.prompt_logprobs or 0)
        return entries
