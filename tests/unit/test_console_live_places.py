"""The number of open live streams is limited, overall and per member."""

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


async def test_the_limit_per_member_leaves_streams_to_other_members(
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


async def test_a_stream_beyond_the_limit_of_a_member_gets_503_with_retry_after(
    console: ConsoleApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_stream, "STREAMS_OF_MEMBER_MAX", 0)

    answer = await (await console.alice()).get("/console/events")

    assert (answer.status_code, answer.headers["retry-after"]) == (503, "10")
    assert "you can have at most 0 live pages open" in answer.text.lower()
