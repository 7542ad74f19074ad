"""The encoding of a PostgreSQL database: we speak UTF-8, and tables are made in a database that keeps it. Knows no table."""

from __future__ import annotations

from sqlalchemy import Connection, text
from sqlalchemy.engine import URL

from appliance.base.settings import UnusableData

ENCODING = "UTF8"


def server_url(target: URL) -> URL:
    """Return `target` for psycopg. A server whose own encoding is SQL_ASCII would else send bytes where text is read."""
    return target.set(drivername="postgresql+psycopg").update_query_dict({"client_encoding": ENCODING})


def encoding_of(connection: Connection) -> str:
    """Return what the database keeps text in: UTF8 for SQLite, which knows nothing else."""
    if connection.dialect.name == "sqlite":
        return ENCODING
    return str(connection.execute(text("SHOW server_encoding")).scalar_one())


def check_encoding(connection: Connection) -> None:
    """Raise UnusableData where names could not be stored: a database gets its encoding when it is created."""
    encoding = encoding_of(connection)
    if encoding != ENCODING:
        raise UnusableData(
            f"the database is in {encoding}, which cannot hold every name: take one that was made by "
            f"CREATE DATABASE … ENCODING '{ENCODING}' TEMPLATE template0"
        )
