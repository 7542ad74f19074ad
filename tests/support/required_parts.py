"""Parts of the suite that must not be skipped, named by the environment variable GATEHOUSE_REQUIRE."""

from __future__ import annotations

import os


def is_required(part: str) -> bool:
    """Return whether GATEHOUSE_REQUIRE names `part`: its absence is then a failure instead of a reason to skip."""
    return part in os.environ.get("GATEHOUSE_REQUIRE", "").split(",")
