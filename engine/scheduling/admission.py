"""Admission of waiting requests: whether one can start, its seat, its found and promised blocks, its predicted end. No torch.

A request can start when there is a seat, when decodes leave room in the step for prompts (`StepBudget.is_crowded`), when its
whole prompt fits beside all promises, and when the predicted peak of KV use fits with it, unless no other request runs. A
request whose next block is being computed by a running prefill waits for that block instead. Each step reuses only a limited
number of tokens of long prompts (from other answers or the prefix cache), because this takes time in which all other requests
wait. The policy decides the order.
"""

from __future__ import annotations

from engine.scheduling.accounts import Accounts, account_of
from engine.scheduling.kv_blocks import FoundPrefix, KvBlocks
from engine.scheduling.kv_forecast import BUCKET_STEPS, KvForecast
from engine.scheduling.policy import Start
from engine.scheduling.prefix_cache import NextPrefillBlocks
from engine.scheduling.request import Request, RequestStatus
from engine.scheduling.step_budget import StepBudget

REUSED_TOKENS_PER_STEP = 1 << 19
"""Prompt tokens reused in one step, some 10 ms on the host; beyond that, a long prompt waits for the next step."""
SHORT_TOKENS = 1 << 12
"""A prompt of fewer tokens is not long: its prefix is reused at once."""


