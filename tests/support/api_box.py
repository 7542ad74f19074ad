"""The whole application in this process without engines: for tests of the administrators' API, health and schema."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import httpx
from litestar import Litestar

from appliance.app import Appliance, create_app
from appliance.base.settings import load_settings
from appliance.serving.services import Services


@dataclass(frozen=True, slots=True)
class ApiBox:
    """An application, its services, and a client that speaks to it as the owner unless told otherwise."""

    app: Litestar
    services: Services
    client: httpx.AsyncClient

    async def call(self, method: str, path: str, *, status: int = 200, **options: Any) -> Any:
        """Call the administrators' API; check the status and return the decoded answer."""
        answer = await self.client.request(method, f"/admin/v1{path}", **options)
        assert answer.status_code == status, answer.text
        return answer.json()

    async def as_role(self, role: str) -> dict[str, str]:
        """Return the headers of an administrator of this role."""
        _, secret = await self.services.admin_tokens.create(f"token of a {role}", role)
        return {"authorization": f"Bearer {secret}"}


@asynccontextmanager
async def open_api_box(migrated_sqlite_file: Path, folder: Path) -> AsyncIterator[ApiBox]:
    """Yield the application over a migrated database of its own."""
    path = shutil.copyfile(migrated_sqlite_file, folder / "gatehouse.db")
    async with open_api_box_on(f"sqlite:///{path}", folder) as box:
        yield box


@asynccontextmanager
async def open_api_box_on(database_url: str, folder: Path) -> AsyncIterator[ApiBox]:
    """Yield the application over the migrated database of this URL, with its other data in `folder`."""
    settings = load_settings(options={"data_dir": folder, "database_url": database_url}, environ={})
    appliance = Appliance(settings, engines=False)
    await appliance.start()
    try:
        app = create_app(appliance)
        headers = {"authorization": f"Bearer {appliance.services.control_token}"}
        transport = httpx.ASGITransport(app=cast(Any, app))
        async with httpx.AsyncClient(transport=transport, base_url="http://box", headers=headers) as client:
            yield ApiBox(app, appliance.services, client)
    finally:
        await appliance.stop()
