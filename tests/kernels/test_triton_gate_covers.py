"""What models ask for on an H200 is what the gate compiles: a list that is kept by hand drifts from what launchers choose."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.triton_versions import compiling_process

MODELS = ("llama-8b", "qwen3-0.6b", "qwen3-30b-a3b", "gemma-3-4b")
COVERED = {
    "_split_kernel", "merge_kernel", "_prefill_kernel", "scan_kernel", "weigh_kernel", "choose_kernel", "head_kernel",
    "join_kernel", "logprob_part_kernel", "logprob_join_kernel", "linear_kernel", "grouped_kernel", "sort_kernel",
    "prepare_decode_kernel", "copy_blocks_kernel", "count_tokens_kernel",
}  # fmt: skip
"""Kernels whose tiles follow from the model. Of those that go over rows of some width the gate has widths alone."""


@pytest.fixture(scope="module")
def answers() -> dict[str, dict[str, Any]]:
    """By model."""
    found = map(json.loads, compiling_process("tests.support.triton_models", *MODELS).splitlines())
    return {answer["model"]: answer for answer in found}


@pytest.mark.parametrize("model", MODELS)
def test_every_variant_that_a_model_asks_for_is_compiled_in_the_gate(answers: dict[str, dict[str, Any]], model: str) -> None:
    assert answers[model]["asked"] > 30
    missing = {kernel: variants for kernel, variants in answers[model]["missing"].items() if kernel in COVERED}
    assert missing == {}
