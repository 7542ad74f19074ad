"""Products of one row with the operations around them: those of fused_linear.py for a decode step of a single request.

A tile of 16 rows for the tensor cores is then mostly padding, and its way through shared memory, its splits and their sums cost
more than the products. Here each program multiplies a few whole rows of the weight in registers: nothing is divided among
programs, many small ones share the card evenly, and the first loads of each are in flight before it waits for the kernel before
it, since no kernel writes weights. A layer of Llama-3.1-8B, four products: 110 µs on an H200 instead of 141, of which 103 are
the memory's (docs/log/gpu-kernels.md). A single row is summed in another order than a row among others.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from kernels.quantised_weights import CHUNK_COLUMNS, Fp8Weight, Int8Weight, values_and_scales
from kernels.triton.early_launch import early_launch, wait_for_previous
from kernels.triton.fused_sums import Around, asked_squares, finish
from kernels.triton.hopper_rows import HopperRowTiles, hopper_row_tiles
from kernels.triton.tuning import has_gluon, interpreted, multiprocessors, power_of_two

_INTERPRETED = tl.constexpr(interpreted())
WARP_SIZE = 32
FOUR = tl.constexpr(4)
"""Weights, and elements of x, in one word: they are multiplied in storage order."""
_RAISED = tl.constexpr(8388736.0)
"""2^23 + 128: a byte under the exponent of 2^23, its sign bit flipped, is too large by this much as a float32."""
_INT8 = tl.constexpr(
    "{ .reg .b32 raised; xor.b32 raised, $4, 0x80808080; "
    + " ".join(f"prmt.b32 ${byte}, raised, 0x4B000000, 0x765{byte};" for byte in range(4))
    + " }"
)
_E4M3 = tl.constexpr(
    "{ .reg .b16 low, high, first, second; .reg .b32 two; mov.b32 {low, high}, $4; "
    "cvt.rn.f16x2.e4m3x2 two, low; mov.b32 {first, second}, two; cvt.f32.f16 $0, first; cvt.f32.f16 $1, second; "
    "cvt.rn.f16x2.e4m3x2 two, high; mov.b32 {first, second}, two; cvt.f32.f16 $2, first; cvt.f32.f16 $3, second; }"
)


@dataclass(frozen=True, slots=True)
class RowTiles:
    """A program's outputs, and the columns per step."""

    block_n: int
    block_k: int
    num_warps: int = 4


