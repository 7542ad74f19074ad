"""Unpacks 4-bit codes to floats in registers and multiplies them: shared by all products with 4-bit weights.

A 16-bit word holds four codes, of columns 32 apart, and a register two words of neighbouring columns, as matrix instructions
need them: a shift and a mask, which also sets an exponent, turn two codes into 128 + code (bfloat16) or 1024 + code (float16)
without moving data between registers. Minus the zero point under the same exponent they are exact integers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.quantised_weights import CHUNK_COLUMNS, CHUNK_RUNS, RUN_COLUMNS
from kernels.triton.launching.card_properties import interpreted

COLUMNS = tl.constexpr(CHUNK_COLUMNS)
RUNS = tl.constexpr(CHUNK_RUNS)
RUN = tl.constexpr(RUN_COLUMNS)
_BFLOAT_EXPONENT, _HALF_EXPONENT = tl.constexpr(0x4300), tl.constexpr(0x6400)  # of 128 and of 1024
_INTERPRETED = tl.constexpr(interpreted())


@triton.constexpr_function
def unpack_instructions(run: int, exponent: int) -> str:
    """PTX that unpacks two words: the mask also removes the upper word's bits that the shift brings into the lower one.
    Triton's own 16-bit operations compile to twice as many instructions, because each word is shifted by itself."""
    both = exponent << 16 | exponent
    return f"{{ .reg .b32 shifted; shr.u32 shifted, $1, {4 * run}; lop3.b32 $0, shifted, 0x000F000F, {both:#x}, 0xEA; }}"


@triton.jit
def unpack_biased_codes(words, RUN_INDEX: tl.constexpr, DTYPE: tl.constexpr):
    """The codes of one run, biased by the exponent of DTYPE. words: int16"""
    EXPONENT: tl.constexpr = _BFLOAT_EXPONENT if tl.bfloat16 == DTYPE else _HALF_EXPONENT
    if _INTERPRETED:
        biased = ((words >> (4 * RUN_INDEX)) & 15 | EXPONENT).to(tl.int16)
    else:
        instructions: tl.constexpr = unpack_instructions(RUN_INDEX, EXPONENT)
        biased = tl.inline_asm_elementwise(instructions, "=r,r", [words], dtype=tl.int16, is_pure=True, pack=2)
    return biased.to(DTYPE, bitcast=True)


@triton.jit
def unpack_biased_zeros(scale_zero, DTYPE: tl.constexpr):
    """The zero point, stored above the 16 bits of the scale, biased by the same exponent."""
    EXPONENT: tl.constexpr = _BFLOAT_EXPONENT if tl.bfloat16 == DTYPE else _HALF_EXPONENT
    return ((scale_zero >> 16) | EXPONENT).to(tl.int16).to(DTYPE, bitcast=True)


@triton.jit
def unpack_scales(scale_zero, IS_BFLOAT: tl.constexpr):
    """The scale, stored in the lower 16 bits as float16 or bfloat16, in float32."""
    dtype: tl.constexpr = tl.bfloat16 if IS_BFLOAT else tl.float16
    return (scale_zero & 0xFFFF).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def accumulate_int4(
    x, rows, row_mask, x_stride, words, scales_zeros, outputs, output_mask, num_outputs, K, first, last,
    GROUP: tl.constexpr, BFLOAT_SCALES: tl.constexpr, EVEN_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Σ x[rows, k] · w[outputs, k] over the columns of chunks first … last - 1: [rows, outputs] float32

    `num_outputs`: outputs of the whole weight: a chunk has RUN words for each, a group one scale. The scale is applied to the
    sum over each chunk's part of its group.

    Each chunk's sum starts from zero: where several dots accumulate into a value that the loop carries, Triton up to 3.8 starts
    the first one before the last of the previous iteration has completed (Blackwell, 64 rows and more; triton-lang/triton,
    issue 10821).
    """
    DTYPE: tl.constexpr = x.dtype.element_ty
    offsets = tl.arange(0, RUN)
    x_ptrs = x + rows.to(tl.int64)[:, None] * x_stride + offsets[None, :]
    word_ptrs = words + outputs.to(tl.int64)[None, :] * RUN + offsets[:, None]
    acc = tl.zeros((rows.shape[0], outputs.shape[0]), tl.float32)
    for chunk in tl.range(first, last, num_stages=STAGES):
        chunk_ptrs = word_ptrs + tl.cast(chunk, tl.int64) * (num_outputs * RUN)
        word_tile = tl.load(chunk_ptrs, mask=output_mask[None, :], other=0, eviction_policy="evict_first")
        partial_sum = tl.zeros((rows.shape[0], outputs.shape[0]), tl.float32)
        for run in tl.static_range(RUNS):
            if (RUN * run) % GROUP == 0:
                group = (chunk * COLUMNS + RUN * run) // GROUP
                scale_zero = tl.load(scales_zeros + group * num_outputs + outputs, mask=output_mask, other=0)
                zeros = unpack_biased_zeros(scale_zero, DTYPE)[None, :]
            k = chunk * COLUMNS + RUN * run
            x_mask = row_mask[:, None]
            if not EVEN_K:
                x_mask = x_mask & (offsets < K - k)[None, :]
            x_run = tl.load(x_ptrs + k, mask=x_mask, other=0.0)
            partial_sum = tl.dot(x_run, unpack_biased_codes(word_tile, run, DTYPE) - zeros, partial_sum)
            if (RUN * run + RUN) % GROUP == 0 or run == RUNS - 1:
                acc += partial_sum * unpack_scales(scale_zero, BFLOAT_SCALES)[None, :]
                partial_sum = tl.zeros((rows.shape[0], outputs.shape[0]), tl.float32)
    return acc
