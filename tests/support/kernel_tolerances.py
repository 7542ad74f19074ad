"""How far a kernel may differ from its float32 reference: one table, with a reason for each row. Comparisons raise.

`rtol` is relative to the reference's element, `atol` to the magnitude of the summed terms: pass `scale` if it is not of order
one. The unit of a dtype, its relative rounding error, is 2^-24 for float32, 2^-11 for float16, 2^-8 for bfloat16.
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
# Every element contains a sum over the row, which adds the rounding of up to thousands of float32 terms.
_NORMED = {
    torch.float32: Tolerance(2e-5, 2e-6),
    torch.float16: Tolerance(2**-9, 2**-20),
    torch.bfloat16: Tolerance(2**-6, 2**-20),
}
# Softmax weights are rounded to the storage dtype before they multiply the values (as tensor cores require), an absolute error
# of one unit times the values' magnitude; in float32, the order of summation differs and every tile rescales.
_ATTENTION = {
    torch.float32: Tolerance(2e-5, 5e-6),
    torch.float16: Tolerance(2**-9, 2**-10),
    torch.bfloat16: Tolerance(2**-6, 2**-7),
}
# Products of storage dtypes are exact in float32; the order of up to a few thousand additions differs, then one rounding.
_MATMUL = {
    torch.float32: Tolerance(2e-5, 2e-5),
    torch.float16: Tolerance(2**-9, 2**-10),
    torch.bfloat16: Tolerance(2**-6, 2**-7),
}
# exp2 of a scaled difference, over a sum of a whole vocabulary.
_PROBABILITY = {torch.float32: Tolerance(1e-4, 1e-7)}
# Values quantised to e4m3 (three mantissa bits): a value halfway between two may round to either.
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
    """Raise unless `actual` is within the tolerance of its kind and dtype of `expected`. NaN equals nothing."""
    limit = TABLE[kind][actual.dtype]
    torch.testing.assert_close(actual.float(), expected.float(), rtol=limit.rtol, atol=limit.atol * scale, check_device=False)


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Raise unless both have the same bits, including NaN and the sign of zero: copies, integers, the batch-invariant mode."""
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    differing = _bytes(actual) != _bytes(expected)
    assert not differing.any(), f"{int(differing.sum())} of {differing.numel()} bytes differ"


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
