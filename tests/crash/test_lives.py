"""A few of the lives of `tests.crash.lives`, on each database: what is killed at a named point finds its books in order."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle

import pytest

from tests.crash.lives import RANDOM, Death, live
from tests.support.databases import postgresql_binaries
from tests.support.required_parts import is_required

DEATHS = (
    Death("serving", "pending record: after COMMIT", "both"),
    Death("starting", "recovery: before COMMIT", "gateway"),
    Death("serving", "tenth token", "engine"),
    Death("serving", "checkpoint: in COMMIT", "gateway"),
    Death("starting", "migration: before COMMIT", "gateway"),
    Death("serving", "events settled, sums not written", "gateway"),
    Death("serving", RANDOM, "both"),
)


ON_SQLITE = (
    Death("serving", "line in the journal: after COMMIT", "both"),
    Death("serving", "pending record: before COMMIT", "gateway"),
    Death("starting", "journal to tables: not cleared", "gateway"),
)


def few(kind: str) -> Iterator[Death]:
    """Yield the deaths that CI has time for."""
    return cycle(DEATHS + ON_SQLITE if kind == "sqlite" else DEATHS)


@pytest.mark.parametrize("kind", ["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def test_books_survive_every_death(kind: str) -> None:
    if kind == "postgresql" and postgresql_binaries() is None:
        assert not is_required("postgres"), "no PostgreSQL binaries on this machine"
        pytest.skip("no PostgreSQL binaries on this machine")
    row = live(len(DEATHS) + 2 + len(ON_SQLITE) * (kind == "sqlite"), kind, seed=5, order=few(kind))

    assert row["first_findings"] == []
    if kind == "sqlite":
        assert row["points"]["serving: line in the journal: after COMMIT"] == [1, 1]
    assert row["events"]["posted"] > 0
    assert row["events"]["recovered"] > 0
    assert row["streams_told_of_an_engines_death"] > 0
