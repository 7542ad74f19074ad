"""How the quantised matrices of a checkpoint are stored. Values only: `engine.config.quantization` reads them from JSON.

Formats: FP8 E4M3 (arXiv 2209.05433), AWQ (arXiv 2306.00978), GPTQ (arXiv 2210.17323).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Activations(StrEnum):
    """How a product with 8-bit float weights quantises its input: with a scale computed for every token, with a scale from the
    checkpoint, or not at all."""

    DYNAMIC = "dynamic"
    STATIC = "static"
    UNTOUCHED = "untouched"


class Int4Layout(StrEnum):
    """How eight 4-bit codes share 32 bits: AWQ packs outputs, in the order of its GEMM kernel; GPTQ packs inputs, in order."""

    AWQ = "awq"
    GPTQ = "gptq"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Weights:
    """Weights in E4M3, with one scale per matrix or one per row of it."""

    activations: Activations


@dataclass(frozen=True, slots=True, kw_only=True)
class Int4Weights:
    """Weights of 4 bits: (code - zero) · scale. There is one zero and one scale for each output and each `group_size` inputs,
    None for all inputs. `zero_offset` is added to the stored zero."""

    layout: Int4Layout
    group_size: int | None
    zero_offset: int


StoredWeights = Fp8Weights | Int4Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointQuantization:
    """How the quantised modules of a checkpoint are stored."""

    method: str
    weights: StoredWeights
