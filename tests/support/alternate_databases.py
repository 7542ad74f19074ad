"""Cases of one test take turns on the two databases: which database there is and what a case asks are independent.

A test without other parameters meets both databases. So does each case of one that is marked `on_each_database`, because its
cases themselves are of the databases, as triggers are. In a file that is marked `on_either_database`, because it asks the
database nothing that others do not test on both, tests take turns, too. Where there is no PostgreSQL, SQLite has all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import pytest

DATABASES = ("sqlite", "postgresql")
FIXTURES = ("database_url", "empty_database_url")


def skipped_cases(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return what is not run: of each case that could be on either database the one whose turn it is not."""
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
    """Whose turn each case is: as the squares of a chessboard, so that each value of several parameters meets both."""
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
    """The database of a test that has one by a fixture's own parameter or another's."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    return next((params[name] for name in FIXTURES if params.get(name) in DATABASES), None)
