"""Epilogue of a fused product, for any kind of weights: split-K reduction, scales, the preceding norm's division, bias, gate,
and the residual sum with the inputs of the next norm."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.residual_stream import Gate
from kernels.triton.rows.activation import gated_activation


@dataclass(frozen=True, slots=True, kw_only=True)
class Epilogue:
    """Operands and results of the epilogue of a product of M rows; None for each part that is absent.

    out: [M, N]; bias: [N], or [2·N] with a gate. Either squares: [C, M] float32, the partial sums of squares of the rows before
    they were multiplied by the norm's weight: alpha · product is divided by their RMS; or residual: [M, N], to which alpha ·
    product is added. Of that sum, weighted: [M, N] receives its product with norm_weight: [N], and squares_out: [tiles, M]
    float32 its sums of squares.
    """

    out: torch.Tensor
    bias: torch.Tensor | None = None
    squares: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    norm_weight: torch.Tensor | None = None
    weighted: torch.Tensor | None = None
    squares_out: torch.Tensor | None = None
    eps: float = 0.0
    alpha: float = 1.0
    gate: Gate | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """In the order of the kernels' arguments."""
        return self.bias, self.squares, self.residual, self.norm_weight, self.out, self.weighted, self.squares_out

    @property
    def num_squares(self) -> int:
        return 0 if self.squares is None else self.squares.shape[0]


@triton.jit
def load_squares(squares, rows, M, num_squares, SQUARES_BLOCK: tl.constexpr):
    """Loads the partial sums of squares before the product, to be added up after it: [rows, SQUARES_BLOCK] float32; 0 without a
    norm."""
    if squares is None:
        return 0.0
    else:  # noqa: RET505 - Triton takes the branch away where it is not a tail
        index = tl.arange(0, SQUARES_BLOCK)
        mask = (rows < M)[:, None] & (index < num_squares)[None, :]
        return tl.load(squares + index[None, :] * M + rows[:, None], mask=mask, other=0.0)


@triton.jit
def _reduce_splits(
    product, up, partials, arrivals, tile, split, mask,
    GATE: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """→ product, up, and whether this program is the last of its tile to arrive; only that one gets the sums of all splits.

    As in split_k.py: arrivals are counted atomically in integers, and the last program adds the partial sums in their order.
    """
    HALVES: tl.constexpr = 1 if GATE is None else 2
    SIZE: tl.constexpr = BLOCK_M * BLOCK_N
    offsets = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    tile_partials = partials + tile.to(tl.int64) * (SPLITS * HALVES * SIZE) + offsets
    tl.store(tile_partials + split * (HALVES * SIZE), product, mask=mask)
    if GATE is not None:
        tl.store(tile_partials + split * (HALVES * SIZE) + SIZE, up, mask=mask)
    tl.debug_barrier()
    is_last = tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == SPLITS - 1
    if is_last:
        product = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for index in tl.static_range(SPLITS):
            product += tl.load(tile_partials + index * (HALVES * SIZE), mask=mask, other=0.0, cache_modifier=".cg")
            if GATE is not None:
                up += tl.load(tile_partials + index * (HALVES * SIZE) + SIZE, mask=mask, other=0.0, cache_modifier=".cg")
        tl.store(arrivals + tile, 0)
    return product, up, is_last


@triton.jit
def _scale_and_gate(
    product, up, weight_scales, bias, squares, row_squares, columns, column_mask, N, K, eps, alpha,
    GATE: tl.constexpr,
):  # fmt: skip
    """Applies weight scales, the division by the RMS, bias and gate to the sums of a tile."""
    if weight_scales is not None:
        product *= tl.load(weight_scales + columns, mask=column_mask, other=0.0)[None, :]
        if GATE is not None:
            up *= tl.load(weight_scales + N + columns, mask=column_mask, other=0.0)[None, :]
    if squares is not None:
        alpha_over_rms = alpha * tl.rsqrt(tl.sum(row_squares, axis=1) / K + eps)[:, None]
        product *= alpha_over_rms
        up *= alpha_over_rms
    if bias is not None:
        product += tl.load(bias + columns, mask=column_mask, other=0.0).to(tl.float32)[None, :]
        if GATE is not None:
            up += tl.load(bias + N + columns, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    if GATE is not None:
        product = gated_activation(product, up, GATE == "gelu_tanh")
    return product


@triton.jit
def _store_tile(
    product, residual, norm_weight, out, weighted, squares_out, tile, rows, columns, row_mask, column_mask, mask, M, N, alpha
):  # fmt: skip
    """Stores a tile of the product, or of its sum with the residual stream; of that also its product with the next norm's
    weight, and the rows' sums of squares."""
    offsets = rows[:, None] * N + columns[None, :]
    if residual is not None:
        product = tl.load(residual + offsets, mask=mask, other=0.0).to(tl.float32) + alpha * product
    stored = product.to(out.dtype.element_ty)
    tl.store(out + offsets, stored, mask=mask)
    if norm_weight is not None:
        rounded = tl.where(mask, stored.to(tl.float32), 0.0)
        next_weights = tl.load(norm_weight + columns, mask=column_mask, other=0.0).to(tl.float32)[None, :]
        tl.store(weighted + offsets, (rounded * next_weights).to(weighted.dtype.element_ty), mask=mask)
        tl.store(squares_out + tile * M + rows, tl.sum(rounded * rounded, axis=1), mask=row_mask)


@triton.jit
def apply_epilogue(
    product, up, weight_scales, bias, squares, row_squares, residual, norm_weight, out, weighted, squares_out,
    partials, arrivals, tile, split, rows, columns, M, N, K, eps, alpha,
    GATE: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Finishes `linear_add` or `normed_linear` of fused_linear.py and stores the results; with SPLITS > 1 only in the last
    program of a tile to arrive. product, and with a GATE up: [BLOCK_M, BLOCK_N] float32, the sums of one program."""
    row_mask, column_mask = rows < M, columns < N
    is_last = True
    mask = row_mask[:, None] & column_mask[None, :]
    if SPLITS > 1:
        product, up, is_last = _reduce_splits(
            product, up, partials, arrivals, tile, split, mask, GATE, SPLITS, BLOCK_M, BLOCK_N
        )  # fmt: skip
    if is_last:
        product = _scale_and_gate(
            product, up, weight_scales, bias, squares, row_squares, columns, column_mask, N, K, eps, alpha, GATE
        )  # fmt: skip
        _store_tile(
            product, residual, norm_weight, out, weighted, squares_out, tile, rows, columns, row_mask, column_mask, mask,
            M, N, alpha,
        )  # fmt: skip
