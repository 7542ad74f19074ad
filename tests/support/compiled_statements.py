"""Shares compiled SQL statements between tests: SQLAlchemy caches them per engine, and every test opens its own engines. A
statement's text depends only on the kind of database, as all test databases of a kind have one version.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.util import LRUCache

from appliance.base import db, migrations

CACHE_ENTRIES = 4000  # more than any part of the suite sends


class SharedStatements(LRUCache[Any, Any]):
    """A statement cache keyed by the class of the dialect instead of the dialect itself."""

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(_dialect_class_key(key), default)

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(_dialect_class_key(key), value)


def _dialect_class_key(key: Any) -> Any:
    dialect, *statement = key
    return type(dialect), *statement


@contextmanager
def share_compiled_statements() -> Iterator[None]:
    """Let all engines that the appliance opens share one cache of compiled statements."""
    options = {"compiled_cache": SharedStatements(CACHE_ENTRIES)}
    make_engine = partial(create_engine, execution_options=options)
    with (
        mock.patch.object(db, "create_engine", make_engine),
        mock.patch.object(migrations, "create_engine", make_engine),
        mock.patch.object(db, "create_async_engine", partial(create_async_engine, execution_options=options)),
    ):
        yield
