"""Says in one sentence where a request's time went. Works on figures alone, so live and past requests share it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from appliance.serving.answers import COMPLETE

if TYPE_CHECKING:
    from appliance.metering.ledger.records import RequestRow
    from appliance.serving.live_requests import LiveRequest

NOTICEABLE_S = 0.5  # below this nobody asks why


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Where the time of a request went, in seconds; None where that stage was not reached. Of its own tenant's requests
    `queue_position` wait before it and `tenant_open` were open when it came, as far as that is known. `batch`: everybody's more
    urgent requests come before it."""

    queue_s: float | None
    ttft_s: float | None
    decode_s: float | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    preemptions: int
    is_queued: bool = False
    queue_position: int | None = None
    tenant_open: int = 0
    finish_reason: str | None = None
    batch: bool = False

    @classmethod
    def of(cls, request: LiveRequest | RequestRow, **others: Any) -> Timeline:
        """Return the fields that `request` has by the same names, and the `others`."""
        names = [field.name for field in fields(cls) if hasattr(request, field.name)]
        return cls(**{name: getattr(request, name) for name in names} | others)


def explain(timeline: Timeline) -> str:
    """Return the sentence: what took longest, with its figure, what made it worse, and whether it was ended early."""
    if timeline.ttft_s is None:
        return _explain_before_first_token(timeline)
    queue_s = timeline.queue_s or 0.0
    prefill_s = max(0.0, timeline.ttft_s - queue_s)
    decode_s = timeline.decode_s or 0.0
    total_s = queue_s + prefill_s + decode_s
    is_cut = timeline.finish_reason is not None and timeline.finish_reason not in COMPLETE
    end = f"; ended early ({timeline.finish_reason})" if is_cut else ""
    if total_s < NOTICEABLE_S and not timeline.preemptions:
        if is_cut:
            return f"Ended early, after {_seconds(total_s)} ({timeline.finish_reason})."
        return f"Quick: {_seconds(total_s)} {'so far' if timeline.finish_reason is None else 'in all'}."
    name, longest_s = max((("queue", queue_s), ("prefill", prefill_s), ("decode", decode_s)), key=lambda stage: stage[1])
    return f"{_cause(name, longest_s, total_s, timeline)}{_preempted(timeline.preemptions)}{end}."


def explain_past(row: RequestRow) -> str:
    """Return the sentence for a request that is no longer live. One without an end belonged to a process that died."""
    return explain(Timeline.of(row, tenant_open=row.tenant_open or 0, finish_reason=row.finish_reason or "error"))


def _explain_before_first_token(timeline: Timeline) -> str:
    waited = "" if timeline.queue_s is None else f" after {_seconds(timeline.queue_s)} in the queue"
    if timeline.finish_reason is not None and timeline.completion_tokens:
        # Recovered after the gateway died: the ledger's checkpoints have counts, the times died with the process.
        return f"Ended after about {timeline.completion_tokens} tokens ({timeline.finish_reason}); its times are not known."
    if timeline.finish_reason is not None:
        return f"Ended before its first token ({timeline.finish_reason}){waited}{_preempted(timeline.preemptions)}."
    if timeline.is_queued:
        return f"Waiting for a place in the batch{_ahead(timeline)}{_urgency(timeline)}{_preempted(timeline.preemptions)}."
    computed = timeline.prompt_tokens - timeline.cached_tokens
    return f"Reading its prompt: {computed} of {timeline.prompt_tokens} tokens to compute{waited}."


def _cause(stage: str, longest_s: float, total_s: float, timeline: Timeline) -> str:
    share = f"{_seconds(longest_s)} of {_seconds(total_s)}"
    if stage == "queue":
        own = f"; {_requests(timeline.tenant_open)} of its own tenant came before it" if timeline.tenant_open else ""
        return f"Mostly waited for a place in the batch: {share}{own}{_urgency(timeline)}"
    if stage == "prefill":
        computed = timeline.prompt_tokens - timeline.cached_tokens
        return f"Mostly read its prompt: {share} for {computed} tokens that were not cached"
    # The first token is there when decoding begins: the same rate as `LiveRequest.tokens_per_second`.
    rate = max(timeline.completion_tokens - 1, 0) / longest_s if longest_s > 0 else 0.0
    return f"Mostly generated: {share} for {timeline.completion_tokens} tokens at {rate:.1f} per second"


def _ahead(timeline: Timeline) -> str:
    if timeline.queue_position is None:
        return ""
    if timeline.queue_position == 0:
        return ": the next one of its tenant"
    return f": {_requests(timeline.queue_position)} of its own tenant ahead of it"


def _urgency(timeline: Timeline) -> str:
    return "; as batch work it lets more urgent requests go first" if timeline.batch else ""


def _requests(count: int) -> str:
    return "one request" if count == 1 else f"{count} requests"


def _preempted(preemptions: int) -> str:
    if preemptions == 0:
        return ""
    times = "once" if preemptions == 1 else f"{preemptions} times"
    return f"; preempted {times} to make room for other requests"


def _seconds(duration_s: float) -> str:
    return f"{duration_s * 1000:.0f} ms" if duration_s < 1 else f"{duration_s:.1f} s"
