"""`bench.gateway_streams` does not wait for ever."""

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
