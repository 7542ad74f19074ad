"""What `quantization_config` of config.json says about the weights in the checkpoint, checked. Reads JSON; knows no torch.

Which modules are quantised is not read here: the tensors in the files say so, whatever the lists of exceptions look like.
Formats: FP8 E4M3 (arXiv 2209.05433), AWQ (arXiv 2306.00978), GPTQ (arXiv 2210.17323).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from engine.config.values import JsonObject, flag, mapping
from engine.errors import UnsupportedModel

KEY = "quantization_config"
METHODS = ("fp8", "compressed-tensors", "awq", "gptq")
FP8_FORMATS = ("float-quantized", "naive-quantized")
GROUP_SIZES = (32, 64, 128, 256, 512, 1024)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointQuantization:
    """How the quantised modules of a checkpoint are stored."""

    method: str
    weights: Fp8Weights | Int4Weights


def parse_quantization(config: JsonObject) -> CheckpointQuantization | None:
    """The checked form of `quantization_config`, None without one. Raises `UnsupportedModel` with the key and what can be."""
    settings = mapping(config, KEY)
    if not settings:
        if config.get("compression_config"):
            raise UnsupportedModel(f"config.json: compression_config is not read; supported: the same under {KEY}")
        return None
    method = settings.get("quant_method")
    if not isinstance(method, str) or method not in METHODS:
        raise _refusal("quant_method", method, ", ".join(METHODS))
    return CheckpointQuantization(method=method, weights=_weights(method, settings))


def _weights(method: str, settings: JsonObject) -> Fp8Weights | Int4Weights:
    if method == "awq":
        return _awq(settings)
    if method == "gptq":
        return _gptq(settings)
    return _fp8(settings) if method == "fp8" else _compressed(settings)


def _refusal(key: str, value: object, supported: str) -> UnsupportedModel:
    return UnsupportedModel(f"config.json: {KEY}.{key} {value!r} is not supported; supported: {supported}")


def _require_one_of(settings: JsonObject, key: str, *accepted: object, prefix: str = "") -> None:
    """Raise `UnsupportedModel` for a value that is none of `accepted`; a missing key and null are `None`."""
    value = settings.get(key)
    if not any(value == each and type(value) is type(each) for each in accepted):
        allowed = ", ".join("none" if each is None else str(each).lower() for each in accepted)
        raise _refusal(f"{prefix}{key}", value, allowed)


def _fp8(settings: JsonObject) -> Fp8Weights:
    """The layout of vLLM's and transformers' `fp8`: weight, weight_scale and, with static activations, input_scale."""
    _require_one_of(settings, "weight_block_size", None)
    _require_one_of(settings, "fmt", None, "e4m3", "float8_e4m3fn")
    _require_one_of(settings, "activation_scheme", None, "dynamic", "static")
    return Fp8Weights(activations=Activations(settings.get("activation_scheme") or "dynamic"))


def _compressed(settings: JsonObject) -> Fp8Weights:
    """The layout of llm-compressor: one group of settings for all linear modules."""
    for key in ("sparsity_config", "transform_config"):
        if settings.get(key) and mapping(settings, key).get("format", "dense") != "dense":
            raise _refusal(key, settings[key], "none")
    _kv_scheme(mapping(settings, "kv_cache_scheme"))
    groups = mapping(settings, "config_groups")
    if len(groups) != 1:
        raise _refusal("config_groups", sorted(groups), "one group for all linear modules")
    name, group = next(iter(groups.items()))
    prefix = f"config_groups.{name}."
    if not isinstance(group, Mapping):
        raise _refusal(prefix.rstrip("."), group, "an object")
    format_name = group.get("format") or settings.get("format")
    if format_name not in FP8_FORMATS:
        raise _refusal("format", format_name, ", ".join(FP8_FORMATS))
    _require_one_of(group, "targets", ["Linear"], prefix=prefix)
    _require_one_of(group, "output_activations", None, prefix=prefix)
    _compressed_weights(mapping(group, "weights"), f"{prefix}weights.")
    return Fp8Weights(activations=_compressed_activations(mapping(group, "input_activations"), f"{prefix}input_activations."))


def _compressed_weights(weights: JsonObject, prefix: str) -> None:
    _require_one_of(weights, "num_bits", 8, prefix=prefix)
    _require_one_of(weights, "type", "float", prefix=prefix)
    _require_one_of(weights, "strategy", "tensor", "channel", prefix=prefix)
    _require_one_of(weights, "symmetric", True, None, prefix=prefix)
    _require_one_of(weights, "dynamic", False, None, prefix=prefix)


def _compressed_activations(activations: JsonObject, prefix: str) -> Activations:
    if not activations:
        return Activations.UNTOUCHED
    _require_one_of(activations, "num_bits", 8, prefix=prefix)
    _require_one_of(activations, "type", "float", prefix=prefix)
    _require_one_of(activations, "symmetric", True, None, prefix=prefix)
    _require_one_of(activations, "dynamic", True, False, None, prefix=prefix)
    if activations.get("dynamic"):
        _require_one_of(activations, "strategy", "token", prefix=prefix)
        return Activations.DYNAMIC
    _require_one_of(activations, "strategy", "tensor", prefix=prefix)
    return Activations.STATIC


def _kv_scheme(scheme: JsonObject) -> None:
    """Scales of keys and values, one of each in every layer; they serve where the cache is kept in 8 bits."""
    if scheme:
        prefix = "kv_cache_scheme."
        _require_one_of(scheme, "num_bits", 8, prefix=prefix)
        _require_one_of(scheme, "type", "float", prefix=prefix)
        _require_one_of(scheme, "strategy", "tensor", prefix=prefix)
        _require_one_of(scheme, "symmetric", True, None, prefix=prefix)
        _require_one_of(scheme, "dynamic", False, None, prefix=prefix)


def _awq(settings: JsonObject) -> Int4Weights:
    settings = {"bits": settings.get("w_bit"), "group_size": settings.get("q_group_size"), **settings}
    _require_one_of(settings, "bits", 4)
    if str(settings.get("version") or "gemm").lower() != "gemm":
        raise _refusal("version", settings["version"], "gemm")
    return Int4Weights(layout=Int4Layout.AWQ, group_size=_group_size(settings), zero_offset=0)


def _gptq(settings: JsonObject) -> Int4Weights:
    """`desc_act` needs nothing here: `g_idx` in the files says which group an input belongs to. Neither do entries of `dynamic`
    that begin with `-:`, which name modules that are not quantised."""
    _require_one_of(settings, "bits", 4)
    _require_one_of(settings, "pack_dtype", None, "int32")
    others = [pattern for pattern in mapping(settings, "dynamic") if not pattern.startswith("-:")]
    if others:
        raise _refusal("dynamic", others, "the same bits and group_size for all modules; exceptions begin with -:")
    if flag(settings, "is_marlin_format"):
        raise _refusal("is_marlin_format", True, "false")
    format_name = settings.get("checkpoint_format") or settings.get("format") or "gptq"
    if format_name not in ("gptq", "gptq_v2"):
        raise _refusal("checkpoint_format", format_name, "gptq, gptq_v2")
    offset = 1 if format_name == "gptq" else 0  # the first format stores zero - 1
    return Int4Weights(layout=Int4Layout.GPTQ, group_size=_group_size(settings), zero_offset=offset)


def _group_size(settings: dict[str, Any] | JsonObject) -> int | None:
    size = settings.get("group_size")
    if size == -1 and not isinstance(size, bool):
        return None
    if size not in GROUP_SIZES or isinstance(size, bool):
        raise _refusal("group_size", size, f"{', '.join(map(str, GROUP_SIZES))} or -1")
    return int(size)
