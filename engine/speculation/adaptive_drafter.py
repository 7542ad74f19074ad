"""How many tokens to draft for a request, and for prompt lookup which ones. Knows no torch.

Speculative decoding (arXiv 2211.17192, 2302.01318) lets one step verify several draft tokens of a request. Two proposers:

    prompt lookup  the text repeats itself: what followed an earlier occurrence of the last n tokens (arXiv 2304.04487)
    draft model    a smaller model of the same vocabulary writes the drafts; this module only decides how many

A draft token costs a row of the batch, accepted or not. The first rows of a step are almost free, because reading the weights
takes longer than multiplying with them; later ones are not. So the depth k of a request is the one with the most
expected tokens per time, (1 + a + … + aᵏ) / cost(rows), where a is the measured share of its drafts accepted, and the
cost of rows is measured when the engine starts. In a large batch no draft is worth its row, so none is made.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from weakref import WeakKeyDictionary, WeakSet

from engine.scheduling.drafting import NO_DRAFT, Draft
from engine.scheduling.request import Request
from engine.speculation.options import SpeculativeOptions

ACCEPTANCE_DECAY = 0.7
"""Decay per step of older drafts in a request's acceptance: text begins and stops repeating abruptly."""

PRIOR_ACCEPTED, PRIOR_TRIED = 1.4, 2.0
"""Acceptance of a request that has not been measured, expressed as this many draft tokens."""

PROBE_INTERVAL = 16
"""Tokens without a draft after which one is made anyway: the text may have begun to repeat itself."""

GOOD_ACCEPTANCE = 0.9
"""If drafts of this acceptance are not worth their rows, none are made at all."""

ACCEPTANCE_STEPS = 64
"""Resolution of the acceptance when depths are chosen."""

DEPTHS_CACHED = 4096
"""Capacity of the cache of chosen depths: there are half a million combinations of requests and drafts."""

NUM_RUNNING_MAX = 4096

INDEX_TOKENS_MAX = 16384
"""Tokens after which a generation of the index is closed. Two are kept, so that a long context costs bounded memory."""

