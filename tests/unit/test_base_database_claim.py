"""The claim of a database: one gateway at a time, shared by commands, watched, lost and reacquired."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
import structlog

from appliance.base import database_claim
from appliance.base.database_claim import DatabaseClaim, claim_database
from appliance.base.settings import UnusableData
from tests.support.databases import Cluster

END_CLAIMS = "SELECT pg_terminate_backend(pid, 5000) FROM pg_locks WHERE locktype = 'advisory'"


class ControlledSleep:
    """A sleep function whose pauses a test ends one by one; `begun` receives each pause when it starts."""

    def __init__(self) -> None:
        self.begun: asyncio.Queue[float] = asyncio.Queue()
        self.ended: asyncio.Queue[None] = asyncio.Queue()

    async def __call__(self, pause_s: float) -> None:
        self.begun.put_nowait(pause_s)
        await self.ended.get()

    async def check_once(self) -> None:
        """Let the watch check the claim once, and return when it pauses again."""
        self.ended.put_nowait(None)
        await self.begun.get()

    async def end_all(self, waiting: asyncio.Future[Any]) -> None:
        """End every pause until `waiting` is done: a server notices a closed connection with a delay."""
        while not waiting.done():
            self.ended.put_nowait(None)
            begun = asyncio.ensure_future(self.begun.get())
            await asyncio.wait({waiting, begun}, return_when=asyncio.FIRST_COMPLETED)
            begun.cancel()


class MayResume:
    """The holder's answer to whether it may continue after its claim was reacquired."""

    def __init__(self, answer: bool | Exception = True) -> None:
        self.answer = answer
        self.num_calls = 0

    async def __call__(self) -> bool:
        self.num_calls += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@asynccontextmanager
async def watched_claim(
    url: str, may_resume: MayResume
) -> AsyncIterator[tuple[DatabaseClaim, asyncio.Task[str], ControlledSleep]]:
    """Yield a claim whose watch has checked once."""
    pauses = ControlledSleep()
    claim = await claim_database(url, wait_s=0, sleep=pauses)
    watch = asyncio.create_task(claim.wait_until_lost(may_resume))
    await pauses.begun.get()
    try:
        yield claim, watch, pauses
    finally:
        watch.cancel()
        await asyncio.wait({watch})
        await claim.release()


@pytest.fixture
def database(postgresql: Cluster) -> Iterator[str]:
    url = postgresql.create()
    yield url
    postgresql.drop(url)


def end_claims(url: str) -> None:
    """Terminate every connection that claims the database, as a restart of the server does."""
    with psycopg.connect(url) as connection:
        connection.execute(END_CLAIMS)


async def test_a_second_gateway_is_refused_until_the_first_releases_its_claim(empty_database_url: str) -> None:
    first = await claim_database(empty_database_url)
    with pytest.raises(UnusableData, match="another Gatehouse is using"):
        await claim_database(empty_database_url, wait_s=0)
    await first.release()

    second = await claim_database(empty_database_url, wait_s=5)

    await second.release()


async def test_a_symbolic_link_to_a_database_is_the_same_database(tmp_path: Path) -> None:
    (tmp_path / "link.db").symlink_to(tmp_path / "real.db")
    first = await claim_database(f"sqlite:///{tmp_path}/real.db")
    with pytest.raises(UnusableData, match="another Gatehouse is using"):
        await claim_database(f"sqlite:///{tmp_path}/link.db")
    await first.release()


async def test_the_folder_of_a_new_database_is_created(tmp_path: Path) -> None:
    claim = await claim_database(f"sqlite:///{tmp_path}/new/folder/x.db")
    await claim.release()


async def test_a_folder_that_cannot_be_created_is_reported_on_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UnusableData, match=r"cannot open .*file/x\.db\.claim \(.*\): correct --database"):
        await claim_database(f"sqlite:///{tmp_path}/file/x.db")


async def test_commands_share_a_database_without_a_gateway(empty_database_url: str) -> None:
    first = await claim_database(empty_database_url, shared=True, wait_s=0)
    second = await claim_database(empty_database_url, shared=True, wait_s=0)
    with pytest.raises(UnusableData, match="another Gatehouse is using"):
        await claim_database(empty_database_url, wait_s=0)
    await first.release()
    await second.release()


async def test_a_command_is_refused_while_a_gateway_holds_the_database(empty_database_url: str) -> None:
    gateway = await claim_database(empty_database_url)
    with pytest.raises(UnusableData, match="another Gatehouse is using"):
        await claim_database(empty_database_url, shared=True, wait_s=0)
    await gateway.release()


