"""The whole application in this process without engines: for tests of the administrators' API, health and schema."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
from litestar import Litestar

from appliance.app import Appliance, create_app
from appliance.base.settings import load_settings
from appliance.serving.services import Services
from tests.support.reused_app import ReusedApp


@dataclass(frozen=True, slots=True)
class ApiApp:
    """An application, its services, and a client that is authorised as the owner by default."""

    app: Litestar
    services: Services
    client: httpx.AsyncClient

    async def call(self, method: str, path: str, *, status: int = 200, **options: Any) -> Any:
        """Call the administrators' API; check the status and return the decoded answer."""
        answer = await self.client.request(method, f"/admin/v1{path}", **options)
        assert answer.status_code == status, answer.text
        return answer.json()

    async def refusal(self, method: str, path: str, status: int, **options: Any) -> tuple[str, str | None]:
        """Call the administrators' API with a request that it refuses with `status`; return code and parameter of the error."""
        error = (await self.call(method, path, status=status, **options))["error"]
        return error["code"], error["param"]

    async def as_role(self, role: str) -> dict[str, str]:
        """Return the headers of an administrator of this role."""
        _, secret = await self.services.admin_tokens.create(f"token of a {role}", role)
        return {"authorization": f"Bearer {secret}"}


_IDLE: list[ReusedApp] = []


def _create(services: Services) -> Litestar:
    return create_app(cast(Appliance, SimpleNamespace(services=services)))


@asynccontextmanager
async def open_api_app(migrated_sqlite_file: Path, folder: Path) -> AsyncIterator[ApiApp]:
    """Yield an application, possibly reused, over a migrated database of its own."""
    path = shutil.copyfile(migrated_sqlite_file, folder / "gatehouse.db")
    async with open_api_app_on(f"sqlite:///{path}", folder) as api:
        yield api


@asynccontextmanager
async def open_api_app_on(database_url: str, folder: Path) -> AsyncIterator[ApiApp]:
    """Yield an application, possibly reused, over the migrated database at this URL."""
    async with _started(database_url, folder) as appliance:
        reused = _IDLE.pop() if _IDLE else ReusedApp(appliance.services, _create)
        reused.serve(appliance.services)
        async with _with_client(reused.app, appliance.services) as api:
            yield api
        _IDLE.append(reused)


@asynccontextmanager
async def _started(database_url: str, folder: Path) -> AsyncIterator[Appliance]:
    settings = load_settings(options={"data_dir": folder, "database_url": database_url}, environ={})
    appliance = Appliance(settings, engines=False)
    await appliance.start()
    try:
        yield appliance
    finally:
        await appliance.stop()


@asynccontextmanager
async def _with_client(app: Litestar, services: Services) -> AsyncIterator[ApiApp]:
    headers = {"authorization": f"Bearer {services.control_token}"}
    transport = httpx.ASGITransport(app=cast(Any, app))
    async with httpx.AsyncClient(transport=transport, base_url="http://appliance.test", headers=headers) as client:
        yield ApiApp(app, services, client)
