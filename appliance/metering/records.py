"""What the ledger is told and what it tells: values only."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from appliance.metering.prices import Price

Status = Literal["pending", "posted", "voided", "recovered"]
SettledAs = Literal["posted", "voided"]
ERROR_CHARS_MAX = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one request as the engine counted them. `cached_tokens` are those of the prompt not computed anew."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.cached_tokens <= self.prompt_tokens or self.completion_tokens < 0:
            raise ValueError(f"token counts must satisfy 0 <= cached <= prompt and 0 <= completion, not {self}")

    @property
    def total_tokens(self) -> int:
        """Return prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingEntry:
    """A request that was admitted and of which the engine has not heard yet. `prompt_tokens` is what it asks for; the record
    itself begins with zero tokens, because nothing has been computed."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """How a request went, for the console; nothing here is money."""

    queue_s: float | None = None
    ttft_s: float | None = None
    inter_token_p50_s: float | None = None
    decode_s: float | None = None
    kv_blocks: int = 0
    preemptions: int = 0
    first_token_at: datetime | None = None
    finished_at: datetime | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Settlement:
    """How a pending entry ends. Nothing is owed for a voided one: its usage must be zero."""

    request_id: str
    status: SettledAs
    finish_reason: str
    usage: Usage = field(default_factory=Usage)
    record: RequestRecord = field(default_factory=RequestRecord)

    def __post_init__(self) -> None:
        if self.status == "voided" and self.usage != Usage():
            raise ValueError("a voided request has no usage")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What a running request would be billed if the process died now: the prompt once prefill is done, the output so far."""

    request_id: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageEvent:
    """One record of the ledger. While pending its tokens are checkpoints and it costs nothing yet."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRow:
    """One past request as the console and `/admin/v1/requests` show it. `finished_at` None: it has not been settled."""

    id: str
    tenant_id: str
    key_id: str
    model: str
    endpoint: str
    stream: bool
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    kv_blocks: int
    preemptions: int
    finish_reason: str | None
    error: str | None
    queue_s: float | None
    ttft_s: float | None
    inter_token_p50_s: float | None
    decode_s: float | None
    tokens_per_second: float | None
    admitted_at: datetime
    first_token_at: datetime | None
    finished_at: datetime | None
