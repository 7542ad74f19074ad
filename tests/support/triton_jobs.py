"""Work with other versions of Triton that runs beside the tests, in processes of its own, at most two at a time."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from steps.locks import read_lock

from tests.support import triton_versions
from tests.support.databases import required
from tests.support.triton_versions import REPO, TritonVersion

PROCESSES = min(2, os.cpu_count() or 1)
LIMIT_S = 900
OLD_INTERPRETER = "ignore:Conversion of an array with ndim:DeprecationWarning"
"""Triton 3.6 turns the bound of a `range` into a number in a way that numpy will refuse from 2.4 on; our lock stays below."""

KERNELS = REPO / "kernels" / "triton"
MODULES = sorted(path.stem for path in KERNELS.glob("*.py") if "\ndef compilations(" in path.read_text("utf-8"))
Rows = list[dict[str, Any]]


def promised() -> list[str]:
    """The versions that the lock names, oldest first: the ends of the range that the kernels are written for."""
    return [pin.version for pin in read_lock("triton").pins]


class TritonJobs:
    """What each promised version that is on this machine makes of the kernels: machine code, and the interpreter's tests."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pool = ThreadPoolExecutor(PROCESSES)
        self._compiled: dict[str, Future[Rows]] = {}
        self._tested: dict[str, Future[str]] = {}

    def start_tests(self, version: str, files: Iterable[Path]) -> None:
        """Begin to run `files` under `version`, unless it is the version of this process or is not on this machine."""
        found = triton_versions.find(version)
        if found is not None and found.folder is not None:
            self._tested[version] = self._pool.submit(self._test, found, [str(file) for file in files])

    def start_compiling(self, version: str, only: int | None) -> None:
        """Begin to compile every module under `version`, if it is on this machine, for one compute capability or for all."""
        found = triton_versions.find(version)
        if found is not None:
            names = [f"kernels.triton.{module}" for module in MODULES]
            cache = self._folder / f"cache-{version}"
            self._compiled[version] = self._pool.submit(found.compile_modules, names, cache, only)

    def rows(self, version: str) -> Rows:
        """What compiling gave. Skips where this machine has no such version, or fails if CI promised it."""
        if version not in self._compiled:
            _absent(version)
        return self._compiled[version].result()

    def test_output(self, version: str) -> str:
        """The output of the tests under `version`, empty when all passed. Skips or fails as `rows` does."""
        if version not in self._tested:
            _absent(version)
        return self._tested[version].result()

    def close(self) -> None:
        """Begin nothing more and wait for what runs."""
        self._pool.shutdown(cancel_futures=True)

    def _test(self, found: TritonVersion, files: Sequence[str]) -> str:
        answer = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=short", "-W", OLD_INTERPRETER, *files],
            cwd=REPO,
            env=found.environment(self._folder / f"cache-{found.version}", interpret=not torch.cuda.is_available()),
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT_S,
        )
        return "" if answer.returncode == 0 else answer.stdout + answer.stderr


def _absent(version: str) -> None:
    reason = f"Triton {version} is not on this machine; `python3 installer test` installs it"
    if required("triton"):
        pytest.fail(reason)
    pytest.skip(reason)
