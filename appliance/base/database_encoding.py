"""The encoding of a PostgreSQL database, which must be UTF-8. Independent of the tables."""

from __future__ import annotations

from sqlalchemy import Connection, text
from sqlalchemy.engine import URL

from appliance.base.settings import UnusableData

ENCODING = "UTF8"


def server_url(target: URL) -> URL:
    """Return `target` as a psycopg URL with client encoding UTF8: a SQL_ASCII server would otherwise return bytes for text."""
    return target.set(drivername="postgresql+psycopg").update_query_dict({"client_encoding": ENCODING})


def encoding_of(connection: Connection) -> str:
    """Return the encoding of the database; UTF8 for SQLite, where we use no other."""
    if connection.dialect.name == "sqlite":
        return ENCODING
    return str(connection.execute(text("SHOW server_encoding")).scalar_one())


def check_encoding(connection: Connection) -> None:
    """Raise UnusableData unless the database is in UTF-8. Its encoding is fixed when it is created."""
    encoding = encoding_of(connection)
    if encoding != ENCODING:
        raise UnusableData(
            f"the database has the encoding {encoding}, which cannot store every name: use one created with "
            f"CREATE DATABASE … ENCODING '{ENCODING}' TEMPLATE template0"
        )
