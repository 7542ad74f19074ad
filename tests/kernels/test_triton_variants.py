"""Traffic requests no kernel variant that was not compiled at the start, because compiling would delay all requests."""

from __future__ import annotations

import json
from importlib import metadata
from typing import Any

import pytest

from tests.support.triton_jobs import locked_versions
from tests.support.triton_versions import compiling_process

ALL_CASES = (
    "plain", "window-fp8", "awq", "experts-int8", "experts-awq", "ngram-int8-head", "draft-fp8-static", "draft-eager",
    "invariant-fp8", "invariant-awq-experts",
)  # fmt: skip
FEWER_CASES = ("window-fp8", "awq", "experts-int8", "experts-awq", "draft-eager", "invariant-awq-experts")
"""Those that ask for every kernel. Which variants an engine asks for does not depend on Triton, but how Triton tells the
arguments of a kernel apart does: a version that tests run under beside the newest has each kernel asked for."""
CASES = ALL_CASES if metadata.version("triton") == locked_versions()[-1] else FEWER_CASES


pytestmark = pytest.mark.every_case


@pytest.fixture(scope="module")
def variants() -> dict[str, dict[str, Any]]:
    """The variants that each case requested."""
    answers = map(json.loads, compiling_process("tests.support.triton_variants", *CASES).splitlines())
    return {answer["case"]: answer for answer in answers}


@pytest.mark.parametrize("case", CASES)
def test_every_variant_requested_by_serving_was_requested_at_the_start(variants: dict[str, dict[str, Any]], case: str) -> None:
    assert variants[case]["asked"], "kernels are launched through Triton"
    assert variants[case]["while_serving"] == {}


@pytest.mark.parametrize("case", CASES)
def test_every_variant_is_requested_before_the_first_launch(variants: dict[str, dict[str, Any]], case: str) -> None:
    assert variants[case]["launched_first"] == {}


def test_drafts_of_a_draft_model_are_verified_by_compiled_kernels(variants: dict[str, dict[str, Any]]) -> None:
    assert {"accept_drafts_kernel", "sample_residual_kernel", "emit_tokens_kernel"} <= set(variants["draft-eager"]["asked"])


def test_the_reduced_cases_request_every_kernel(variants: dict[str, dict[str, Any]]) -> None:
    asked = {case: set(variants[case]["asked"]) for case in CASES}
    assert set().union(*asked.values()) == set().union(*(asked[case] for case in FEWER_CASES))
