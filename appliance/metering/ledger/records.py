"""Values passed to and returned by the ledger."""

from __future__ import annotations

from datetime import date, datetime
from typing import Literal

import msgspec

from appliance.base.money import BASIS_POINTS
from appliance.metering.prices import Price

Status = Literal["pending", "posted", "voided", "recovered"]
BILLED: tuple[Status, ...] = ("posted", "recovered")
"""The states of events that count in sums, limits and invoices."""
KINDS = ("usage", "adjustment")
SettledAs = Literal["posted", "voided"]
ERROR_CHARS_MAX = 500


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one request as counted by the engine. `cached_tokens` are prompt tokens reused from the cache;
    `rejected_tokens` are speculative tokens that were computed and discarded."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    rejected_tokens: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.cached_tokens <= self.prompt_tokens or min(self.completion_tokens, self.rejected_tokens) < 0:
            raise ValueError(f"token counts must satisfy 0 <= cached <= prompt, 0 <= completion and rejected, not {self}")

    @property
    def total_tokens(self) -> int:
        """Return prompt plus completion tokens: what limits count. Rejected tokens never reach the client."""
        return self.prompt_tokens + self.completion_tokens


TOKEN_COLUMNS = Usage.__struct_fields__
"""Names of the token count columns, the same in every table."""


class PendingEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An admitted request, not yet sent to the engine. `prompt_tokens` is the length of its prompt; the event itself begins
    with zero tokens, because nothing has been computed. `price_basis_points` is the share of the price that is paid, by tier
    and batch; `batch` marks batch work; `currency` is the tenant's, used if there is no price."""

    request_id: str
    tenant_id: str
    key_id: str
    model: str
    endpoint: str
    stream: bool
    prompt_tokens: int
    reserved_tokens: int
    price: Price | None
    admitted_at: datetime
    price_basis_points: int = BASIS_POINTS
    currency: str | None = None
    batch: bool = False


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Timings and outcome of a request, for the console; not for billing. `tenant_open`: the tenant's open requests on
    arrival. `admission_wait_s`: the wait for room in the limits, before admission; `awaited_limit`: the limit that it waited
    for longest, such as `tenant_tokens`. `batch_size_mean`: seats taken in the engine's batch, from its first token to its
    end."""

    admission_wait_s: float | None = None
    awaited_limit: str | None = None
    queue_s: float | None = None
    ttft_s: float | None = None
    inter_token_p50_s: float | None = None
    decode_s: float | None = None
    kv_blocks: int = 0
    preemptions: int = 0
    tenant_open: int | None = None
    batch_size_mean: float | None = None
    first_token_at: datetime | None = None
    finished_at: datetime | None = None
    error: str | None = None


class Settlement(msgspec.Struct, frozen=True, kw_only=True):
    """The final state of a pending event. A voided one costs nothing: its usage must be zero.

    `cause` says why it ended early if `finish_reason` does not: `key_revoked`, `budget_exceeded`, `shutdown`, ….
    """

    request_id: str
    status: SettledAs
    finish_reason: str
    usage: Usage = msgspec.field(default_factory=Usage)
    record: RequestRecord = msgspec.field(default_factory=RequestRecord)
    cause: str | None = None

    def __post_init__(self) -> None:
        if self.status == "voided" and self.usage != Usage():
            raise ValueError("a voided request has no usage")


class UsageEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the ledger. While pending, its token counts are checkpoints and its cost is zero.

    `posting` numbers events in the order of their final states; `billing_day` is the day of admission in the billing time zone.
    An adjustment's counts and cost are signed; `corrects_id` is the event that it corrects.
    """

    id: int
    request_id: str
    tenant_id: str
    key_id: str
    model: str
    endpoint: str
    kind: str
    status: Status
    finish_reason: str | None
    reserved_tokens: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    estimated: bool
    price_id: str | None
    cost_picos: int
    currency: str
    admitted_at: datetime
    settled_at: datetime | None
    billing_day: date
    rejected_tokens: int = 0
    price_basis_points: int = BASIS_POINTS
    batch: bool = False
    cause: str | None = None
    posting: int | None = None
    corrects_id: int | None = None
    note: str | None = None
