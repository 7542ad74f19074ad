"""Jobs with other versions of Triton that run alongside the tests, in processes of their own, two at a time.

They have a low priority, so that they hardly delay tests with time limits.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from steps.locks import read_lock

from kernels.triton.gate.declared import module_names
from tests.support import triton_versions
from tests.support.required_parts import is_required
from tests.support.triton_versions import RECORD, REPO, TritonVersion

PROCESSES = 2  # at low priority, they leave the processors to the tests
LIMIT_S = 3600  # for a slow machine and an empty record
LOW_PRIORITY = ("nice", "-n", "10")
OLD_INTERPRETER = "ignore:Conversion of an array with ndim:DeprecationWarning"
"""Triton 3.6 converts the bound of a `range` in a way that numpy rejects from 2.4 on; our lock stays below that."""

KERNEL_FILES = {
    f"{path.parent.name}.{path.stem}": path
    for path in sorted((REPO / "kernels" / "triton").glob("*/*.py"))
    if path.parent.name != "gate"
}
"""The modules in the packages of `kernels.triton`, as `rows.norm`."""
MODULES = module_names()
Rows = list[dict[str, Any]]


def locked_versions() -> list[str]:
    """The locked versions, oldest first: both ends of the range that the kernels support."""
    return [pin.version for pin in read_lock("triton").pins]


class TritonJobs:
    """Runs the compile gate and the interpreter tests under each locked version that is installed."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="gatehouse-triton-")
        self._pool = ThreadPoolExecutor(PROCESSES)
        self._running: set[subprocess.Popen[str]] = set()
        self._compiled: dict[str, Future[Rows]] = {}
        self._tested: dict[str, Future[str]] = {}

    def start_tests(self, version: str, files: Iterable[Path]) -> None:
        """Start the tests in `files` under `version`, unless it is this process's version or not installed."""
        found = triton_versions.find(version)
        if found is not None and found.folder is not None:
            self._tested[version] = self._pool.submit(self._test, found, [str(file) for file in files])

    def start_compiling(self, version: str) -> None:
        """Start the compile gate for every module under `version`, if it is installed."""
        found = triton_versions.find(version)
        if found is not None:
            self._compiled[version] = self._pool.submit(self._compile, found)

    def rows(self, version: str) -> Rows:
        """The gate's rows. Skips if the version is not installed, or fails if GATEHOUSE_REQUIRE names `triton`."""
        if version not in self._compiled:
            _absent(version)
        return self._compiled[version].result()

    def test_output(self, version: str) -> str:
        """The output of the tests under `version`, empty when all passed. Skips or fails as `rows` does."""
        if version not in self._tested:
            _absent(version)
        return self._tested[version].result()

    def close(self) -> None:
        """Cancel waiting jobs, terminate running ones, and remove their files."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in list(self._running):
            process.terminate()
        self._pool.shutdown()
        self._folder.cleanup()

    def _test(self, found: TritonVersion, files: Sequence[str]) -> str:
        interpret = not torch.cuda.is_available()
        fewer = ("-p", "tests.support.one_case_per_test")  # all cases run under this environment's own version
        command = [
            *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *fewer), "--tb=short", "-W", OLD_INTERPRETER, *files
        ]  # fmt: skip
        status, out, err = self._run(command, found, interpret=interpret)
        return "" if status == 0 else out + err

    def _compile(self, found: TritonVersion) -> Rows:
        status, out, err = self._run(triton_versions.gate_command(MODULES, RECORD), found, interpret=False)
        assert status == 0, err[-3000:]
        return triton_versions.gate_rows(out)

    def _run(self, command: Sequence[str], found: TritonVersion, *, interpret: bool) -> tuple[int, str, str]:
        """Exit status, standard output and standard error."""
        environment = found.environment(Path(self._folder.name, found.version), interpret=interpret)
        process = subprocess.Popen(
            [*LOW_PRIORITY, *command],
            cwd=REPO,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._running.add(process)
        try:
            out, err = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise
        finally:
            self._running.discard(process)
        return process.returncode, out, err


def _absent(version: str) -> None:
    reason = f"Triton {version} is not on this machine; `python3 installer test` installs it"
    if is_required("triton"):
        pytest.fail(reason)
    pytest.skip(reason)
