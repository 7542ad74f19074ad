"""Secrets are never logged, not even when a request that carries them fails."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator

import pytest
import structlog

from appliance.base.logging import configure_logging
from tests.support.api_app import ApiApp

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


async def test_a_logged_traceback_contains_no_secret(api: ApiApp, logged: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(secret: str, address: str) -> None:
        raise RuntimeError(f"failed with {len(secret)} characters from {address}")

    monkeypatch.setattr(sys, "stderr", logged)
    monkeypatch.setattr(api.services.admin_tokens, "authenticate", fail)
    answer = await api.client.get("/admin/v1/tenants", headers={"authorization": f"Bearer {SECRET}"})

    assert answer.status_code == 500
    assert "RuntimeError" in logged.getvalue()
    assert answer.headers["x-request-id"] in logged.getvalue()
    assert SECRET not in logged.getvalue()
