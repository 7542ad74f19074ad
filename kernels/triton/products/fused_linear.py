"""Products of a decode step of few rows, fused with norms, activation and residual sums: three launches fewer per layer.

    unfused   norm ─ qkv ─ attention (2) ─ out ─ norm ─ gate_up ─ activation ─ down     9 launches
    here             qkv ─ attention (2) ─ out ────────── gate_up ───────────── down     6; with one request 5

RMS normalisation divides a whole row by one number, and the product after it can do so in its epilogue: rms_norm(x) Wᵀ is (x ·
w) Wᵀ / rms(x). So the product that adds to the residual stream also stores the sum times the next norm's weight w, and each of
its tiles the sum of squares of its columns; the next product adds up these partial sums in the order of the tiles. Only the
launch that needs a whole row waits for it. In each kernel a row has the same bits whatever rows it is batched with. A single
row goes through the GEMV kernel (`fused_row`), which runs at memory speed, and on Hopper up to 16 rows with weights of 8 and 4
bits through `fused_byte_rows` and `fused_int4_rows`, where a start did not find others faster (`kernels.alternatives`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from functools import partial

import torch
import triton
import triton.language as tl

from kernels.alternatives import GEMV, HOPPER, TILES, serving_product
from kernels.operations import FUSED_ROWS_MAX
from kernels.quantised_weights import Int4Weight, Weight, values_and_scales
from kernels.residual_stream import Gate, Stream
from kernels.triton.launching.card_properties import capability, card, multiprocessors, power_of_two
from kernels.triton.launching.early_launch import early_launch, wait_for_previous
from kernels.triton.products import fused_int4, fused_row, hopper_rows, hopper_tiles
from kernels.triton.products.epilogue import Epilogue, apply_epilogue, load_squares
from kernels.triton.products.fused_row import GemvTiles
from kernels.triton.products.hopper_tiles import HopperTiles
from kernels.triton.products.int4 import Int4Tiles
from kernels.triton.products.split_k import CONVERT, STREAM, split_workspace
from kernels.triton.products.tiles import Tiles, cast_weight, cheapest_tiles


@dataclass(frozen=True, slots=True)
class FusedTiles(Tiles):
    """`column_warps`: warps among which the columns of a step are split: all of the program's, or 1 if warps are side by side
    over the outputs (`step_columns`)."""

    column_warps: int = 1


_tiles = partial(FusedTiles, FUSED_ROWS_MAX, num_warps=4)
CANDIDATES = {
    (2, False): (_tiles(64, 128, num_stages=6), _tiles(32, 256, num_stages=4, column_warps=4)),
    (2, True): (_tiles(32, 256, num_stages=3, column_warps=4), _tiles(16, 512, num_stages=3, column_warps=4)),
    (1, False): (_tiles(64, 128, num_stages=6),),
    (1, True): (_tiles(64, 128, num_stages=4),),
}
"""By the bytes of a weight and by whether the product is gated. A gated step reads two such tiles of weights."""
CANDIDATES_FLOAT32 = (_tiles(16, 64, num_stages=4),)
"""Tensor cores do not multiply rows of 32 bits: registers are the limit, whatever the weights are."""

AnyTiles = FusedTiles | Int4Tiles | HopperTiles | GemvTiles


@triton.jit
def step_columns(BLOCK_K: tl.constexpr, WARPS: tl.constexpr):
    """Columns of x that one step multiplies: [BLOCK_K], or [WARPS, BLOCK_K / WARPS] where each warp multiplies its own.

    Warps side by side over few outputs would each read all of x, or even all of the weights, from shared memory, which is
    then slower than the card's memory. With columns of its own, each warp reads its part of both once, and the warps' sums are
    added at the end.
    """
    if WARPS == 1:
        return tl.arange(0, BLOCK_K)
    else:  # noqa: RET505 - Triton takes the branch away where it is not a tail
        WARP_COLUMNS: tl.constexpr = BLOCK_K // WARPS
        return tl.arange(0, WARPS)[:, None] * WARP_COLUMNS + tl.arange(0, WARP_COLUMNS)[None, :]


@triton.jit
def zero_accumulator(BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WARPS: tl.constexpr):
    if WARPS == 1:
        return tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    else:  # noqa: RET505
        return tl.zeros((WARPS, BLOCK_M, BLOCK_N), tl.float32)


@triton.jit
def reduce_warps(sums, WARPS: tl.constexpr):
    """Adds up the sums of the warps → [BLOCK_M, BLOCK_N]"""
    if WARPS == 1:
        return sums
    else:  # noqa: RET505
        return tl.sum(sums, axis=0)


@triton.jit(do_not_specialize=["M"])
def fused_linear_kernel(
    x, weight, weight_scales, bias, squares, residual, norm_weight, out, weighted, squares_out, partials, arrivals,
    M, N, K, x_stride, num_squares, eps, alpha, split_columns,
    GATE: tl.constexpr, EVEN_K: tl.constexpr, SQUARES_BLOCK: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WARPS: tl.constexpr, STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    tile, split = tl.program_id(0), tl.program_id(1)
    rows, columns = tl.arange(0, BLOCK_M), tile * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask, column_mask = rows < M, columns < N
    k_offsets = step_columns(BLOCK_K, WARPS)
    x_offsets, w_offsets = tl.expand_dims(k_offsets, -2), tl.expand_dims(k_offsets, -1)
    start, end = 0, K
    if SPLITS > 1:
        start = split * split_columns
        end = min(start + split_columns, K)
    wait_for_previous(EARLY)
    row_squares = load_squares(squares, rows, M, num_squares, SQUARES_BLOCK)
    x_ptrs = x + rows[:, None] * x_stride + x_offsets
    w_ptrs = weight + columns.to(tl.int64)[None, :] * K + w_offsets
    up_ptrs = w_ptrs + N.to(tl.int64) * K
    product = zero_accumulator(BLOCK_M, BLOCK_N, WARPS)
    up = zero_accumulator(BLOCK_M, BLOCK_N, WARPS)
    for k in tl.range(start, end, BLOCK_K, num_stages=STAGES):
        x_mask, w_mask = row_mask[:, None], column_mask[None, :]
        if not EVEN_K:
            x_mask, w_mask = x_mask & (x_offsets < K - k), w_mask & (w_offsets < K - k)
        x_tile = tl.load(x_ptrs + k, mask=x_mask, other=0.0)
        w_tile = tl.load(w_ptrs + k, mask=w_mask, other=0.0, eviction_policy="evict_first")
        product = tl.dot(x_tile, cast_weight(w_tile, x_tile.dtype), product, input_precision="ieee")
        if GATE is not None:
            up_tile = tl.load(up_ptrs + k, mask=w_mask, other=0.0, eviction_policy="evict_first")
            up = tl.dot(x_tile, cast_weight(up_tile, x_tile.dtype), up, input_precision="ieee")
    product, up = reduce_warps(product, WARPS), reduce_warps(up, WARPS)
    apply_epilogue(
        product, up, weight_scales, bias, squares, row_squares, residual, norm_weight, out, weighted, squares_out,
        partials, arrivals, tile, split, rows, columns, M, N, K, eps, alpha, GATE, SPLITS, BLOCK_M, BLOCK_N,
    )  # fmt: skip


def linear_add(
    x: torch.Tensor,
    weight: Weight,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    *,
    alpha: float = 1.0,
    bias: torch.Tensor | None = None,
) -> Stream:
    """total = residual + alpha · (x Wᵀ + bias); weighted = total · norm_weight; squares[c] = Σ total² over tile c's columns

    x: [M, K], rows need not be contiguous, weight: [d, K], residual: [M, d], bias: [d], all of one type of 16 or 32 bits,
    except weights in 8 bits, whose scales are applied after the sum, and in 4 bits, for rows of 16 bits; norm_weight: [d] of
    that type or float32; M ≤ 16. Source: arXiv 1910.07467, eq. 4, with the division moved after the next product. Reads the
    weight once and, in 16 bits, 2·M·(K + d) bytes of rows, writes 4·M·d; 2·M·d·K operations. Rows beyond M, columns beyond d
    and K are masked. Accumulates in float32; total is rounded before it is squared, weighted is rounded a second time.
    """
    num_rows, width = x.shape[0], residual.shape[1]
    tiles = choose_tiles(x, weight, width, gated=False, has_squares_out=True)
    total, weighted = torch.empty_like(residual), torch.empty_like(residual)
    squares = torch.empty(triton.cdiv(width, tiles.block_n), num_rows, dtype=torch.float32, device=x.device)
    epilogue = Epilogue(
        out=total, bias=bias, residual=residual, norm_weight=norm_weight, weighted=weighted, squares_out=squares, alpha=alpha
    )
    _launch(x, weight, epilogue, tiles)
    return Stream(total, weighted, squares)


def normed_linear(
    stream: Stream,
    weight: Weight,
    eps: float,
    *,
    bias: torch.Tensor | None = None,
    gate: Gate | None = None,
    factor: float = 1.0,
) -> torch.Tensor:
    """factor · (weighted Wᵀ) / √(Σ squares / d + eps) + bias, which is rms_norm(total) Wᵀ + bias if `weighted` was computed
    with a norm's weight divided by `factor`; weight: [N, d] → [M, N]

    With `gate` N = 2·inner (gates first) and the result is act(gate) · up: [M, inner] (arXiv 2002.05202): each program holds
    the same columns of both halves. Reads the weight once. Otherwise as `linear_add`; `weighted` must be finite, which in fp16
    it is whenever total is, if `factor` leaves no weight of the norm above one.
    """
    x, num_rows = stream.weighted, weight.num_rows if isinstance(weight, Int4Weight) else values_and_scales(weight)[0].shape[0]
    outputs = num_rows if gate is None else num_rows // 2
    tiles = choose_tiles(x, weight, outputs, gated=gate is not None, has_squares_out=False)
    out = torch.empty(x.shape[0], outputs, dtype=x.dtype, device=x.device)
    _launch(x, weight, Epilogue(out=out, bias=bias, squares=stream.squares, eps=eps, alpha=factor, gate=gate), tiles)
    return out


@functools.cache
def fused_tiles(
    num_outputs: int,
    num_columns: int,
    capability: int,
    multiprocessors: int,
    *,
    gated: bool,
    weight_bytes: int = 2,
    row_bytes: int = 2,
) -> FusedTiles:
    """The cheapest candidate, with fewer loads in flight on cards with 100 KiB of shared memory; the same for any number of
    rows. `row_bytes`: bytes of an element of x"""
    stages_max = 3 if card(capability).is_small else 6
    candidates = [
        replace(tiles, num_stages=min(tiles.num_stages, stages_max))
        for tiles in (CANDIDATES_FLOAT32 if row_bytes == 4 else CANDIDATES[weight_bytes, gated])
    ]
    shape, column_bytes = (num_outputs, num_columns), 2 * weight_bytes if gated else weight_bytes
    occupancy = CONVERT if weight_bytes == 1 else STREAM
    return cheapest_tiles(candidates, shape, multiprocessors, column_bytes, occupancy=occupancy)


def choose_tiles(x: torch.Tensor, weight: Weight, num_outputs: int, *, gated: bool, has_squares_out: bool) -> AnyTiles:
    """The tiles of the kernel that serves. `has_squares_out`: whether the outputs' sums of squares are stored."""
    tiles: dict[str, AnyTiles] = {}
    hopper = None if isinstance(weight, torch.Tensor) else hopper_tiles.supported_tiles(x, weight, num_outputs, gated=gated)
    if hopper is not None:
        tiles[HOPPER] = hopper
    if isinstance(weight, Int4Weight):
        bits = 4
        tiles[TILES] = fused_int4.fused_int4_tiles(num_outputs, weight.num_columns, multiprocessors(x.device), gated=gated)
    else:
        weight_bytes = values_and_scales(weight)[0].element_size()
        bits = 8 * weight_bytes
        if fused_row.supports(x):
            tiles[GEMV] = fused_row.gemv_tiles(
                x.shape[1], gated=gated, has_squares_out=has_squares_out, weight_bytes=weight_bytes
            )
        tiles[TILES] = fused_tiles(
            num_outputs, x.shape[1], capability(x.device), multiprocessors(x.device),
            gated=gated, weight_bytes=weight_bytes, row_bytes=x.element_size(),
        )  # fmt: skip
    return tiles[serving_product(bits, x.shape[0], *tiles)]


