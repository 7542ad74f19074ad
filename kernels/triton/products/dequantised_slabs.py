"""Products of many rows with quantised weights: some rows of a weight at a time are dequantised once and multiplied by cuBLAS.

Tiles that decode weights in registers decode them again for every tile of rows of x, beside the tensor cores' work. With many
rows it costs less to write the weight out once: in slabs that stay in the second-level cache until they have been multiplied.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from kernels.quantised_weights import Fp8Weight, Int8Weight
from kernels.triton.products.linear import cublas

TILED_ROWS_MAX = 512  # above, dequantising the weight once costs less than decoding it in every tile of rows
SLAB_ELEMENTS = 1 << 23  # dequantised at a time: 16 MiB, so that the product reads them from the L2 cache
BLOCK_N, BLOCK_K = 16, 256
"""Rows and columns of a program of four warps: a thread loads 32 codes and stores 64 bytes."""


@triton.jit(do_not_specialize=["num_rows"])
def dequantise_bytes_kernel(
    values_ptr, scales_ptr, out_ptr, num_rows, num_columns, stride_values, stride_out,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Dequantises a tile of [num_rows, num_columns] values → out, each row with its scale."""
    columns = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    rows = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask = rows < num_rows
    mask = row_mask[:, None] & (columns < num_columns)[None, :]
    wide_rows = rows.to(tl.int64)[:, None]
    values = tl.load(
        values_ptr + wide_rows * stride_values + columns[None, :], mask=mask, other=0.0, eviction_policy="evict_first"
    )
    scales = tl.load(scales_ptr + rows, mask=row_mask, other=0.0)
    weights = values.to(tl.float32) * scales[:, None]
    tl.store(out_ptr + wide_rows * stride_out + columns[None, :], weights.to(out_ptr.dtype.element_ty), mask=mask)


def takes_slabs(x: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether rows are so many, of 16 bits, and multiplied to their own type, that `multiply_slabs` serves them."""
    return x.shape[0] > TILED_ROWS_MAX and x.element_size() == 2 and out.dtype is x.dtype


def multiply_slabs(
    x: torch.Tensor,
    dequantise: Callable[[int, torch.Tensor], None],
    width: int,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> torch.Tensor:
    """out[m, n] = Σ_k x[m, k] · w[n, k] + bias[n]; x: [M, K], out: [M, N] of one type of 16 bits, bias: [N] → out

    `dequantise(first, slab)` writes rows first … first + R - 1 of w into slab: [R, width] like x, of which K columns are
    multiplied. Allocates SLAB_ELEMENTS of x's type, or N·width. Besides what dequantising moves, cuBLAS reads 2·N·width bytes
    of slabs and 2·M·K of x for each, writes 2·M·N; 2·M·N·K operations. Accumulates in float32, adds the bias before rounding.
    """
    num_outputs = out.shape[1]
    slab_rows = max(16, SLAB_ELEMENTS // width // 16 * 16)
    memory = x.new_empty(min(slab_rows, num_outputs), width)
    for first in range(0, num_outputs, slab_rows):
        last = min(first + slab_rows, num_outputs)
        slab = memory[: last - first]
        dequantise(first, slab)
        cublas(x, slab[:, : x.shape[1]], None if bias is None else bias[first:last], out[:, first:last])
    return out


def dequantise_rows(weight: Int8Weight | Fp8Weight, first: int, out: torch.Tensor) -> None:
    """out[r, k] = scale · value of row first + r: [R, K] of 16 bits

    Reads R·K + 4·R bytes, writes 2·R·K; one operation per weight, in float32, rounded once. Rows beyond R and columns beyond K
    are masked.
    """
    num_rows, num_columns = out.shape
    values = weight.values[first : first + num_rows]
    dequantise_bytes_kernel[(triton.cdiv(num_columns, BLOCK_K), triton.cdiv(num_rows, BLOCK_N))](
        values, weight.scales[first:], out, num_rows, num_columns, values.stride(0), out.stride(0),
        BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, num_warps=4,
    )  # fmt: skip
