"""The compile gate covers every variant that models request on a GPU."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kernels.triton.gate.compilation import CAPABILITIES
from tests.support.triton_versions import compiling_process

ASKED = {
    80: ("llama-8b", "gemma-3-4b"),
    89: ("qwen3-0.6b", "qwen3-30b-a3b"),
    90: (
        "llama-8b", "qwen3-0.6b", "qwen3-30b-a3b", "gemma-3-4b", "llama-8b-int8", "llama-8b-fp8", "llama-8b-awq",
        "llama-8b-invariant", "llama-8b-invariant-awq",
    ),
    100: ("llama-8b", "gemma-3-4b"),
}  # fmt: skip
"""Models of each card: all of them on the card that has most kernels of its own, each of the others has two, and each model two
cards or three."""
COVERED = {
    "scan_kernel", "sum_weights_kernel", "select_kernel", "head_kernel", "merge_argmax_kernel",
    "partial_logprobs_kernel", "merge_logprobs_kernel", "linear_kernel", "grouped_kernel", "sort_kernel",
    "route_kernel", "combine_kernel", "prepare_decode_kernel", "copy_blocks_kernel", "count_tokens_kernel",
    "split_kernel", "merge_kernel", "prefill_kernel", "bitmask_kernel", "merge_chunks_kernel", "lone_kernel",
    "overlapped_kernel", "rows_kernel", "merge_rows_kernel", "invariant_kernel", "invariant_int4_kernel", "linear_int4_kernel",
    "fused_row_kernel", "fused_byte_rows_kernel", "fused_int4_rows_kernel", "fused_int4_kernel", "dequantise_bytes_kernel",
    "dequantise_int4_kernel",
}  # fmt: skip
"""Kernels whose tiles follow from the model. Of those that go over rows of some width the gate has widths alone."""


@pytest.fixture(scope="module")
def answers() -> dict[tuple[int, str], dict[str, Any]]:
    """By card and model."""
    cards = [f"{number}={','.join(models)}" for number, models in ASKED.items()]
    found = map(json.loads, compiling_process("tests.support.triton_models", *cards).splitlines())
    return {(answer["capability"], answer["model"]): answer for answer in found}


@pytest.mark.parametrize(("capability", "model"), [(number, model) for number in CAPABILITIES for model in ASKED[number]])
def test_every_variant_that_a_model_requests_is_compiled_in_the_gate(
    answers: dict[tuple[int, str], dict[str, Any]], capability: int, model: str
) -> None:
    answer = answers[capability, model]
    assert answer["asked"] > 30
    missing = {kernel: variants for kernel, variants in answer["missing"].items() if kernel in COVERED}
    assert missing == {}
    assert answer["options"] == {}, "launched with warps, stages or registers that the gate does not compile with"
