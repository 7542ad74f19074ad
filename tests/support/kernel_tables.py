"""Replaces the operation table of a device type in tests."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from kernels import ops


def replace_table(device_type: str, by: str) -> AbstractContextManager[Any]:
    """Inside the block, models built for `device_type` use the operation table of `by`, "cpu" or "cuda"."""
    return mock.patch.dict(ops._TABLES, {device_type: ops._TABLES[by]})
