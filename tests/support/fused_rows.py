"""The test of one-row products for any kind of weight: a product added to the residual stream, then a product of its norm."""

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
    before: Weight, behind: Weight, sizes: tuple[int, int, int], gate: Gate | None, dtype: torch.dtype, *, has_bias: bool
) -> None:
    """sizes: width of the residual stream, columns of `before`, outputs of `behind` (half its rows if it is gated)."""
    width, columns, inner = sizes
    x = padded_rows(normal(1, columns, dtype=dtype, device=CPU) + 0.5, columns + 16)
    made_of = partial(normal, dtype=dtype, device=CPU)
    given = x, before, made_of(1, width, seed=3), made_of(width, seed=4)
    biases = made_of(width, seed=5), made_of(inner * (2 if gate else 1), seed=6)
    made = linear_add(*given, alpha=0.5, bias=biases[0] if has_bias else None)
    product = normed_linear(made, behind, EPS, gate=gate, bias=biases[1] if has_bias else None)
    expected = reference.linear_add(*given, alpha=0.5, bias=biases[0] if has_bias else None)
    assert_near(made.total, expected.total, "matmul")
    assert_near(made.weighted, expected.weighted, "matmul", scale=4)
    assert_near(made.squares.sum(0), made.total.float().square().sum(-1), "matmul")
    exact = reference.normed_linear(made, behind, EPS, gate=gate, bias=biases[1] if has_bias else None)
    assert_near(product, exact, "matmul", scale=8)
