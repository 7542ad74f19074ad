"""Deselects cases that others cover. `GATEHOUSE_EVERY_CASE=1` runs all of them."""

from __future__ import annotations

import os
from collections.abc import Collection

import pytest


def deselect(config: pytest.Config, items: list[pytest.Item], cases: Collection[pytest.Item]) -> None:
    """Remove `cases` from `items`; pytest reports their number."""
    if os.environ.get("GATEHOUSE_EVERY_CASE") == "1":
        return
    gone = set(cases)
    config.hook.pytest_deselected(items=[item for item in items if item in gone])
    items[:] = [item for item in items if item not in gone]
