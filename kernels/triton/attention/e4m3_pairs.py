"""Conversion of pairs of e4m3 values in 16-bit words to two float16 tensors in registers: even columns and odd columns."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.launching.card_properties import interpreted

_INTERPRETED = tl.constexpr(interpreted())
_UNPACK = tl.constexpr(
    "{ .reg .b32 sorted; .reg .b16 lower, upper; prmt.b32 sorted, $2, 0, 0x3120; mov.b32 {lower, upper}, sorted;"
    " cvt.rn.f16x2.e4m3x2 $0, lower; cvt.rn.f16x2.e4m3x2 $1, upper; }"
)
"""For two words in one register: their lower bytes become one pair of float16, their upper bytes another. Triton's own 16-bit
operations unpack words one by one and repack every pair, with twice the instructions for a whole tile."""


@triton.jit
def e4m3_pairs(words):
    """→ the e4m3fn values in the lower and in the upper bytes as float16, exactly. words: uint16"""
    if _INTERPRETED:
        lower = (words & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        upper = (words >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        lower, upper = tl.inline_asm_elementwise(
            _UNPACK, "=r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    return lower, upper