async def test_a_gateway_waits_for_a_command_to_end(empty_database_url: str) -> None:
    command, pauses = await claim_database(empty_database_url, shared=True), ControlledSleep()
    gateway = asyncio.create_task(claim_database(empty_database_url, sleep=pauses))
    await pauses.begun.get()
    await command.release()
    await pauses.end_all(gateway)

    await (await gateway).release()


@pytest.mark.postgres
async def test_a_claim_whose_connection_was_closed_is_reacquired(database: str) -> None:
    may_resume = MayResume()
    async with watched_claim(database, may_resume) as (_, _, pauses):
        end_claims(database)
        await pauses.check_once()

        with pytest.raises(UnusableData, match="another Gatehouse is using"):
            await claim_database(database, wait_s=0)
    assert may_resume.num_calls == 1


@pytest.mark.postgres
async def test_a_claim_taken_by_another_gateway_is_lost(database: str) -> None:
    async with watched_claim(database, MayResume()) as (_, watch, pauses):
        end_claims(database)
        other = await claim_database(database)
        pauses.ended.put_nowait(None)

        assert await watch == "another Gatehouse claimed the database while the connection that held the claim was lost"
        await other.release()


@pytest.mark.postgres
async def test_a_claim_is_lost_if_another_gateway_used_the_database_meanwhile(database: str) -> None:
    async with watched_claim(database, MayResume(answer=False)) as (_, watch, pauses):
        end_claims(database)
        pauses.ended.put_nowait(None)

        assert await watch == "another Gatehouse used the database while the connection that held the claim was lost"


@pytest.mark.postgres
async def test_an_error_of_the_holder_is_retried_at_the_next_check(database: str) -> None:
    may_resume = MayResume(OSError("the database is gone again"))
    async with watched_claim(database, may_resume) as (_, _, pauses):
        end_claims(database)
        await pauses.check_once()
        may_resume.answer = True
        await pauses.check_once()
        await pauses.check_once()
    assert may_resume.num_calls == 2


@pytest.mark.postgres
async def test_an_unreachable_server_is_retried(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    may_resume = MayResume()
    async with watched_claim(database, may_resume) as (claim, watch, pauses):
        monkeypatch.setattr(claim, "_server", "postgresql://nobody@127.0.0.1:1/nothing")
        end_claims(database)
        with structlog.testing.capture_logs() as logs:
            for _ in range(3):
                await pauses.check_once()
            assert not watch.done()
            monkeypatch.undo()
            await pauses.check_once()
    assert may_resume.num_calls == 1
    assert [(line["event"], line.get("failures")) for line in logs] == [
        ("database claim ended: its connection was lost", None),
        ("database cannot be claimed again yet", 1),
        ("database claimed again", 3),
    ]


@pytest.mark.postgres
async def test_a_stale_session_of_the_holder_does_not_count_as_another_gateway(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with watched_claim(database, MayResume()) as (claim, watch, pauses):
        broken = await psycopg.AsyncConnection.connect(database)
        await broken.close()
        kept = claim._connection  # type: ignore[attr-defined]
        monkeypatch.setattr(claim, "_connection", broken)
        pauses.ended.put_nowait(None)
        while await pauses.begun.get() != database_claim.WATCH_INTERVAL_S:  # the server ends the session with a delay
            pauses.ended.put_nowait(None)
        assert not watch.done()
        with pytest.raises(UnusableData, match="another Gatehouse is using"):
            await claim_database(database, wait_s=0)
        await kept.close()


@pytest.mark.postgres
async def test_a_command_that_claimed_meanwhile_is_waited_for(database: str) -> None:
    async with watched_claim(database, MayResume()) as (_, watch, pauses):
        end_claims(database)
        command = await claim_database(database, shared=True)
        pauses.ended.put_nowait(None)
        assert await pauses.begun.get() == database_claim.POLL_S
        await command.release()
        pauses.ended.put_nowait(None)
        while await pauses.begun.get() != database_claim.WATCH_INTERVAL_S:
            pauses.ended.put_nowait(None)

        assert not watch.done()


async def test_an_unreachable_server_is_reported_on_one_line() -> None:
    with pytest.raises(UnusableData, match=r"^the database cannot be used: .*check --database") as refused:
        await claim_database("postgresql://nobody@127.0.0.1:1/nothing")

    assert "\n" not in str(refused.value)
