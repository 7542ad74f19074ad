"""`quantization_config`: supported layouts are accepted, all others rejected with the offending key."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from engine.config.quantization import parse_quantization
from engine.config.stored_weights import (
    Activations,
    Fp8BlockWeights,
    Fp8Weights,
    GroupLayout,
    Int4Weights,
    Int8GroupWeights,
    Int8Weights,
)
from engine.errors import UnsupportedModel
from tests.support import hub_checkpoints as hub
from tests.support.quantised_checkpoints import compressed_settings

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
COMPRESSED = compressed_settings("channel", "dynamic")
GROUP = COMPRESSED["config_groups"]["group_0"]
MODELOPT = hub.modelopt_fp8().settings
KV_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}


def parsed(settings: Any) -> Any:
    found = parse_quantization({"quantization_config": settings})
    return None if found is None else found.weights


def group(**changes: Any) -> dict[str, Any]:
    """COMPRESSED with some settings of its group replaced."""
    return {**COMPRESSED, "config_groups": {"group_0": {**GROUP, **changes}}}


def int8(**changes: Any) -> dict[str, Any]:
    """Settings of 8-bit integers with some settings of the inputs replaced."""
    inputs = {"num_bits": 8, "type": "int", "strategy": "token", **changes}
    return hub.group_settings("int-quantized", num_bits=8, strategy="channel", input_activations=inputs)


def transformed(*locations: Any) -> dict[str, Any]:
    """COMPRESSED with a transform that is applied at these locations."""
    applied = [{"targets": ["Linear"], "location": location} for location in locations]
    return {**COMPRESSED, "transform_config": {"config_groups": {"R1": {"type": "hadamard", "apply": applied}}}}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (None, None),
        ({}, None),
        (FP8, Fp8Weights(activations=Activations.DYNAMIC)),
        ({**FP8, "activation_scheme": "static"}, Fp8Weights(activations=Activations.STATIC)),
        (
            {**FP8, "weight_block_size": None, "modules_to_not_convert": ["lm_head"]},
            Fp8Weights(activations=Activations.DYNAMIC),
        ),
        (COMPRESSED, Fp8Weights(activations=Activations.DYNAMIC)),
        ({**COMPRESSED, "kv_cache_scheme": KV_SCHEME}, Fp8Weights(activations=Activations.DYNAMIC)),
        ({**COMPRESSED, "sparsity_config": {"format": "dense"}}, Fp8Weights(activations=Activations.DYNAMIC)),
        ({**COMPRESSED, "transform_config": {}}, Fp8Weights(activations=Activations.DYNAMIC)),
        (transformed("weight_input", "weight_output"), Fp8Weights(activations=Activations.DYNAMIC)),
        (compressed_settings("tensor", "static"), Fp8Weights(activations=Activations.STATIC)),
        (compressed_settings("tensor", "none"), Fp8Weights(activations=Activations.UNTOUCHED)),
        (AWQ, Int4Weights(layout=GroupLayout.AWQ, group_size=128, zero_offset=0)),
        (
            {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "version": "GEMM"},
            Int4Weights(layout=GroupLayout.AWQ, group_size=64, zero_offset=0),
        ),
        ({**AWQ, "version": None}, Int4Weights(layout=GroupLayout.AWQ, group_size=128, zero_offset=0)),
        (GPTQ, Int4Weights(layout=GroupLayout.GPTQ, group_size=128, zero_offset=1)),
        ({**GPTQ, "format": "gptq_v2"}, Int4Weights(layout=GroupLayout.GPTQ, group_size=128, zero_offset=0)),
        ({**GPTQ, "group_size": -1, "lm_head": True}, Int4Weights(layout=GroupLayout.GPTQ, group_size=None, zero_offset=1)),
        ({**GPTQ, "dynamic": {"-:.*gate": {}}}, Int4Weights(layout=GroupLayout.GPTQ, group_size=128, zero_offset=1)),
        ({**GPTQ, "checkpoint_format": "gptq_v2"}, Int4Weights(layout=GroupLayout.GPTQ, group_size=128, zero_offset=0)),
        (
            {**GPTQ, "bits": 8},
            Int8GroupWeights(layout=GroupLayout.GPTQ, group_size=128, zero_offset=1, key=""),
        ),
        (
            hub.group_settings("pack-quantized"),
            Int4Weights(layout=GroupLayout.COMPRESSED, group_size=32, zero_offset=0, has_zeros=False),
        ),
        (
            hub.group_settings("pack-quantized", strategy="channel", group_size=None, symmetric=False),
            Int4Weights(layout=GroupLayout.COMPRESSED, group_size=None, zero_offset=0),
        ),
        (hub.packed_8_bits().settings, Int8Weights(is_packed=True)),
        (
            hub.packed_8_bit_groups(group_size=128).settings,
            Int8GroupWeights(layout=GroupLayout.COMPRESSED, group_size=128, zero_offset=0, key=""),
        ),
        (
            hub.group_settings("pack-quantized", num_bits=8),
            Int8GroupWeights(layout=GroupLayout.COMPRESSED, group_size=32, zero_offset=0, has_zeros=False, key=""),
        ),
        (
            hub.group_settings("pack-quantized", num_bits=8, strategy="channel", group_size=None, symmetric=False),
            Int8GroupWeights(layout=GroupLayout.COMPRESSED, group_size=None, zero_offset=0, key=""),
        ),
        (hub.int8().settings, Int8Weights(is_packed=False)),
        (hub.int8(per_row=False, activations="static").settings, Int8Weights(is_packed=False)),
        (
            {**FP8, "weight_block_size": [128, 128]},
            Fp8BlockWeights(block=(128, 128), marker="weight_scale_inv", key=""),
        ),
        (
            hub.fp8_blocks(block=(128, 128), compressed=True).settings,
            Fp8BlockWeights(block=(128, 128), marker="weight_scale", key=""),
        ),
        (MODELOPT, Fp8Weights(activations=Activations.STATIC)),
        (hub.modelopt_fp8(kv_cache=True).settings, Fp8Weights(activations=Activations.STATIC)),
    ],
)
def test_a_supported_layout_is_understood(settings: Any, expected: Any) -> None:
    assert parsed(settings) == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"quant_method": "bitsandbytes"},
            "quant_method 'bitsandbytes' .* supported: fp8, compressed-tensors, awq, gptq, modelopt",
        ),
        ({"bits": 4}, "quant_method None"),
        ({**FP8, "weight_block_size": [128]}, r"weight_block_size \[128\] .* supported: two positive integers"),
        (
            {**FP8, "weight_block_size": [128, 128], "activation_scheme": "static"},
            "activation_scheme 'static' .*: none, dynamic",
        ),
        ({**FP8, "activation_scheme": "both"}, "activation_scheme 'both' .* supported: none, dynamic, static"),
        ({**FP8, "fmt": "e5m2"}, "fmt 'e5m2'"),
        ({**AWQ, "bits": 4.0}, "bits 4.0 .* supported: 4"),
        ({**AWQ, "bits": 3}, "bits 3 .* supported: 4"),
        ({**AWQ, "version": "gemv"}, "version 'gemv' .* supported: gemm"),
        ({**AWQ, "group_size": 48}, "group_size 48 .* supported: 32, 64, 128"),
        ({**GPTQ, "bits": 3}, "bits 3 .* supported: 4, 8"),
        ({**GPTQ, "group_size": 16}, "group_size 16"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin' .* supported: gptq, gptq_v2"),
        ({**GPTQ, "is_marlin_format": True}, "is_marlin_format True"),
        ({**GPTQ, "pack_dtype": "int64"}, "pack_dtype 'int64'"),
        (
            {**GPTQ, "dynamic": {"-:.*gate": {}, "+:.*up": {"bits": 8}}},
            r"dynamic \['\+:\.\*up'\] .* the same bits and group_size",
        ),
        ({**GPTQ, "dynamic": {".*up": {"bits": 8}}}, "dynamic .* exceptions begin with -:"),
        (
            {**COMPRESSED, "format": "nvfp4-pack-quantized"},
            "format 'nvfp4-pack-quantized' .* supported: float-quantized, naive-quantized, int-quantized, pack-quantized",
        ),
        ({**COMPRESSED, "format": "pack-quantized"}, "group_0.input_activations .* supported: none"),
        (hub.group_settings("pack-quantized", num_bits=3), "weights.num_bits 3 .* supported: 4, 8"),
        (hub.group_settings("pack-quantized", type="float"), "weights.type 'float' .* supported: int"),
        (hub.group_settings("pack-quantized", strategy="tensor"), "weights.strategy 'tensor' .* supported: group, channel"),
        (hub.group_settings("pack-quantized", group_size=48), "weights.group_size 48 .* supported: 32, 64, 128"),
        (hub.group_settings("int-quantized"), "weights.num_bits 4 .* supported: 8"),
        (hub.group_settings("int-quantized", num_bits=8), "weights.strategy 'group' .* supported: tensor, channel"),
        (
            hub.group_settings("int-quantized", num_bits=8, strategy="channel", symmetric=False),
            "weights.symmetric False .* supported: true, none",
        ),
        (
            hub.group_settings("int-quantized", num_bits=8, strategy="channel", input_activations={"num_bits": 4}),
            "input_activations.num_bits 4 .* supported: 8",
        ),
        (int8(type="float"), "input_activations.type 'float'"),
        (int8(strategy="channel"), "input_activations.strategy 'channel'"),
        (hub.group_settings("pack-quantized", symmetric="no"), "weights.symmetric 'no'"),
        ({**MODELOPT, "quant_algo": "NVFP4"}, "quant_algo 'NVFP4' .* supported: FP8"),
        ({**MODELOPT, "quant_algo": None}, "quant_algo None .* supported: FP8"),
        ({**MODELOPT, "kv_cache_quant_algo": "NVFP4"}, "kv_cache_quant_algo 'NVFP4' .* supported: none, FP8"),
        ({**MODELOPT, "kv_cache_scheme": {"num_bits": 4, "type": "float"}}, "kv_cache_scheme.num_bits 4 .* supported: 8"),
        ({**COMPRESSED, "config_groups": {}}, r"config_groups \[\] .* one group"),
        ({**COMPRESSED, "config_groups": {"a": GROUP, "b": GROUP}}, r"config_groups \['a', 'b'\]"),
        ({**COMPRESSED, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        ({**COMPRESSED, "transform_config": {"format": "rotation"}}, "transform_config.format"),
        (transformed("input"), "transform_config.config_groups.R1 .* supported: transforms that are in the weights"),
        (transformed("weight_input", "output"), "transform_config.config_groups.R1"),
        (transformed(["weight_input"]), "transform_config.config_groups.R1"),
        ({**COMPRESSED, "transform_config": {"config_groups": {"R1": {}}}}, "transform_config.config_groups.R1"),
        ({**COMPRESSED, "transform_config": {"config_groups": {"R1": 1}}}, "transform_config.config_groups.R1"),
        ({**COMPRESSED, "transform_config": {"config_groups": {"R1": {"apply": [1]}}}}, "transform_config.config_groups.R1"),
        ({**COMPRESSED, "kv_cache_scheme": {"num_bits": 4, "type": "int"}}, "kv_cache_scheme.num_bits 4 .* supported: 8"),
        ({**COMPRESSED, "kv_cache_scheme": {**KV_SCHEME, "type": "int"}}, "kv_cache_scheme.type 'int'"),
        ({**COMPRESSED, "kv_cache_scheme": {**KV_SCHEME, "strategy": "channel"}}, "kv_cache_scheme.strategy 'channel'"),
        ({**COMPRESSED, "kv_cache_scheme": {**KV_SCHEME, "symmetric": False}}, "kv_cache_scheme.symmetric False"),
        ({**COMPRESSED, "kv_cache_scheme": {**KV_SCHEME, "dynamic": True}}, "kv_cache_scheme.dynamic True"),
        (group(format="int-quantized"), "weights.type 'float' .* supported: int"),
        (group(targets=["re:.*q_proj"]), "config_groups.group_0.targets .* supported: .'Linear'."),
        (group(output_activations={"num_bits": 8}), "group_0.output_activations"),
        (group(weights={**GROUP["weights"], "strategy": "group"}), "weights.strategy 'group' .*: tensor, channel, block"),
        (group(weights={**GROUP["weights"], "strategy": "block"}), "weights.block_structure None .*: two positive integers"),
        (group(weights={**GROUP["weights"], "num_bits": 4}), "weights.num_bits 4"),
        (group(weights={**GROUP["weights"], "symmetric": False}), "weights.symmetric False"),
        (group(weights={**GROUP["weights"], "dynamic": True}), "weights.dynamic True"),
        (group(weights={**GROUP["weights"], "type": "int"}), "weights.type 'int'"),
        (group(input_activations={**GROUP["input_activations"], "num_bits": 4}), "input_activations.num_bits 4"),
        (group(input_activations={**GROUP["input_activations"], "type": "int"}), "input_activations.type 'int'"),
        (group(input_activations={**GROUP["input_activations"], "symmetric": False}), "input_activations.symmetric False"),
        (group(input_activations={**GROUP["input_activations"], "dynamic": False}), "input_activations.strategy 'token'"),
        (group(input_activations={**GROUP["input_activations"], "strategy": "tensor"}), "input_activations.strategy 'tensor'"),
        (group(input_activations={**GROUP["input_activations"], "dynamic": "local"}), "input_activations.dynamic 'local'"),
    ],
)
def test_a_layout_that_is_not_computed_is_refused_by_its_key_with_what_is(settings: Any, message: str) -> None:
    with pytest.raises(UnsupportedModel, match=rf"config\.json: quantization_config\.(.*\.)?{message}"):
        parsed(settings)


@pytest.mark.parametrize(
    ("weights", "why"), [({}, "in groups"), ({"strategy": "channel", "symmetric": False}, "with zero points")]
)
def test_weights_of_8_bits_that_no_product_reads_say_by_which_setting(weights: dict[str, Any], why: str) -> None:
    settings = hub.group_settings("pack-quantized", **{"num_bits": 8, "group_size": 32, **weights})
    assert parsed(settings).key == f"config_groups.group_0.weights.num_bits 8 {why}"


def test_the_older_place_of_the_settings_is_named() -> None:
    with pytest.raises(UnsupportedModel, match="compression_config is not read; supported: the same under quantization_config"):
        parse_quantization({"compression_config": {"format": "float-quantized"}})


ODD_VALUES: tuple[Any, ...] = (
    None, "x", -1, 0, 1.5, [], {}, True, [1], {"a": 1}, "", 10**12, float("nan"), [None], "1", ["Linear"], {"a": {}}
)  # fmt: skip


@pytest.mark.parametrize(
    "settings", [AWQ, GPTQ, FP8, COMPRESSED, MODELOPT], ids=["awq", "gptq", "fp8", "compressed", "modelopt"]
)
def test_odd_values_are_read_or_refused_and_nothing_else(settings: dict[str, Any]) -> None:
    keys = (
        *settings,
        "weight_block_size",
        "fmt",
        "lm_head",
        "dynamic",
        "is_marlin_format",
        "sparsity_config",
        "w_bit",
        "format",
    )
    for key in keys:
        for value in ODD_VALUES:
            with contextlib.suppress(UnsupportedModel):
                parsed({**settings, key: value})
    for key in GROUP:
        for value in ODD_VALUES:
            with contextlib.suppress(UnsupportedModel):
                parsed(group(**{key: value}))


@pytest.mark.parametrize("format_name", ["pack-quantized", "int-quantized", "float-quantized"])
def test_odd_values_of_a_groups_weights_are_read_or_refused_and_nothing_else(format_name: str) -> None:
    for key in hub.weights_settings():
        for value in (*ODD_VALUES, [0, 128], [128, 128.0], ["a", "b"], [True, 1]):
            for changes in ({}, {"num_bits": 8, "strategy": "channel"}, {"num_bits": 8, "strategy": "block", "type": "float"}):
                with contextlib.suppress(UnsupportedModel):
                    parsed(hub.group_settings(format_name, **{**changes, key: value}))
