"""Schema migrations: upgrade or downgrade a database to a revision, in one transaction.

Synchronous, because it runs at startup and from the command line, before anything is served.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, create_engine, text
from sqlalchemy.pool import NullPool

from appliance.base.database_encoding import check_encoding, server_url
from appliance.base.db import parse_url, prepare_sqlite
from appliance.base.settings import UnusableData

SQLITE_MIN = (3, 35)  # for RETURNING; UPDATE … FROM is slightly older
_SCRIPTS = Path(__file__).resolve().parents[2] / "migrations"


def upgrade(url: str, revision: str = "head") -> None:
    """Upgrade the schema to `revision` in one transaction.

    Raises UnusableData if a newer version has migrated this database, whose tables this version does not know; if Python's
    SQLite is too old; and if tables would be created in a database that is not in UTF-8.
    """
    with _connected(url) as connection:
        if _check_known(connection) is None:
            check_encoding(connection)
        command.upgrade(_config(connection), revision)


def downgrade(url: str, revision: str) -> None:
    """Downgrade the schema to `revision` (`base` for none) in one transaction. Rows of removed tables are lost.

    Raises UnusableData as `upgrade` does.
    """
    with _connected(url) as connection:
        _check_known(connection)
        command.downgrade(_config(connection), revision)


def current_revision(url: str) -> str | None:
    """Return the revision of the schema, None if no migration has run. Creates no file and waits for no writer."""
    kind, target = parse_url(url)
    if kind == "sqlite" and not Path(str(target.database)).exists():
        return None
    with _reading(url) as connection:
        return MigrationContext.configure(connection).get_current_revision()


def head_revision() -> str:
    """Return the newest revision of this version."""
    head = ScriptDirectory.from_config(_config()).get_current_head()
    assert head is not None
    return head


def is_known(revision: str) -> bool:
    """Return whether this version has the migration of this revision; if not, a newer version has migrated the database."""
    return revision in {script.revision for script in ScriptDirectory.from_config(_config()).walk_revisions()}


def schema_problem(current: str | None) -> str | None:
    """Return why this version cannot work with a schema at revision `current` (None: no tables) and what mends it; None if it
    can."""
    if current == head_revision():
        return None
    remedy = "run gatehouse db upgrade, or start the appliance"
    if current is None:
        return f"the database has no tables yet: {remedy}"
    if is_known(current):
        return f"the database is at revision {current}, but this version needs {head_revision()}: {remedy}"
    return (
        f"the database is at revision {current}, which this version does not know (its newest is {head_revision()}): "
        "start the newer version, or restore a backup"
    )


def _check_known(connection: Connection) -> str | None:
    current = MigrationContext.configure(connection).get_current_revision()
    if current is not None and not is_known(current):
        raise UnusableData(schema_problem(current))
    return current


def _config(connection: Connection | None = None) -> Config:
    config = Config()
    config.set_main_option("script_location", str(_SCRIPTS).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    return config


@contextmanager
def _reading(url: str) -> Iterator[Connection]:
    """Yield a connection that blocks no writer: commands inspect the schema of a database in use."""
    kind, target = parse_url(url)
    engine = create_engine(target if kind == "sqlite" else server_url(target), poolclass=NullPool)
    if kind == "sqlite":
        prepare_sqlite(engine, begin="BEGIN", query_only=True)
    with engine.connect() as connection:
        yield connection
    engine.dispose()


@contextmanager
def _connected(url: str) -> Iterator[Connection]:
    kind, target = parse_url(url)
    if kind == "sqlite":
        _check_sqlite()
        _create_private(Path(str(target.database)))
        engine = create_engine(target, poolclass=NullPool)
        # Tables are altered by rebuilding them while others reference them; foreign keys are checked at the end.
        prepare_sqlite(engine, begin="BEGIN IMMEDIATE", foreign_keys=False)
    else:
        engine = create_engine(server_url(target), poolclass=NullPool)
    with engine.begin() as connection:
        yield connection
        if kind == "sqlite":
            _check_references(connection)
    engine.dispose()


def _check_sqlite() -> None:
    if sqlite3.sqlite_version_info < SQLITE_MIN:
        needed = ".".join(map(str, SQLITE_MIN))
        raise UnusableData(
            f"this Python has SQLite {sqlite3.sqlite_version}, which is too old: use a Python with SQLite {needed} or newer, "
            "or PostgreSQL with --database"
        )


def _create_private(path: Path) -> None:
    """Create the file, readable only by its owner, if it is missing; the WAL inherits its mode."""
    path.parent.mkdir(parents=True, exist_ok=True)
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))


def _check_references(connection: Connection) -> None:
    dangling = connection.execute(text("PRAGMA foreign_key_check")).all()
    if dangling:
        raise UnusableData(f"{len(dangling)} foreign keys reference missing rows, the first in the table {dangling[0][0]}")
