"""Statements that one test has compiled need not be compiled by the next: SQLAlchemy keeps them by engine, and every test opens
engines of its own. A statement's text depends on the kind of database alone; all databases of the tests are of one version.
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

CACHE_ENTRIES = 4000  # all that a part of the suite sends


class SharedStatements(LRUCache[Any, Any]):
    """What SQLAlchemy asks for by an engine's dialect, shared by all dialects of that class."""

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(_dialect_class_key(key), default)

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(_dialect_class_key(key), value)


def _dialect_class_key(key: Any) -> Any:
    dialect, *statement = key
    return type(dialect), *statement


@contextmanager
def share_compiled_statements() -> Iterator[None]:
    """Let all engines that the appliance opens keep their compiled statements in one place."""
    options = {"compiled_cache": SharedStatements(CACHE_ENTRIES)}
    make_engine = partial(create_engine, execution_options=options)
    with (
        mock.patch.object(db, "create_engine", make_engine),
        mock.patch.object(migrations, "create_engine", make_engine),
        mock.patch.object(db, "create_async_engine", partial(create_async_engine, execution_options=options)),
    ):
        yield
