"""Every configuration that serving uses, compiled to machine code for the cards we name, by the oldest and the newest Triton.

Processes of their own, two at a time, without TRITON_INTERPRET: a kernel module is compiled or interpreted, never both.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support import triton_versions
from tests.support.databases import required

REPO = Path(__file__).resolve().parents[2]
FOLDER = REPO / "kernels" / "triton"
PROCESSES = min(2, os.cpu_count() or 1)
MODULES = sorted(path.stem for path in FOLDER.glob("*.py") if "\ndef compilations(" in path.read_text("utf-8"))
PROMISED = triton_versions.promised()
Rows = list[dict[str, Any]]


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[tuple[str, str], Future[Rows]]]:
    """The rows of each version and module, all being made from the first test on."""
    with ThreadPoolExecutor(PROCESSES) as pool:
        yield {
            (found.version, module): pool.submit(
                found.compile_module, f"kernels.triton.{module}", tmp_path_factory.getbasetemp() / f"triton-{found.version}"
            )
            for version in PROMISED
            if (found := triton_versions.find(version)) is not None
            for module in MODULES
        }
        pool.shutdown(cancel_futures=True)


def rows(compiled: dict[tuple[str, str], Future[Rows]], version: str, module: str) -> Rows:
    """The rows of one module; where this machine has no such Triton, a skip or, if CI promised it, a failure."""
    if (version, module) not in compiled:
        reason = f"Triton {version} is not on this machine; `python3 installer test` installs it"
        pytest.fail(reason) if required("triton") else pytest.skip(reason)
    return compiled[version, module].result()


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("version", PROMISED)
def test_every_configuration_becomes_machine_code_that_may_be_served(
    compiled: dict[tuple[str, str], Future[Rows]], version: str, module: str
) -> None:
    made = rows(compiled, version, module)
    assert made, f"{module} declares no configuration"
    assert {row["triton"] for row in made if "triton" in row} <= {version}
    faults = [f"sm_{row['capability']} {row['name']}: {fault}" for row in made for fault in row["faults"]]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("version", PROMISED)
def test_every_configuration_has_a_name_of_its_own(compiled: dict[tuple[str, str], Future[Rows]], version: str) -> None:
    names = [(row["name"], row["capability"]) for module in MODULES for row in rows(compiled, version, module)]
    assert len(names) == len(set(names))


def test_every_kernel_is_compiled_by_these_tests() -> None:
    kernels = {path.stem for path in FOLDER.glob("*.py") if "\n@triton.jit" in path.read_text("utf-8")}
    declared = "\n".join((FOLDER / f"{module}.py").read_text("utf-8") for module in MODULES)
    assert not {name for name in kernels - set(MODULES) if f"kernels.triton.{name} import" not in declared}
