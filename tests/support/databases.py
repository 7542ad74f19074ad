"""Databases for tests: a SQLite file, or databases of a throw-away PostgreSQL server that are emptied and reused."""

from __future__ import annotations

import getpass
import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg

from appliance.base import migrations
from appliance.base.tables import metadata

BINARIES = Path("/usr/lib/postgresql")
_SERVER_OPTIONS = {
    "listen_addresses": "",  # a socket in our own folder: no port can collide
    "fsync": "off",
    "synchronous_commit": "off",
    "full_page_writes": "off",
    "shared_buffers": "64MB",
    "max_connections": "400",  # a busy server closes its side of cancelled tasks' connections late
}


def postgresql_binaries() -> Path | None:
    """Return the binaries folder of this machine's newest PostgreSQL, or None."""
    found = [path.parent for path in BINARIES.glob("*/bin/initdb")] if BINARIES.is_dir() else []
    if found:
        return max(found, key=lambda path: int(path.parent.name))
    on_path = shutil.which("initdb")
    return Path(on_path).resolve().parent if on_path else None


class Cluster:
    """A running throw-away PostgreSQL server."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._free: list[str] = []

    def url(self, name: str) -> str:
        """Return the URL of the database `name`."""
        return f"postgresql://postgres@/{name}?host={self._folder}"

    def create(self, *, encoding: str = "UTF8") -> str:
        """Return the URL of a new database."""
        name = f"test_{uuid.uuid4().hex[:12]}"
        self._execute(f"CREATE DATABASE {name} TEMPLATE template0 ENCODING '{encoding}'")
        return self.url(name)

    def acquire(self) -> str:
        """Return the URL of an empty, fully migrated database. Call `release` afterwards, for reuse."""
        if self._free:
            return self._free.pop()
        url = self.create()
        migrations.upgrade(url)
        return url

    def release(self, url: str) -> None:
        """Empty a database from `acquire` for reuse; end all other connections to it."""
        # Replica mode disables the triggers that make the audit log immutable.
        statements = ["SET LOCAL session_replication_role = replica"]
        statements += [f"DELETE FROM {table.name}" for table in reversed(metadata.sorted_tables)]
        others = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
        with psycopg.connect(url) as connection:
            connection.execute(f"{others} AND pid <> pg_backend_pid()")
            connection.execute("; ".join(statements).encode())
        self._free.append(url)

    def drop(self, url: str) -> None:
        """Drop a database from `create`, even if it is still in use."""
        name = url.removeprefix("postgresql://postgres@/").partition("?")[0]
        self._execute(f"DROP DATABASE {name} WITH (FORCE)")

    def _execute(self, statement: str) -> None:
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(statement.encode())


@contextmanager
def running_cluster(binaries: Path) -> Iterator[Cluster]:
    """Start a server in a temporary folder and stop it afterwards. As root it runs as the user `postgres`."""
    folder = Path(tempfile.mkdtemp(prefix="gatehouse-pg-"))
    as_root = os.geteuid() == 0
    prefix = ["runuser", "-u", "postgres", "--"] if as_root else []
    if as_root:
        shutil.chown(folder, "postgres", "postgres")
    options = " ".join(f"-c {name}='{value}'" for name, value in {**_SERVER_OPTIONS, "unix_socket_directories": folder}.items())
    data, log = str(folder / "data"), str(folder / "log")
    try:
        _call([*prefix, f"{binaries}/initdb", "-D", data, "-A", "trust", "-U", "postgres", "-N", "-E", "UTF8", "--no-locale"])
        _call([*prefix, f"{binaries}/pg_ctl", "-D", data, "-w", "-l", log, "-o", options, "start"])
        try:
            yield Cluster(folder)
        finally:
            _call([*prefix, f"{binaries}/pg_ctl", "-D", data, "-w", "-m", "immediate", "stop"])
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def transaction_is_blocked(url: str) -> bool:
    """Return whether a transaction in the PostgreSQL database at `url` waits for another one."""
    with psycopg.connect(url) as connection:
        return connection.execute("SELECT 1 FROM pg_locks WHERE NOT granted").fetchone() is not None


def _call(command: list[str]) -> None:
    done = subprocess.run(
        command, cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert done.returncode == 0, f"{command} as {getpass.getuser()} ended with {done.returncode}:\n{done.stdout}"
