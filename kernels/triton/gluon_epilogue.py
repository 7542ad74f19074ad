"""Operations around a product of one row, for the Gluon kernels: loaded before its sums, computed after them.

As `fused_sums.apply_epilogue`, for kernels whose programs each have all columns of OUTPUTS outputs, in matrix instructions whose rows
are the outputs. Data that no kernel writes is loaded before the wait, so that nothing is waited for at the end.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.triton.activation import gated_activation

OUTPUTS = gl.constexpr(16)
COPIES = gl.constexpr(8)
"""Columns of a matrix instruction's right operand, all of them x."""

gluon_gated_activation = gluon.jit(gated_activation.fn)


@gluon.jit
def output_rows(tile, N, HALVES: gl.constexpr, LAYOUT: gl.constexpr):
    """→ the rows of the weight that a program multiplies, OUTPUTS of each half, and which of them exist: [HALVES · OUTPUTS]"""
    lane = gl.arange(0, HALVES * OUTPUTS, layout=LAYOUT)
    column = tile * OUTPUTS + lane % OUTPUTS
    return column + lane // OUTPUTS * N, column < N


@gluon.jit
def load_or_default(values, outputs, mask, DEFAULT: gl.constexpr):
    """Of weights the values of these outputs in float32, read once; ABSENT where there are none."""
    if values is None:
        return DEFAULT
    else:  # noqa: RET505 - Triton takes the branch away where it is not a tail
        return gl.load(values + outputs, mask=mask, other=0.0, eviction_policy="evict_first").to(gl.float32)


@gluon.jit
def load_squares(squares, num_squares, BLOCK: gl.constexpr, WARPS: gl.constexpr):
    """[BLOCK] float32: asked for before the product and added up behind it; 0 where there is no norm."""
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
def apply_epilogue(
    product, outputs, mask, bias, squares, row_squares, residual, residual_values, norm_weight, next_weights, out, weighted, squares_out,
    tile, N, K, eps, alpha, GATE: gl.constexpr,
):  # fmt: skip
    """product: [HALVES · OUTPUTS] float32, and of its layout `bias`, `residual_values`, which is the residual stream, and `next_weights`, the
    next norm's weight: as `load_or_default`. `residual` and `squares` say whether there are such."""
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
