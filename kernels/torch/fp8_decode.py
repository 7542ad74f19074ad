"""Conversion of e4m3 to wider numbers by shifts: on CPUs several times faster than torch's, with the same results."""

from __future__ import annotations

import torch

SIGN_AND_SEVEN_BITS = 0xBF80 - 0x10000
"""Bits of an int16: the sign of float16, the lower four bits of its exponent and the upper three of its fraction."""

BIAS_FACTOR = 256.0
"""Exponents of float16 are biased by 15 and those of e4m3 by 7: the same bits mean a number 2⁸ times smaller."""


def decode_fp8(codes: torch.Tensor, dtype: torch.dtype, scales: torch.Tensor | None = None) -> torch.Tensor:
    """Decoded codes: float8_e4m3fn of any shape → code · scale in `dtype`; `scales` must broadcast with `codes`, None is one.

    NaN becomes 480: readers of codes that were never written must mask them, and weights that contain NaN are refused on
    loading.
    """
    bits = codes.view(torch.int8).to(torch.int16)  # the sign fills the upper half
    bits.bitwise_left_shift_(7).bitwise_and_(SIGN_AND_SEVEN_BITS)
    is_exact = dtype.itemsize > 2 or (dtype is torch.bfloat16 and scales is None)  # else rounded once, from float32
    wide = bits.view(torch.float16).to(dtype if is_exact else torch.float32)
    wide.mul_(BIAS_FACTOR if scales is None else (scales * BIAS_FACTOR).to(wide.dtype))
    return wide.to(dtype)


def decode_kv(slots: torch.Tensor, dtype: torch.dtype, kv_scales: torch.Tensor | None) -> torch.Tensor:
    """Decoded keys and values, in `dtype`.

    slots: [..., 2, K, D] float8_e4m3fn, kv_scales: [2] float32 of keys and of values, None is one
    """
    return decode_fp8(slots, dtype, None if kv_scales is None else kv_scales[:, None, None])
