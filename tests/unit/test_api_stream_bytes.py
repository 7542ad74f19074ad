"""The bytes of a stream do not depend on how its tokens arrive: one complete event in each frame of the engine, or all frames
at once, in which tokens that only continue an answer have no event."""

from __future__ import annotations

from typing import Any

import pytest

from appliance.api.chat_responses import ChunkFramer
from appliance.api.sse import chat_frames
from tests.support.cast import Cast
from tests.support.fake_engine import FakeEngine
from tests.support.generations import Serving

pytestmark = pytest.mark.on_either_database

TEXT = "the quick brown fox — é 漢 🦜 "
USAGE = {"include_usage": True, "continuous_usage": True}


class HeldBack:
    """A writer that keeps what the engine sends until none of its requests is live."""

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine
        self._writer = engine._writer
        self._held = b""

    def write(self, frame: bytes) -> None:
        """Send everything at once, if this is the last frame of the last request."""
        self._held += frame
        if not self._engine._live:
            self._writer.write(self._held)
            self._held = b""

    def close(self) -> None:
        """Close the writer."""
        self._writer.close()


async def stream(serving: Serving, cast: Cast, sampling: dict[str, Any], framing: dict[str, Any]) -> bytes:
    """Return the bytes of a stream of TEXT, which the engine repeats."""
    generation = await serving.start(cast.bob, TEXT, **sampling)
    options = {"logprobs": "logprobs" in sampling, "include_usage": False, "continuous_usage": False, **framing}
    framer = ChunkFramer(
        request_id="req_1", created=1, model="tiny", prompt_tokens=9, num_answers=generation.live.num_answers, **options
    )
    return b"".join([frame async for frame in chat_frames(generation, framer)])


@pytest.mark.parametrize(
    ("sampling", "framing"),
    [
        ({}, {}),
        ({}, USAGE),
        ({"logprobs": 3}, USAGE),
        ({"stop": ["brown"]}, USAGE),
        ({"stop": ["é 漢"], "logprobs": 1}, USAGE),
        ({"stop": ["fox", "🦜"], "min_tokens": 12}, {"service_tier": "flex"}),
        ({"n": 2}, USAGE),
        ({"n": 2, "logprobs": 0, "stop_token_ids": [5]}, {}),
    ],
)
async def test_a_stream_has_the_same_bytes_however_its_tokens_arrive(
    serving: Serving, cast: Cast, monkeypatch: pytest.MonkeyPatch, sampling: dict[str, Any], framing: dict[str, Any]
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(serving.engine, "_continues", lambda _event: False)
        one_by_one = await stream(serving, cast, sampling, framing)
    monkeypatch.setattr(serving.engine, "_writer", HeldBack(serving.engine))
    at_once = await stream(serving, cast, sampling, framing)

    assert at_once == one_by_one
    assert one_by_one.count(b'"content":"') > 2
