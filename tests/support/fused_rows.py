"""Checks the fused products of one row, whatever their weights: one added to the stream, and one of the stream's norm."""

from __future__ import annotations

from functools import partial

import torch

from kernels.quantised_weights import Weight
from kernels.reference import fused_linear as reference
from kernels.residual_stream import Gate
from kernels.triton.fused_linear import linear_add, normed_linear
from tests.support.kernel_cases import normal, padded_rows
from tests.support.kernel_tolerances import assert_near

CPU = torch.device("cpu")
EPS = 1e-6


def check_row(
    first_weight: Weight,
    second_weight: Weight,
    sizes: tuple[int, int, int],
    gate: Gate | None,
    dtype: torch.dtype,
    *,
    has_bias: bool,
) -> None:
    """sizes: width of the residual stream, columns of `first_weight`, outputs of `second_weight` (half its rows if gated)."""
    width, columns, inner = sizes
    x = padded_rows(normal(1, columns, dtype=dtype, device=CPU) + 0.5, columns + 16)
    values = partial(normal, dtype=dtype, device=CPU)
    operands = x, first_weight, values(1, width, seed=3), values(width, seed=4)
    biases = values(width, seed=5), values(inner * (2 if gate else 1), seed=6)
    actual = linear_add(*operands, alpha=0.5, bias=biases[0] if has_bias else None)
    product = normed_linear(actual, second_weight, EPS, gate=gate, bias=biases[1] if has_bias else None)
    expected = reference.linear_add(*operands, alpha=0.5, bias=biases[0] if has_bias else None)
    assert_near(actual.total, expected.total, "matmul")
    assert_near(actual.weighted, expected.weighted, "matmul", scale=4)
    assert_near(actual.squares.sum(0), actual.total.float().square().sum(-1), "matmul")
    exact = reference.normed_linear(actual, second_weight, EPS, gate=gate, bias=biases[1] if has_bias else None)
    assert_near(product, exact, "matmul", scale=8)
