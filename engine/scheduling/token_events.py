"""What a step did to its requests, as events to send: plain tokens in columns, a `TokenEvent` for everything else. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.protocol import DecodedToken, FinishReason, TokenEvent, TokenLogprob
from engine.scheduling.request import Request


@dataclass(slots=True)
class StepEvents:
    """`requests[i]` got `token_ids[i]` after its token at `starts[i]`, and continues. Nearly all events are of this kind, too
    many for an object each. `others` holds the rest and comes first; no answer is in both."""

    others: list[TokenEvent] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)

    @property
    def decoded(self) -> list[DecodedToken]:
        """The columns in the form that is sent."""
        rows = zip(self.requests, self.token_ids, strict=True)
        return [(request.request_id, request.index, token_id) for request, token_id in rows]

    def extend(self, later: StepEvents) -> None:
        """Append later events, perhaps of the same requests."""
        if later.others or later.requests:
            if self.requests:
                self.others = self.as_events()
            self.others += later.others
            self.requests, self.starts, self.token_ids = later.requests, later.starts, later.token_ids

    def as_events(self) -> list[TokenEvent]:
        """All events as objects."""
        rows = zip(self.requests, self.starts, self.token_ids, strict=True)
        return self.others + [_decode_event(request, start, token_id) for request, start, token_id in rows]


def _decode_event(request: Request, start: int, token_id: int) -> TokenEvent:
    event = token_event(request, [token_id])
    event.num_output_tokens = start + 2 - request.num_prompt_tokens
    event.finish_reason = None  # it may have ended since
    return event


def token_event(request: Request, token_ids: list[int], *, prompt_logprobs: list[TokenLogprob] | None = None) -> TokenEvent:
    """What just happened to `request`, with its exact counts."""
    return TokenEvent(
        request.request_id,
        token_ids,
        len(request.token_ids) - request.num_prompt_tokens - request.num_unknown_tokens,
        request.num_prompt_tokens_computed,
        request.num_cached_tokens,
        request.num_preemptions,
        request.queue_s,
        None,
        request.finish_reason,
        None,
        request.index,
        prompt_logprobs,
        None,
        request.num_rejected_draft_tokens,
    )


def end_unscheduled(request: Request, reason: FinishReason, error: str | None = None, param: str | None = None) -> TokenEvent:
    """End an answer that never reached the scheduler. Returns its one event."""
    request.finish(reason)
    event = token_event(request, [])
    event.error, event.error_param = error, param
    return event
