"""The settings of llm-compressor's `compressed-tensors`, checked. Reads JSON; knows no torch."""

from __future__ import annotations

from collections.abc import Mapping

from engine.config.quantization_keys import refusal, require_one_of
from engine.config.stored_weights import Activations, Fp8Weights
from engine.config.values import JsonObject, mapping

FP8_FORMATS = ("float-quantized", "naive-quantized")


def parse_compressed(settings: JsonObject) -> Fp8Weights:
    """One group of settings for all linear modules. Raises `UnsupportedModel` with the key and what can be."""
    for key in ("sparsity_config", "transform_config"):
        if settings.get(key) and mapping(settings, key).get("format", "dense") != "dense":
            raise refusal(key, settings[key], "none")
    _kv_scheme(mapping(settings, "kv_cache_scheme"))
    groups = mapping(settings, "config_groups")
    if len(groups) != 1:
        raise refusal("config_groups", sorted(groups), "one group for all linear modules")
    name, group = next(iter(groups.items()))
    prefix = f"config_groups.{name}."
    if not isinstance(group, Mapping):
        raise refusal(prefix.rstrip("."), group, "an object")
    format_name = group.get("format") or settings.get("format")
    if format_name not in FP8_FORMATS:
        raise refusal("format", format_name, ", ".join(FP8_FORMATS))
    require_one_of(group, "targets", ["Linear"], prefix=prefix)
    require_one_of(group, "output_activations", None, prefix=prefix)
    _check_fp8_weights(mapping(group, "weights"), f"{prefix}weights.")
    return Fp8Weights(activations=_fp8_activations(mapping(group, "input_activations"), f"{prefix}input_activations."))


def _check_fp8_weights(weights: JsonObject, prefix: str) -> None:
    require_one_of(weights, "num_bits", 8, prefix=prefix)
    require_one_of(weights, "type", "float", prefix=prefix)
    require_one_of(weights, "strategy", "tensor", "channel", prefix=prefix)
    require_one_of(weights, "symmetric", True, None, prefix=prefix)
    require_one_of(weights, "dynamic", False, None, prefix=prefix)


def _fp8_activations(activations: JsonObject, prefix: str) -> Activations:
    if not activations:
        return Activations.UNTOUCHED
    require_one_of(activations, "num_bits", 8, prefix=prefix)
    require_one_of(activations, "type", "float", prefix=prefix)
    require_one_of(activations, "symmetric", True, None, prefix=prefix)
    require_one_of(activations, "dynamic", True, False, None, prefix=prefix)
    if activations.get("dynamic"):
        require_one_of(activations, "strategy", "token", prefix=prefix)
        return Activations.DYNAMIC
    require_one_of(activations, "strategy", "tensor", prefix=prefix)
    return Activations.STATIC


def _kv_scheme(scheme: JsonObject) -> None:
    """Scales of keys and values, one of each in every layer; they serve where the cache is kept in 8 bits."""
    if scheme:
        prefix = "kv_cache_scheme."
        require_one_of(scheme, "num_bits", 8, prefix=prefix)
        require_one_of(scheme, "type", "float", prefix=prefix)
        require_one_of(scheme, "strategy", "tensor", prefix=prefix)
        require_one_of(scheme, "symmetric", True, None, prefix=prefix)
        require_one_of(scheme, "dynamic", False, None, prefix=prefix)
