"""The way of one request's token events from the socket to their owner: at once, in the reader's turn of the event loop."""

from __future__ import annotations

from typing import Protocol

from appliance.base.errors import EngineUnavailable
from engine.protocol import TokenEvent
from engine.transport import MalformedFrame


class EventReceiver(Protocol):
    """The owner of a request. Its methods never raise: an error would end the reader of all requests."""

    def receive(self, event: TokenEvent) -> None:
        """Handle the next event of the request."""
        ...

    def fail(self, error: EngineUnavailable) -> None:
        """Handle the end of the request without the final events of some answers. Nothing follows."""
        ...


class EventRoute:
    """Passes the events of a request to `receiver`, until the final event of every answer or a failure.

    `open_answers` holds the indices of the answers whose final event has not arrived.
    """

    def __init__(self, request_id: str, num_answers: int, receiver: EventReceiver) -> None:
        self.request_id = request_id
        self.receiver = receiver
        self.open_answers = set(range(num_answers))
        self._last: dict[int, TokenEvent] = {}

    def put(self, event: TokenEvent) -> None:
        """Pass on `event`."""
        self._last[event.index] = event
        if event.finish_reason is not None:
            self.open_answers.discard(event.index)
        self.receiver.receive(event)

    def put_token(self, index: int, token_id: int) -> None:
        """Pass on the event of one more token for which the engine reported nothing else. Raises MalformedFrame if the answer
        has had no event before."""
        last = self._last.get(index)
        if last is None:
            raise MalformedFrame(f"answer {index} of request {self.request_id} continues without a first event")
        self.put(next_token_event(last, token_id))


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
