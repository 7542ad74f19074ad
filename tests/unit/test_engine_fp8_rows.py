"""Rows quantised to 8 bits by the operation before a product equal those that the product quantises itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels import ops
from kernels.torch import table
from kernels.torch.fp8_rows import quantize_rows_fp8
from tests.support.engines import generation_request, run_to_end, small_engine, tokens
from tests.support.tiny_models import saved_model

PLAIN = table.OPERATIONS
PROMPTS = {"a": [5, 6, 7], "b": list(range(3, 21)), "c": [8]}
Pair = tuple[torch.Tensor, torch.Tensor]


def quantising(operation: Callable[..., torch.Tensor], calls: list[str], name: str) -> Callable[..., Pair]:
    """`operation` followed by the quantisation of its rows; each call appends `name` to `calls`."""

    def quantised_result(*arguments: Any) -> Pair:
        calls.append(name)
        return quantize_rows_fp8(operation(*arguments))

    return quantised_result


def generated_ids(model: Path, **options: Any) -> dict[str, list[int]]:
    events = run_to_end(
        small_engine(model, quantization="fp8", **options),
        [generation_request(name, prompt, max_tokens=6) for name, prompt in PROMPTS.items()],
    )
    return {name: tokens(each) for name, each in events.items()}


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("llama", {"rms_norm", "add_rms_norm", "silu_mul"}),
        ("gemma2", {"rms_norm", "add_rms_norm", "gelu_tanh_mul"}),
        ("olmo2", {"silu_mul"}),
    ],
    ids=lambda value: str(value)[:50],
)
def test_operations_before_an_fp8_product_quantise_its_rows_without_changing_tokens(
    family: str, expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = saved_model(family).directory
    monkeypatch.setattr(ops, "_FLOAT32_TABLES", {})
    before, calls = generated_ids(directory), list[str]()

    def add_rms_norm_fp8(*arguments: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        calls.append("add_rms_norm")
        normed, total = PLAIN.add_rms_norm(*arguments, **options)
        return (*quantize_rows_fp8(normed), total)

    fused = replace(
        PLAIN,
        rms_norm_fp8=quantising(PLAIN.rms_norm, calls, "rms_norm"),
        add_rms_norm_fp8=add_rms_norm_fp8,
        silu_mul_fp8=quantising(PLAIN.silu_mul, calls, "silu_mul"),
        gelu_tanh_mul_fp8=quantising(PLAIN.gelu_tanh_mul, calls, "gelu_tanh_mul"),
    )
    monkeypatch.setattr(ops, "_load_table", lambda _name: fused)
    assert generated_ids(directory) == before
    assert set(calls) == expected
