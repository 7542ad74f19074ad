"""The settings of llm-compressor's `compressed-tensors`, checked. Reads JSON; knows no torch."""

from __future__ import annotations

from collections.abc import Mapping

from engine.config.quantization_keys import group_size, refusal, require_one_of, require_values
from engine.config.stored_weights import (
    Activations,
    Fp8BlockWeights,
    Fp8Weights,
    GroupLayout,
    Int4Weights,
    Int8GroupWeights,
    Int8Weights,
    StoredWeights,
)
from engine.config.values import JsonObject, mapping, positive

SYMMETRIC, STATIC = (True, None), (False, None)  # of the keys `symmetric` and `dynamic`; null is the default
FP8_FORMATS = ("float-quantized", "naive-quantized")
INT8_FORMAT, PACKED_FORMAT = "int-quantized", "pack-quantized"
FUSED_TRANSFORMS = ("weight_input", "weight_output")
IN_ORDER, BY_GROUP = (None, False, "weight", "static"), (True, "group", "dynamic")
"""Of the key `actorder`: groups of neighbouring inputs, and groups that `weight_g_idx` states."""


def parse_compressed(settings: JsonObject) -> StoredWeights:
    """One group of settings for all linear modules. Raises `UnsupportedModel` with the key and the supported values."""
    require_one_of(mapping(settings, "sparsity_config"), "format", "dense", None, prefix="sparsity_config.")
    _check_transforms(mapping(settings, "transform_config"))
    check_kv_scheme(mapping(settings, "kv_cache_scheme"))
    groups = mapping(settings, "config_groups")
    if len(groups) != 1:
        raise refusal("config_groups", sorted(groups), "one group for all linear modules")
    name, group = next(iter(groups.items()))
    prefix = f"config_groups.{name}."
    if not isinstance(group, Mapping):
        raise refusal(prefix.rstrip("."), group, "an object")
    format_name = group.get("format") or settings.get("format")
    if format_name not in (*FP8_FORMATS, INT8_FORMAT, PACKED_FORMAT):
        raise refusal("format", format_name, ", ".join((*FP8_FORMATS, INT8_FORMAT, PACKED_FORMAT)))
    require_values(group, prefix, targets=[["Linear"]], output_activations=[None])
    weights, inputs = mapping(group, "weights"), mapping(group, "input_activations")
    require_one_of(weights, "dynamic", *STATIC, prefix=f"{prefix}weights.")
    if format_name in FP8_FORMATS:
        return _fp8_weights(weights, inputs, prefix)
    if format_name == INT8_FORMAT:
        return _int8_weights(weights, inputs, prefix)
    if inputs:
        raise refusal(f"{prefix}input_activations", inputs, "none")
    return _packed_weights(weights, f"{prefix}weights.")


def _check_transforms(transforms: JsonObject) -> None:
    """Transforms of weights were multiplied into them when the checkpoint was made; those of activations, queries and keys are
    not computed. Raises `UnsupportedModel`."""
    require_one_of(transforms, "format", None, prefix="transform_config.")
    for name, scheme in mapping(transforms, "config_groups").items():
        applied = scheme.get("apply") if isinstance(scheme, dict) else None
        listed = applied if isinstance(applied, list) else []
        locations = [item.get("location") if isinstance(item, dict) else item for item in listed]
        if not locations or not all(location in FUSED_TRANSFORMS for location in locations):
            raise refusal(f"transform_config.config_groups.{name}", locations, "transforms that are in the weights")


def check_kv_scheme(scheme: JsonObject) -> None:
    """Scales of keys and values, one of each in every layer; they serve where the cache is kept in 8 bits. Raises
    `UnsupportedModel`."""
    if scheme:
        prefix, strategies = "kv_cache_scheme.", ("tensor", None)  # null is the default
        require_values(scheme, prefix, num_bits=[8], type=["float"], strategy=strategies, symmetric=SYMMETRIC, dynamic=STATIC)


def _fp8_weights(weights: JsonObject, inputs: JsonObject, prefix: str) -> Fp8Weights | Fp8BlockWeights:
    """Inputs of matrices in blocks are not rounded, so their settings do not matter."""
    of_weights = f"{prefix}weights."
    strategies = ("tensor", "channel", "block")
    require_values(weights, of_weights, num_bits=[8], type=["float"], strategy=strategies, symmetric=SYMMETRIC)
    if weights["strategy"] != "block":
        return Fp8Weights(activations=_fp8_activations(inputs, f"{prefix}input_activations."))
    block = read_block(weights, "block_structure", prefix=of_weights)
    return Fp8BlockWeights(block=block, marker="weight_scale", key=f"{of_weights}strategy 'block'")


def _fp8_activations(activations: JsonObject, prefix: str) -> Activations:
    if not activations:
        return Activations.UNTOUCHED
    require_values(activations, prefix, num_bits=[8], type=["float"], symmetric=SYMMETRIC, dynamic=[True, *STATIC])
    if activations.get("dynamic"):
        require_one_of(activations, "strategy", "token", prefix=prefix)
        return Activations.DYNAMIC
    require_one_of(activations, "strategy", "tensor", prefix=prefix)
    return Activations.STATIC


def read_block(settings: JsonObject, key: str, *, prefix: str = "") -> tuple[int, int]:
    """Rows and columns of a block. Raises `UnsupportedModel`."""
    block = settings.get(key)
    if not isinstance(block, list) or len(block) != 2:
        raise refusal(f"{prefix}{key}", block, "two positive integers")
    rows, columns = (positive({f"{prefix}{key}": size}, f"{prefix}{key}") for size in block)
    return rows, columns


def _int8_weights(weights: JsonObject, inputs: JsonObject, prefix: str) -> Int8Weights:
    """Inputs are not rounded; what rounds them elsewhere must be 8 bits all the same, so that little is different."""
    strategies = ("tensor", "channel")
    require_values(weights, f"{prefix}weights.", num_bits=[8], type=["int"], strategy=strategies, symmetric=SYMMETRIC)
    if inputs:
        require_values(inputs, f"{prefix}input_activations.", num_bits=[8], type=["int"], strategy=["token", "tensor"])
    return Int8Weights(is_packed=False)


def _packed_weights(weights: JsonObject, prefix: str) -> StoredWeights:
    strategies = ("group", "channel")
    require_values(weights, prefix, num_bits=[4, 8], type=["int"], strategy=strategies, symmetric=[True, False, None])
    require_one_of(weights, "actorder", *IN_ORDER, *BY_GROUP, prefix=prefix)
    has_groups, has_zeros = weights["strategy"] == "group", weights.get("symmetric") is False
    if weights["num_bits"] == 8 and not has_groups and not has_zeros:
        return Int8Weights(is_packed=True)
    size = group_size(weights, prefix=prefix) if has_groups else None
    layout, ordered = GroupLayout.COMPRESSED, has_groups and weights.get("actorder") in BY_GROUP
    if weights["num_bits"] == 4:
        return Int4Weights(layout=layout, group_size=size, zero_offset=0, has_zeros=has_zeros, needs_order=ordered)
    key = f"{prefix}num_bits 8 " + ("in groups" if has_groups else "with zero points")
    return Int8GroupWeights(layout=layout, group_size=size, zero_offset=0, has_zeros=has_zeros, needs_order=ordered, key=key)
