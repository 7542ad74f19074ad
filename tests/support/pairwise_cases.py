"""Cases of a test with three independent parameters or more: few that have each pair of their values, not each combination.

What goes wrong between two options is found so, and in a few of the cases; a test whose subject is more than that is marked
`every_case`.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import combinations

import pytest

Pair = tuple[tuple[int, str], ...]


def skipped_cases(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return what is not run: each `parametrize` is a parameter, however many names it has."""
    cases: dict[str, dict[pytest.Item, tuple[str, ...]]] = defaultdict(dict)
    for item in items:
        ids = tuple(item.callspec._idlist) if hasattr(item, "callspec") else ()
        if len(ids) > 2 and item.get_closest_marker("every_case") is None:
            cases[item.nodeid.partition("[")[0]][item] = ids
    return [item for test_cases in cases.values() for item in _redundant_cases(test_cases)]


def _redundant_cases(cases: dict[pytest.Item, tuple[str, ...]]) -> list[pytest.Item]:
    """All but some that have each pair: next always one with the most new ones, the first of several."""
    remaining: dict[pytest.Item, set[Pair]] = {item: set(combinations(enumerate(ids), 2)) for item, ids in cases.items()}
    missing: set[Pair] = set().union(*remaining.values())
    while missing:
        chosen = max(remaining, key=lambda item: len(remaining[item] & missing))
        missing -= remaining.pop(chosen)
    return list(remaining)
