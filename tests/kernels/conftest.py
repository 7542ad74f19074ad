"""Kernel tests choose their device here, before any of them imports triton; what other versions make of them runs beside."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.databases import required
from tests.support.kernel_device import interpret_without_gpu
from tests.support.triton_jobs import TritonJobs, promised

FOLDER = Path(__file__).parent
DEVICE = interpret_without_gpu()
COMPILING, OTHER_VERSIONS = "test_compiled_kernels.py", "test_other_tritons.py"
OLDER_VERSIONS_FOR = 90  # the card that they serve on; for the others the newest compiles, and bench/compiled_kernels.py both

if importlib.util.find_spec("triton") is None:
    assert not required("triton"), "Triton is not installed; `python3 installer test` installs it"
    collect_ignore_glob = ["test_triton_*.py", "test_comp*.py"]  # it is made for Linux alone


@pytest.fixture
def device() -> torch.device:
    """The GPU, or the CPU with kernels in Triton's interpreter."""
    return DEVICE


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put what waits for other processes behind the tests that run meanwhile."""
    places = [index for index, item in enumerate(items) if item.path.parent == FOLDER]
    ours = sorted((items[index] for index in places), key=lambda item: item.path.name in (COMPILING, OTHER_VERSIONS))
    for index, item in zip(places, ours, strict=True):
        items[index] = item


@pytest.fixture(scope="session", autouse=True)
def triton_jobs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonJobs]:
    """The work of other processes; only what a collected test will ask for is begun."""
    asked = {item.path.name for item in request.session.items}
    jobs = TritonJobs(tmp_path_factory.mktemp("triton"))
    *older, newest = promised()
    if COMPILING in asked:
        jobs.start_compiling(newest, only=None)
    for version in promised() if OTHER_VERSIONS in asked else ():
        jobs.start_tests(version, sorted(FOLDER.glob("test_triton_*.py")))
    for version in older if COMPILING in asked else ():
        jobs.start_compiling(version, only=OLDER_VERSIONS_FOR)
    yield jobs
    jobs.close()
