"""The operator's limits on requests: how many may wait, how long they may take, and whether unpriced models are refused."""

from __future__ import annotations

from dataclasses import dataclass

from appliance.base.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """Limits of every request. About `buffer_chunks` chunks are buffered for a slow reader. A model may have
    `max_waiting_requests` open beyond those that its engine runs at a time, all of one tenant if no other has any.
    `queue_deadline_s` bounds the wait in the engine (None: unbounded), `deadline_s` the whole request. `refuse_unpriced`:
    refuse requests to models without a price.
    """

    buffer_chunks: int
    max_waiting_requests: int
    queue_deadline_s: float | None
    deadline_s: float
    refuse_unpriced: bool

    @classmethod
    def of(cls, settings: Settings) -> RequestLimits:
        """Return the limits of the settings."""
        return cls(
            buffer_chunks=settings.stream_buffer_events,
            max_waiting_requests=settings.max_waiting_requests,
            queue_deadline_s=settings.queue_deadline_s,
            deadline_s=settings.request_deadline_s,
            refuse_unpriced=settings.unpriced == "refuse",
        )