INDEX_TOKENS_PER_STEP = 2048
"""Tokens indexed in one step by all requests together: about a millisecond. A long prompt is indexed over several steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationCosts:
    """Time of a step, measured for some numbers of rows (`rows`, ascending from 1), and of one pass of the draft model (0 for
    prompt lookup), both in units of a step with one row. The draft model runs once in every step, with drafts or without, to
    compute its own keys and values of every token."""

    rows: tuple[int, ...]
    times: tuple[float, ...]
    draft_step: float = 0.0

    def relative_cost(self, num_rows: int, num_draft_steps: int = 0) -> float:
        """The time of a step in units of one with one row, interpolated between the measured numbers of rows and extrapolated
        beyond them."""
        rows, times = self.rows, self.times
        upper = min(max(1, bisect_left(rows, num_rows)), len(rows) - 1)
        slope = (times[upper] - times[upper - 1]) / (rows[upper] - rows[upper - 1])
        return times[upper - 1] + slope * (num_rows - rows[upper - 1]) + self.draft_step * num_draft_steps

    def best_depth(self, acceptance: float, num_running: int, limit: int) -> int:
        """The depth up to `limit` with the most expected tokens per time, if all running requests draft to the same depth."""
        best, best_rate = 0, 1.0 / self.relative_cost(num_running)
        expected = term = 1.0
        for depth in range(1, limit + 1):
            term *= acceptance
            expected += term
            rate = expected / self.relative_cost(num_running * (1 + depth), depth)
            if rate > best_rate:
                best, best_rate = depth, rate
        return best

    def crossover(self, acceptance: float) -> int:
        """The most requests for which a draft token accepted with this probability is worth its row."""
        low, high = 0, NUM_RUNNING_MAX
        while low < high:
            middle = (low + high + 1) // 2
            if self.best_depth(acceptance, middle, 1):
                low = middle
            else:
                high = middle - 1
        return low


class AcceptanceRecord:
    """The share of draft tokens of one request that were accepted, weighted towards recent ones.

    A step reports its accepted drafts and the first rejected one; those after it were never tried.
    """

    __slots__ = ("_accepted", "_tried")

    def __init__(self) -> None:
        self._accepted, self._tried = PRIOR_ACCEPTED, PRIOR_TRIED

    @property
    def acceptance(self) -> float:
        return self._accepted / self._tried

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        self._accepted = self._accepted * ACCEPTANCE_DECAY + num_accepted
        self._tried = self._tried * ACCEPTANCE_DECAY + num_accepted + (num_accepted < num_drafted)


class NgramIndex:
    """The last occurrence of each n-gram of one token list, for some n; follows the list as it grows.

    Keys are hashes: two n-grams with equal hashes cause a wrong draft, never a wrong token.
    """

    __slots__ = ("_num_indexed", "_older", "_recent", "_sizes")

    def __init__(self, sizes: Sequence[int]) -> None:
        """sizes: lengths of the n-grams, the preferred first"""
        self._sizes = tuple(sizes)
        self._recent: dict[int, int] = {}
        self._older: dict[int, int] = {}
        self._num_indexed = 0

    def update(self, token_ids: Sequence[int], num_tokens: int, *, num_unknown: int = 0) -> bool:
        """Index at most `num_tokens` more positions, excluding the `num_unknown` last ones. Returns whether the index is up to
        date. Positions out of reach are skipped."""
        num_known = len(token_ids) - num_unknown
        first = max(self._num_indexed, num_known - 2 * INDEX_TOKENS_MAX, 1)
        last = min(num_known, first + num_tokens)
        if len(self._recent) > INDEX_TOKENS_MAX * len(self._sizes):
            self._older, self._recent = self._recent, {}
        recent = self._recent
        for size in self._sizes:
            for end in range(max(first, size), last):
                recent[hash((size, *token_ids[end - size : end]))] = end
        self._num_indexed = last
        return last == num_known

    def continuation(self, token_ids: Sequence[int], num_tokens: int) -> list[int]:
        """What followed the last occurrence of the longest indexed n-gram that ends the list; [] if there was none before.

        If the list ends before `num_tokens` are found, it is assumed to continue with the same period.
        """
        for size in self._sizes:
            key = hash((size, *token_ids[-size:]))
            end = self._recent.get(key) or self._older.get(key)
            if end is not None:
                continuation_ids = list(token_ids[end : end + num_tokens])
                while len(continuation_ids) < num_tokens:
                    continuation_ids += continuation_ids[: num_tokens - len(continuation_ids)]
                return continuation_ids
        return []


@dataclass(slots=True)
class _DraftState:
    """`drafted_at`: number of tokens when a draft was last made."""

    record: AcceptanceRecord
    index: NgramIndex | None
    drafted_at: int


class AdaptiveDrafter:
    """The `Drafter` of both proposers: looks up n-grams of `ngram_sizes`, or only chooses the depth for a draft model."""

    def __init__(self, options: SpeculativeOptions, costs: SpeculationCosts) -> None:
        self._best_depth = lru_cache(DEPTHS_CACHED)(costs.best_depth)
        self._depth_max = options.num_speculative_tokens
        self._sizes = options.ngram_sizes
        self._num_running_max = options.disable_by_batch_size or costs.crossover(GOOD_ACCEPTANCE)
        self._states: WeakKeyDictionary[Request, _DraftState] = WeakKeyDictionary()
        self._unindexed: WeakSet[Request] = WeakSet()

    def pays(self, num_running: int) -> bool:
        return num_running <= self._num_running_max

    def draft(self, request: Request, *, limit: int, num_running: int) -> Draft:
        """At most `limit` draft tokens after `request.token_ids`; none if a choice depends on the choices before it."""
        if limit < 1 or not self.pays(num_running) or not can_draft(request):
            return NO_DRAFT
        state = self._states.get(request)
        if state is None:
            index = NgramIndex(self._sizes) if self._sizes else None
            state = self._states[request] = _DraftState(AcceptanceRecord(), index, request.num_tokens)
        limit = min(limit, self._depth_max)
        if state.index is None:
            return Draft(self._depth(request, state, num_running, limit), [])
        if not self._update_index(request, state.index, num_running):
            return NO_DRAFT
        draft_ids = state.index.continuation(request.token_ids, limit)
        depth = self._depth(request, state, num_running, len(draft_ids)) if draft_ids else 0
        return Draft(depth, draft_ids[:depth])

    def read(self, num_running: int) -> None:
        """Index more of the texts that are not fully indexed, as much as in a step that drafts."""
        for request in [*self._unindexed]:
            index = self._states[request].index
            if index is not None:
                self._update_index(request, index, num_running)

    def _update_index(self, request: Request, index: NgramIndex, num_running: int) -> bool:
        num_tokens = max(1, INDEX_TOKENS_PER_STEP // num_running)
        is_indexed = index.update(request.token_ids, num_tokens, num_unknown=request.num_unknown_tokens)
        if is_indexed:
            self._unindexed.discard(request)
        else:
            self._unindexed.add(request)
        return is_indexed

    def _depth(self, request: Request, state: _DraftState, num_running: int, limit: int) -> int:
        """The depth that pays best. If none pays, occasionally one draft token, to notice when that changes."""
        acceptance = round(state.record.acceptance * ACCEPTANCE_STEPS) / ACCEPTANCE_STEPS
        depth = self._best_depth(acceptance, num_running, limit)
        if not depth and request.num_tokens - state.drafted_at >= PROBE_INTERVAL:
            depth = 1
        if depth:
            state.drafted_at = request.num_tokens
        return depth

    def observe(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        """Record the result of a step that verified drafts."""
        state = self._states.get(request)
        if state is not None:
            state.record.observe(num_drafted, num_accepted)


def can_draft(request: Request) -> bool:
    """Whether drafts can be verified in parallel: each row's choice must not depend on the choices before it."""
    sampling = request.sampling
    return not (
        sampling.is_guided
        or sampling.has_penalties
        or bool(sampling.bad_words_token_ids)
        or request.num_output_tokens < sampling.min_tokens
    )
