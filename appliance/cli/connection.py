"""Connects a command to the appliance: over HTTP if it is running, else to the same application in this process."""

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
CLAIM_WAIT_S = 2.0  # a database server may notice late that an appliance has exited
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Control:
    """The control file of a running appliance: its URL, its pid and a token that is valid while it runs."""

    url: str
    pid: int
    token: str


def read_control(data_dir: Path) -> Control | None:
    """Return the control file of a running appliance, None if there is none or its process is dead."""
    from appliance.base.data_folder import CONTROL_FILE

    try:
        content = json.loads((data_dir / CONTROL_FILE).read_text("utf-8"))
        control = Control(str(content["url"]), int(content["pid"]), str(content["token"]))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except PermissionError as error:
        raise CommandFailed(
            f"this user cannot read {data_dir / CONTROL_FILE}; run the command as the user that runs the appliance",
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
    """Client of `/admin/v1`. Error responses become CommandFailed with the server's message and code."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        body: object = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> dict[str, Any]:
        """Send a request and return the decoded JSON response."""
        parts = {"params": {name: value for name, value in (query or {}).items() if value is not None}, "json": body}
        response: dict[str, Any] = (await self._request(method, path, **parts, headers=headers, timeout=timeout_s)).json()
        return response

    async def fetch(self, path: str) -> bytes:
        """Return the file at `path`."""
        return (await self._request("GET", path)).content

    async def remove(self, path: str) -> None:
        """Send DELETE to `path`, which responds without a body."""
        await self._request("DELETE", path)

    async def find(self, collection: str, item_id: str) -> dict[str, Any] | None:
        """Return an item of a collection such as `/keys`, None if it has no such item. `item_id` must satisfy `is_id`."""
        try:
            return await self.call("GET", f"{collection}/{item_id}")
        except CommandFailed as failure:
            if failure.code != NotFound.code:
                raise
            return None

    async def list_all(self, path: str, *, query: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        """Return all rows of a paginated list."""
        return (await self._list(path, query, None))[0]

    async def list_first(self, path: str, limit: int, *, query: Mapping[str, Any]) -> tuple[list[dict[str, Any]], bool]:
        """Return the first `limit` rows of a paginated list, and whether there are more."""
        rows, has_more = await self._list(path, query, limit)
        return rows[:limit], has_more or len(rows) > limit

    async def _list(
        self, path: str, query: Mapping[str, Any] | None, at_least: int | None
    ) -> tuple[list[dict[str, Any]], bool]:
        """Return the rows of whole pages, all or `at_least` so many, and whether there are more pages."""
        rows: list[dict[str, Any]] = []
        cursor: str | None = None
        while True:
            page = await self.call("GET", path, query={**(query or {}), "limit": PAGE_LIMIT, "cursor": cursor})
            rows += page["data"]
            cursor = page.get("next_cursor")
            has_more = bool(page.get("has_more")) and cursor is not None
            if not has_more or (at_least is not None and len(rows) >= at_least):
                return rows, has_more

    async def _request(self, method: str, path: str, **parts: Any) -> httpx.Response:
        import httpx

        try:
            response = await self._client.request(method, f"/admin/v1{path}", **parts)
        except httpx.HTTPError as error:
            raise CommandFailed(
                f"the appliance does not respond: {error or type(error).__name__}", code="unreachable"
            ) from error
        if response.is_success:
            return response
        raise _command_failed(response)


Work = Callable[[AdminClient], Awaitable[dict[str, Any]]]
"""A command's work with a client; returns the response to print."""


def _command_failed(response: httpx.Response) -> CommandFailed:
    try:
        error = response.json()["error"]
        return CommandFailed(str(error["message"]), code=str(error["code"]), status=exit_status(response.status_code))
    except (ValueError, KeyError, TypeError):
        status = response.status_code
        return CommandFailed(f"the appliance responded with HTTP status {status}", code=f"http_{status}")


def check_has_tables(settings: Settings) -> None:
    """Raise CommandFailed if the database has no tables: a mistyped folder must not look like an empty appliance."""
    from appliance.base import migrations

    if migrations.current_revision(settings.database_url) is None:
        raise CommandFailed(
            f"there is no appliance in {settings.data_dir} (its database has no tables). Give another folder with --data-dir "
            "after the command, or with GATEHOUSE_DATA_DIR; to create an appliance here, run gatehouse serve, gatehouse admin "
            "create or gatehouse db upgrade",
            code="no_appliance",
        )


@asynccontextmanager
async def open_database(settings: Settings) -> AsyncIterator[Database]:
    """Yield the database, for commands that bypass the appliance. Raises CommandFailed unless its schema is this version's."""
    from appliance.base import db, migrations

    problem = migrations.schema_problem(await asyncio.to_thread(migrations.current_revision, settings.database_url))
    if problem is not None:
        raise CommandFailed(problem, code="database")
    async with db.Database.open(settings.database_url) as database:
        yield database


@asynccontextmanager
async def hold_claim(settings: Settings, *, shared: bool) -> AsyncIterator[None]:
    """Hold the database claim while a command changes the database directly, exclusively or shared with other commands.

    Raises UnusableData, and CommandFailed while an appliance uses the database, because it would keep its cached values.
    """
    from appliance.base.data_folder import is_locked
    from appliance.base.database_claim import DatabaseInUse, claim_database

    try:
        claim = await claim_database(settings.database_url, shared=shared, wait_s=CLAIM_WAIT_S)
    except DatabaseInUse as error:
        if is_locked(settings.data_dir):  # it has no control file, or the command would have used its API
            raise CommandFailed(
                "the appliance is starting or stopping; nothing was changed. Try again in a few seconds", code="running"
            ) from error
        raise CommandFailed(
            "an appliance running elsewhere uses this database and would not notice the change; nothing was changed. Run the "
            "command where the appliance runs, with its --data-dir",
            code="running",
        ) from error
    try:
        yield
    finally:
        await claim.release()


@asynccontextmanager
async def connect(settings: Settings) -> AsyncIterator[AdminClient]:
    """Yield a client of the appliance that has these settings."""
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
    """Yield a client of the same application, run in this process without engines while the command runs.

    It holds a shared database claim from its first change on; a command that only reads holds none.
    """
    import httpx

    from appliance.app import Appliance, create_app
    from appliance.base import migrations
    from appliance.base.logging import configure_logging

    configure_logging("warning", json=False)
    if await asyncio.to_thread(migrations.current_revision, settings.database_url) != migrations.head_revision():
        async with hold_claim(settings, shared=False):
            await asyncio.to_thread(migrations.upgrade, settings.database_url)
    appliance = Appliance(settings, engines=False)
    async with AsyncExitStack() as held:
        await appliance.start()
        held.push_async_callback(appliance.stop)
        headers = {"authorization": f"Bearer {appliance.services.control_token}"} | operator_headers()
        application: Any = create_app(appliance)  # the ASGI types of Litestar and httpx differ
        hooks = {"request": [_claim_before_changes(settings, held)]}
        client = httpx.AsyncClient(
            base_url="http://in-process", headers=headers, transport=httpx.ASGITransport(app=application), event_hooks=hooks
        )
        yield await held.enter_async_context(client)


def _claim_before_changes(settings: Settings, held: AsyncExitStack) -> Callable[[httpx.Request], Awaitable[None]]:
    """Return a request hook that acquires the claim before the first request other than GET; `held` releases it."""
    is_claimed = False

    async def claim_once(request: httpx.Request) -> None:
        nonlocal is_claimed
        if request.method != "GET" and not is_claimed:
            await held.enter_async_context(hold_claim(settings, shared=True))
            is_claimed = True

    return claim_once


def run(settings: Settings, work: Callable[[AdminClient], Awaitable[T]]) -> T:
    """Run `work` with a client and return what it returns."""

    async def connect_and_work() -> T:
        async with connect(settings) as client:
            return await work(client)

    return asyncio.run(connect_and_work())
