"""Products with weights of 8 bits by the processor's instructions for 8-bit integers, with inputs of two digits of 8 bits.

An input row x is written as largest / 32258 · (254 · h + l), h and l whole numbers from -127 to 127: 16 bits of its largest
element, so that rounding it weighs less than rounding the weights did by a factor of 250. Both digits of all rows are one
product of 8-bit integers, whose sums are exact: a row has the same bits in any batch. The weights are read once, in a byte
each, which is what a product of few rows waits for.

oneDNN multiplies unsigned inputs with signed weights: 128 is added to each digit and taken away through its zero point.
Processors without VNNI add pairs of such products in 16 bits, which overflow; `is_exact` finds that out.
"""

from __future__ import annotations

from functools import cache

import torch

from kernels.cpu.linear import LinearKernel
from kernels.quantised_weights import INT8_MAX, Int8Weight

STEP = 254.0
"""How many low digits make a high one: -127 to 127, and half a step on each side."""

ZERO = 128
SMALLEST = 1e-30
"""A row of nothing but zeros is scaled as if this were its largest element."""


@cache
def is_exact() -> bool:
    """Whether the sums of this processor's 8-bit products are exact, tried with the largest that there can be."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    values = torch.full((16, 64), INT8_MAX, dtype=torch.int8)
    values[1::2].neg_()
    x = torch.tensor([1.0, -1.0]).repeat_interleave(64).view(2, 64)
    found = bind_int8_digits(Int8Weight(values, torch.ones(16)))(x)
    return torch.allclose(found, x @ values.float().T, rtol=1e-4, atol=0.0)


def bind_int8_digits(weight: Int8Weight) -> LinearKernel:
    """→ a function [T, K] → [T, N], for inputs of any float type; keeps no reference to `weight.values`"""
    packed = torch.ops.onednn.qlinear_prepack(weight.values, None)
    scales, zeros = weight.scales, torch.zeros(weight.values.shape[0], dtype=torch.int32)
    multiply = torch.ops.onednn.qlinear_pointwise.default

    def linear(x: torch.Tensor) -> torch.Tensor:
        num_rows = x.shape[0]
        digits, unit = two_digits(x)
        sums = multiply(digits, 1.0, ZERO, packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], "")
        product: torch.Tensor = sums[num_rows:].add_(sums[:num_rows], alpha=STEP).mul_(unit)
        return product.to(x.dtype)

    return linear


def two_digits(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x: [T, K] → high and low digits plus 128: [2·T, K] uint8, and what a low digit counts: [T, 1] float32"""
    wide = x.float()
    unit = wide.abs().amax(dim=1, keepdim=True).clamp_min_(SMALLEST).div_(INT8_MAX * STEP)
    digits = torch.empty(2, *x.shape)
    high, low = digits[0], digits[1]
    torch.div(wide, unit, out=low).round_()
    torch.mul(low, 1 / STEP, out=high).round_()
    low.sub_(high, alpha=STEP)
    return digits.add_(ZERO).to(torch.uint8).flatten(0, 1), unit
