"""A plugin of pytest (`-p tests.support.one_case_per_test`): of the cases of each test one, of every test in a file the next one.

For kernels under another Triton: what a kernel makes of which case is found out under this environment's own, and what the
oldest Triton makes of each form of a kernel is executed as machine-level code (tests/ptx).
"""

from __future__ import annotations

from collections import defaultdict

import pytest

from tests.support.deselection import deselect


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the other cases, but for tests that are marked `every_case`."""
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    counts: dict[str, int] = defaultdict(int)
    chosen = set()
    for name, test_cases in cases.items():
        number = counts[file := name.partition("::")[0]]
        counts[file] += 1
        runs_every_case = test_cases[0].get_closest_marker("every_case") is not None
        chosen |= set(test_cases if runs_every_case else [test_cases[number % len(test_cases)]])
    deselect(config, items, [item for item in items if item not in chosen])
