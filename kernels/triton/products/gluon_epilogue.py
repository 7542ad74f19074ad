"""What the Gluon kernels of few rows share around their loops: waits, and an epilogue whose data is loaded before the loop.

The epilogue is that of `epilogue.apply_epilogue`, for kernels whose programs each sum all columns of their outputs. Outputs are
the rows of a matrix instruction, x's rows its columns: a single row of x fills all of them with copies, more are padded to a
multiple of them. Warps have summed different columns; the sum of their sums is distributed over all threads, outputs along the
lanes. Data that no kernel writes is loaded before the wait for the previous kernel, so that the end waits for no load.
"""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.triton.products import hopper_tiles
from kernels.triton.rows.activation import gated_activation

OPERAND_ROWS = gl.constexpr(hopper_tiles.OPERAND_ROWS)
"""Columns of a matrix instruction's right operand: rows of x, or copies of a single one."""

gluon_gated_activation = gluon.jit(gated_activation.fn)


@triton.constexpr_function
def sums_layout(num_outputs: int, num_warps: int) -> gl.SliceLayout:
    """The layout of the sums of a program, [HALVES · outputs, rows], with a thread's halves of an output together."""
    lanes = min(32, num_outputs)
    return gl.SliceLayout(0, gl.BlockedLayout([num_warps, 1, 1], [1, lanes, 32 // lanes], [1, 1, num_warps], [2, 1, 0]))


@gluon.jit
def output_rows(tile, N, HALVES: gl.constexpr, OUTPUTS: gl.constexpr, LAYOUT: gl.constexpr):
    """The weight's rows that a program multiplies, OUTPUTS of each half, and which of them exist: both [HALVES · OUTPUTS]"""
    lane = gl.arange(0, HALVES * OUTPUTS, layout=LAYOUT)
    column = tile * OUTPUTS + lane % OUTPUTS
    return column + lane // OUTPUTS * N, column < N


@gluon.jit
def load_or(values, offsets, mask, DEFAULT: gl.constexpr):
    """Loads values in float32, each of which is read once; DEFAULT if `values` is None."""
    if values is None:
        return DEFAULT
    else:  # noqa: RET505 - Triton takes the branch away where it is not a tail
        return gl.load(values + offsets, mask=mask, other=0.0, eviction_policy="evict_first").to(gl.float32)


@gluon.jit
def load_column(values, outputs, mask):
    """`load_or` for a value of each output, the same for all rows: [outputs, 1]; 0 if `values` is None."""
    if values is None:
        return 0.0
    else:  # noqa: RET505
        return load_or(values, outputs, mask, 0.0)[:, None]


@gluon.jit
def row_offsets(M, x_stride, NUM_ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """Offsets of x's rows: [1, NUM_ROWS, 1]. Rows beyond M have the last one's, so that their loads need no mask."""
    row = gl.arange(0, NUM_ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    if NUM_ROWS == 1:
        return row[None, :, None]
    else:  # noqa: RET505
        return (gl.minimum(row, M - 1) * x_stride)[None, :, None]


@gluon.jit
def load_squares(squares, M, num_squares, BLOCK: gl.constexpr, NUM_ROWS: gl.constexpr, WARPS: gl.constexpr):
    """Loads the partial sums of squares, to be added up after the product: [BLOCK, NUM_ROWS] float32; 0 without a norm. In one
    layout for 8 and 16 rows, so that a row's are added in the same order."""
    if squares is None:
        return 0.0
    else:  # noqa: RET505
        LANES: gl.constexpr = 1 if NUM_ROWS == 1 else 16
        LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [32 // LANES, LANES], [WARPS, 1], [1, 0])
        index = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, LAYOUT))[:, None]
        row = gl.arange(0, NUM_ROWS, layout=gl.SliceLayout(0, LAYOUT))[None, :]
        return gl.load(squares + index * M + row, mask=(index < num_squares) & (row < M), other=0.0)


@gluon.jit
def wait_for_previous(EARLY: gl.constexpr):
    if EARLY:
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def keep_loads_here():
    """Keeps the assembler from moving loads across. It takes no instruction: a warp's threads are together anyway."""
    gl.inline_asm_elementwise("bar.warp.sync -1; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def add_warps(acc, NUM_ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """Adds up the sums of all warps. acc: [WARPS, HALVES · OUTPUTS, padded rows] → [HALVES · OUTPUTS, NUM_ROWS] in LAYOUT"""
    if NUM_ROWS == 1:
        acc = gl.expand_dims(gl.max(acc, 2), 2)  # all copies of x have the same sum
    return gl.sum(gl.convert_layout(acc, LAYOUT.parent), 0)


@gluon.jit
def apply_epilogue(
    product, outputs, output_mask, rows, row_mask, bias, squares, row_squares, residual, residual_values, norm_weight,
    next_weights, out, weighted, squares_out, tile, M, N, K, eps, alpha, OUTPUTS: gl.constexpr, GATE: gl.constexpr,
):  # fmt: skip
    """Applies norm, bias, gate and residual sum to product: [HALVES · OUTPUTS, rows] float32, and stores the results.

    `bias`, `residual_values` and `next_weights` (the next norm's weight) were loaded by `load_or` in the layout of `product`,
    in which `outputs` and `rows` are, too: [HALVES · OUTPUTS] and [rows]; `squares`, `residual` and `norm_weight` are None for
    parts that are absent."""
    LAYOUT: gl.constexpr = product.type.layout
    if squares is not None:
        mean = gl.convert_layout(gl.sum(row_squares, 0), gl.SliceLayout(0, LAYOUT)) / K
        product *= alpha * gl.rsqrt(mean + eps)[None, :]
    product += bias
    if GATE is not None:
        gate, up = product.reshape([2, OUTPUTS, product.shape[1]]).permute([1, 2, 0]).split()
        product = gl.convert_layout(gluon_gated_activation(gate, up, GATE == "gelu_tanh"), LAYOUT)
        outputs, output_mask = output_rows(tile, N, 1, OUTPUTS, gl.SliceLayout(1, LAYOUT))
    mask = output_mask[:, None] & row_mask[None, :]
    offsets = rows[None, :] * N + outputs[:, None]
    if residual is not None:
        product = residual_values + alpha * product
    stored = product.to(out.dtype.element_ty)
    gl.store(out + offsets, stored, mask=mask)
    if norm_weight is not None:
        rounded = gl.where(mask, stored.to(gl.float32), 0.0)
        gl.store(weighted + offsets, (rounded * next_weights).to(weighted.dtype.element_ty), mask=mask)
        gl.store(squares_out + tile * M + rows, gl.sum(rounded * rounded, 0), mask=row_mask)
