"""The tables of operations that tests put in the place of others."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from kernels import ops


def replace_table(device_type: str, by: str) -> AbstractContextManager[Any]:
    """What is made meanwhile for one type of device takes the table of another one, "cpu" or "cuda"."""
    return mock.patch.dict(ops._TABLES, {device_type: ops._TABLES[by]})
