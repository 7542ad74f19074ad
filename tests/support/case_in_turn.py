"""A plugin of pytest (`-p tests.support.case_in_turn`): of the cases of each test one, of every test in a file the next one.

For kernels under another Triton: what a kernel makes of which case is found out under this environment's own, and what the
oldest Triton makes of each form of a kernel is executed as machine-level code (tests/ptx).
"""

from __future__ import annotations

from collections import defaultdict

import pytest

from tests.support.selection import leave_out


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the other cases, but for tests that are marked `every_case`."""
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    numbers: dict[str, int] = defaultdict(int)
    chosen = set()
    for name, of_one_test in cases.items():
        number = numbers[file := name.partition("::")[0]]
        numbers[file] += 1
        whole = of_one_test[0].get_closest_marker("every_case") is not None
        chosen |= set(of_one_test if whole else [of_one_test[number % len(of_one_test)]])
    leave_out(config, items, [item for item in items if item not in chosen])
