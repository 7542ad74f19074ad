"""Kernel tests choose their device here, before any of them imports triton. Tests under other versions run in processes."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.support.deselection import deselect
from tests.support.kernel_cases import poisoned
from tests.support.kernel_device import interpret_without_gpu
from tests.support.pairwise_cases import skipped_cases
from tests.support.quick_interpreter import replace_language_once
from tests.support.required_parts import is_required
from tests.support.triton_jobs import OLD_INTERPRETER, TritonJobs, locked_versions

FOLDER = Path(__file__).parent
DEVICE = interpret_without_gpu()
NO_TRAPS = "ignore:invalid value encountered:RuntimeWarning"
"""A card goes on with NaN. The interpreter's numpy warns of it, also where memory that nobody has written holds such bits."""
WITHOUT_GPU = ("test_rehearsal_", "test_triton_interpreter.py")  # with a GPU nothing is rehearsed or interpreted
COMPILING, OTHER_VERSIONS = "test_compiled_kernels.py", "test_other_tritons.py"
JOBS = pytest.StashKey[TritonJobs]()
# Whole models run kernels that have tests of their own, and what models ask for is decided before Triton is: both with this
# environment's Triton alone.
OF_KERNELS = [path for path in sorted(FOLDER.glob("test_triton_*.py")) if not path.stem.endswith(("_model", "_gate_covers"))]

if importlib.util.find_spec("triton") is None:
    assert not is_required("triton"), "Triton is not installed; `python3 installer test` installs it"
    names = ("triton_*", "rehearsal_*", "comp*", "gpu_bench*", "hopper_rows", "warm_up_sizes")  # it is made for Linux alone
    collect_ignore_glob = [f"test_{name}.py" for name in names]
elif DEVICE.type == "cpu":
    replace_language_once()


@pytest.fixture
def device() -> torch.device:
    """The GPU, or the CPU with kernels in Triton's interpreter."""
    return DEVICE


@pytest.fixture(scope="session")
def llama() -> Path:
    """A Llama of one layer, small enough for the interpreter."""
    from tests.support.tiny_models import saved_model

    return saved_model("llama", num_hidden_layers=1, head_dim=16).directory


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """The number of torch's threads within the test."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def poisoned_partial_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Poisons partial sums with NaN, so that adding one that no program stored shows."""
    monkeypatch.setattr(
        "kernels.triton.products.split_k.allocate_partials",
        lambda size, device: poisoned(size, dtype=torch.float32, device=device),
    )


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> Callable[[], int]:
    """How many kernels were launched since it was asked last."""
    count = [0]
    if device.type == "cuda":
        from triton.runtime.jit import JITFunction as Launcher

        name = "run"
    else:
        from triton.runtime.interpreter import GridExecutor as Launcher

        name = "__call__"
    original = getattr(Launcher, name)

    def counted(self: object, *args: object, **kwargs: object) -> object:
        count[0] += 1
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Launcher, name, counted)

    def since() -> int:
        made, count[0] = count[0], 0
        return made

    return since


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take few cases that have each pair of options. Put what waits for other processes behind everything that runs meanwhile,
    the tests of other folders included.

    Tests of this folder do not fail on what an old interpreter does: where this environment's own Triton is one, all meet it.
    """
    deselect(config, items, skipped_cases([item for item in items if item.path.parent == FOLDER]))
    for item in items:
        if item.path.parent == FOLDER:
            item.add_marker(pytest.mark.filterwarnings(OLD_INTERPRETER, NO_TRAPS))
            if DEVICE.type == "cuda" and item.path.name.startswith(WITHOUT_GPU):
                item.add_marker(pytest.mark.skip("needs Triton's interpreter, which a GPU replaces"))
    items.sort(key=lambda item: item.path.parent == FOLDER and item.path.name in (COMPILING, OTHER_VERSIONS))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Begin the work of other processes, as much of it as a collected test will ask for."""
    asked = {item.path.name for item in session.items if item.path.parent == FOLDER}
    if session.config.option.collectonly or not asked & {COMPILING, OTHER_VERSIONS}:
        return
    jobs = TritonJobs()
    session.config.stash[JOBS] = jobs
    session.config.add_cleanup(jobs.close)
    for version in locked_versions():
        if COMPILING in asked:
            jobs.start_compiling(version)
        if OTHER_VERSIONS in asked:
            jobs.start_tests(version, OF_KERNELS)


@pytest.fixture
def triton_jobs(request: pytest.FixtureRequest) -> TritonJobs:
    """The work of other processes."""
    return request.config.stash[JOBS]
