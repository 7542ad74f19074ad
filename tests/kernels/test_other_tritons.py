"""The interpreter tests also pass under the other supported versions of Triton."""

from __future__ import annotations

from importlib import metadata

import pytest

from tests.support.triton_jobs import TritonJobs, locked_versions


def own_version() -> str:
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return ""


@pytest.mark.parametrize("version", [version for version in locked_versions() if version != own_version()])
def test_the_interpreter_tests_pass_under_another_triton(triton_jobs: TritonJobs, version: str) -> None:
    output = triton_jobs.test_output(version)
    if output:
        pytest.fail(output[-6000:], pytrace=False)
