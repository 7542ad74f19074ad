"""Fixtures of the whole suite: a fake clock, databases of both kinds, and the cast."""

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
from tests.support.databases import Cluster, postgresql_binaries, running_cluster
from tests.support.deselection import deselect
from tests.support.required_parts import is_required
from tests.support.row_templates import make_from_template

YOUNG_OBJECTS_MAX = 20_000  # threshold of a collection: tests create more objects than a server, and pauses do not matter
_STAY_FROZEN = mock.patch.object(gc, "unfreeze")

# As the engine does before it imports torch: threads that spin while waiting for each other, on processors shared by the suite,
# took twice as long as everything else in the tests of CPU kernels.
os.environ.setdefault("GOMP_SPINCOUNT", str(SPINS))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Alternate the cases of a test between the databases, if there are both."""
    if postgresql_binaries() is not None or is_required("postgres"):
        deselect(config, items, skipped_cases(items))


def pytest_collection_finish() -> None:
    """Exempt from garbage collection what lives to the end anyway: libraries, test modules and items.

    This is kept when a program under test unfreezes: a full collection over the libraries takes a second.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS_MAX)
    _STAY_FROZEN.start()


def pytest_unconfigure() -> None:
    """Unfreeze only at the end of the process, where some libraries report leaked objects: before that, pytest collects five
    times to report what tests left behind."""
    _STAY_FROZEN.stop()
    atexit.register(gc.unfreeze)


@pytest.fixture(scope="session", autouse=True)
def _cheap_passwords() -> Iterator[None]:
    """Make applications hash passwords at low cost: argon2 takes a tenth of a second by design."""
    with mock.patch.object(members, "PasswordHasher", quick_hasher):
        yield


@pytest.fixture(scope="session", autouse=True)
def _statements_compiled_once() -> Iterator[None]:
    """Share compiled SQL statements between applications: compiling them took a fifth of a database test's time."""
    with share_compiled_statements():
        yield


@pytest.fixture(scope="session", autouse=True)
def _migrations_read_once() -> Iterator[None]:
    """Load migrations once for all databases; a server migrates only one."""
    scripts = ScriptDirectory.from_config(migrations._config())
    with mock.patch.object(ScriptDirectory, "from_config", return_value=scripts):
        yield


@pytest.fixture(scope="session", autouse=True)
def _nothing_outlives_the_machine() -> Iterator[None]:
    """Turn off SQLite's disk synchronisation: a process cannot test power cuts on itself."""
    with mock.patch.object(db, "SQLITE_SYNCHRONOUS", "OFF"):
        yield


@pytest.fixture(scope="session", autouse=True)
def _plain_tracebacks() -> None:
    """Make unconfigured logs write plain tracebacks, as ours do: formatting one with all variables takes 20 ms."""
    structlog.dev.ConsoleRenderer.get_active().exception_formatter = structlog.dev.plain_traceback


@pytest.fixture
def clock() -> FakeClock:
    """A clock that only the test moves."""
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
    """The URL of an empty database, of each kind."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'gatehouse.db'}"
        return
    cluster: Cluster = request.getfixturevalue("postgresql")
    url = cluster.create()
    yield url
    cluster.drop(url)


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a migrated database for this test only, of each kind."""
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
    """A migrated database for this test only, of each kind. All connections must have been returned."""
    opened = Database.open(database_url)
    yield opened
    assert opened.checked_out() == 0, "a connection was not given back"
    await opened.close()


@pytest.fixture
async def cast(database: Database, clock: FakeClock) -> Cast:
    """Alice, Bob and Charlie, created in `database`."""
    return await make_from_template(database, clock, make_cast)
