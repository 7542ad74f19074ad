"""Queue of one request's token events between the socket reader and the task that owns the generation.

Never blocks the reader: when the owner is slow, events are merged, so the queue holds few objects and never more tokens than
the request's answers may have.
"""

from __future__ import annotations

import dataclasses
from collections import deque

from appliance.base.errors import EngineUnavailable
from appliance.serving.wakeup import Wakeup
from engine.protocol import TokenEvent, TokenLogprob
from engine.transport import MalformedFrame

EVENTS_MAX = 256


class EventQueue:
    """For one writer and one reader. Ends with the final event of every answer, or with a failure.

    `open_answers` holds the indices of the answers whose final event has not arrived.
    """

    def __init__(self, request_id: str, num_answers: int = 1) -> None:
        self.request_id = request_id
        self.open_answers = set(range(num_answers))
        self._events: deque[TokenEvent] = deque()
        self._last: dict[int, TokenEvent] = {}
        self._failure: str | None = None
        self._retry_after_s: float | None = None
        self._reader = Wakeup()

    def put(self, event: TokenEvent) -> None:
        """Add `event`; merge it into the last one of its answer when the queue is full."""
        self._last[event.index] = event
        if len(self._events) < EVENTS_MAX or not self._merge_into_last(event):
            self._events.append(event)
        if event.finish_reason is not None:
            self.open_answers.discard(event.index)
        self._reader.wake()

    def put_token(self, index: int, token_id: int) -> None:
        """Add the event of one more token for which the engine reported nothing else. Raises MalformedFrame if the answer has
        had no event before."""
        last = self._last.get(index)
        if last is None:
            raise MalformedFrame(f"answer {index} of request {self.request_id} continues without a first event")
        self.put(next_token_event(last, token_id))

    def fail(self, reason: str, *, retry_after_s: float | None = None) -> None:
        """End the queue with EngineUnavailable(`reason`). Events that are already in it are still delivered first."""
        self._failure, self._retry_after_s = reason, retry_after_s
        self._reader.wake()

    async def take(self) -> list[TokenEvent]:
        """Wait for events and return all there are, in order. Raises EngineUnavailable when the queue has failed."""
        while not self._events:
            if self._failure is not None:
                raise EngineUnavailable(self._failure, retry_after_s=self._retry_after_s)
            await self._reader.wait()
        events = list(self._events)
        self._events.clear()
        return events

    def _merge_into_last(self, event: TokenEvent) -> bool:
        """Merge `event` into the last one of its answer; return whether there was one."""
        for position in range(len(self._events) - 1, -1, -1):
            if self._events[position].index == event.index:
                self._events[position] = merge_events(self._events[position], event)
                return True
        return False


def next_token_event(last: TokenEvent, token_id: int) -> TokenEvent:
    """Return the event of the next token after `last`, with every other field unchanged."""
    return TokenEvent(
        last.request_id,
        [token_id],
        last.num_output_tokens + 1,
        last.num_prompt_tokens_computed,
        last.num_cached_tokens,
        last.num_preemptions,
        last.queue_s,
        index=last.index,
        num_rejected_draft_tokens=last.num_rejected_draft_tokens,
    )


def merge_events(earlier: TokenEvent, later: TokenEvent) -> TokenEvent:
    """Return one event equivalent to two consecutive ones of the same answer: tokens concatenated, other fields of `later`."""
    return dataclasses.replace(
        later,
        token_ids=[*earlier.token_ids, *later.token_ids],
        logprobs=_concatenated(earlier.logprobs, later.logprobs),
        prompt_logprobs=_concatenated(earlier.prompt_logprobs, later.prompt_logprobs),
    )


def _concatenated(earlier: list[TokenLogprob] | None, later: list[TokenLogprob] | None) -> list[TokenLogprob] | None:
    return None if earlier is None and later is None else [*(earlier or ()), *(later or ())]
