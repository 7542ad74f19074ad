"""The number of open live pages is limited, overall and per member, so that nobody can use them all."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest

from appliance.console import live_stream
from appliance.console.context import Console
from tests.support.console_fixtures import ConsoleApp


async def frames() -> AsyncGenerator[bytes, None]:
    """Yield frames without an end."""
    while True:
        yield b"x"


async def test_one_member_does_not_take_the_places_of_everybody_else(
    console: ConsoleApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_stream, "STREAMS_OF_MEMBER_MAX", 2)
    monkeypatch.setattr(live_stream, "STREAMS_MAX", 3)
    console_state = Console(console.services)
    pages = [
        live_stream._counted_stream(console_state, member, frames())
        for member in ("mallory", "mallory", "mallory", "alice", "bob")
    ]

    shown = [await anext(page, None) for page in pages]

    assert shown == [b"x", b"x", None, b"x", None]
    await pages[0].aclose()
    assert console_state.open_streams == {"mallory": 1, "alice": 1}
    assert await anext(live_stream._counted_stream(console_state, "bob", frames())) == b"x"


async def test_who_has_too_many_live_pages_is_told_to_wait(console: ConsoleApp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_stream, "STREAMS_OF_MEMBER_MAX", 0)

    answer = await (await console.alice()).get("/console/events")

    assert (answer.status_code, answer.headers["retry-after"]) == (503, "10")
    assert "you can have at most 0 live pages open" in answer.text.lower()
