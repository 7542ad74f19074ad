"""Fused GEMV: the products of fused_linear.py for a decode step of a single request, with their epilogue.

For one row, a 16-row tile for the tensor cores is mostly padding, and staging it in shared memory, splitting it and reducing
the splits cost more than the products. Here each program multiplies a few whole rows of the weight in registers: no output is
split among programs, many small programs load the card evenly, and the first loads of each are in flight before it waits for
the previous kernel, since no kernel writes weights. A layer of Llama-3.1-8B, four products: 110 µs on an H200 instead of 141;
reading the weights alone takes 103 (docs/log/gpu-kernels.md). A single row is summed in another order than a row in a batch.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from kernels.quantised_weights import Fp8Weight, Int8Weight, values_and_scales
from kernels.triton.launching.card_properties import interpreted, power_of_two
from kernels.triton.launching.early_launch import early_launch, wait_for_previous
from kernels.triton.products.epilogue import Epilogue, apply_epilogue, load_squares

_INTERPRETED = tl.constexpr(interpreted())
WARP_SIZE = 32
WORD_ELEMENTS = tl.constexpr(4)
"""Weights, and elements of x, in one word; both are multiplied in storage order."""
_INT8_BIAS = tl.constexpr(8388736.0)
"""2^23 + 128: by how much a byte under the exponent of 2^23, its sign bit flipped, is too large as a float32."""
_FROM_INT8 = tl.constexpr(
    "{ .reg .b32 raised; xor.b32 raised, $4, 0x80808080; "
    + " ".join(f"prmt.b32 ${byte}, raised, 0x4B000000, 0x765{byte};" for byte in range(4))
    + " }"
)
_FROM_E4M3 = tl.constexpr(
    "{ .reg .b16 low, high, first, second; .reg .b32 two; mov.b32 {low, high}, $4; "
    "cvt.rn.f16x2.e4m3x2 two, low; mov.b32 {first, second}, two; cvt.f32.f16 $0, first; cvt.f32.f16 $1, second; "
    "cvt.rn.f16x2.e4m3x2 two, high; mov.b32 {first, second}, two; cvt.f32.f16 $2, first; cvt.f32.f16 $3, second; }"
)


@dataclass(frozen=True, slots=True)
class GemvTiles:
    """Outputs of a program, and columns per step."""

    block_n: int
    block_k: int
    num_warps: int = 4


@triton.jit
def _unpack16(word, INDEX: tl.constexpr, DTYPE: tl.constexpr):
    """Element INDEX of the four 16-bit elements of a 64-bit word, in float32."""
    if tl.bfloat16 == DTYPE:  # the upper bits of a float32
        half = (word >> (32 if INDEX >= 2 else 0)).to(tl.int32)
        bits = half << 16 if INDEX % 2 == 0 else half & -65536
        return bits.to(tl.float32, bitcast=True)
    else:  # noqa: RET505 - Triton takes the branch away where it is not a tail
        return (word >> (16 * INDEX)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _unpack_weights(words, DTYPE: tl.constexpr):
    """The four weights of each word in float32, exactly. Integer conversion runs at 16 per cycle, so int8 is not
    converted: a byte moved under an exponent is a float already."""
    if DTYPE.primitive_bitwidth == 16:
        return (_unpack16(words, 0, DTYPE), _unpack16(words, 1, DTYPE), _unpack16(words, 2, DTYPE), _unpack16(words, 3, DTYPE))
    elif tl.int8 == DTYPE:  # noqa: RET505
        if _INTERPRETED:
            return (_from_int8(words, 24), _from_int8(words, 16), _from_int8(words, 8), _from_int8(words, 0))
        else:  # noqa: RET505
            a, b, c, d = tl.inline_asm_elementwise(
                _FROM_INT8, "=r,=r,=r,=r,r", [words], dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1
            )
            return _subtract_bias(a), _subtract_bias(b), _subtract_bias(c), _subtract_bias(d)
    else:
        if _INTERPRETED:
            return (_from_e4m3(words), _from_e4m3(words >> 8), _from_e4m3(words >> 16), _from_e4m3(words >> 24))
        else:  # noqa: RET505
            return tl.inline_asm_elementwise(
                _FROM_E4M3,
                "=f,=f,=f,=f,r",
                [words],
                dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
                is_pure=True,
                pack=1,
            )


@triton.jit
def _from_int8(words, SHIFT: tl.constexpr):
    return (words << SHIFT >> 24).to(tl.float32)


@triton.jit
def _subtract_bias(bits):
    return bits.to(tl.float32, bitcast=True) - _INT8_BIAS


@triton.jit
def _from_e4m3(words):
    return words.to(tl.int8).to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def _load_words(weight_ptrs, word, num_words, mask, lane, EVEN_K: tl.constexpr):
    """Loads the words of a step; zeros beyond the last word."""
    load_mask = mask & (tl.full((1, 1), word, tl.int32) < num_words) if EVEN_K else mask & (lane < num_words - word)[None, :]
    return tl.load(weight_ptrs + word, mask=load_mask, other=0, eviction_policy="evict_first")


@triton.jit
def _accumulate(acc, words, row, DTYPE: tl.constexpr, X_TYPE: tl.constexpr):
    a, b, c, d = _unpack_weights(words, DTYPE)
    acc += a * _unpack16(row, 0, X_TYPE)[None, :]
    acc += b * _unpack16(row, 1, X_TYPE)[None, :]
    acc += c * _unpack16(row, 2, X_TYPE)[None, :]
    acc += d * _unpack16(row, 3, X_TYPE)[None, :]
    return acc


@triton.jit
def fused_row_kernel(
    x, weight, weight_scales, bias, squares, residual, norm_weight, out, weighted, squares_out, N, K, num_squares, eps, alpha,
    GATE: tl.constexpr, EVEN_K: tl.constexpr, SQUARES_BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (tile): BLOCK_N columns of out, from both halves of the weight if it is gated. The loads of two steps are in
    flight while one is multiplied."""
    DTYPE: tl.constexpr = weight.dtype.element_ty
    X_TYPE: tl.constexpr = x.dtype.element_ty
    WORD: tl.constexpr = tl.int64 if DTYPE.primitive_bitwidth == 16 else tl.int32
    STEP: tl.constexpr = BLOCK_K // WORD_ELEMENTS
    tile = tl.program_id(0)
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    # Each thread holds two adjacent words, of x and of the weight, whatever their types.
    lane = tl.max_contiguous(tl.arange(0, STEP), 2)
    mask, num_words = (columns < N)[:, None], K // WORD_ELEMENTS
    weight_ptrs = weight.to(tl.pointer_type(WORD)) + columns.to(tl.int64)[:, None] * num_words + lane[None, :]
    up_ptrs = weight_ptrs + N.to(tl.int64) * num_words
    first = _load_words(weight_ptrs, 0, num_words, mask, lane, EVEN_K)
    first_up = _load_words(up_ptrs, 0, num_words, mask, lane, EVEN_K) if GATE is not None else first
    second = _load_words(weight_ptrs, STEP, num_words, mask, lane, EVEN_K)
    second_up = _load_words(up_ptrs, STEP, num_words, mask, lane, EVEN_K) if GATE is not None else second
    wait_for_previous(EARLY)
    rows = tl.arange(0, 1)
    row_squares = load_squares(squares, rows, 1, num_squares, SQUARES_BLOCK)
    x_ptrs = x.to(tl.pointer_type(tl.int64)) + lane
    acc = tl.zeros((BLOCK_N, STEP), tl.float32)
    up = acc
    for word in range(0, num_words, STEP):
        third = _load_words(weight_ptrs, word + 2 * STEP, num_words, mask, lane, EVEN_K)
        third_up = _load_words(up_ptrs, word + 2 * STEP, num_words, mask, lane, EVEN_K) if GATE is not None else third
        row = tl.load(x_ptrs + word) if EVEN_K else tl.load(x_ptrs + word, mask=lane < num_words - word, other=0)
        acc = _accumulate(acc, first, row, DTYPE, X_TYPE)
        if GATE is not None:
            up = _accumulate(up, first_up, row, DTYPE, X_TYPE)
        first, second = second, third
        first_up, second_up = second_up, third_up
    apply_epilogue(
        tl.sum(acc, axis=1)[None, :], tl.sum(up, axis=1)[None, :], weight_scales, bias, squares, row_squares, residual,
        norm_weight, out, weighted, squares_out, None, None, tile, 0, rows, columns, 1, N, K, eps, alpha,
        GATE, 1, 1, BLOCK_N,
    )  # fmt: skip


