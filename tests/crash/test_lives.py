"""A few crashes of `tests.crash.lives` on each database: after a kill at any named point the ledger is consistent."""

from __future__ import annotations

import pytest

from tests.crash.lives import FIRST_STARTS, RANDOM, Crash, live

CRASHES = (
    Crash("serving", "pending record: after COMMIT", "both"),
    Crash("starting", "recovery: before COMMIT", "gateway"),
    Crash("serving", "tenth token received", "engine"),
    Crash("serving", "checkpoint: in COMMIT", "gateway"),
    Crash("starting", "migration: before COMMIT", "gateway"),
    Crash("serving", "events settled, rollups not written", "gateway"),
    Crash("serving", RANDOM, "both"),
)
SQLITE_CRASHES = (
    Crash("serving", "journal write: after COMMIT", "both"),
    Crash("serving", "pending record: before COMMIT", "gateway"),
    Crash("starting", "journal replay: journal not cleared", "gateway"),
)


@pytest.mark.parametrize("kind", ["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def test_the_ledger_is_consistent_after_crashes_at_named_points(kind: str, request: pytest.FixtureRequest) -> None:
    cluster = request.getfixturevalue("postgresql") if kind == "postgresql" else None
    crashes = CRASHES if cluster else CRASHES + SQLITE_CRASHES
    row = live(FIRST_STARTS + len(crashes), cluster, seed=5, order=iter(crashes))

    assert row["first_findings"] == []
    if cluster is None:
        assert row["points"]["serving: journal write: after COMMIT"] == [1, 1]
    assert row["events"]["posted"] > 0
    assert row["events"]["recovered"] > 0
    assert row["streams_told_of_an_engines_death"] > 0
