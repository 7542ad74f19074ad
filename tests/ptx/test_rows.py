"""PTX of row-wise kernels: norms, activations, embeddings, quantisation to e4m3."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernels.reference import activation as reference_activation
from kernels.reference import embedding as reference_embedding
from kernels.reference import fp8_rows as reference_fp8
from kernels.reference import norm as reference_norm
from kernels.triton.rows import activation, norm
from kernels.triton.rows.fp8 import quantize_rows_fp8
from kernels.triton.step import embedding
from tests.support.kernel_cases import Guarded, normal, padded_rows
from tests.support.kernel_tolerances import assert_near, assert_same

CPU = torch.device("cpu")
EPS = 1e-6
WIDTHS = pytest.mark.parametrize("width", [64, 1031])
Pair = tuple[torch.Tensor, torch.Tensor]


def rows(count: int, width: int, *, seed: int = 0) -> torch.Tensor:
    """[count, width] bfloat16 among NaN."""
    return padded_rows(normal(count, width, dtype=torch.bfloat16, device=CPU, seed=seed), width + 9)


def assert_codes_near(actual: Pair, expected: Pair) -> None:
    """Rows in e4m3 with their scales."""
    assert_near(actual[1], expected[1], "normed")
    assert_near(actual[0].float() * actual[1], expected[0].float() * expected[1], "fp8")


@WIDTHS
def test_norms_match_the_reference(width: int) -> None:
    x, residual, weight = rows(3, width), rows(3, width, seed=1), normal(width, dtype=torch.bfloat16, device=CPU, seed=2)
    out = Guarded((3, width), torch.bfloat16, CPU)
    norm.rms_norm(x, weight, EPS, out=out.tensor)
    assert_near(out.check(), reference_norm.rms_norm(x, weight, EPS), "normed")
    normed, total = norm.add_rms_norm(x, residual, weight, EPS, alpha=0.5)
    expected, expected_total = reference_norm.add_rms_norm(x, residual, weight, EPS, alpha=0.5)
    assert_near(total, expected_total, "pointwise", scale=4)
    assert_near(normed, expected, "normed", scale=4)


@WIDTHS
def test_norms_in_e4m3_match_the_reference(width: int) -> None:
    x, residual, weight = rows(2, width), rows(2, width, seed=1), normal(width, dtype=torch.float32, device=CPU, seed=2)
    assert_codes_near(norm.rms_norm_fp8(x, weight, EPS), reference_norm.rms_norm_fp8(x, weight, EPS))
    *actual, total = norm.add_rms_norm_fp8(x, residual, weight, EPS)
    *expected, expected_total = reference_norm.add_rms_norm_fp8(x, residual, weight, EPS)
    assert_codes_near((actual[0], actual[1]), (expected[0], expected[1]))
    assert_near(total, expected_total, "pointwise", scale=4)


@pytest.mark.parametrize("name", ["silu_mul", "gelu_tanh_mul"])
def test_gated_activations_match_the_reference(name: str) -> None:
    gate_up = rows(3, 2 * 1096)
    kernel: Callable[..., Any] = getattr(activation, name)
    assert_near(kernel(gate_up), getattr(reference_activation, name)(gate_up), "pointwise", scale=4)
    quantised = getattr(activation, f"{name}_fp8")(gate_up)
    assert_codes_near(quantised, getattr(reference_activation, f"{name}_fp8")(gate_up))


def test_rows_quantised_to_fp8_match_the_reference() -> None:
    x = rows(3, 530) * 5
    assert_codes_near(quantize_rows_fp8(x), reference_fp8.quantize_rows_fp8(x))


@pytest.mark.parametrize("multiplier", [1.0, 48.0])
def test_embeddings_match_the_reference(multiplier: float) -> None:
    table, ids = normal(97, 2304, dtype=torch.bfloat16, device=CPU), torch.tensor([96, 0, 3, 3, 50])
    assert_same(
        embedding.embed(ids, table, multiplier=multiplier), reference_embedding.embed(ids, table, multiplier=multiplier)
    )


def test_rotation_rows_are_those_of_the_tables() -> None:
    cos, sin = (normal(200, 1, 96, dtype=torch.bfloat16, device=CPU, seed=seed) for seed in (0, 1))
    positions = torch.tensor([199, 0, 7])
    for made, table in zip(embedding.rotation_rows(cos, sin, positions), (cos, sin), strict=True):
        assert_same(made, table[positions])


def test_nan_stays_nan_in_e4m3() -> None:
    x = rows(2, 96)
    x[1, 5] = float("nan")
    quantised, _ = quantize_rows_fp8(x)
    assert bool(quantised.float()[1, 5].isnan())
    assert not bool(quantised.float()[0].isnan().any())
