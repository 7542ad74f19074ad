"""`start_problems`: why engines would refuse to start on a machine, one by one and together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.errors import EngineConfigError, NotAModelDirectory
from engine.memory import main_memory
from engine.memory.needs import GIB
from engine.simulator.fitting import plan_together
from engine.simulator.refusals import gpu_of_machine, start_problems
from tests.support.published_configs import LLAMA_8B


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return str(tmp_path)


@pytest.mark.parametrize(
    "own",
    [
        {},
        {"kv_cache_bytes": GIB, "max_model_len": 131_072},
        {"kv_cache_bytes": 40 * GIB},
        {"kv_cache_bytes": 1},
        {"max_model_len": 131_073},
        {"quantization": "awq"},
        {"max_num_seqs": 8, "max_num_batched_tokens": 4},
    ],
    ids=str,
)
@pytest.mark.parametrize("memory_gib", [12, 24, 48, 141])
def test_problems_on_a_gpu_equal_those_of_a_plan(own: dict[str, Any], memory_gib: int, folder: str) -> None:
    gpu, engines = gpu_of_machine(memory_gib * GIB, (9, 0)), [{"model": folder}, {"model": folder, **own}]
    problems = start_problems(engines, gpu)
    if own.keys() & {"quantization"} or own.get("max_model_len") == 131_073:
        assert isinstance(problems[1], EngineConfigError)
        (planned,) = plan_together(engines[:1], gpu)
        assert planned.problem == (None if problems[0] is None else str(problems[0]))
        return
    planned_problems = [model.problem for model in plan_together(engines, gpu)]
    assert [problem is None for problem in problems] == [problem is None for problem in planned_problems]
    for problem, planned_problem in zip(problems, planned_problems, strict=True):
        assert problem is None or str(problem) in str(planned_problem)


def test_fp8_is_refused_on_a_gpu_without_it_and_accepted_on_one_with_it(folder: str) -> None:
    engine = {"model": folder, "kv_cache_dtype": "fp8"}
    (problem,) = start_problems([engine], gpu_of_machine(80 * GIB, (8, 0)))
    assert "fp8_e4m3" not in str(problem)
    assert "this one has 8.0" in str(problem)
    assert start_problems([engine], gpu_of_machine(80 * GIB, (8, 9))) == [None]


def test_a_model_on_the_cpu_is_checked_against_main_memory(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = gpu_of_machine(24 * GIB, (9, 0))
    engines = [{"model": folder}, {"model": folder, "device": "cpu"}]
    monkeypatch.setattr("engine.simulator.refusals.main_memory_bytes", lambda: 64 * GIB)
    assert start_problems(engines, gpu) == [None, None]
    monkeypatch.setattr("engine.simulator.refusals.main_memory_bytes", lambda: 16 * GIB)
    on_gpu, on_cpu = start_problems(engines, gpu)
    assert on_gpu is None
    assert f"model {Path(folder).name} does not fit with 256.0 MiB of keys and values: needs" in str(on_cpu)
    assert [str(problem) for problem in start_problems(engines)] == [str(on_cpu)] * 2, "without a GPU, auto is the CPU"


def test_without_a_gpu_all_but_the_memory_of_a_gpu_engine_is_checked(folder: str) -> None:
    engine = {"model": folder, "device": "cuda", "kv_cache_bytes": 900 * GIB}
    (problem,) = start_problems([{**engine, "max_model_len": 131_073}])
    assert "max_model_len (131073) is longer than the model's context" in str(problem)
    assert start_problems([engine]) == [None]


def test_swap_space_shared_prefixes_and_model_folders_are_checked(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main_memory, "main_memory_bytes", lambda: 8 * GIB)
    engines: list[dict[str, Any]] = [
        {"model": folder, "swap_space": 7.0},
        {"model": folder, "shared_prefixes": [str(tmp_path / "missing")]},
        {"model": str(tmp_path / "missing")},
        {"model": folder},
    ]
    swap, prefix, missing, fine = start_problems(engines, gpu_of_machine(80 * GIB, (9, 0)))
    assert "swap_space (7 GiB), page-locked as 8 GiB, is more than 80% of main memory" in str(swap)
    assert "shared_prefixes need the model's tokenizer" in str(prefix)
    assert isinstance(missing, NotAModelDirectory)
    assert fine is None


def test_a_refused_engine_still_counts_against_the_memory_of_others(folder: str, tmp_path: Path) -> None:
    gpu, refused = gpu_of_machine(24 * GIB, (9, 0)), {"model": folder, "shared_prefixes": [str(tmp_path / "missing")]}
    assert start_problems([{"model": folder}], gpu) == [None]
    other, problem = start_problems([{"model": folder}, refused], gpu)
    assert "does not fit" in str(other), "its engine counts the options of the refused one as colocated_models"
    assert "shared_prefixes need the model's tokenizer" in str(problem)


@pytest.mark.parametrize("memory_gib", [8, 141])
def test_a_cache_smaller_than_a_block_is_reported_even_if_the_model_does_not_fit(memory_gib: int, folder: str) -> None:
    engine = {"model": folder, "kv_cache_bytes": 1 << 20, "block_size": 1024}
    (problem,) = start_problems([engine], gpu_of_machine(memory_gib * GIB, (9, 0)))
    assert "kv_cache_bytes (1048576 bytes) is less than one KV block: no request fits" in str(problem)
