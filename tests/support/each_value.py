"""A plugin of pytest (`-p tests.support.each_value`): of a test's combinations of parameters, few that have each value.

For kernels under another Triton: what a kernel makes of which combination is found out under this environment's own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the other combinations."""
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    chosen = {item for of_one_test in cases.values() for item in _covering(of_one_test)}
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


def _covering(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Cases of one test that between them have every entry of each `parametrize`: next always one with the most new ones."""
    left = {item: _entries(item) for item in items}
    missing = set().union(*left.values())
    chosen: list[pytest.Item] = []
    while missing or not chosen:
        chosen.append(max(left, key=lambda item: len(left[item] & missing)))
        missing -= left.pop(chosen[-1])
    return chosen


def _entries(item: pytest.Item) -> frozenset[tuple[int, str]]:
    """The entry that an item has of each `parametrize`: one value, or the values of a case together."""
    return frozenset(enumerate(item.callspec._idlist)) if hasattr(item, "callspec") else frozenset()
