"""One request as the scheduler sees it: tokens, blocks, progress, and the only legal ways through its life. Knows no torch.

    QUEUED ──admit──► PREFILL ──last chunk──► DECODE
      ▲                  │                      │
      └────preempt───────┴──────────────────────┤
                                                ▼
    any live state ──stop, length, abort, error──► FINISHED

Token positions of a request, P tokens per block:

    0 ............... num_cached ........ num_computed_tokens ........ len(token_ids)
    │ found in cache      │ computed here        │ to compute next            │ to sample next
    └───────────── keys and values in block_table ─────────────┘

While a step is under way (`scheduling.outcomes`), its tokens stand at the end of the list as `UNKNOWN_TOKEN`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from engine.protocol import FinishReason, Priority, SamplingParams

if TYPE_CHECKING:
    from engine.scheduling.accounts import Account


UNKNOWN_TOKEN = -1
"""In the place of a token that a step under way will yield. Hashing it or sending it to a device fails."""


def table_of(block_ids: Iterable[int] = ()) -> array[int]:
    """Block ids side by side in 32 bits each, as the device reads them: steps copy whole tables."""
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
    `queue_deadline_s` is a time of the scheduler's clock; `queue_s` the wait until the first schedule, 0.0 before it.

    `token_ids` is prompt and output in one list. `stop_ids` are the ids that end it (end-of-sequence unless ignored, and
    the caller's own). `max_total_tokens` is prompt plus output, already bounded by the model's context.

    `num_unknown_tokens` stand at the end of `token_ids`; `num_flying_tokens` are those of prompt chunks under way.

    From `block_hashes` on the scheduler keeps its own notes: names of full blocks and the running hash behind the last of
    them; prompt blocks that were promised but are not held yet; tokens that were computed when the request was preempted, and
    those up to which it is not preempted again; steps (of the last chunk, of the next growth, of the last start or
    preemption); whether it started because its class had waited for too long; who pays.
    """

    request_id: str
    tenant_id: str
    sampling: SamplingParams
    token_ids: list[int]
    num_prompt_tokens: int
    max_total_tokens: int
    stop_ids: frozenset[int]
    arrived_s: float
    index: int = 0
    weight: int = 1
    priority: Priority = Priority.STANDARD
    queue_deadline_s: float | None = None
    forked_from: Request | None = None
    status: RequestStatus = RequestStatus.QUEUED
    block_table: array[int] = field(default_factory=table_of)
    num_computed_tokens: int = 0
    num_prompt_tokens_computed: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_rejected_draft_tokens: int = 0
    num_unknown_tokens: int = 0
    num_flying_tokens: int = 0
    num_skips: int = 0
    first_scheduled_s: float | None = None
    queue_s: float = 0.0
    finish_reason: FinishReason | None = None
    block_hashes: list[bytes] = field(default_factory=list)
    prefix_hash: Any = None
    prefix_is_blessed: bool = False
    num_promised_blocks: int = 0
    num_lost_tokens: int = 0
    secured_len: int = 0
    scheduled_step: int = -1
    growth_step: int = -1
    moved_step: int = -1
    is_aged: bool = False
    is_late: bool = False
    account: Account | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Those that are known."""
        return len(self.token_ids) - self.num_prompt_tokens - self.num_unknown_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens : len(self.token_ids) - self.num_unknown_tokens]

    @property
    def num_settled_tokens(self) -> int:
        """Tokens whose keys and values are in the blocks for certain, while at most one step is under way."""
        settled = self.num_computed_tokens - self.num_flying_tokens
        return min(settled, len(self.token_ids) - self.num_unknown_tokens - 1) if self.num_unknown_tokens else settled

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def schedule_first(self, now_s: float) -> None:
        """A preempted request finds its own blocks again: that is no discount, so only the first match counts."""
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
        """Add a sampled token; the reason to end here, if any. A stop token counts as output."""
        token_ids = self.token_ids
        token_ids.append(token_id)
        if token_id in self.stop_ids and self.num_output_tokens >= self.sampling.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(token_ids) >= self.max_total_tokens else None

    def fill(self, position: int, token_id: int) -> FinishReason | None:
        """The token of a step that was under way is known; the reason to end with it, if any. What was under way behind an
        end never existed."""
        token_ids = self.token_ids
        token_ids[position] = token_id
        self.num_unknown_tokens -= 1
        if token_id in self.stop_ids and position + 1 - self.num_prompt_tokens >= self.sampling.min_tokens:
            del token_ids[position + 1 :]
            self.num_unknown_tokens = 0
            return FinishReason.STOP
        return FinishReason.LENGTH if position + 1 >= self.max_total_tokens else None

    def take_unknown(self) -> int:
        """Take the unknown tokens off the list; how many there were."""
        num_unknown = self.num_unknown_tokens
        if num_unknown:
            del self.token_ids[-num_unknown:]
            self.num_unknown_tokens = 0
        return num_unknown

    def give_unknown(self, num_unknown: int) -> None:
        """Put back what `take_unknown` took."""
        self.token_ids += [UNKNOWN_TOKEN] * num_unknown
        self.num_unknown_tokens = num_unknown

    def forget_unknown(self) -> None:
        """The steps under way yield nothing for this request."""
        self.take_unknown()
        self.num_flying_tokens = 0