def _launch(x: torch.Tensor, weight: Weight, epilogue: Epilogue, tiles: AnyTiles) -> None:
    num_rows, num_columns = x.shape
    assert num_rows <= FUSED_ROWS_MAX, f"{num_rows} rows are for other kernels"
    assert x.stride(1) == 1, "rows of x are contiguous"
    if not num_rows:
        return
    if isinstance(tiles, HopperTiles):
        assert not isinstance(weight, torch.Tensor)
        hopper_rows.launch(x, weight, epilogue, tiles)
        return
    if isinstance(weight, Int4Weight):
        assert isinstance(tiles, Int4Tiles)
        fused_int4.launch(x, weight, epilogue, tiles)
        return
    if isinstance(tiles, GemvTiles):
        fused_row.launch(x, weight, epilogue, tiles)
        return
    assert isinstance(tiles, FusedTiles)
    values, scales = values_and_scales(weight)
    assert values.is_contiguous(), "the weight is contiguous"
    outputs = epilogue.out.shape[1]
    num_tiles = triton.cdiv(outputs, tiles.block_n)
    size = tiles.block_m * tiles.block_n * (1 if epilogue.gate is None else 2)
    split_columns = triton.cdiv(triton.cdiv(num_columns, tiles.block_k), tiles.splits) * tiles.block_k
    fused_linear_kernel[(num_tiles, tiles.splits)](
        x, values, scales, *epilogue.tensors,
        *split_workspace(num_tiles, tiles.splits, size, x.device),
        num_rows, outputs, num_columns, x.stride(0), epilogue.num_squares, epilogue.eps, epilogue.alpha, split_columns,
        GATE=epilogue.gate, EVEN_K=num_columns % tiles.block_k == 0, SQUARES_BLOCK=power_of_two(epilogue.num_squares),
        SPLITS=tiles.splits, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_K=tiles.block_k,
        WARPS=tiles.column_warps, STAGES=tiles.num_stages, num_warps=tiles.num_warps, **early_launch(x.device, x.shape[0]),
    )  # fmt: skip
