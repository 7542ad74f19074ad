"""What the Gluon kernels of one row share around their loops: waits, and an epilogue whose data is loaded before the loop.

The epilogue is that of `epilogue.apply_epilogue`, for kernels whose programs each sum all columns of OUTPUTS outputs, the rows
of a matrix instruction. Data that no kernel writes is loaded before the wait for the previous kernel, so that the end waits for
no load.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.triton.activation import gated_activation

OUTPUTS = gl.constexpr(16)
COPIES = gl.constexpr(8)
"""Columns of a matrix instruction's right operand, each of them a copy of x."""

gluon_gated_activation = gluon.jit(gated_activation.fn)


@gluon.jit
def output_rows(tile, N, HALVES: gl.constexpr, LAYOUT: gl.constexpr):
    """The weight's rows that a program multiplies, OUTPUTS of each half, and which of them exist: both [HALVES · OUTPUTS]"""
    lane = gl.arange(0, HALVES * OUTPUTS, layout=LAYOUT)
    column = tile * OUTPUTS + lane % OUTPUTS
    return column + lane // OUTPUTS * N, column < N


@gluon.jit
def load_or(values, outputs, mask, DEFAULT: gl.constexpr):
    """Loads the values of these outputs in float32, each of which is read once; DEFAULT if `values` is None."""
    if values is None:
        return DEFAULT
    else:  # noqa: RET505 - Triton takes the branch away where it is not a tail
        return gl.load(values + outputs, mask=mask, other=0.0, eviction_policy="evict_first").to(gl.float32)


@gluon.jit
def load_squares(squares, num_squares, BLOCK: gl.constexpr, WARPS: gl.constexpr):
    """Loads the partial sums of squares before the product, to be added up after it: [BLOCK] float32; 0 without a norm."""
    if squares is None:
        return 0.0
    else:  # noqa: RET505
        index = gl.arange(0, BLOCK, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
        return gl.load(squares + index, mask=index < num_squares, other=0.0)


@gluon.jit
def wait_for_previous(EARLY: gl.constexpr):
    if EARLY:
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def keep_loads_here():
    """Keeps the assembler from moving loads across. It takes no instruction: a warp's threads are together anyway."""
    gl.inline_asm_elementwise("bar.warp.sync -1; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def apply_epilogue(
    product, outputs, mask, bias, squares, row_squares, residual, residual_values, norm_weight, next_weights,
    out, weighted, squares_out, tile, N, K, eps, alpha, GATE: gl.constexpr,
):  # fmt: skip
    """Applies norm, bias, gate and residual sum to product: [HALVES · OUTPUTS] float32, and stores the results.

    `bias`, `residual_values` and `next_weights` (the next norm's weight) were loaded by `load_or` in the layout of `product`;
    `squares`, `residual` and `norm_weight` are None for parts that are absent."""
    if squares is not None:
        product *= alpha * gl.rsqrt(gl.sum(row_squares, 0) / K + eps)
    product += bias
    if GATE is not None:
        gate, up = product.reshape([2, OUTPUTS]).permute([1, 0]).split()
        product = gluon_gated_activation(gate, up, GATE == "gelu_tanh")
        LAYOUT: gl.constexpr = product.type.layout
        outputs, mask = output_rows(tile, N, 1, LAYOUT)
    if residual is not None:
        product = residual_values + alpha * product
    stored = product.to(out.dtype.element_ty)
    gl.store(out + outputs, stored, mask=mask)
    if norm_weight is not None:
        rounded = gl.where(mask, stored.to(gl.float32), 0.0)
        gl.store(weighted + outputs, (rounded * next_weights).to(weighted.dtype.element_ty), mask=mask)
        gl.store(squares_out + tile, gl.sum(rounded * rounded, 0))
