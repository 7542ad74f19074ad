"""No step of ordinary traffic asks for a kernel that was not compiled at the start: a compiler takes seconds, and all wait."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.support.triton_versions import REPO

LIMIT_S = 1800


def variants(case: str) -> dict[str, dict[str, list[str]]]:
    """In a process of its own: this one has its kernels interpreted."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.triton_variants", case]
    answer = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert answer.returncode == 0, answer.stderr[-3000:]
    found: dict[str, dict[str, list[str]]] = json.loads(answer.stdout)
    return found


@pytest.mark.parametrize("case", ["plain", "window-fp8", "experts-int8", "guesses"])
def test_every_variant_of_a_kernel_that_serving_asks_for_was_asked_for_at_the_start(case: str) -> None:
    found = variants(case)
    assert found["at_start"], "kernels are launched through Triton"
    assert found["while_serving"] == {}
