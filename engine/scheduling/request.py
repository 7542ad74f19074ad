"""One request as the scheduler sees it: tokens, blocks, progress, and the legal transitions of its life. Knows no torch.

`scheduling.lifecycle` draws the transitions. Token positions of a request, P tokens per block:

    0 ............... num_cached ........ num_computed_tokens ........ len(token_ids)
    │ found in cache      │ computed here        │ to compute next            │ to sample next
    └───────────── keys and values in block_table ─────────────┘

While a step is in flight (`scheduling.outcomes`), its tokens stand at the end of the list as `UNKNOWN_TOKEN`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from engine.protocol import FinishReason, Priority, SamplingParams

UNKNOWN_TOKEN = -1
"""Stands for a token that a step in flight will yield. Hashing it or sending it to a device fails."""


def table_of(block_ids: Iterable[int] = ()) -> array[int]:
    """Block ids in 32 bits each, contiguous, as the device reads them: steps copy whole tables."""
    return array("i", block_ids)


class RequestStatus(StrEnum):
    """Where a request is; the values are those of `RequestProgress.state`."""

    QUEUED = "queued"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


LEGAL_TRANSITIONS: dict[RequestStatus, frozenset[RequestStatus]] = {
    RequestStatus.QUEUED: frozenset({RequestStatus.PREFILL, RequestStatus.FINISHED}),
    RequestStatus.PREFILL: frozenset({RequestStatus.DECODE, RequestStatus.QUEUED, RequestStatus.FINISHED}),
    RequestStatus.DECODE: frozenset({RequestStatus.QUEUED, RequestStatus.FINISHED}),
    RequestStatus.FINISHED: frozenset(),
}


class IllegalTransition(AssertionError):
    """A bug: a request was moved along an edge that does not exist."""


@dataclass(slots=True, eq=False, kw_only=True, weakref_slot=True)
class Request:
    """State of one request between its submission and its single final event. Only the scheduler mutates it.

    A submission with n > 1 answers is n of these with one `request_id` and an `index` each; the scheduler tells them apart
    by identity. `forked_from` is the one whose computed prompt blocks this one shares when they are still there.
    """

    request_id: str
    tenant_id: str
    sampling: SamplingParams
    token_ids: list[int]  # of prompt and output in one list
    num_prompt_tokens: int
    max_total_tokens: int  # of prompt and output, already bounded by the model's context
    stop_ids: frozenset[int]  # tokens that end it: end-of-sequence unless ignored, and the caller's own
    arrived_s: float  # by the scheduler's clock, like all times here
    index: int = 0  # index of this answer among the answers of one submission
    weight: int = 1  # of its tenant
    priority: Priority = Priority.STANDARD
    queue_deadline_s: float | None = None  # the request ends at this time if it has not been scheduled
    forked_from: Request | None = None  # another answer to this prompt, whose blocks this one shares
    shares_token_ids: bool = False  # one list with the other answers, until it starts
    status: RequestStatus = RequestStatus.QUEUED
    block_table: array[int] = field(default_factory=table_of)
    num_computed_tokens: int = 0  # with keys and values in its blocks, now or when the steps in flight have ended
    num_prompt_tokens_computed: int = 0  # the most prompt tokens ever computed, before preemptions too
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache when it was first scheduled
    num_preemptions: int = 0
    num_rejected_draft_tokens: int = 0
    num_in_flight_tokens: int = 0  # of prompt chunks in flight
    num_skips: int = 0  # times that others passed it because it did not fit
    first_scheduled_s: float | None = None
    queue_s: float = 0.0  # from arrival to its first schedule; 0.0 before that
    first_token_s: float | None = None
    finish_reason: FinishReason | None = None
    block_hashes: list[bytes] = field(default_factory=list)  # of its full blocks, in the prefix cache
    prefix_hash: Any = None  # the running hash after the last of these
    prefix_is_global: bool = False  # all hashed blocks so far are shared by all tenants
    num_promised_blocks: int = 0  # for its prompt, not held yet
    num_lost_tokens: int = 0  # computed when it was last preempted
    protected_len: int = 0  # computed tokens up to which it is not preempted again
    scheduled_step: int = -1  # the last step with a chunk of its prompt
    growth_step: int = -1  # the step in which its blocks will be full
    last_step: int = -1  # the step that samples its last token
    moved_step: int = -1  # the step of its last start or preemption
    preempted_s: float = 0.0  # when it was last preempted
    is_aged: bool = False  # it was started because its class had waited too long
    is_late: bool = False  # it was moved after others, because its first token will be late
    account: object = None  # the account charged for it (`accounts.account_of`); None before it reaches the scheduler

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_unknown_tokens(self) -> int:
        """How many tokens at the end will be yielded by steps in flight, of which there are at most two."""
        return self.token_ids[-2:].count(UNKNOWN_TOKEN)

    @property
    def num_output_tokens(self) -> int:
        """How many output tokens are known."""
        return len(self.token_ids) - self.num_prompt_tokens - self.num_unknown_tokens

    @property
    def num_settled_tokens(self) -> int:
        """Tokens whose keys and values are in the blocks for certain, while at most one step is in flight."""
        settled, num_unknown = self.num_computed_tokens - self.num_in_flight_tokens, self.num_unknown_tokens
        return min(settled, len(self.token_ids) - num_unknown - 1) if num_unknown else settled

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def copy_shared_token_ids(self) -> None:
        """Copy a list shared with other answers. Called when it starts, because it will append to the list."""
        if self.shares_token_ids:
            self.token_ids, self.shares_token_ids = self.token_ids.copy(), False

    def record_first_schedule(self, now_s: float) -> None:
        """Only the first match counts as cached: a preempted request finds its own blocks again, which is no discount."""
        self.first_scheduled_s = now_s
        self.queue_s = now_s - self.arrived_s
        self.num_cached_tokens = min(self.num_computed_tokens, self.num_prompt_tokens)
        self.num_prompt_tokens_computed = self.num_cached_tokens

    def move_to(self, status: RequestStatus) -> None:
        """Take one legal edge; raises `IllegalTransition` for any other."""
        if status not in LEGAL_TRANSITIONS[self.status]:
            raise IllegalTransition(f"request {self.request_id}: {self.status} → {status}")
        self.status = status

    def finish(self, reason: FinishReason) -> None:
        self.move_to(RequestStatus.FINISHED)
        self.finish_reason = reason

    def append(self, token_id: int) -> FinishReason | None:
        """Add a sampled token, where all before it are known. Returns the reason to end here, if any."""
        self.token_ids.append(token_id)
        return self._end_reason(len(self.token_ids), token_id)

    def fill_token(self, position: int, token_id: int) -> FinishReason | None:
        """Fill in the token of a step that was in flight. Returns the reason to end with it, if any; unknown tokens after a
        stop token are dropped."""
        self.token_ids[position] = token_id
        reason = self._end_reason(position + 1, token_id)
        if reason is FinishReason.STOP:
            del self.token_ids[position + 1 :]
        return reason

    def _end_reason(self, num_tokens: int, token_id: int) -> FinishReason | None:
        """Why it ends with this token, the last of `num_tokens`, if it does. A stop token counts as output."""
        if token_id in self.stop_ids and num_tokens - self.num_prompt_tokens >= self.sampling.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if num_tokens >= self.max_total_tokens else None

    def remove_unknown_tokens(self) -> int:
        """Remove the unknown tokens from the list and return their number."""
        num_unknown = self.num_unknown_tokens
        if num_unknown:
            del self.token_ids[-num_unknown:]
        return num_unknown

    def restore_unknown_tokens(self, num_unknown: int) -> None:
        """Restore what `remove_unknown_tokens` removed."""
        self.token_ids += [UNKNOWN_TOKEN] * num_unknown

    def discard_unknown_tokens(self) -> None:
        """Drop the unknown tokens of a request for which the steps in flight yield nothing."""
        self.remove_unknown_tokens()
        self.num_in_flight_tokens = 0
