"""The state of a request while it is live, as shown in the request table. Updated by the task that owns the generation."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from statistics import median

from appliance.metering.past_requests import tokens_per_second
from engine.protocol import FinishReason, RequestProgress, TokenEvent

INTERVALS_MAX = 4096  # enough for a median; of longer answers the latest ones are kept
STATES = ("queued", "prefill", "decode", "finished")  # in order of progress


@dataclass(slots=True)
class _AnswerCounts:
    """Counts of one answer of a request."""

    completion_tokens: int = 0
    rejected_tokens: int = 0
    preemptions: int = 0
    last_token_monotonic_s: float | None = None


@dataclass(slots=True, kw_only=True)
class LiveRequest:
    """One request. States: queued → prefill → decode → finished; a preemption leads back to queued or prefill.

    Tokens, blocks and preemptions are sums over its answers; the state is that of the most advanced answer. Figures of the
    prompt are taken from the first answer, whose blocks the others share. `tenant_open` is the number of the tenant's requests
    that were open for this model at admission. `admission_wait_s` is how long it waited for room in its limits before that,
    which no other time includes, and `awaited_limit` the limit that it waited for longest. One that still waits is a snapshot
    with `admitted_at` None, and `awaited_limit` is the limit that holds it up. `batch_size_mean` is the mean number
    of seats taken in the engine's batch since its first token, its own included.
    """

    id: str
    tenant_id: str
    tenant_name: str
    key_id: str
    key_prefix: str
    model: str
    endpoint: str
    stream: bool
    prompt_tokens: int
    admitted_at: datetime | None
    admitted_monotonic_s: float
    num_answers: int = 1
    batch: bool = False
    tenant_open: int = 0
    admission_wait_s: float = 0.0
    awaited_limit: str | None = None
    state: str = "queued"
    queue_position: int | None = None
    cached_tokens: int = 0
    completion_tokens: int = 0
    rejected_tokens: int = 0
    kv_blocks: int = 0
    kv_blocks_max: int = 0
    preemptions: int = 0
    batch_size_mean: float | None = None
    first_token_at: datetime | None = None
    finished_at: datetime | None = None
    queue_s: float | None = None
    ttft_s: float | None = None
    decode_s: float | None = None
    finish_reason: str | None = None
    error: str | None = None
    _first_token_monotonic_s: float | None = None
    _answers: dict[int, _AnswerCounts] = field(default_factory=dict)
    _intervals_s: array[float] = field(default_factory=lambda: array("d"))

    @property
    def tokens_per_second(self) -> float | None:
        """Return generated tokens per second of decoding, or None before the second token."""
        return tokens_per_second(self.completion_tokens, self.decode_s)

    @property
    def inter_token_p50_s(self) -> float | None:
        """Return the median time between two tokens, or None before the second token."""
        return median(self._intervals_s) if self._intervals_s else None

    def at(self, monotonic_s: float) -> datetime:
        """Return the time of a moment since the admission, by the clock of the admission: it may have been set since then, and
        differences of a request's times are its durations."""
        assert self.admitted_at is not None
        return self.admitted_at + timedelta(seconds=monotonic_s - self.admitted_monotonic_s)

    def apply_progress(self, answers: Sequence[RequestProgress]) -> None:
        """Apply the engine's progress report on this request's live answers; it comes a few times per second."""
        self.state = max((answer.state for answer in answers), key=STATES.index)
        positions = [answer.queue_position for answer in answers if answer.queue_position is not None]
        self.queue_position = min(positions, default=None) if self.state == "queued" else None
        self.kv_blocks = sum(answer.kv_blocks for answer in answers)
        self.kv_blocks_max = max(self.kv_blocks_max, self.kv_blocks)
        for answer in answers:
            self._count_preemptions(self._counts(answer.index), answer.num_preemptions)

    def apply_event(self, event: TokenEvent, *, monotonic_s: float) -> list[float]:
        """Apply the counts of `event`; return the inter-token intervals (seconds) that its tokens ended."""
        counts = self._counts(event.index)
        self._set_completion(counts, event.num_output_tokens)
        self._count_preemptions(counts, event.num_preemptions)
        if event.num_rejected_draft_tokens:
            self.rejected_tokens += event.num_rejected_draft_tokens - counts.rejected_tokens
            counts.rejected_tokens = event.num_rejected_draft_tokens
        if event.index == 0:
            self.cached_tokens = event.num_cached_tokens
            if event.num_prompt_tokens_computed or event.token_ids:
                self.queue_s = event.queue_s
        if event.finish_reason is FinishReason.DEADLINE:
            self.queue_s = monotonic_s - self.admitted_monotonic_s
        if not event.token_ids:
            return []
        self.state = "decode"
        self.queue_position = None
        return self._count_tokens(counts, len(event.token_ids), monotonic_s, event.decode_s)

    def set_completion(self, index: int, completion_tokens: int) -> None:
        """Set the number of billed tokens of answer `index`."""
        self._set_completion(self._counts(index), completion_tokens)

    def _set_completion(self, counts: _AnswerCounts, completion_tokens: int) -> None:
        self.completion_tokens += completion_tokens - counts.completion_tokens
        counts.completion_tokens = completion_tokens

    def finish(self, reason: str, *, now: datetime, error: str | None = None) -> None:
        """Set how the request ended. Only the first call counts."""
        if self.finish_reason is None:
            self.state = "finished"
            self.queue_position = None
            self.finish_reason = reason
            self.finished_at = now
            self.error = error

    def _counts(self, index: int) -> _AnswerCounts:
        counts = self._answers.get(index)
        if counts is None:
            counts = self._answers[index] = _AnswerCounts()
        return counts

    def _count_preemptions(self, counts: _AnswerCounts, preemptions: int) -> None:
        """Raise the count, never lower it: a token in flight at a preemption still carries the older count."""
        if preemptions > counts.preemptions:
            self.preemptions += preemptions - counts.preemptions
            counts.preemptions = preemptions

    def _count_tokens(self, counts: _AnswerCounts, num_tokens: int, monotonic_s: float, engine_decode_s: float) -> list[float]:
        last_s, counts.last_token_monotonic_s = counts.last_token_monotonic_s, monotonic_s
        if self._first_token_monotonic_s is None:
            self._first_token_monotonic_s = monotonic_s
            self.ttft_s = monotonic_s - self.admitted_monotonic_s
        # Tokens that arrived in one burst took the engine longer than the gateway saw.
        self.decode_s = max(self.decode_s or 0.0, monotonic_s - self._first_token_monotonic_s, engine_decode_s)
        if last_s is None:
            return []
        intervals = [(monotonic_s - last_s) / num_tokens] * num_tokens
        self._intervals_s.extend(intervals)
        del self._intervals_s[:-INTERVALS_MAX]
        return intervals
