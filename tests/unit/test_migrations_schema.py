"""The migrations produce the tables that the code uses, and can be reverted."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext
from sqlalchemy import create_engine, inspect, text
from sqlalchemy.pool import NullPool

from appliance.base import db, migrations
from appliance.base.settings import UnusableData
from appliance.base.tables import metadata


def _inspect(url: str) -> tuple[set[str], list[object]]:
    """Return the tables that are there and how they differ from `metadata`."""
    target = url.replace("postgresql://", "postgresql+psycopg://")
    engine = create_engine(target, poolclass=NullPool)
    with engine.connect() as connection:
        tables = set(inspect(connection).get_table_names())
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        differences = compare_metadata(context, metadata)
    engine.dispose()
    return tables, differences


def test_an_upgrade_of_an_empty_database_creates_the_tables_of_the_code(empty_database_url: str) -> None:
    migrations.upgrade(empty_database_url)
    tables, differences = _inspect(empty_database_url)
    assert tables == {"alembic_version", *metadata.tables}
    assert differences == []
    assert migrations.current_revision(empty_database_url) == migrations.head_revision()


def test_a_downgrade_removes_every_table_and_an_upgrade_recreates_them(empty_database_url: str) -> None:
    migrations.upgrade(empty_database_url)
    migrations.downgrade(empty_database_url, "base")
    assert _inspect(empty_database_url)[0] == {"alembic_version"}
    assert migrations.current_revision(empty_database_url) is None
    migrations.upgrade(empty_database_url)
    assert _inspect(empty_database_url)[1] == []


def test_an_upgrade_of_an_upgraded_database_changes_nothing(empty_database_url: str) -> None:
    migrations.upgrade(empty_database_url)
    migrations.upgrade(empty_database_url)
    assert migrations.current_revision(empty_database_url) == migrations.head_revision()


def test_an_empty_database_has_no_revision(empty_database_url: str) -> None:
    assert migrations.current_revision(empty_database_url) is None


def test_the_sqlite_file_is_readable_only_by_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "new" / "gatehouse.db"
    migrations.upgrade(f"sqlite:///{path}")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_every_migration_is_named_by_date_and_number() -> None:
    folder = Path(db.__file__).resolve().parents[2] / "migrations" / "versions"
    names = [path.name for path in folder.glob("*.py")]
    assert names
    assert all(name[:10].count("_") == 2 and name[11:15].isdigit() for name in names)


def test_a_database_of_a_newer_version_is_refused_unchanged(empty_database_url: str) -> None:
    migrations.upgrade(empty_database_url)
    engine = create_engine(empty_database_url.replace("postgresql://", "postgresql+psycopg://"), poolclass=NullPool)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    for step, revision in ((migrations.upgrade, "head"), (migrations.downgrade, "base")):
        with pytest.raises(UnusableData, match="at revision 9999, which this version does not know"):
            step(empty_database_url, revision)
    assert migrations.current_revision(empty_database_url) == "9999"
    assert len(_inspect(empty_database_url)[0]) > 1


def test_an_interrupted_upgrade_is_rolled_back(empty_database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    create_index: Any = Operations.create_index

    def killed(operations: Operations, name: str, *arguments: Any, **options: Any) -> None:
        if name == "ix_requests_admitted_at":
            raise KeyboardInterrupt
        create_index(operations, name, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Operations, "create_index", killed)
        with pytest.raises(KeyboardInterrupt):
            migrations.upgrade(empty_database_url)
    assert _inspect(empty_database_url)[0] == set()
    migrations.upgrade(empty_database_url)
    assert _inspect(empty_database_url)[1] == []
