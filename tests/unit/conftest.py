"""Fixtures for unit tests of the API, the console and commands."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import structlog
from hypothesis import settings

from tests.support import cached_commands
from tests.support.api_app import ApiApp, open_api_app
from tests.support.clock import FakeClock
from tests.support.console_fixtures import ConsoleApp, open_console
from tests.support.typed_commands import Run, command_runner

settings.load_profile("ci")  # the same examples in every run, and no verdict on how long one took


@pytest.fixture
async def api(migrated_sqlite_file: Path, tmp_path: Path) -> AsyncIterator[ApiApp]:
    """The whole application without engines, over an empty database, with a client that is authorised as the owner."""
    async with open_api_app(migrated_sqlite_file, tmp_path) as opened:
        yield opened


@pytest.fixture
async def console(migrated_sqlite_file: Path, tmp_path: Path, clock: FakeClock) -> AsyncIterator[ConsoleApp]:
    """A console with Alice (owner), Vera (viewer), and the tenants of Bob and Charlie."""
    async with open_console(migrated_sqlite_file, tmp_path, clock) as opened:
        yield opened


@pytest.fixture(autouse=True, scope="module")
def _kept_commands(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let the tests of commands type one after another in one process."""
    if not request.path.name.startswith("test_cli_"):
        yield
        return
    with cached_commands.cache_between_commands():
        yield


@pytest.fixture
def own_logging() -> Iterator[None]:
    """Take back what a command does to the logging of its process: its stream is closed when the test ends."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    structlog.reset_defaults()
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def typed(
    tmp_path: Path,
    migrated_sqlite_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    own_logging: None,
    capsys: pytest.CaptureFixture[str],
) -> Run:
    """Commands on an appliance that does not run, with the tenant `bob`."""
    return command_runner(tmp_path, migrated_sqlite_file, monkeypatch, capsys)
