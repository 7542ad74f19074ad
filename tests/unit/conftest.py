"""Fixtures for unit tests of the API, the console and commands."""

from __future__ import annotations

import io
import logging
import os
import shutil
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio
import structlog
from hypothesis import settings

from appliance.base.db import Database
from appliance.cli import model_check
from appliance.cli.main import main
from appliance.metering.ledger import writer as ledger_writer
from appliance.metering.ledger.writer import Ledger
from tests.support import cached_commands
from tests.support.api_app import ApiApp, open_api_app
from tests.support.cast import Cast
from tests.support.clock import FakeClock
from tests.support.console_fixtures import ConsoleApp, open_console
from tests.support.generations import Serving, open_serving
from tests.support.ledgers import running_ledger
from tests.support.typed_commands import CommandResult, Run, Terminal

settings.load_profile("ci")  # the same examples in every run, and no verdict on how long one took


@pytest.fixture
async def api(migrated_sqlite_file: Path, tmp_path: Path) -> AsyncIterator[ApiApp]:
    """The whole application without engines, over an empty database, with a client that is authorised as the owner."""
    async with open_api_app(migrated_sqlite_file, tmp_path) as opened:
        yield opened


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def api_document(migrated_sqlite_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The OpenAPI document of the whole application, only to be read."""
    async with open_api_app(migrated_sqlite_file, tmp_path_factory.mktemp("openapi")) as opened:
        return (await opened.client.get("/schema/openapi.json")).json()


@pytest.fixture
async def console(migrated_sqlite_file: Path, tmp_path: Path, clock: FakeClock) -> AsyncIterator[ConsoleApp]:
    """A console with Alice (owner), Vera (viewer), and the tenants of Bob and Charlie."""
    async with open_console(migrated_sqlite_file, tmp_path, clock) as opened:
        yield opened


@pytest.fixture
def patient_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raises the journal's time limits, so that a slow disk does not fail tests that are not about it."""
    monkeypatch.setattr(ledger_writer, "CATCH_UP_S", 60.0)
    monkeypatch.setattr(ledger_writer, "JOURNAL_TIMEOUT_S", 60.0)


@pytest.fixture
async def ledger(database: Database, clock: FakeClock, cast: Cast) -> AsyncIterator[Ledger]:
    """A running ledger in UTC and EUR that writes settlements at once."""
    async with running_ledger(database, clock, cast.epoch_id) as running:
        yield running


@pytest.fixture
async def serving(database: Database, clock: FakeClock, cast: Cast, tmp_path: Path) -> AsyncIterator[Serving]:
    """The serving layer over a fake engine in this process, for the tenants of the cast."""
    async with open_serving(database, clock, tmp_path / "model", cast.epoch_id) as opened:
        yield opened


@pytest.fixture(autouse=True, scope="module")
def _kept_commands(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let the tests of commands run one command line after another in one process."""
    if not request.path.name.startswith("test_cli_"):
        yield
        return
    with cached_commands.cache_between_commands():
        yield


@pytest.fixture
def own_logging() -> Iterator[None]:
    """Restore logging after the test: a command redirects it to a stream that is closed when the test ends."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    structlog.reset_defaults()
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def data_dir(tmp_path: Path, migrated_sqlite_file: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The data folder of a stopped appliance, which the environment names as the only setting."""
    for name in [name for name in os.environ if name.startswith("GATEHOUSE_")]:
        monkeypatch.delenv(name)
    folder = tmp_path / "data"
    folder.mkdir()
    shutil.copyfile(migrated_sqlite_file, folder / "gatehouse.db")
    monkeypatch.setenv("GATEHOUSE_DATA_DIR", str(folder))
    return folder


@pytest.fixture
def skip_tensor_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the check of a model's tensors, a process that takes seconds, by one that passes."""
    facts = {"architecture": "LlamaForCausalLM", "parameters": 6_600_000}
    monkeypatch.setattr(model_check, "check_model", lambda *_: facts)


@pytest.fixture
def verify_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the check of a model's tensors in this process: a new one imports torch for seconds."""
    from engine import verify

    class InProcess:
        """Has the part of `subprocess.Popen` that `check_model` uses."""

        def __init__(self, command: Sequence[str], **_options: object) -> None:
            self.stdout = io.StringIO()
            with redirect_stdout(self.stdout):
                self.returncode = verify.main(list(command[3:]))  # behind the interpreter, -m and the module
            self.stdout.seek(0)

        def __enter__(self) -> InProcess:
            return self

        def __exit__(self, *_error: object) -> None:
            self.stdout.close()

    monkeypatch.setattr(
        model_check, "subprocess", SimpleNamespace(Popen=InProcess, **dict.fromkeys(("DEVNULL", "PIPE", "STDOUT")))
    )


@pytest.fixture
def run_command(data_dir: Path, monkeypatch: pytest.MonkeyPatch, own_logging: None, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run command lines of `gatehouse` on a stopped appliance."""

    def run(*arguments: str, piped: str = "", at_terminal: str | None = None) -> CommandResult:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", io.StringIO(piped) if at_terminal is None else Terminal(at_terminal))
            patch.setattr(sys.stderr, "isatty", lambda: at_terminal is not None)
            status = main(list(arguments))
        return CommandResult(status, *capsys.readouterr())

    return run


@pytest.fixture
def gatehouse(run_command: Run) -> Run:
    """Run command lines of `gatehouse` on a stopped appliance that has the tenant `bob`."""
    assert run_command("tenants", "create", "bob").status == 0
    return run_command
