"""Linter, formatter and type checker, run as tests so that one command checks everything."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
CACHE = REPO / ".mypy_cache"
"""Exists if mypy was run by hand. In a clone that is used once, writing a cache takes a seventh of the time."""


@pytest.mark.parametrize(
    "tool",
    [("ruff", "check", "--quiet", "."), ("ruff", "format", "--check", "."), ("mypy", "--no-error-summary")],
    ids=" ".join,
)
def test_the_tool_reports_nothing(tool: tuple[str, ...]) -> None:
    without_cache = ["--cache-dir", os.devnull] if tool[0] == "mypy" and not CACHE.exists() else []
    answer = subprocess.run(
        [sys.executable, "-m", *tool, *without_cache], cwd=REPO, capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
