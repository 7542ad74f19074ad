"""Fixtures of the unit tests of the console."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.clock import FakeClock
from tests.support.console_fixtures import Box, open_box


@pytest.fixture
async def box(migrated_sqlite_file: Path, tmp_path: Path, clock: FakeClock) -> AsyncIterator[Box]:
    """A console with Alice (owner), Vera (viewer), and the tenants of Bob and Charlie."""
    async with open_box(migrated_sqlite_file, tmp_path, clock) as opened:
        yield opened
