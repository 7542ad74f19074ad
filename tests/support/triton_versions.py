"""The installed versions of Triton, and processes that use one: the environment's own, and others in folders beside it.

The installer puts the newest version that pyproject.toml allows into the test environment, and the oldest into its folder
`triton-<version>`. CI names `triton` in GATEHOUSE_REQUIRE: a missing version is then a failure.
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
RECORD = REPO / "bench" / "results" / "compiled_kernels.jsonl"
ENVIRONMENT = Path(sys.prefix)
LIMIT_S = 900


@dataclass(frozen=True)
class TritonVersion:
    """One version. `folder` comes first on the import path; None for the environment's own version."""

    version: str
    folder: Path | None

    def environment(self, cache: Path, *, interpret: bool) -> dict[str, str]:
        """Environment of a process that uses this version, with the interpreter or compiling into `cache`."""
        kept = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "PYTHONPATH")}
        path = {"PYTHONPATH": str(self.folder)} if self.folder is not None else {}
        mode = {"TRITON_INTERPRET": "1"} if interpret else {}
        single = {"OMP_NUM_THREADS": "1"}  # several run at the same time
        # Line information is not used here and does not change machine code, but takes a sixteenth of the compiler's time.
        unlined = {"TRITON_DISABLE_LINE_INFO": "1"}
        return {**kept, **path, **mode, **single, **unlined, "TRITON_CACHE_DIR": str(cache)}

    def compile_modules(self, modules: Sequence[str], cache: Path, record: Path | None) -> list[dict[str, Any]]:
        """The rows of `kernels.triton.gate` for `modules` (such as `rows.norm`). Raises CalledProcessError."""
        command, environment = gate_command(modules, record), self.environment(cache, interpret=False)
        answer = subprocess.run(command, cwd=REPO, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        return gate_rows(answer.stdout)


def gate_command(modules: Sequence[str], record: Path | None) -> list[str]:
    """The command that runs the gate on `modules` for every card, in one process because its start takes as long as three
    kernels. Only what is missing in `record` is compiled."""
    recorded = [] if record is None else ["--record", str(record)]
    return [sys.executable, "-m", "kernels.triton.gate", *recorded, *modules]


def gate_rows(output: str) -> list[dict[str, Any]]:
    """Parse the output of `gate_command`."""
    return [json.loads(line) for line in output.splitlines()]


def installed() -> list[TritonVersion]:
    """The installed versions: the environment's own first, then those in folders beside it."""
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
    """The installed version of that name, or None."""
    return next((found for found in installed() if found.version == version), None)


def compiling_process(module: str, *arguments: str, cache: Path | None = None) -> str:
    """The output of `python -m module` in a process in which this environment's Triton compiles (into `cache`) instead of
    interpreting. Raises CalledProcessError; its standard error is not captured."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}
    if cache is not None:
        environment["TRITON_CACHE_DIR"] = str(cache)
    command = [sys.executable, "-W", "ignore", "-m", module, *arguments]
    answer = subprocess.run(command, cwd=REPO, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=LIMIT_S)
    return answer.stdout
