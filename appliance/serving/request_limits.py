"""What the operator allows of requests that are served: how many, how long, and whether at no price. Knows no request."""

from __future__ import annotations

from dataclasses import dataclass

from appliance.base.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """Up to `buffer_chunks` of an answer wait for its reader. A model may have `max_waiting_requests` open beyond those that
    its engine runs at a time, all of one tenant if no other asks. `queue_deadline_s` (None: none) bounds the wait in the
    engine, `deadline_s` the whole request.
    """

    buffer_chunks: int
    max_waiting_requests: int
    queue_deadline_s: float | None
    deadline_s: float
    refuse_unpriced: bool

    @classmethod
    def of(cls, settings: Settings) -> RequestLimits:
        """Return the limits that the settings name."""
        return cls(
            buffer_chunks=settings.stream_buffer_events,
            max_waiting_requests=settings.max_waiting_requests,
            queue_deadline_s=settings.queue_deadline_s,
            deadline_s=settings.request_deadline_s,
            refuse_unpriced=settings.unpriced == "refuse",
        )
