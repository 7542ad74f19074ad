"""PTX types in numpy (PTX ISA 5.2, fundamental, packed and alternate floating-point types).

A register holds raw bits: an unsigned integer of its width per thread. `unpack` converts them to values for computation:
integers unchanged, narrow floats to float32, which represents them exactly; two packed numbers become two rows. `pack` rounds
back, to nearest even.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[Any]
RAW: dict[int, Any] = {0: np.bool_, 1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
"""Raw dtype by register width in bytes; 0 for predicates."""
DTYPES = {width: np.dtype(raw) for width, raw in RAW.items()}
NUMBERS = {(kind, width): np.dtype(f"{kind}{width}") for kind in "iuf" for width in (1, 2, 4, 8) if (kind, width) != ("f", 1)}
POISON = 0xCD  # every byte of uninitialised data


@dataclass(frozen=True)
class Type:
    """`width` in bytes. `kind` is that of numpy: b(ool), u, i, f."""

    name: str
    width: int
    kind: str
    unpack: Callable[[Array], Array]
    pack: Callable[[Array], Array]

    @property
    def raw(self) -> Any:
        return RAW[self.width]


def widen_bf16(bits: Array) -> Array:
    """uint16 → float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def round_bf16(values: Array) -> Array:
    """float32 → uint16; NaN becomes 0x7FFF, as by `cvt`."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), rounded)


def widen_f16(bits: Array) -> Array:
    """uint16 → float32."""
    return bits.view(np.float16).astype(np.float32)


def round_f16(values: Array) -> Array:
    """float32 → uint16."""
    return values.astype(np.float16).view(np.uint16)


_E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()


def widen_e4m3(codes: Array) -> Array:
    """uint8 → float32."""
    return _E4M3[codes]


def round_e4m3(values: Array) -> Array:
    """float32 → uint8, saturating at ±448 (`.satfinite`); NaN stays NaN."""
    bounded = torch.from_numpy(np.clip(values, -448, 448).astype(np.float32))
    return bounded.to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def split_halves(bits: Array) -> Array:
    """[…, T] → [2, …, T] of half the width, lower bits first."""
    half = RAW[bits.dtype.itemsize // 2]
    shift = bits.dtype.type(8 * half().itemsize)
    return np.stack([bits.astype(half), (bits >> shift).astype(half)])


def join_halves(lower: Array, upper: Array) -> Array:
    """The inverse of `split_halves`."""
    wide = RAW[2 * lower.dtype.itemsize]
    bits: Array = lower.astype(wide) | (upper.astype(wide) << wide(8 * lower.dtype.itemsize))
    return bits


def _integer(name: str, width: int, kind: str) -> Type:
    made = np.dtype(f"{kind}{width}")
    if kind == "u":
        return Type(name, width, kind, lambda bits: bits, lambda values: values.astype(made, copy=False))
    return Type(
        name, width, kind, lambda bits: bits.view(made), lambda values: values.astype(made, copy=False).view(RAW[width])
    )


def _float(name: str, made: Any) -> Type:
    width = np.dtype(made).itemsize
    return Type(name, width, "f", lambda bits: bits.view(made), lambda values: values.astype(made, copy=False).view(RAW[width]))


def _pair(name: str, width: int, widen: Callable[[Array], Array], rounded: Callable[[Array], Array]) -> Type:
    return Type(
        name,
        width,
        "f",
        lambda bits: widen(split_halves(bits)),
        lambda values: join_halves(rounded(values[0]), rounded(values[1])),
    )


def _types() -> list[Type]:
    sizes = ((8, 1), (16, 2), (32, 4), (64, 8))
    integers = [_integer(f"{letter}{bits}", width, kind) for bits, width in sizes for letter, kind in ("uu", "si", "bu")]
    return [
        *integers,
        Type("pred", 1, "b", lambda bits: bits, lambda values: values),
        _float("f32", np.float32),
        _float("f64", np.float64),
        Type("f16", 2, "f", widen_f16, round_f16),
        Type("bf16", 2, "f", widen_bf16, round_bf16),
        _pair("f16x2", 4, widen_f16, round_f16),
        _pair("bf16x2", 4, widen_bf16, round_bf16),
        _pair("e4m3x2", 2, widen_e4m3, round_e4m3),
    ]


TYPES = {made.name: made for made in _types()}
MATRIX_WIDENED: dict[str, tuple[int, Callable[[Array], Array]]] = {
    "bf16": (2, widen_bf16),
    "f16": (2, widen_f16),
    "e4m3": (1, widen_e4m3),
}
"""Matrix element types: bytes per element, and the conversion of bits to float32."""