class Admission:
    """Admits requests. `start` must follow a `can_start` that returned NOW or a `can_return` that returned True for the same
    request, with no change in between; answers about other requests change nothing."""

    def __init__(self, accounts: Accounts, kv: KvBlocks, *, max_num_seqs: int, step_budget: StepBudget | None) -> None:
        self._accounts = accounts
        self._kv = kv
        self._block_size = kv.block_size
        self._max_num_seqs = max_num_seqs
        self._step_budget = step_budget
        self._forecast = KvForecast(kv.pool.num_blocks * kv.block_size, kv.block_size)
        self._next_blocks = NextPrefillBlocks(kv.prefix_cache)
        self._found: tuple[Request, FoundPrefix] | None = None  # the last prefix found, and the request that it belongs to
        self._step = 0  # the step being planned
        self._reused_tokens = 0  # from other answers or the prefix cache, in this step
        self._deferred: Request | None = None  # the first long prompt deferred in this step
        self._deferred_last_step: Request | None = None  # the one deferred in the step before: not deferred again

    def begin_step(self) -> None:
        """A step is about to be planned: predict new ends for requests that should have ended by now."""
        self._step = self._accounts.step + 1
        self._reused_tokens, self._deferred_last_step, self._deferred = 0, self._deferred, None
        for request in self._forecast.overdue(self._step):
            self._forecast.renew(request, self._step, predicted_remaining(request))

    @property
    def has_seat(self) -> bool:
        return len(self._accounts.running_requests) < self._max_num_seqs

    def can_start(self, request: Request) -> Start:
        if not self.has_seat or self._is_crowded():
            return Start.NO_ROOM
        if request.num_unknown_tokens:  # preempted in this very plan, while its last token is in flight
            return Start.LATER
        if self._exceeds_reuse_limit(request):
            self._deferred = self._deferred or request
            return Start.LATER
        if _shares_prompt(request):
            has_room = self._kv.num_spare > 0
        else:
            found = self._find(request)
            if self._is_being_computed(request, len(found.blocks)):
                return Start.LATER
            has_room = self._kv.has_room(request, found)
        if has_room and self._accounts.running_requests:
            has_room = self._forecast.fits(self._step, self._own_tokens(request), predicted_remaining(request))
        return Start.NOW if has_room else Start.NO_ROOM

    def can_return(self, request: Request) -> bool:
        """Whether a preempted request can take the seat that another request of its tenant has just freed."""
        has_room = self._kv.has_room(request, self._find(request))
        return has_room and self.has_seat and not request.num_unknown_tokens

    def _find(self, request: Request) -> FoundPrefix:
        found = self._kv.find(request)
        self._found = request, found
        return found

    def _found_for(self, request: Request) -> FoundPrefix:
        """The prefix of a request about which `can_start` or `can_return` was asked just before, perhaps not as the last."""
        if self._found is None or self._found[0] is not request:
            return self._find(request)
        return self._found[1]

    def _exceeds_reuse_limit(self, request: Request) -> bool:
        """Whether this step has reused so many tokens that a long prompt must wait for the next one."""
        if not self._reused_tokens or request.num_tokens < SHORT_TOKENS or request is self._deferred_last_step:
            return False
        return self._reused_tokens + request.num_tokens > REUSED_TOKENS_PER_STEP

    def _is_crowded(self) -> bool:
        """Whether the decodes alone fill the step."""
        if self._step_budget is None:
            return False
        total = self._accounts.aggregate
        return self._step_budget.is_crowded(total.num_decoding, total.context_at(self._accounts.step))

    def _is_being_computed(self, request: Request, num_found_blocks: int) -> bool:
        """Whether a running prefill, which was in this step or the one before, computes the block that is needed next."""
        owner = self._next_blocks.owner(request, num_found_blocks)
        if owner is None or account_of(owner).is_paused:
            return False
        return owner.scheduled_step >= self._step - 1

    def _own_tokens(self, request: Request) -> int:
        """KV slots that a request needs beyond the blocks that other requests hold."""
        if _shares_prompt(request):
            return self._block_size
        found = self._found_for(request)
        num_shared = len(found.blocks) - found.num_on_host - found.num_unowned
        return request.num_tokens - num_shared * self._block_size

    def first_position(self, request: Request) -> int:
        """Start of the next chunk of a request: after its computed tokens or, if it waits, after those that it shares with its
        parent or finds."""
        if request.status is not RequestStatus.QUEUED:
            return request.num_computed_tokens
        if _shares_prompt(request):
            return request.num_prompt_tokens - 1
        return len(self._found_for(request).blocks) * self._block_size

    def start(self, request: Request) -> int:
        """Assign blocks and a predicted end to a request that got a seat. Returns how many blocks come from the host tier."""
        self._forecast.add(request, self._step, self._own_tokens(request), predicted_remaining(request))
        if _shares_prompt(request):
            assert request.forked_from is not None
            self._kv.fork(request, request.forked_from)
            self._reused_tokens += request.num_computed_tokens
            return 0
        found, self._found = self._found_for(request), None
        self._kv.attach_prefix(request, found)
        self._reused_tokens += request.num_computed_tokens
        return found.num_on_host

    def note_next_block(self, request: Request) -> None:
        """Note the block that a running prefill computes in this step or the next."""
        self._next_blocks.update(request)

    def finish_prefill(self, request: Request) -> None:
        """A prefill is complete."""
        self._next_blocks.remove(request)

    def stop(self, request: Request, *, is_preempted: bool, is_failed: bool) -> None:
        """Release the blocks of a request, and its prediction."""
        self._forecast.remove(request)
        self._next_blocks.remove(request)
        self._kv.release(request, is_preempted=is_preempted, is_failed=is_failed)

    def check_invariants(self) -> None:
        """Raise `AssertionError` unless exactly the running requests have a predicted end, and it is in the future."""
        self._forecast.check_invariants(self._accounts.running_requests, self._accounts.step)


def _shares_prompt(request: Request) -> bool:
    """Whether a fork can share the prompt blocks of its parent: the parent decodes, and the steps that computed its prompt
    (again, after a preemption) are settled."""
    parent = request.forked_from
    if parent is None or parent.status is not RequestStatus.DECODE or request.num_output_tokens:
        return False
    return parent.num_settled_tokens >= request.num_prompt_tokens


def predicted_remaining(request: Request) -> int:
    """Predicted tokens still to be generated: up to its tenant's usual length, or as many again when it is past that."""
    written = request.num_output_tokens
    usual = account_of(request).predicted_output_len()
    expected = usual - written if written < usual else max(BUCKET_STEPS, written)
    return min(expected, request.max_total_tokens - request.num_tokens)
