"""Explains in one sentence where a request's time went. Works on numbers alone, for live and past requests alike."""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any, Protocol

from appliance.metering.limits.refusals import LIMIT_WORDS
from appliance.metering.past_requests import PastRequest
from appliance.serving.answers import COMPLETE
from appliance.serving.live_requests import LiveRequest

NOTICEABLE_S = 0.5  # shorter requests are only called quick
SHARED_BATCH = 2.0  # itself and one more on average; smaller means are not mentioned


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Duration of each stage of a request in seconds, None if it was not reached. `queue_position` counts the requests of the
    same tenant that wait ahead of it, `tenant_open` those that were open when it was admitted. `batch`: lowest priority.
    `admission_wait_s`, the wait for room in the limits, comes before the others; `awaited_limit` names the limit.
    `batch_size_mean` is from the first token on. `after_s`: from the last token to the end."""

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
    admission_wait_s: float | None = None
    awaited_limit: str | None = None
    batch_size_mean: float | None = None
    after_s: float = 0.0
    finish_reason: str | None = None
    batch: bool = False

    @classmethod
    def of(cls, request: LiveRequest | PastRequest, **overrides: Any) -> Timeline:
        """Return a timeline from the fields of `request` with the same names, and `overrides`."""
        names = [field.name for field in fields(cls) if hasattr(request, field.name)]
        values = {name: getattr(request, name) for name in names} | {"after_s": after_last_token_s(request)}
        return cls(**values | overrides)


class Timed(Protocol):
    """Times of a request."""

    @property
    def admitted_at(self) -> datetime | None: ...
    @property
    def finished_at(self) -> datetime | None: ...
    @property
    def ttft_s(self) -> float | None: ...
    @property
    def decode_s(self) -> float | None: ...


def after_last_token_s(request: Timed) -> float:
    """Return the time from the last token to the end in seconds, such as until an engine that hung was ended. It is 0 before
    the end, and without a token."""
    if request.admitted_at is None or request.finished_at is None or request.ttft_s is None:
        return 0.0
    total_s = (request.finished_at - request.admitted_at).total_seconds()
    return max(total_s - request.ttft_s - (request.decode_s or 0.0), 0.0)


def explain(timeline: Timeline) -> str:
    """Return one sentence: the longest stage and its duration, what made it longer, and whether the request ended early."""
    if timeline.ttft_s is None:
        return _explain_before_first_token(timeline)
    queue_s = timeline.queue_s or 0.0
    prefill_s = max(0.0, timeline.ttft_s - queue_s)
    stages = {
        "limits": timeline.admission_wait_s or 0.0,
        "queue": queue_s,
        "prefill": prefill_s,
        "decode": timeline.decode_s or 0.0,
        "after": timeline.after_s,
    }
    total_s = sum(stages.values())
    ended_early = timeline.finish_reason is not None and timeline.finish_reason not in COMPLETE
    end = f"; ended early ({timeline.finish_reason})" if ended_early else ""
    if total_s < NOTICEABLE_S and not timeline.preemptions:
        if ended_early:
            return f"Ended early, after {_seconds(total_s)} ({timeline.finish_reason})."
        return f"Quick: {_seconds(total_s)} {'so far' if timeline.finish_reason is None else 'in all'}."
    stage, longest_s = max(stages.items(), key=lambda item: item[1])
    return f"{_explain_stage(stage, longest_s, total_s, timeline)}{_preempted(timeline.preemptions)}{end}."


def explain_live(live: LiveRequest) -> str:
    """Return the sentence for a request that is live or has just ended: where its time went so far."""
    if live.admitted_at is None:
        waited = f"room in {awaited(live.awaited_limit)}, {_seconds(live.admission_wait_s)}"
        return f"Waiting for {waited} so far." if live.finish_reason is None else f"Ended while it waited for {waited}."
    return explain(Timeline.of(live, is_queued=live.state == "queued"))


def explain_past(row: PastRequest) -> str:
    """Return the sentence for a request that is no longer live. If it has no finish reason, its gateway process died."""
    return explain(Timeline.of(row, tenant_open=row.tenant_open or 0, finish_reason=row.finish_reason or "error"))


def _explain_before_first_token(timeline: Timeline) -> str:
    waited = "" if timeline.queue_s is None else f" after {_seconds(timeline.queue_s)} in the queue"
    before = _before_admission(timeline)
    if timeline.finish_reason is not None and timeline.completion_tokens:
        # Recovered after the gateway died: the ledger's checkpoints have token counts but no times.
        return f"Ended after about {_tokens(timeline.completion_tokens)} ({timeline.finish_reason}); its times are not known."
    if timeline.finish_reason is not None:
        return f"Ended before its first token ({timeline.finish_reason}){waited}{_preempted(timeline.preemptions)}{before}."
    if timeline.is_queued:
        why = f"{_ahead(timeline)}{_urgency(timeline)}{_preempted(timeline.preemptions)}"
        return f"Waiting for a place in the batch{why}{before}."
    computed = timeline.prompt_tokens - timeline.cached_tokens
    return f"Reading its prompt: {computed:,} of {_tokens(timeline.prompt_tokens)} to compute{waited}{before}."


def _explain_stage(stage: str, longest_s: float, total_s: float, timeline: Timeline) -> str:
    share = f"{_seconds(longest_s)} of {_seconds(total_s)}"
    if stage == "limits":
        return f"Mostly waited for room in {awaited(timeline.awaited_limit)}: {share}"
    if stage == "queue":
        own = f"; {_requests(timeline.tenant_open)} of its own tenant came before it" if timeline.tenant_open else ""
        return f"Mostly waited for a place in the batch: {share}{own}{_urgency(timeline)}"
    if stage == "prefill":
        computed = timeline.prompt_tokens - timeline.cached_tokens
        return f"Mostly read its prompt: {share} for {_tokens(computed)} not in the cache"
    if stage == "after":
        return f"Mostly waited for its end after the last token: {share}"
    # The first token belongs to prefill: the same rate as `LiveRequest.tokens_per_second`.
    rate = max(timeline.completion_tokens - 1, 0) / longest_s if longest_s > 0 else 0.0
    return f"Mostly generated: {share} for {_tokens(timeline.completion_tokens)} at {rate:.1f} per second{_batch(timeline)}"


def awaited(limit: str | None) -> str:
    """Return what a request waits for, such as "its tenant's tokens per minute"."""
    if limit is None:
        return "its limits"
    scope, _, kind = limit.partition("_")
    return f"{'the' if scope == 'model' else 'its'} {scope}'s {LIMIT_WORDS[kind]}"


def _before_admission(timeline: Timeline) -> str:
    wait_s = timeline.admission_wait_s or 0.0
    if wait_s < NOTICEABLE_S:
        return ""
    return f"; before that, {_seconds(wait_s)} of waiting for room in {awaited(timeline.awaited_limit)}"


def _batch(timeline: Timeline) -> str:
    mean = timeline.batch_size_mean or 0.0
    return f" in a batch of {mean:.0f} on average" if mean >= SHARED_BATCH else ""


def _ahead(timeline: Timeline) -> str:
    if timeline.queue_position is None:
        return ""
    if timeline.queue_position == 0:
        return ": the next one of its tenant"
    return f": {_requests(timeline.queue_position)} of its own tenant ahead of it"


def _urgency(timeline: Timeline) -> str:
    return "; as batch work it lets more urgent requests go first" if timeline.batch else ""


def _tokens(count: int) -> str:
    return "1 token" if count == 1 else f"{count:,} tokens"


def _requests(count: int) -> str:
    return "one request" if count == 1 else f"{count:,} requests"


def _preempted(preemptions: int) -> str:
    if preemptions == 0:
        return ""
    times = "once" if preemptions == 1 else f"{preemptions} times"
    return f"; preempted {times} to make room for other requests"


def _seconds(duration_s: float) -> str:
    return f"{duration_s * 1000:.0f} ms" if duration_s < 1 else f"{duration_s:.1f} s"
