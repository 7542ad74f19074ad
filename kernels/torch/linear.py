"""Matrix products by torch, for formats without a compiled CPU kernel (`kernels.simd.linear` serves float32)."""

from __future__ import annotations

import torch
from torch.nn import functional

from kernels.operations import LinearKernel


def pack_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> LinearKernel:
    """weight: [out, in], bias: [out] → the function [T, in] → [T, out]; it keeps both."""
    return lambda x: functional.linear(x, weight, bias)
