"""Checks the fused products of a few rows, whatever their weights: one added to the stream, and one of the stream's norm."""

from __future__ import annotations

import math
from functools import partial

import torch

from kernels.quantised_weights import Fp8Weight, Int4Weight, Int8Weight, Weight
from kernels.reference import fused_linear as reference
from kernels.residual_stream import Gate
from kernels.triton.products import hopper_rows
from kernels.triton.products.epilogue import Epilogue
from kernels.triton.products.fused_linear import linear_add, normed_linear
from kernels.triton.products.hopper_tiles import HopperTiles
from tests.support.kernel_cases import Guarded, normal, padded_rows
from tests.support.kernel_tolerances import assert_near

CPU = torch.device("cpu")
EPS = 1e-6


def check_rows(
    num_rows: int,
    first_weight: Weight,
    second_weight: Weight,
    sizes: tuple[int, int, int],
    gate: Gate | None,
    dtype: torch.dtype,
    *,
    has_bias: bool,
) -> None:
    """sizes: width of the residual stream, columns of `first_weight`, outputs of `second_weight` (half its rows if gated). Rows
    of x are among NaN."""
    width, columns, inner = sizes
    x = padded_rows(normal(num_rows, columns, dtype=dtype, device=CPU) + 0.5, columns + 16)
    values = partial(normal, dtype=dtype, device=CPU)
    operands = x, first_weight, values(num_rows, width, seed=3), values(width, seed=4)
    biases = values(width, seed=5), values(inner * (2 if gate else 1), seed=6)
    actual = linear_add(*operands, alpha=0.5, bias=biases[0] if has_bias else None)
    product = normed_linear(actual, second_weight, EPS, gate=gate, bias=biases[1] if has_bias else None)
    expected = reference.linear_add(*operands, alpha=0.5, bias=biases[0] if has_bias else None)
    assert_near(actual.total, expected.total, "matmul")
    assert_near(actual.weighted, expected.weighted, "matmul", scale=4)
    assert_near(actual.squares.sum(0), actual.total.float().square().sum(-1), "matmul")
    exact = reference.normed_linear(actual, second_weight, EPS, gate=gate, bias=biases[1] if has_bias else None)
    assert_near(product, exact, "matmul", scale=8)


def check_edges(num_rows: int, weight: Int8Weight | Fp8Weight | Int4Weight, tiles: HopperTiles) -> None:
    """A product and its residual sum, with NaN in the rows after the last, write nothing but their outputs."""
    outputs, columns = (
        (weight.num_rows, weight.num_columns)
        if isinstance(weight, Int4Weight)
        else (weight.values.shape[0], weight.values.shape[1])
    )
    values = partial(normal, dtype=torch.bfloat16, device=CPU)
    x = torch.full((num_rows + 3, columns), math.nan, dtype=torch.bfloat16)
    x[:num_rows] = values(num_rows, columns)
    out, weighted = (Guarded((num_rows, outputs), torch.bfloat16, CPU) for _ in range(2))
    squares = Guarded((-(-outputs // tiles.block_n), num_rows), torch.float32, CPU)
    operands = values(num_rows, outputs, seed=1), values(outputs, seed=2)
    epilogue = Epilogue(
        out=out.tensor, residual=operands[0], norm_weight=operands[1], weighted=weighted.tensor, squares_out=squares.tensor
    )
    hopper_rows.launch(x[:num_rows], weight, epilogue, tiles)
    expected = reference.linear_add(x[:num_rows], weight, *operands)
    assert_near(out.check(), expected.total, "matmul")
    assert_near(weighted.check(), expected.weighted, "matmul", scale=4)
    assert_near(squares.check().sum(0), out.tensor.float().square().sum(-1), "matmul")
