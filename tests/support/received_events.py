"""Owners of engine requests for tests: one that keeps its events, and engines that send a list of events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Protocol

from appliance.base.errors import EngineUnavailable
from appliance.serving.event_route import EventReceiver
from engine.protocol import GenerationRequest, TokenEvent

Submit = Callable[[GenerationRequest, EventReceiver], None]


class Engine(Protocol):
    """A client or supervisor."""

    def submit(self, request: GenerationRequest, receiver: EventReceiver) -> None:
        """Send a request."""
        ...


class ReceivedEvents:
    """Keeps the events of a request until they are taken."""

    def __init__(self) -> None:
        self._events: list[TokenEvent] = []
        self._error: EngineUnavailable | None = None
        self._arrived = asyncio.Event()

    def receive(self, event: TokenEvent) -> None:
        """Keep an event."""
        self._events.append(event)
        self._arrived.set()

    def fail(self, error: EngineUnavailable) -> None:
        """Keep the error."""
        self._error = error
        self._arrived.set()

    async def take(self) -> list[TokenEvent]:
        """Wait for events and return all there are. Raises the error after the last one."""
        await self._arrived.wait()
        if not self._events:
            assert self._error is not None
            raise self._error
        events, self._events = self._events, []
        if self._error is None:
            self._arrived.clear()
        return events


def submit_to(engine: Engine, request: GenerationRequest) -> ReceivedEvents:
    """Send `request` and return its events."""
    events = ReceivedEvents()
    engine.submit(request, events)
    return events


def sending(make_events: Callable[[GenerationRequest], Iterable[TokenEvent]], *, then_dies: bool = False) -> Submit:
    """Return the `submit` of an engine that answers a request with the events of `make_events`, and then dies if so told."""

    def answer(request: GenerationRequest, receiver: EventReceiver) -> None:
        for event in make_events(request):
            receiver.receive(event)
        if then_dies:
            receiver.fail(EngineUnavailable("the engine has died"))

    def submit(request: GenerationRequest, receiver: EventReceiver) -> None:
        asyncio.get_running_loop().call_soon(answer, request, receiver)

    return submit
