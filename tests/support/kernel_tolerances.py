"""How far a kernel may be from its float32 reference: one table, each row with its reason. Comparison raises, never returns.

`rtol` is relative to the reference's element, `atol` to the size of what was summed: pass `scale` when terms are not of
order one. The unit of a dtype, its relative rounding error, is 2^-24 for float32, 2^-11 for float16, 2^-8 for bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Kind = Literal["pointwise", "normed", "attention", "matmul", "probability", "fp8"]


@dataclass(frozen=True)
class Tolerance:
    """|actual - expected| ≤ atol · scale + rtol · |expected|."""

    rtol: float
    atol: float


# Computed in float32 and rounded once, as the reference is: one unit in the last place apart where both round differently;
# float32 itself differs by the order of a few operations and by exp2 against exp.
_POINTWISE = {
    torch.float32: Tolerance(1e-5, 1e-6),
    torch.float16: Tolerance(2**-10, 1e-6),
    torch.bfloat16: Tolerance(2**-7, 1e-6),
}
# A sum of a row stands in every element: its own rounding, of up to thousands of float32 terms, comes on top.
_NORMED = {
    torch.float32: Tolerance(2e-5, 2e-6),
    torch.float16: Tolerance(2**-9, 2**-20),
    torch.bfloat16: Tolerance(2**-6, 2**-20),
}
# Softmax weights are rounded to the storage dtype before they meet the values (tensor cores take them so), which gives an
# absolute error of a unit times the values' size; float32 sums in another order and rescales at every tile.
_ATTENTION = {
    torch.float32: Tolerance(2e-5, 5e-6),
    torch.float16: Tolerance(2**-9, 2**-10),
    torch.bfloat16: Tolerance(2**-6, 2**-7),
}
# Products of storage dtypes are exact in float32; what differs is the order of up to a few thousand sums, then one rounding.
_MATMUL = {
    torch.float32: Tolerance(2e-5, 2e-5),
    torch.float16: Tolerance(2**-9, 2**-10),
    torch.bfloat16: Tolerance(2**-6, 2**-7),
}
# exp2 of a scaled difference, over a sum of a whole vocabulary.
_PROBABILITY = {torch.float32: Tolerance(1e-4, 1e-7)}
# Values that were quantised to e4m3 (three bits of mantissa): a value on the edge between two may fall to either.
_FP8 = {
    torch.float32: Tolerance(2**-3, 2**-9),
    torch.float16: Tolerance(2**-3, 2**-9),
    torch.bfloat16: Tolerance(2**-3, 2**-9),
    torch.float8_e4m3fn: Tolerance(2**-3, 2**-9),
}

TABLE: dict[Kind, dict[torch.dtype, Tolerance]] = {
    "pointwise": _POINTWISE,
    "normed": _NORMED,
    "attention": _ATTENTION,
    "matmul": _MATMUL,
    "probability": _PROBABILITY,
    "fp8": _FP8,
}


def assert_near(actual: torch.Tensor, expected: torch.Tensor, kind: Kind, *, scale: float = 1.0) -> None:
    """Raise unless `actual` is as near to `expected` as its kind and its own dtype allow. NaN equals nothing."""
    limit = TABLE[kind][actual.dtype]
    torch.testing.assert_close(actual.float(), expected.float(), rtol=limit.rtol, atol=limit.atol * scale, check_device=False)


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Raise unless both hold the same bits, NaN and the sign of zero included: copies, integers, the batch-invariant mode."""
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    differing = _bytes(actual) != _bytes(expected)
    assert not differing.any(), f"{int(differing.sum())} of {differing.numel()} bytes differ"


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
