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


def left_out(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return what is not run: of each case that could be on either database the one whose turn it is not."""
    tests: dict[str, dict[tuple[str, ...], dict[str, pytest.Item]]] = defaultdict(lambda: defaultdict(dict))
    for item in items:
        database = _database(item)
        if database is not None and item.get_closest_marker("on_each_database") is None:
            test, ids = item.nodeid.partition("[")[0], item.callspec._idlist  # type: ignore[attr-defined]
            tests[test][tuple(name for name in ids if name != database)][database] = item
    found = []
    alone: dict[str, int] = defaultdict(int)  # tests without cases, by file
    for test, cases in tests.items():
        either = {ids: case for ids, case in cases.items() if len(case) == len(DATABASES)}
        if len(either) == 1 and next(iter(either.values()))[DATABASES[0]].get_closest_marker("on_either_database"):
            file = test.partition("::")[0]
            found.append(next(iter(either.values()))[DATABASES[alone[file] % len(DATABASES)]])
            alone[file] += 1
        elif len(either) > 1:
            found += [case[DATABASES[1 - turn]] for turn, case in zip(_turns(either), either.values(), strict=True)]
    return found


def _turns(cases: Iterable[tuple[str, ...]]) -> list[int]:
    """Whose turn each case is: as the squares of a chessboard, so that each value of several parameters meets both."""
    places: dict[tuple[int, str], int] = {}
    counts: dict[int, int] = defaultdict(int)
    turns = []
    for ids in cases:
        for value in enumerate(ids):
            if value not in places:
                places[value] = counts[value[0]]
                counts[value[0]] += 1
        turns.append(sum(places[value] for value in enumerate(ids)) % len(DATABASES))
    return turns


def _database(item: pytest.Item) -> str | None:
    """The database of a test that has one by a fixture's own parameter or another's."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    return next((params[name] for name in FIXTURES if params.get(name) in DATABASES), None)
