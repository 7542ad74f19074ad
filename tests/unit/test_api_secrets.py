"""Secrets are never logged, not even when a request that carries them fails."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from appliance.base.logging import configure_logging
from tests.support.api_app import open_api_app

SECRET = "gha_secret-that-must-not-be-logged"


@pytest.fixture(params=[True, False], ids=["json", "console"])
def logged(request: pytest.FixtureRequest) -> Iterator[io.StringIO]:
    """The appliance's log in both formats; the logging of the test suite is restored afterwards."""
    written = io.StringIO()
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    configure_logging("debug", json=request.param)
    yield written
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


async def test_a_logged_traceback_contains_no_secret(
    migrated_sqlite_file: Path, tmp_path: Path, logged: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", logged)
    async with open_api_app(migrated_sqlite_file, tmp_path) as api:

        async def broken(secret: str, address: str) -> None:
            raise RuntimeError(f"failed with {len(secret)} characters from {address}")

        monkeypatch.setattr(api.services.admin_tokens, "authenticate", broken)
        answer = await api.client.get("/admin/v1/tenants", headers={"authorization": f"Bearer {SECRET}"})

    assert answer.status_code == 500
    assert "RuntimeError" in logged.getvalue()
    assert answer.headers["x-request-id"] in logged.getvalue()
    assert SECRET not in logged.getvalue()
