"""Pairs of e4m3 values in 16-bit words become two float16 in registers: of an even column and of the odd one after it."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.tuning import interpreted

_INTERPRETED = tl.constexpr(interpreted())
_UNPACK = tl.constexpr(
    "{ .reg .b32 sorted; .reg .b16 lower, upper; prmt.b32 sorted, $2, 0, 0x3120; mov.b32 {lower, upper}, sorted;"
    " cvt.rn.f16x2.e4m3x2 $0, lower; cvt.rn.f16x2.e4m3x2 $1, upper; }"
)
"""For two words in one register: their lower bytes become one pair of float16 and their upper bytes the other. Triton's own
16-bit operations take words apart one by one and reassemble every pair: twice the instructions of a whole tile."""


@triton.jit
def e4m3_pairs(words):
    """The values in the lower and in the upper bytes, as float16: exact. words: uint16, of e4m3fn"""
    if _INTERPRETED:
        lower = (words & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        upper = (words >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        lower, upper = tl.inline_asm_elementwise(
            _UNPACK, "=r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    return lower, upper
