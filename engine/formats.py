"""The formats in which an engine computes and keeps its numbers, decided by checkpoint, options and card. Knows no torch.

Formats that contradict each other are refused here, before anything is loaded: by an engine for its own card, by `gatehouse
plan` for any.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from engine.config.model import ModelConfig
from engine.config.quantization_keys import KEY
from engine.config.stored_weights import DecodedWeights, Fp8Weights, Int4Weights
from engine.errors import EngineConfigError, UnsupportedModel
from engine.options import EngineOptions

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
ON_THE_FLY = ("int8", "fp8")
"""Formats to which weights are quantised while they are read."""

UNQUANTISED = "none"
DECODED_FORMATS = (*ON_THE_FLY, UNQUANTISED)
"""Formats for weights that are plain numbers once they are read."""

FP8_CAPABILITY = (8, 9)
"""The first compute capability with products of fp8 numbers."""

HEAD_DIM_MAX = 256
"""The longest head of attention kernels for GPUs: longer ones do not fit the shared memory of every card."""


class WeightFormat(NamedTuple):
    """How the matrices of the layers are stored: `bits` for each weight, and `group_bits` more for every `group` of weights.
    `head_bits`: bits of a weight of the output head, 0 where it is kept in the format that is computed in."""

    name: str
    bits: int
    group: int = 1
    group_bits: int = 0
    head_bits: int = 0

    def num_bytes(self, num_weights: int) -> int:
        return -(-num_weights * self.bits // 8) + -(-num_weights // self.group) * self.group_bits // 8


def unquantised(element_bytes: int) -> WeightFormat:
    """Weights as they are computed with."""
    return WeightFormat(f"{8 * element_bytes} bits", 8 * element_bytes)


EIGHT_BITS = WeightFormat("8 bits", 8, head_bits=8)  # and one scale for each row: less than a thousandth
EIGHT_BITS_STORED = EIGHT_BITS._replace(head_bits=0)  # checkpoints leave the head as it was
HEAD_BITS = {"none": 0, "int8": 8}  # by the option `head_quantization`
FOUR_BITS = WeightFormat("4 bits", 4, group=128, group_bits=32)  # a scale of 16 bits and the zero in 16 more


@dataclass(frozen=True, slots=True, kw_only=True)
class Formats:
    """How weights are stored, and the bytes of a number that is computed with, and of one in the KV cache."""

    weights: WeightFormat
    element_bytes: int
    kv_element_bytes: int


def computed_dtype(requested: str, stored: str, device_type: str) -> str:
    """`auto` computes in float32 on CPUs (16-bit products are many times slower there), on GPUs in the checkpoint's format if
    that has 16 bits, else in bfloat16: float32 would take twice the memory and several times as long."""
    if requested != "auto":
        return requested
    if device_type == "cpu":
        return "float32"
    return stored if DTYPE_BYTES.get(stored) == 2 else "bfloat16"


def has_fp8(capability: tuple[int, int] | None) -> bool:
    """Whether a GPU of this compute capability computes with fp8. None is a CPU, which decodes fp8 in its registers."""
    return capability is None or capability >= FP8_CAPABILITY


def check_quantization(config: ModelConfig, requested: str | None, head: str | None) -> None:
    """Raise `EngineConfigError`, naming the option, where these options contradict the checkpoint, or where one is needed to
    say how decoded matrices will be kept."""
    stored = config.quantization
    if stored is not None and stored.decoded is not None:
        _check_decoded(stored.decoded, requested)
    elif stored is not None and requested not in (None, stored.method):
        raise EngineConfigError(
            "quantization", f"= {requested!r} cannot be applied: the checkpoint is quantised already ({stored.method})"
        )
    if stored is None and requested not in (None, *DECODED_FORMATS):
        raise EngineConfigError(
            "quantization",
            f"= {requested!r} cannot be applied to an unquantised checkpoint; supported here: {', '.join(DECODED_FORMATS)}",
        )
    if head is not None and not config.has_head:
        raise EngineConfigError("head_quantization", f"= {head!r} cannot be applied: the model has no output head")


def _check_decoded(stored: DecodedWeights, requested: str | None) -> None:
    """The checkpoint is in a form that no product reads. What its weights become is chosen, never assumed (ADR 62)."""
    if requested in DECODED_FORMATS:
        return
    given = "must be chosen" if requested is None else f"= {requested!r} cannot be applied"
    raise EngineConfigError(
        "quantization",
        f"{given}: the checkpoint is {stored} (config.json: {KEY}.{stored.key}), which is decoded while it is read. "
        "int8 rounds its weights to 8-bit integers (usually closest), fp8 to E4M3 once more, none keeps them unquantised "
        '(in gatehouse.toml: quantization = "int8"; of gatehouse plan, simulate and models verify: --quantization int8)',
    )


def check_formats(config: ModelConfig, options: EngineOptions, dtype: str, capability: tuple[int, int] | None) -> None:
    """Raise `EngineConfigError`, naming the option, for formats that contradict the checkpoint, or for which a GPU of this
    compute capability has no instructions or no kernel; None is a CPU. Raise `UnsupportedModel` for heads that no kernel is
    made for."""
    check_quantization(config, options.quantization, options.head_quantization)
    if capability is None:
        return
    if config.head_dim > HEAD_DIM_MAX:
        raise UnsupportedModel(f"head_dim must be at most {HEAD_DIM_MAX} on a GPU, not {config.head_dim}")
    weights = None if config.quantization is None else config.quantization.weights
    if isinstance(weights, Int4Weights) and DTYPE_BYTES[dtype] > 2:
        raise EngineConfigError("dtype", "must be bfloat16 or float16 on a GPU for weights of 4 bits")
    if config.experts is not None and DTYPE_BYTES[dtype] > 2:  # their tiles are for matrix instructions, which have no float32
        raise EngineConfigError("dtype", "must be bfloat16 or float16 on a GPU for a mixture of experts")
    if has_fp8(capability):
        return
    found = f"needs a GPU of compute capability 8.9 or newer, this one has {capability[0]}.{capability[1]}"
    if options.quantization == "fp8" or isinstance(weights, Fp8Weights):
        raise EngineConfigError("quantization", f"fp8 {found}; use int8 on an unquantised checkpoint")
    if options.kv_cache_dtype != "auto":
        raise EngineConfigError("kv_cache_dtype", f"{options.kv_cache_dtype} {found}; use auto")


def formats_of(config: ModelConfig, options: EngineOptions, dtype: str) -> Formats:
    """How weights, keys and values will be kept."""
    element_bytes = DTYPE_BYTES[dtype]
    layers, head = _layers_format(config, options, element_bytes), options.head_quantization
    return Formats(
        weights=layers if head is None else layers._replace(head_bits=HEAD_BITS[head]),
        element_bytes=element_bytes,
        kv_element_bytes=element_bytes if options.kv_cache_dtype == "auto" else 1,
    )


def _layers_format(config: ModelConfig, options: EngineOptions, element_bytes: int) -> WeightFormat:
    stored = config.quantization
    if stored is None or stored.decoded is not None:
        return unquantised(element_bytes) if options.quantization in (None, UNQUANTISED) else EIGHT_BITS
    weights = stored.weights
    if isinstance(weights, Int4Weights):
        return FOUR_BITS._replace(group=weights.group_size or config.hidden_size)
    return EIGHT_BITS_STORED
