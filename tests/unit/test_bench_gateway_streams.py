"""`bench.gateway_streams` does not wait for ever, and measures answers without text too."""

from __future__ import annotations

from typing import Any

import pytest

from bench import gateway_streams


async def test_a_gateway_that_never_becomes_ready_ends_the_bench_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    async def not_ready(_port: int, _method: str, _path: str) -> tuple[int, Any]:
        return 503, {"parts": {"models": "engine of tiny is failed"}}

    monkeypatch.setattr(gateway_streams, "READY_WAIT_S", 0.0)
    monkeypatch.setattr(gateway_streams, "_call", not_ready)
    with pytest.raises(RuntimeError, match=r"not ready after 0 s: .*engine of tiny is failed"):
        await gateway_streams._make_key(1)


def test_a_round_without_any_text_has_no_tokens_per_frame() -> None:
    found = [gateway_streams.Round(1.0, 0.1, num_frames=frames).tokens_per_frame(4) for frames in (0, 2)]
    assert found == [None, 2.0]
