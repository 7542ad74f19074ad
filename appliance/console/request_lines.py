"""A row of the request tables, with the same fields for live and past requests. Knows no page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from typing import TYPE_CHECKING, Any

from appliance.metering.past_requests import PastRequest
from appliance.serving.explanation import after_last_token_s, awaited, explain_live, explain_past

if TYPE_CHECKING:
    from appliance.serving.live_requests import LiveRequest

TAIL_CHARS = 8  # the random end of an id; ids of neighbouring requests share the beginning, which is the time
NOTICEABLE_S = 0.001
_TONES = {"stop": "ok", "length": "ok", "error": "bad", "refused": "bad"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLine:
    """A request as shown in tables and on its page. `end`, the finish reason, is empty while it is live. `awaits` names the
    limit in which it waits for room, if it does. `total_s` includes that wait, before admission."""

    id: str
    live: bool
    state: str
    state_text: str
    end: str
    tone: str
    tenant_id: str
    tenant_name: str
    key_id: str
    key_prefix: str
    model: str
    endpoint: str
    stream: bool
    batch: bool
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    kv_blocks: int
    preemptions: int
    admission_wait_s: float | None
    queue_s: float | None
    ttft_s: float | None
    decode_s: float | None
    total_s: float | None
    tokens_per_second: float | None
    inter_token_p50_s: float | None
    batch_size_mean: float | None
    admitted_at: datetime | None
    first_token_at: datetime | None
    finished_at: datetime | None
    explanation: str
    error: str | None
    awaits: str | None = None

    @property
    def short_id(self) -> str:
        """Return the end of the id, which distinguishes neighbouring rows."""
        return f"…{self.id[-TAIL_CHARS:]}"

    @property
    def prefill_s(self) -> float | None:
        """Return the time between leaving the queue and the first token."""
        if self.ttft_s is None:
            return None
        return max(self.ttft_s - (self.queue_s or 0.0), 0.0)

    @property
    def phases(self) -> list[tuple[str, str, float | None]]:
        """Return (name, label, seconds) of the phases, which add up to the total; None for a phase that was not reached.

        The wait for room in the limits is listed if there was one, and time after the last token if it is noticeable, for
        example until an abort has reached the engine.
        """
        phases = [("queue", "queue", self.queue_s), ("prefill", "prefill", self.prefill_s), ("decode", "decode", self.decode_s)]
        wait_s = self.admission_wait_s or 0.0
        if wait_s >= NOTICEABLE_S:
            phases.insert(0, ("limits", "waiting for limits", wait_s))
        after_s = 0.0 if self.live else after_last_token_s(self)
        return [*phases, ("other", "after the last token", after_s)] if after_s >= NOTICEABLE_S else phases


def live_line(live: LiveRequest, now: datetime) -> RequestLine:
    """Return the row of a request that is not settled yet; its total time ends now."""
    return RequestLine(
        **_shared_fields(live),
        live=True,
        state=live.state,
        state_text=_state_text(live),
        end=live.finish_reason or "",
        tone="",
        tenant_name=live.tenant_name,
        key_prefix=live.key_prefix,
        total_s=live.admission_wait_s + _since_admission_s(live, now),
        explanation=explain_live(live),
        awaits=None if live.admitted_at else awaited(live.awaited_limit),
    )


def _since_admission_s(live: LiveRequest, now: datetime) -> float:
    if live.admitted_at is None:
        return 0.0
    return max(((live.finished_at or now) - live.admitted_at).total_seconds(), 0.0)


def _state_text(live: LiveRequest) -> str:
    if live.state != "queued" or live.queue_position is None:
        return live.state
    return f"queued, {live.queue_position} ahead" if live.queue_position else "queued, next"


def past_line(row: PastRequest, tenant_names: Mapping[str, str], key_prefix: str = "") -> RequestLine:
    """Return the row of a request that the ledger has settled. When one ended whose gateway died is not known."""
    end = row.finish_reason or "unsettled"
    wait_s = row.admission_wait_s or 0.0
    died = row.ttft_s is None and row.completion_tokens > 0
    return RequestLine(
        **_shared_fields(row),
        live=False,
        state="finished",
        state_text="finished",
        end=end,
        tone=_TONES.get(end, "warn"),
        tenant_name=tenant_names.get(row.tenant_id, row.tenant_id),
        key_prefix=key_prefix,
        total_s=None if died or row.finished_at is None else wait_s + (row.finished_at - row.admitted_at).total_seconds(),
        explanation=explain_past(row),
    )


def _shared_fields(request: LiveRequest | PastRequest) -> dict[str, Any]:
    """Return the fields that the row has in common with the request."""
    return {name: getattr(request, name) for name in _SHARED_FIELDS}


_SHARED_FIELDS = {field.name for field in fields(RequestLine)} & {field.name for field in fields(PastRequest)}
