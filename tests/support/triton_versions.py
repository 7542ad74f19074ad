"""The versions of Triton on this machine and how a process is started with one: the environment's, and others beside it.

The installer puts the newest that pyproject.toml allows into the test environment and the oldest into its folder
`triton-<version>`. CI names `triton` in GATEHOUSE_REQUIRE: a version that is absent then fails what it was to test.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
ENVIRONMENT = Path(sys.prefix)


@dataclass(frozen=True)
class TritonVersion:
    """One version; `folder` stands before everything else on the path, None is the environment's own."""

    version: str
    folder: Path | None

    def environment(self, cache: Path, *, interpret: bool) -> dict[str, str]:
        """Variables of a process that uses this version, compiling into `cache`, or interpreting."""
        kept = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "PYTHONPATH")}
        path = {"PYTHONPATH": str(self.folder)} if self.folder is not None else {}
        mode = {"TRITON_INTERPRET": "1"} if interpret else {}
        single = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}  # several run beside one another
        return {**kept, **path, **mode, **single, "TRITON_CACHE_DIR": str(cache)}

    def compile_modules(self, modules: Sequence[str], cache: Path, only: int | None = None) -> list[dict[str, Any]]:
        """The rows of `kernels.triton.gate`, for one compute capability or all. Raises AssertionError with its last words.

        One process for all modules: its start takes as long as three compilations.
        """
        options = [] if only is None else ["--only", str(only)]
        answer = subprocess.run(
            [sys.executable, "-m", "kernels.triton.gate", *options, *modules],
            cwd=REPO,
            env=self.environment(cache, interpret=False),
            capture_output=True,
            text=True,
            check=False,
        )
        assert answer.returncode == 0, answer.stderr[-3000:]
        return [json.loads(line) for line in answer.stdout.splitlines()]


def installed() -> list[TritonVersion]:
    """The environment's own version first, then those in folders beside it."""
    try:
        found = [TritonVersion(metadata.version("triton"), None)]
    except metadata.PackageNotFoundError:
        found = []
    for folder in sorted(ENVIRONMENT.glob("triton-*")):
        version = folder.name.removeprefix("triton-")
        if version not in {other.version for other in found}:
            found.append(TritonVersion(version, folder))
    return found


def find(version: str) -> TritonVersion | None:
    """The version of that name, None when this machine does not have it."""
    return next((found for found in installed() if found.version == version), None)
