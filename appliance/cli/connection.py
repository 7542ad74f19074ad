"""How a command reaches the appliance: over HTTP if it runs, else as the same application in this process."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from appliance.base.errors import NotFound
from appliance.cli.failure import CommandFailed, exit_status
from appliance.cli.operator import operator_headers

if TYPE_CHECKING:
    import httpx

    from appliance.base.db import Database
    from appliance.base.settings import Settings

TIMEOUT_S = 30.0
PAGE_LIMIT = 100
CLAIM_WAIT_S = 2.0  # a database server notices a little late that an appliance has ended
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Control:
    """What a running appliance leaves in its data folder: where it listens, its pid and a token that dies with it."""

    url: str
    pid: int
    token: str


def read_control(data_dir: Path) -> Control | None:
    """Return the control file of a running appliance. A file left by a killed one counts as none."""
    from appliance.base.data_folder import CONTROL_FILE

    try:
        content = json.loads((data_dir / CONTROL_FILE).read_text("utf-8"))
        control = Control(str(content["url"]), int(content["pid"]), str(content["token"]))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except PermissionError as error:
        raise CommandFailed(
            f"{data_dir / CONTROL_FILE} cannot be read by this user; run the command as the user of the appliance",
            code="forbidden",
        ) from error
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return control if _alive(control.pid) else None


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


class AdminClient:
    """`/admin/v1` for commands: answers are JSON, refusals become CommandFailed with the server's own words and code."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def call(
        self, method: str, path: str, *, query: Mapping[str, Any] | None = None, body: object = None
    ) -> dict[str, Any]:
        """Return the decoded answer."""
        parameters = {name: value for name, value in (query or {}).items() if value is not None}
        answer: dict[str, Any] = (await self._ask(method, path, params=parameters, json=body)).json()
        return answer

    async def fetch(self, path: str) -> bytes:
        """Return the file at `path`."""
        return (await self._ask("GET", path)).content

    async def remove(self, path: str) -> None:
        """Remove what is at `path`; the server answers without a body."""
        await self._ask("DELETE", path)

    async def find(self, collection: str, member_id: str) -> dict[str, Any] | None:
        """Return a member of a collection such as `/keys`; None when it has none. `member_id` must be an id (`is_id`)."""
        try:
            return await self.call("GET", f"{collection}/{member_id}")
        except CommandFailed as failure:
            if failure.code != NotFound.code:
                raise
            return None

    async def every(
        self, path: str, *, query: Mapping[str, Any] | None = None, at_most: int | None = None
    ) -> list[dict[str, Any]]:
        """Return the rows of every page of a list, or the first `at_most`."""
        rows: list[dict[str, Any]] = []
        cursor: str | None = None
        while True:
            page = await self.call("GET", path, query={**(query or {}), "limit": PAGE_LIMIT, "cursor": cursor})
            rows += page["data"]
            cursor = page.get("next_cursor")
            if not page.get("has_more") or cursor is None or (at_most is not None and len(rows) >= at_most):
                return rows[:at_most]

    async def _ask(self, method: str, path: str, **parts: Any) -> httpx.Response:
        import httpx

        try:
            answer = await self._client.request(method, f"/admin/v1{path}", **parts)
        except httpx.HTTPError as error:
            raise CommandFailed(
                f"the appliance does not answer: {error or type(error).__name__}", code="unreachable"
            ) from error
        if answer.is_success:
            return answer
        raise _refusal(answer)


Work = Callable[[AdminClient], Awaitable[dict[str, Any]]]
"""What a command does through a client; returns the answer to show."""


def _refusal(answer: httpx.Response) -> CommandFailed:
    try:
        error = answer.json()["error"]
        return CommandFailed(str(error["message"]), code=str(error["code"]), status=exit_status(answer.status_code))
    except (ValueError, KeyError, TypeError):
        return CommandFailed(f"the appliance answered {answer.status_code}", code=f"http_{answer.status_code}")


