"""A few crashes of `tests.crash.lives` on each database: after a kill at any named point the ledger is consistent."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle

import pytest

from tests.crash.lives import RANDOM, Crash, live
from tests.support.databases import postgresql_binaries
from tests.support.required_parts import is_required

CRASHES = (
    Crash("serving", "pending record: after COMMIT", "both"),
    Crash("starting", "recovery: before COMMIT", "gateway"),
    Crash("serving", "tenth token", "engine"),
    Crash("serving", "checkpoint: in COMMIT", "gateway"),
    Crash("starting", "migration: before COMMIT", "gateway"),
    Crash("serving", "events settled, sums not written", "gateway"),
    Crash("serving", RANDOM, "both"),
)


SQLITE_CRASHES = (
    Crash("serving", "line in the journal: after COMMIT", "both"),
    Crash("serving", "pending record: before COMMIT", "gateway"),
    Crash("starting", "journal to tables: not cleared", "gateway"),
)


def few(kind: str) -> Iterator[Crash]:
    """Yield the crashes that fit the time of CI."""
    return cycle(CRASHES + SQLITE_CRASHES if kind == "sqlite" else CRASHES)


@pytest.mark.parametrize("kind", ["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def test_the_ledger_is_consistent_after_a_crash_at_every_point(kind: str) -> None:
    if kind == "postgresql" and postgresql_binaries() is None:
        assert not is_required("postgres"), "no PostgreSQL binaries on this machine"
        pytest.skip("no PostgreSQL binaries on this machine")
    row = live(len(CRASHES) + 2 + len(SQLITE_CRASHES) * (kind == "sqlite"), kind, seed=5, order=few(kind))

    assert row["first_findings"] == []
    if kind == "sqlite":
        assert row["points"]["serving: line in the journal: after COMMIT"] == [1, 1]
    assert row["events"]["posted"] > 0
    assert row["events"]["recovered"] > 0
    assert row["streams_told_of_an_engines_death"] > 0
