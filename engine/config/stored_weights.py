"""How the quantised matrices of a checkpoint are stored. Values only: `engine.config.quantization` reads them from JSON.

Formats: FP8 E4M3 (arXiv 2209.05433), AWQ (arXiv 2306.00978), GPTQ (arXiv 2210.17323).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar


class Activations(StrEnum):
    """How a product with 8-bit float weights quantises its input: with a scale computed for every token, with a scale from the
    checkpoint, or not at all."""

    DYNAMIC = "dynamic"
    STATIC = "static"
    UNTOUCHED = "untouched"


class GroupLayout(StrEnum):
    """How codes share words of 32 bits: AWQ packs outputs, in the order of its GEMM kernel; GPTQ packs inputs, in order, and
    its rows are inputs; compressed-tensors packs inputs, in order, and its rows are outputs."""

    AWQ = "awq"
    GPTQ = "gptq"
    COMPRESSED = "compressed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Weights:
    """Weights in E4M3, with one scale per matrix or one per row of it."""

    activations: Activations

    @property
    def marker(self) -> str:
        """The last part of the tensor name that quantised modules have and others lack, as in all classes here."""
        return "weight_scale"


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8Weights:
    """Weights of 8-bit integers, with one scale per matrix or one per row of it. Inputs are not rounded, whatever the
    checkpoint says about them. `is_packed`: four codes share 32 bits, offset by 128."""

    is_packed: bool

    @property
    def marker(self) -> str:
        return "weight_packed" if self.is_packed else "weight_scale"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupWeights:
    """Weights of `bits` bits: (code - zero) · scale. There is one zero and one scale for each output and each `group_size`
    inputs, None for all inputs. `zero_offset` is added to the stored zero; without `has_zeros`, zero is half the range of
    codes. With `needs_order` inputs are not in the order of their groups, and only the files can say which group each is in."""

    layout: GroupLayout
    group_size: int | None
    zero_offset: int
    has_zeros: bool = True
    needs_order: bool = False
    bits: ClassVar[int]

    @property
    def marker(self) -> str:
        return "weight_packed" if self.layout is GroupLayout.COMPRESSED else "qweight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Int4Weights(GroupWeights):
    """4-bit codes, multiplied as they are."""

    bits: ClassVar[int] = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8GroupWeights(GroupWeights):
    """8-bit codes in groups or with zero points, for which there is no product. `key`: the setting that says so."""

    key: str = field(compare=False)
    bits: ClassVar[int] = 8

    def __str__(self) -> str:
        return "int8 in one group" if self.group_size is None else f"int8 in groups of {self.group_size}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8BlockWeights:
    """Weights in E4M3 with one scale for each `block` of (outputs, inputs), for which there is no product. `marker`: the name
    of the scales. `key`: the setting that says so."""

    block: tuple[int, int]
    marker: str
    key: str = field(compare=False)

    def __str__(self) -> str:
        return f"fp8 in blocks of {self.block[0]} x {self.block[1]}"


MultipliedWeights = Fp8Weights | Int8Weights | Int4Weights
"""Forms that products read as they are stored, but for the order of the codes."""

DecodedWeights = Int8GroupWeights | Fp8BlockWeights
"""Forms that no product reads: they are decoded while the checkpoint is read, and kept as an option says (ADR 62)."""

StoredWeights = MultipliedWeights | DecodedWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointQuantization:
    """How the quantised modules of a checkpoint are stored."""

    method: str
    weights: StoredWeights

    @property
    def decoded(self) -> DecodedWeights | None:
        """The form of the weights, if they must be decoded while they are read."""
        return self.weights if isinstance(self.weights, DecodedWeights) else None
