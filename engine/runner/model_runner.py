"""Runs one scheduled batch on the device: inputs, drafts, forward pass, sampling. Keeps weights and cache; decides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import torch

from engine.device import is_lost
from engine.errors import EngineBroken
from engine.grammar.masks import GrammarMasks, StepMasks
from engine.memory.shape import LOGITS_ELEMENTS_MAX
from engine.protocol import TokenLogprob
from engine.runner.draft_model import DraftModel
from engine.runner.kv_cache import BlockMover
from engine.runner.paged_decoder import PagedDecoder
from engine.runner.scheduled_rows import PlainStepRows
from engine.sampling.acceptance import accept_by_rejection, accept_equal
from engine.sampling.logits_filters import is_greedy
from engine.sampling.logits_rules import SampledRow
from engine.sampling.logprobs import prompt_logprobs
from engine.sampling.sampler import SampledToken, Sampler
from engine.scheduling.request import Request
from engine.scheduling.scheduled_batch import BlockMoves, ScheduledRequest, StepOutput


class ModelRunner:
    """The device half of the engine: `move` and `run`. Running the same items twice writes the same cache slots and draws the
    same tokens: a step may be repeated. `stage` is what it is doing, for the message when that fails.
    """

    def __init__(
        self,
        target: PagedDecoder,
        sampler: Sampler,
        mover: BlockMover,
        masks: GrammarMasks,
        *,
        draft: PagedDecoder | None,
        accepts_by_equality: bool,
    ) -> None:
        """`accepts_by_equality`: drafts are accepted by equality alone, as in the steps over slots beside these."""
        self.stage = "prepare"
        self.target = target
        self._sampler = sampler
        self.mover = mover
        self.masks = masks
        self._batch_invariant = target.batch_invariant
        self._accepts_by_equality = accepts_by_equality or target.batch_invariant
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
        """Compute `items`; one output per item, in their order. Raises `EngineBroken` where the device is lost, so that nothing
        can be computed."""
        try:
            return self._run(items)
        except Exception as error:
            if is_lost(self.target.device):
                reason = str(error).partition("\n")[0]
                raise EngineBroken(f"the device is lost to this process: {type(error).__name__}: {reason}") from error
            raise

    def _run(self, items: Sequence[ScheduledRequest]) -> list[StepOutput]:
        draft_distributions: list[torch.Tensor | None] = [None] * len(items)
        if self._draft_model is not None:
            self.stage = "draft"
            draft_distributions = self._draft_model.propose(items)
        self.stage = "prepare"
        rows = PlainStepRows.of(items)
        masks = self.masks.fill([row.request for row in rows.sampled])
        inputs = self.target.prepare(rows.spans)
        self.stage = "run"
        hidden = self.target.forward(inputs)
        self.stage = "sample"
        outputs = self._sample_outputs(items, rows, hidden, draft_distributions, masks)
        for index, scored in enumerate(rows.scored_ranges):
            if scored:
                outputs[index].prompt_logprobs = self._score(items[index].request, hidden, scored, rows.scored_starts[index])
        return outputs

    def _sample_outputs(
        self,
        items: Sequence[ScheduledRequest],
        rows: PlainStepRows,
        hidden: torch.Tensor,
        draft_distributions: Sequence[torch.Tensor | None],
        masks: Future[StepMasks] | None,
    ) -> list[StepOutput]:
        """Tokens of all items; hidden: [R, hidden], draft_distributions: per item [k, V] where it is verified by rejection."""
        outputs = [StepOutput() for _ in items]
        rows_to_draw: list[int] = []
        for index, item in enumerate(items):
            distributions = draft_distributions[index]
            if distributions is None:
                rows_to_draw += rows.sampled_ranges[index]
            else:
                outputs[index] = self._verify(item, rows, rows.sampled_ranges[index], hidden, distributions)
        drawn = self._draw(rows, rows_to_draw, hidden, None if masks is None else masks.result())
        for index, item in enumerate(items):
            if item.samples and draft_distributions[index] is None:
                outputs[index] = accept_equal([drawn[row] for row in rows.sampled_ranges[index]], item.draft_token_ids)
        return outputs

    def _draw(
        self, rows: PlainStepRows, chosen: Sequence[int], hidden: torch.Tensor, masks: StepMasks | None
    ) -> dict[int, SampledToken]:
        """Tokens of the sampled rows `chosen`, by row."""
        drawn: dict[int, SampledToken] = {}
        for first in range(0, len(chosen), self._slice_rows):
            rows_of_slice = chosen[first : first + self._slice_rows]
            logits = self._logits(hidden, [rows.hidden_rows[row] for row in rows_of_slice])
            masks_of_slice = None if masks is None else masks.rows[list(rows_of_slice)]
            tokens = self._sample(logits, [rows.sampled[row] for row in rows_of_slice], masks_of_slice)
            drawn.update(zip(rows_of_slice, tokens, strict=True))
        if masks is not None:
            for row, error in masks.errors.items():
                drawn[row] = SampledToken(error=str(error), error_param=error.param)
        return drawn

    def _sample(self, logits: torch.Tensor, rows: Sequence[SampledRow], masks: torch.Tensor | None) -> list[SampledToken]:
        """The tokens of rows of logits. For batch invariance a lone row is computed twice: a reduction over a single row is
        split between threads, one over several is not."""
        if not self._batch_invariant or len(rows) > 1:
            return self._sampler.sample(logits, rows, masks)
        twice = None if masks is None else masks.expand(2, -1)
        return self._sampler.sample(logits.expand(2, -1).clone(), [*rows, *rows], twice)[:1]

    def _logits(self, hidden: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Logits of rows of `hidden`, without a gather where all of them are meant: [len(rows), V]"""
        if len(rows) == hidden.shape[0]:
            return self.target.logits(hidden)
        return self.target.logits(hidden.index_select(0, torch.tensor(rows, dtype=torch.int64).to(hidden.device)))

    def _verify(
        self,
        item: ScheduledRequest,
        rows: PlainStepRows,
        chosen: range,
        hidden: torch.Tensor,
        draft_distributions: torch.Tensor,
    ) -> StepOutput:
        request = item.request
        logits = self._logits(hidden, [rows.hidden_rows[row] for row in chosen])
        target_distributions = self._sampler.distributions(logits, [rows.sampled[row] for row in chosen])
        seed = request.sampling.seed
        assert seed is not None, f"request {request.request_id} has no seed"
        return accept_by_rejection(
            target_distributions, draft_distributions, item.draft_token_ids, seed=seed, position=request.num_tokens
        )

    def _by_rejection(self, request: Request) -> bool:
        """Whether the drafts of a request are verified by rejection. Equality is the rule where log-probabilities are
        requested, and where tokens must not depend on the batch, because the number of drafts does."""
        sampling = request.sampling
        return not (self._accepts_by_equality or is_greedy(sampling) or sampling.logprobs is not None)

    def _score(self, request: Request, hidden: torch.Tensor, scored: range, first_position: int) -> list[TokenLogprob]:
        """Log-probabilities of prompt tokens from position `first_position` on, one per row of `scored`."""
        entries: list[TokenLogprob] = []
        for first in range(0, len(scored), self._slice_rows):
            rows_of_slice = scored[first : first + self._slice_rows]
            token_ids = request.token_ids[first_position + first : first_position + first + len(rows_of_slice)]
            logits = self.target.logits(hidden[rows_of_slice.start : rows_of_slice.stop])
            entries += prompt_logprobs(logits, token_ids, request.sampling.prompt_logprobs or 0)
        return entries
