"""The events of one request on their way from the reader task to the task that owns the generation.

The reader never waits: when the owner is slow, events are merged, so the box holds few objects and never more tokens than
the request may generate.
"""

from __future__ import annotations

import asyncio
from collections import deque

from appliance.base.errors import EngineUnavailable
from engine.protocol import TokenEvent

EVENTS_MAX = 256


class EventStream:
    """A box of events with one writer and one reader. After its final event, or a failure, nothing more comes."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self._events: deque[TokenEvent] = deque()
        self._failure: str | None = None
        self._arrived = asyncio.Event()

    def put(self, event: TokenEvent) -> None:
        """Add `event`; merge it into the last one when the box is full."""
        if len(self._events) >= EVENTS_MAX:
            event = merged(self._events.pop(), event)
        self._events.append(event)
        self._arrived.set()

    def fail(self, reason: str) -> None:
        """Say that the engine is gone. Events that came before are still delivered."""
        self._failure = reason
        self._arrived.set()

    async def take(self) -> list[TokenEvent]:
        """Wait for events and return all of them, in order. Raises EngineUnavailable when the engine ended first."""
        while not self._events:
            if self._failure is not None:
                raise EngineUnavailable(self._failure)
            await self._arrived.wait()
            self._arrived.clear()
        events = list(self._events)
        self._events.clear()
        return events


def merged(earlier: TokenEvent, later: TokenEvent) -> TokenEvent:
    """Return one event that says what both said: tokens in order, counts of the later one."""
    logprobs = (
        None if earlier.logprobs is None and later.logprobs is None else [*(earlier.logprobs or ()), *(later.logprobs or ())]
    )
    return TokenEvent(
        request_id=later.request_id,
        token_ids=[*earlier.token_ids, *later.token_ids],
        num_output_tokens=later.num_output_tokens,
        num_prompt_tokens_computed=later.num_prompt_tokens_computed,
        num_cached_tokens=later.num_cached_tokens,
        num_preemptions=later.num_preemptions,
        queue_s=later.queue_s,
        logprobs=logprobs,
        finish_reason=later.finish_reason,
        error=later.error,
    )