@triton.jit
def _half(word, PLACE: tl.constexpr, DTYPE: tl.constexpr):
    """Number PLACE of the elements of 16 bits of a word of 64."""
    if tl.bfloat16 == DTYPE:  # the upper bits of a float32
        half = (word >> (32 if PLACE >= 2 else 0)).to(tl.int32)
        bits = half << 16 if PLACE % 2 == 0 else half & -65536
        return bits.to(tl.float32, bitcast=True)
    else:  # noqa: RET505 - Triton takes the branch away where it is not a tail
        return (word >> (16 * PLACE)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _floats(words, DTYPE: tl.constexpr):
    """The four weights of each word in float32, exactly. A card converts 16 integers a cycle; a byte that is moved under an
    exponent is a float already."""
    if DTYPE.primitive_bitwidth == 16:
        return _half(words, 0, DTYPE), _half(words, 1, DTYPE), _half(words, 2, DTYPE), _half(words, 3, DTYPE)
    elif tl.int8 == DTYPE:  # noqa: RET505
        if _INTERPRETED:
            return _byte(words, 24), _byte(words, 16), _byte(words, 8), _byte(words, 0)
        else:  # noqa: RET505
            a, b, c, d = tl.inline_asm_elementwise(
                _INT8, "=r,=r,=r,=r,r", [words], dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1
            )
            return _lowered(a), _lowered(b), _lowered(c), _lowered(d)
    else:
        if _INTERPRETED:
            return _e4m3(words), _e4m3(words >> 8), _e4m3(words >> 16), _e4m3(words >> 24)
        else:  # noqa: RET505
            return tl.inline_asm_elementwise(
                _E4M3, "=f,=f,=f,=f,r", [words], dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1
            )


@triton.jit
def _byte(words, SHIFT: tl.constexpr):
    return (words << SHIFT >> 24).to(tl.float32)


@triton.jit
def _lowered(bits):
    return bits.to(tl.float32, bitcast=True) - _RAISED


@triton.jit
def _e4m3(words):
    return words.to(tl.int8).to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def _asked(places, four, fours, mask, lane, EVEN_K: tl.constexpr):
    """The words of a step, if there is one."""
    held = mask & (tl.full((1, 1), four, tl.int32) < fours) if EVEN_K else mask & (lane < fours - four)[None, :]
    return tl.load(places + four, mask=held, other=0, eviction_policy="evict_first")


@triton.jit
def _multiplied(total, words, row, DTYPE: tl.constexpr, X_TYPE: tl.constexpr):
    a, b, c, d = _floats(words, DTYPE)
    total += a * _half(row, 0, X_TYPE)[None, :]
    total += b * _half(row, 1, X_TYPE)[None, :]
    total += c * _half(row, 2, X_TYPE)[None, :]
    total += d * _half(row, 3, X_TYPE)[None, :]
    return total


@triton.jit
def fused_row_kernel(
    x, weight, weight_scales, bias, squares, residual, norm_weight, out, weighted, squares_out, N, K, num_squares, eps, alpha,
    GATE: tl.constexpr, COLUMN_SCALES: tl.constexpr, EVEN_K: tl.constexpr, SQUARES_BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (tile): BLOCK_N columns of out, and of both halves of the weight where it is gated. Two steps are on their way
    while one is multiplied."""
    DTYPE: tl.constexpr = weight.dtype.element_ty
    X_TYPE: tl.constexpr = x.dtype.element_ty
    WORD: tl.constexpr = tl.int64 if DTYPE.primitive_bitwidth == 16 else tl.int32
    STEP: tl.constexpr = BLOCK_K // FOUR
    tile = tl.program_id(0)
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    # Two words side by side for each thread, of x as of the weight, whatever they are.
    lane = tl.max_contiguous(tl.arange(0, STEP), 2)
    mask, fours = (columns < N)[:, None], K // FOUR
    places = weight.to(tl.pointer_type(WORD)) + columns.to(tl.int64)[:, None] * fours + lane[None, :]
    up_places = places + N.to(tl.int64) * fours
    first = _asked(places, 0, fours, mask, lane, EVEN_K)
    first_up = _asked(up_places, 0, fours, mask, lane, EVEN_K) if GATE is not None else first
    second = _asked(places, STEP, fours, mask, lane, EVEN_K)
    second_up = _asked(up_places, STEP, fours, mask, lane, EVEN_K) if GATE is not None else second
    wait_for_previous(EARLY)
    rows = tl.arange(0, 1)
    row_squares = asked_squares(squares, rows, 1, num_squares, SQUARES_BLOCK)
    x_places = x.to(tl.pointer_type(tl.int64)) + lane
    total = tl.zeros((BLOCK_N, STEP), tl.float32)
    up = total
    for four in range(0, fours, STEP):
        third = _asked(places, four + 2 * STEP, fours, mask, lane, EVEN_K)
        third_up = _asked(up_places, four + 2 * STEP, fours, mask, lane, EVEN_K) if GATE is not None else third
        row = tl.load(x_places + four) if EVEN_K else tl.load(x_places + four, mask=lane < fours - four, other=0)
        total = _multiplied(total, first, row, DTYPE, X_TYPE)
        if GATE is not None:
            up = _multiplied(up, first_up, row, DTYPE, X_TYPE)
        first, second = second, third
        first_up, second_up = second_up, third_up
    finish(
        tl.sum(total, axis=1)[None, :], tl.sum(up, axis=1)[None, :], weight_scales, bias, squares, row_squares, residual,
        norm_weight, out, weighted, squares_out, None, None, tile, 0, rows, columns, 1, N, K, eps, alpha,
        GATE, COLUMN_SCALES, 1, 1, BLOCK_N,
    )  # fmt: skip


@functools.cache
def row_tiles(num_columns: int, *, gated: bool, is_summed: bool, weight_bytes: int) -> RowTiles:
    """The fastest of some eight on an H200, for the products of Llama-3.1-8B. `is_summed`: the outputs' squares are stored, one
    sum per program. Every program of the next product adds up these sums, so there are fewer programs then."""
    if gated:
        tiles = RowTiles(2, 2048, num_warps=8 if weight_bytes == 2 and num_columns >= 2048 else 4)
    elif is_summed:
        tiles = RowTiles(4, 1024)
    else:
        tiles = RowTiles(2, 2048) if weight_bytes == 2 else RowTiles(16, 512, num_warps=8)
    return replace(tiles, block_k=min(tiles.block_k, max(4 * WARP_SIZE, power_of_two(num_columns))))


def tiles_on(
    x: torch.Tensor, num_outputs: int, *, gated: bool, is_summed: bool, weight_bytes: int
) -> RowTiles | HopperRowTiles | None:
    """None for rows that no single-row kernel serves. 8-bit weights use Hopper's own kernel if its programs are enough for all
    multiprocessors."""
    num_rows, num_columns = x.shape
    if num_rows != 1 or x.element_size() != 2 or num_columns % FOUR.value:
        return None
    if weight_bytes == 1 and has_gluon(x.device) and num_columns % CHUNK_COLUMNS == 0:
        tiles = hopper_row_tiles(gated=gated)
        if num_outputs >= tiles.block_n * multiprocessors(x.device):
            return tiles
    return row_tiles(num_columns, gated=gated, is_summed=is_summed, weight_bytes=weight_bytes)


def launch(
    x: torch.Tensor, weight: torch.Tensor | Int8Weight | Fp8Weight, around: Around, tiles: RowTiles | HopperRowTiles
) -> None:
    """As fused_linear.py for M = 1, with its formula and source. x: [1, K].

    2 · N · K operations in float32 without tensor cores, products exact. Outputs beyond N and columns beyond K are masked.
    """
    if isinstance(tiles, HopperRowTiles):
        from kernels.triton.fused_byte_row import launch_byte_row

        assert not isinstance(weight, torch.Tensor)
        launch_byte_row(x, weight, around, tiles)
        return
    values, scales = values_and_scales(weight)
    num_columns, outputs = x.shape[1], around.out.shape[1]
    fused_row_kernel[(triton.cdiv(outputs, tiles.block_n),)](
        x, values, scales, *around.tensors, outputs, num_columns, around.num_squares, around.eps, around.alpha,
        GATE=around.gate, COLUMN_SCALES=scales is not None and scales.numel() > 1,
        EVEN_K=num_columns % tiles.block_k == 0,
        SQUARES_BLOCK=power_of_two(around.num_squares), BLOCK_N=tiles.block_n, BLOCK_K=tiles.block_k,
        num_warps=tiles.num_warps, **early_launch(x.device, 1),
    )  # fmt: skip
