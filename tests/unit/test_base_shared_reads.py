"""Callers with the same key share a read; what happens to one of them does not affect the others."""

from __future__ import annotations

import asyncio

import pytest

from appliance.base.errors import InvalidApiKey
from appliance.base.shared_reads import SharedReads
from tests.support.polling import poll_until


class Source:
    """Numbers its reads; each returns its number, or raises `error`, once `may_end` is set."""

    def __init__(self) -> None:
        self.reads = 0
        self.error: Exception | None = None
        self.may_end = asyncio.Event()

    async def read(self) -> int:
        self.reads += 1
        number, error = self.reads, self.error
        await self.may_end.wait()
        if error is not None:
            raise error
        return number


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
def shared() -> SharedReads[str, int]:
    return SharedReads()


async def test_callers_with_the_same_key_share_one_read(source: Source, shared: SharedReads[str, int]) -> None:
    calls = [asyncio.create_task(shared.get("a", source.read)) for _ in range(5)]
    await poll_until(lambda: source.reads == 1)
    source.may_end.set()
    assert await asyncio.gather(*calls) == [1] * 5


async def test_callers_with_different_keys_share_nothing(source: Source, shared: SharedReads[str, int]) -> None:
    source.may_end.set()
    assert await asyncio.gather(*(shared.get(key, source.read) for key in "ab")) == [1, 2]


async def test_a_read_that_has_ended_is_not_used_again(source: Source, shared: SharedReads[str, int]) -> None:
    source.may_end.set()
    assert [await shared.get("a", source.read) for _ in range(2)] == [1, 2]


async def test_a_cancelled_caller_does_not_end_the_read_of_the_others(source: Source, shared: SharedReads[str, int]) -> None:
    first, second = (asyncio.create_task(shared.get("a", source.read)) for _ in range(2))
    await poll_until(lambda: source.reads == 1)
    first.cancel()
    await asyncio.wait({first})
    source.may_end.set()
    assert (first.cancelled(), await second) == (True, 1)


async def test_a_failed_read_fails_only_the_callers_that_waited_for_it(source: Source, shared: SharedReads[str, int]) -> None:
    source.error = InvalidApiKey("the API key is not known or was revoked")
    calls = [asyncio.create_task(shared.get("a", source.read)) for _ in range(3)]
    await poll_until(lambda: source.reads == 1)
    refused, source.error = source.error, None
    source.may_end.set()
    assert await asyncio.gather(*calls, return_exceptions=True) == [refused] * 3
    assert await shared.get("a", source.read) == 2


async def test_the_error_of_a_read_whose_callers_have_left_is_not_reported_as_unhandled(
    source: Source, shared: SharedReads[str, int]
) -> None:
    reported: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: reported.append(context))
    source.error = OSError("no connection")
    call = asyncio.create_task(shared.get("a", source.read))
    await poll_until(lambda: source.reads == 1)
    call.cancel()
    await asyncio.wait({call})
    source.may_end.set()
    await poll_until(lambda: not shared._running)
    del call
    assert reported == []
