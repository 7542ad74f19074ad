"""A pytest plugin (`-p tests.support.one_case_per_test`) that runs one case of each parametrised test, the next test of a file
the next case.

For kernels under another Triton: all cases run under this environment's own version, and what the oldest Triton compiles from
each form of a kernel is executed as PTX (tests/ptx).
"""

from __future__ import annotations

from collections import defaultdict

import pytest

from tests.support.deselection import deselect


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the other cases, except of tests marked `every_case`."""
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