@functools.cache
def gemv_tiles(num_columns: int, *, gated: bool, has_squares_out: bool, weight_bytes: int) -> GemvTiles:
    """The fastest of some eight on an H200, for the products of Llama-3.1-8B. `has_squares_out`: each program stores a sum of
    squares. Every program of the next product adds up these sums, so there are fewer programs then."""
    if gated:
        tiles = GemvTiles(2, 2048, num_warps=8 if weight_bytes == 2 and num_columns >= 2048 else 4)
    elif has_squares_out:
        tiles = GemvTiles(4, 1024)
    else:
        tiles = GemvTiles(2, 2048) if weight_bytes == 2 else GemvTiles(16, 512, num_warps=8)
    return replace(tiles, block_k=min(tiles.block_k, max(4 * WARP_SIZE, power_of_two(num_columns))))


def supports(x: torch.Tensor) -> bool:
    """Whether the GEMV kernel multiplies x: one row of 16 bits, in whole words."""
    num_rows, num_columns = x.shape
    return num_rows == 1 and x.element_size() == 2 and num_columns % WORD_ELEMENTS.value == 0


def launch(x: torch.Tensor, weight: torch.Tensor | Int8Weight | Fp8Weight, epilogue: Epilogue, tiles: GemvTiles) -> None:
    """As fused_linear.py for M = 1, with its formula and source. x: [1, K].

    Reads the weight once; 2 · N · K operations in float32 without tensor cores, products exact. Outputs beyond N and columns
    beyond K are masked.
    """
    values, scales = values_and_scales(weight)
    assert values.is_contiguous(), "the weight is contiguous"
    num_columns, outputs = x.shape[1], epilogue.out.shape[1]
    fused_row_kernel[(triton.cdiv(outputs, tiles.block_n),)](
        x, values, scales, *epilogue.tensors, outputs, num_columns, epilogue.num_squares, epilogue.eps, epilogue.alpha,
        GATE=epilogue.gate, EVEN_K=num_columns % tiles.block_k == 0,
        SQUARES_BLOCK=power_of_two(epilogue.num_squares), BLOCK_N=tiles.block_n, BLOCK_K=tiles.block_k,
        num_warps=tiles.num_warps, **early_launch(x.device, 1),
    )  # fmt: skip