def check_has_tables(settings: Settings) -> None:
    """Raise CommandFailed if there is no database: a mistyped folder must not look like an appliance without tenants."""
    from appliance.base import migrations

    if migrations.current_revision(settings.database_url) is None:
        raise CommandFailed(
            f"no appliance in {settings.data_dir} (its database has no tables yet). Name another folder with --data-dir after "
            "the command, or GATEHOUSE_DATA_DIR; to create one here, run gatehouse serve, gatehouse admin create or gatehouse "
            "db upgrade",
            code="no_appliance",
        )


@asynccontextmanager
async def opened(settings: Settings) -> AsyncIterator[Database]:
    """Yield the database itself, for commands that need no appliance. Raises CommandFailed unless its tables are the newest."""
    from appliance.base import db, migrations

    if await asyncio.to_thread(migrations.current_revision, settings.database_url) != migrations.head_revision():
        raise CommandFailed("the database is not ready: start the appliance once, or run gatehouse db upgrade", code="database")
    async with db.Database.open(settings.database_url) as database:
        yield database


@asynccontextmanager
async def claimed(settings: Settings, *, shared: bool) -> AsyncIterator[None]:
    """Hold the claim on the database while a command changes it directly, alone or shared with other commands.

    Raises UnusableData, and CommandFailed while an appliance serves from it, which would go on with values it has cached.
    """
    from appliance.base.database_claim import DatabaseInUse, claim_database

    try:
        claim = await claim_database(settings.database_url, shared=shared, wait_s=CLAIM_WAIT_S)
    except DatabaseInUse as error:
        raise CommandFailed(
            "this database is used by an appliance running elsewhere, which would not see the change; nothing was changed: "
            "run the command where the appliance runs, with its --data-dir",
            code="running",
        ) from error
    try:
        yield
    finally:
        await claim.release()


@asynccontextmanager
async def connected(settings: Settings) -> AsyncIterator[AdminClient]:
    """Yield a client of the appliance with these settings."""
    import httpx

    control = read_control(settings.data_dir)
    if control is not None:
        headers = {"authorization": f"Bearer {control.token}"} | operator_headers()
        async with httpx.AsyncClient(base_url=control.url, headers=headers, timeout=TIMEOUT_S, trust_env=False) as client:
            yield AdminClient(client)
        return
    await asyncio.to_thread(check_has_tables, settings)
    async with _in_process(settings) as client:
        yield AdminClient(client)


@asynccontextmanager
async def _in_process(settings: Settings) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client of the same application in this process, without engines, for as long as the command takes.

    From its first change on it holds a shared claim on the database; a command that only reads holds none.
    """
    import httpx

    from appliance.app import Appliance, create_app
    from appliance.base import migrations
    from appliance.base.logging import configure_logging

    configure_logging("warning", json=False)
    if await asyncio.to_thread(migrations.current_revision, settings.database_url) != migrations.head_revision():
        async with claimed(settings, shared=False):
            await asyncio.to_thread(migrations.upgrade, settings.database_url)
    appliance = Appliance(settings, engines=False)
    async with AsyncExitStack() as held:
        await appliance.start()
        held.push_async_callback(appliance.stop)
        headers = {"authorization": f"Bearer {appliance.services.control_token}"} | operator_headers()
        application: Any = create_app(appliance)  # its types distinguish the kinds of messages, httpx's do not
        hooks = {"request": [_claim_before_changes(settings, held)]}
        client = httpx.AsyncClient(
            base_url="http://in-process", headers=headers, transport=httpx.ASGITransport(app=application), event_hooks=hooks
        )
        yield await held.enter_async_context(client)


def _claim_before_changes(settings: Settings, held: AsyncExitStack) -> Callable[[httpx.Request], Awaitable[None]]:
    """Return a hook to call before each request: the first one other than GET takes the claim, which `held` releases."""
    is_claimed = False

    async def before(request: httpx.Request) -> None:
        nonlocal is_claimed
        if request.method != "GET" and not is_claimed:
            await held.enter_async_context(claimed(settings, shared=True))
            is_claimed = True

    return before


def run(settings: Settings, work: Callable[[AdminClient], Awaitable[T]]) -> T:
    """Run `work` with a client and return what it returns."""

    async def go() -> T:
        async with connected(settings) as client:
            return await work(client)

    return asyncio.run(go())
