"""The draft tokens of a step: how many fit, what they cost, and how many were accepted. No torch.

A draft token is verified as one more row of its request. Drafts use spare blocks and spare budget only: no request is
preempted or delayed for one.

Drafting needs the last token of a request. Where steps are launched ahead, that token is not known when the next step is
planned, and waiting for it costs what launching ahead gains. So after a search that found nothing worth verifying, the next 1,
3, 7, then 15 steps are planned without one and launched ahead as usual. As soon as a search succeeds, every step searches
again. Long prompts are read in all steps; otherwise most of a short answer would be over before the first draft.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from engine.scheduling.accounts import Accounts
from engine.scheduling.decode_set import DecodeSet
from engine.scheduling.kv_blocks import KvBlocks
from engine.scheduling.limits import STEP_DRAFT_TOKENS_MAX, SchedulerTotals
from engine.scheduling.request import Request
from engine.scheduling.scheduled_batch import ScheduledBatch, ScheduledRequest

BACKOFF_STEPS_MAX = 15
"""Most steps without a search after several in vain: repetition in a text is noticed at most this many tokens late."""


class Draft(NamedTuple):
    """Draft tokens for one request: how many, and which; a draft model fills them in on the device."""

    num_tokens: int
    token_ids: list[int]


NO_DRAFT = Draft(0, [])


class Drafter(Protocol):
    """Drafts tokens for decoding requests, and learns how many of them were accepted."""

    def pays(self, num_running: int) -> bool:
        """Whether a good draft token is worth its row when this many requests are running."""

    def draft(self, request: Request, *, limit: int, num_running: int) -> Draft: ...

    def read(self, num_running: int) -> None:
        """In a step without drafts: go on with the reading that `draft` waits for. The last tokens may be unknown."""

    def observe(self, request: Request, num_drafted: int, num_accepted: int) -> None: ...


class Drafting:
    """Adds a `Drafter`'s draft tokens to steps, and records how many of them were accepted."""

    def __init__(
        self,
        drafter: Drafter,
        accounts: Accounts,
        kv: KvBlocks,
        decodes: DecodeSet,
        totals: SchedulerTotals,
        charge: Callable[[Request, int], None],
    ) -> None:
        """`charge(request, cost_ps)` charges the tenant of a request."""
        self._drafter = drafter
        self._charge = charge
        self._accounts = accounts
        self._kv = kv
        self._decodes = decodes
        self._totals = totals
        self._backoff = self._backoff_left = 0

    def should_settle_first(self) -> bool:
        """Whether to settle the step in flight first, to draft from its tokens. Call once before each step that could
        be planned without them."""
        num_decodes = len(self._decodes.items)
        if not num_decodes or not self._drafter.pays(num_decodes):
            return False
        if self._backoff_left:
            self._backoff_left -= 1
            self._drafter.read(num_decodes)
            return False
        return True

    def plan(self, batch: ScheduledBatch, limit: int) -> None:
        """Let the decodes of `batch` verify drafts, at most `limit` between them. All of their tokens are known."""
        limit = min(limit, STEP_DRAFT_TOKENS_MAX)
        for item in batch.decodes:
            request = item.request
            slots = (len(request.block_table) + self._kv.num_spare) * self._kv.block_size
            most = min(limit, request.max_total_tokens - request.num_tokens - 1, slots - item.start - 1)
            if most <= 0:
                continue
            draft = self._drafter.draft(request, limit=most, num_running=len(batch.decodes))
            if draft.num_tokens:
                item.num_draft_tokens, item.draft_token_ids = draft.num_tokens, draft.token_ids
                item.num_tokens = 1 + draft.num_tokens
                limit -= draft.num_tokens
                batch.num_tokens += draft.num_tokens
                batch.num_draft_tokens += draft.num_tokens
                self._kv.extend(request, item.start + item.num_tokens)
                self._charge(request, self._accounts.costs.prefill_ps(item.start + 1, draft.num_tokens))
                self._totals.draft_tokens += draft.num_tokens
        if batch.decodes:
            self._backoff = 0 if batch.num_draft_tokens else min(2 * self._backoff + 1, BACKOFF_STEPS_MAX)
            self._backoff_left = self._backoff

    def finish(self, request: Request, item: ScheduledRequest, num_accepted: int) -> None:
        """The step is done: the item is a plain decode again, and the request has advanced by its accepted drafts too."""
        self._drafter.observe(request, item.num_draft_tokens, num_accepted)
        request.num_rejected_draft_tokens += item.num_draft_tokens - num_accepted
        item.num_tokens, item.num_draft_tokens, item.draft_token_ids = 1, 0, []
        self._accounts.add_context(request, num_accepted)
        self._decodes.reschedule(request)
