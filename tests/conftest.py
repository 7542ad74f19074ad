"""Fixtures of the whole suite: a clock that stands still, databases of both kinds, and the cast."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from unittest import mock

import pytest
import structlog
from alembic.script import ScriptDirectory

from appliance.base import db, migrations
from appliance.base.db import Database
from appliance.tenancy import members
from engine.environment import SPINS
from tests.support.alternate_databases import skipped_cases
from tests.support.cast import Cast, make_cast, quick_hasher
from tests.support.clock import FakeClock
from tests.support.compiled_statements import share_compiled_statements
from tests.support.databases import Cluster, is_required, postgresql_binaries, running_cluster
from tests.support.deselection import deselect
from tests.support.row_templates import make_from_template

YOUNG_OBJECTS_MAX = 20_000  # of a collection: tests make more of them than a program that serves, and nobody waits
_STAY_FROZEN = mock.patch.object(gc, "unfreeze")

# As the engine does before torch comes: threads that wait for one another at full speed, on processors that the suite shares,
# took twice as long as everything else that the tests of kernels for CPUs do.
os.environ.setdefault("GOMP_SPINCOUNT", str(SPINS))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let the cases of a test take turns on the databases, where there are both."""
    if postgresql_binaries() is not None or is_required("postgres"):
        deselect(config, items, skipped_cases(items))


def pytest_collection_finish() -> None:
    """Let the garbage collector leave alone what lives to the end anyway: the libraries, the tests' own modules and items.

    It stays so when a program under test takes its own freezing back: a full collection over the libraries takes a second.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS_MAX)
    _STAY_FROZEN.start()


def pytest_unconfigure() -> None:
    """Let the end of the process find everything: some libraries complain of what is left. Not before: at its own end pytest
    collects five times, to hear of what tests have left behind."""
    _STAY_FROZEN.stop()
    atexit.register(gc.unfreeze)


@pytest.fixture(scope="session", autouse=True)
def _cheap_passwords() -> Iterator[None]:
    """Let whole applications hash passwords as quickly as `quick_hasher` does: argon2 is made to take a tenth of a second."""
    with mock.patch.object(members, "PasswordHasher", quick_hasher):
        yield


@pytest.fixture(scope="session", autouse=True)
def _statements_compiled_once() -> Iterator[None]:
    """Let whole applications share what they compile: a fifth of a test's time over a database went into that."""
    with share_compiled_statements():
        yield


@pytest.fixture(scope="session", autouse=True)
def _migrations_read_once() -> Iterator[None]:
    """Let every database that is migrated find the migrations loaded: a process that serves migrates one."""
    scripts = ScriptDirectory.from_config(migrations._config())
    with mock.patch.object(ScriptDirectory, "from_config", return_value=scripts):
        yield


@pytest.fixture(scope="session", autouse=True)
def _nothing_outlives_the_machine() -> Iterator[None]:
    """Let SQLite wait for no disk: what a power cut would leave is nothing that a process can test on itself."""
    with mock.patch.object(db, "SQLITE_SYNCHRONOUS", "OFF"):
        yield


@pytest.fixture(scope="session", autouse=True)
def _plain_tracebacks() -> None:
    """Let a log that nobody has configured write failures as ours does: in frames, with every variable, one takes 20 ms."""
    structlog.dev.ConsoleRenderer.get_active().exception_formatter = structlog.dev.plain_traceback


@pytest.fixture
def clock() -> FakeClock:
    """A clock that stands still."""
    return FakeClock()


@pytest.fixture(scope="session")
def postgresql() -> Iterator[Cluster]:
    """A throw-away PostgreSQL server; skips without one, unless GATEHOUSE_REQUIRE names postgres."""
    binaries = postgresql_binaries()
    if binaries is None:
        reason = "no PostgreSQL binaries on this machine"
        if is_required("postgres"):
            pytest.fail(reason)
        pytest.skip(reason)
    with running_cluster(binaries) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def migrated_sqlite_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite file with all migrations applied, to be copied."""
    path = tmp_path_factory.mktemp("sqlite") / "template.db"
    migrations.upgrade(f"sqlite:///{path}")
    return path


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def empty_database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a database without tables, once of each kind."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'gatehouse.db'}"
        return
    cluster: Cluster = request.getfixturevalue("postgresql")
    url = cluster.create()
    yield url
    cluster.drop(url)


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a migrated database of this test alone, once of each kind."""
    if request.param == "sqlite":
        path = tmp_path / "gatehouse.db"
        shutil.copyfile(request.getfixturevalue("migrated_sqlite_file"), path)
        yield f"sqlite:///{path}"
        return
    cluster: Cluster = request.getfixturevalue("postgresql")
    url = cluster.acquire()
    yield url
    cluster.release(url)


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    """A migrated database of this test alone, once of each kind. No connection may be left in use."""
    opened = Database.open(database_url)
    yield opened
    assert opened.checked_out() == 0, "a connection was not given back"
    await opened.close()


@pytest.fixture
async def cast(database: Database, clock: FakeClock) -> Cast:
    """Alice, Bob and Charlie, present in `database`."""
    return await make_from_template(database, clock, make_cast)
