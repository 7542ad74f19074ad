"""Reduces the cases of a test with three or more parameters to a few that cover each pair of values, not each combination.

This finds faults in the interaction of two options with few cases; a test that needs more is marked `every_case`.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import combinations

import pytest

Pair = tuple[tuple[int, str], ...]


def skipped_cases(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the items to skip. Each `parametrize` counts as one parameter, however many names it has."""
    cases: dict[str, dict[pytest.Item, tuple[str, ...]]] = defaultdict(dict)
    for item in items:
        ids = tuple(item.callspec._idlist) if hasattr(item, "callspec") else ()
        if len(ids) > 2 and item.get_closest_marker("every_case") is None:
            cases[item.nodeid.partition("[")[0]][item] = ids
    return [item for test_cases in cases.values() for item in _redundant_cases(test_cases)]


def _redundant_cases(cases: dict[pytest.Item, tuple[str, ...]]) -> list[pytest.Item]:
    """All but a greedy cover of the pairs: each choice is the first case with the most uncovered pairs."""
    remaining: dict[pytest.Item, set[Pair]] = {item: set(combinations(enumerate(ids), 2)) for item, ids in cases.items()}
    missing: set[Pair] = set().union(*remaining.values())
    while missing:
        chosen = max(remaining, key=lambda item: len(remaining[item] & missing))
        missing -= remaining.pop(chosen)
    return list(remaining)
