"""Every configuration that serving uses, compiled for all supported GPUs by the oldest and the newest Triton (ADR 51).

Of the kernels recorded in bench/results/compiled_kernels.jsonl only a sample is compiled again (ADR 53).
"""

from __future__ import annotations

import pytest

from kernels.triton.gate.record import read
from tests.support.triton_jobs import KERNEL_FILES, MODULES, TritonJobs, locked_versions
from tests.support.triton_versions import RECORD

PROMISED = locked_versions()


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("version", PROMISED)
def test_every_configuration_compiles_and_passes_the_gate(triton_jobs: TritonJobs, version: str, module: str) -> None:
    made = [row for row in triton_jobs.rows(version) if row["module"] == module]
    assert made, f"{module} declares no configuration"
    assert {row["triton"] for row in made if "triton" in row} <= {version}
    faults = [f"sm_{row['capability']} {row['name']}: {fault}" for row in made for fault in row["faults"]]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("version", PROMISED)
def test_the_record_matches_the_kernels(triton_jobs: TritonJobs, version: str) -> None:
    rows = triton_jobs.rows(version)
    new = {row["name"] for row in rows if not row["is_recorded"]}
    declared = {(row["module"], row["name"], row["capability"], version) for row in rows}
    gone = {place for place in read(RECORD) if place[3] == version} - declared
    assert not new | gone, f"{len(new)} new or changed, {len(gone)} gone: run `python -m bench.compiled_kernels`"


def test_every_configuration_has_a_unique_name(triton_jobs: TritonJobs) -> None:
    names = [(row["name"], row["capability"]) for row in triton_jobs.rows(PROMISED[-1])]
    assert len(names) == len(set(names))


def test_configurations_are_declared_in_the_file_of_their_name() -> None:
    assert set(MODULES) <= KERNEL_FILES.keys()


def test_every_file_with_a_kernel_declares_configurations_or_is_used_by_one_that_does() -> None:
    texts = {name: path.read_text("utf-8") for name, path in KERNEL_FILES.items()}
    missing = {name for name, text in texts.items() if "\n@triton.jit" in text} - set(MODULES)
    served = list(MODULES)
    for module in served:  # which grows by those that it reaches
        reached = {name for name in missing if f"kernels.triton.{name} import" in texts[module]}
        missing -= reached
        served += sorted(reached)
    assert not missing
