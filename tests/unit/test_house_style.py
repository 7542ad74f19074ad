"""Linter, formatter and type checker are part of the tests, so that one command holds everything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "tool",
    [("ruff", "check", "--quiet", "."), ("ruff", "format", "--check", "."), ("mypy", "--no-error-summary")],
    ids=" ".join,
)
def test_the_tool_finds_nothing(tool: tuple[str, ...]) -> None:
    answer = subprocess.run([sys.executable, "-m", *tool], cwd=REPO, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stdout + answer.stderr
