"""Alternates the cases of a test between SQLite and PostgreSQL, as the database and the other parameters are independent.

A test without other parameters runs on both databases. So does each case of a test marked `on_each_database`, whose cases are
about the databases themselves, for example triggers. In a file marked `on_either_database`, whose queries are all tested on
both elsewhere, the tests alternate too. Without PostgreSQL, everything runs on SQLite.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import pytest

DATABASES = ("sqlite", "postgresql")
FIXTURES = ("database_url", "empty_database_url")


def skipped_cases(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the items to skip: for each case that exists on both databases, the one on the database not assigned to it."""
    tests: dict[str, dict[tuple[str, ...], dict[str, pytest.Item]]] = defaultdict(lambda: defaultdict(dict))
    for item in items:
        database = _database(item)
        if database is not None and item.get_closest_marker("on_each_database") is None:
            test, ids = item.nodeid.partition("[")[0], item.callspec._idlist  # type: ignore[attr-defined]
            tests[test][tuple(name for name in ids if name != database)][database] = item
    skipped = []
    num_single_cases: dict[str, int] = defaultdict(int)  # tests without cases, by file
    for test, cases in tests.items():
        cases_on_both = {ids: case for ids, case in cases.items() if len(case) == len(DATABASES)}
        if len(cases_on_both) == 1 and next(iter(cases_on_both.values()))[DATABASES[0]].get_closest_marker(
            "on_either_database"
        ):
            file = test.partition("::")[0]
            skipped.append(next(iter(cases_on_both.values()))[DATABASES[num_single_cases[file] % len(DATABASES)]])
            num_single_cases[file] += 1
        elif len(cases_on_both) > 1:
            skipped += [
                case[DATABASES[1 - database_index]]
                for database_index, case in zip(_assign_databases(cases_on_both), cases_on_both.values(), strict=True)
            ]
    return skipped


def _assign_databases(cases: Iterable[tuple[str, ...]]) -> list[int]:
    """Assign databases in a chessboard pattern, so that each value of each parameter meets both. → an index per case"""
    value_index: dict[tuple[int, str], int] = {}
    counts: dict[int, int] = defaultdict(int)
    assignments = []
    for ids in cases:
        for value in enumerate(ids):
            if value not in value_index:
                value_index[value] = counts[value[0]]
                counts[value[0]] += 1
        assignments.append(sum(value_index[value] for value in enumerate(ids)) % len(DATABASES))
    return assignments


def _database(item: pytest.Item) -> str | None:
    """The database of an item, from the parameter of a database fixture; None if it has none."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    return next((params[name] for name in FIXTURES if params.get(name) in DATABASES), None)
