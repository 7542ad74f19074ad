"""`quantization_config`: supported layouts are parsed, all others refused with the offending key."""

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
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
COMPRESSED = compressed_settings("channel", "dynamic")
GROUP = COMPRESSED["config_groups"]["group_0"]
MODELOPT = hub.modelopt_fp8().settings
KV_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}


def parsed_weights(settings: Any) -> Any:
    found = parse_quantization({"quantization_config": settings})
    return None if found is None else found.weights


def compressed_with_group(**changes: Any) -> dict[str, Any]:
    """COMPRESSED with changed settings of its group."""
    return {**COMPRESSED, "config_groups": {"group_0": {**GROUP, **changes}}}


def int8_with_inputs(**changes: Any) -> dict[str, Any]:
    """Settings for 8-bit integer weights and inputs, with changed settings of the inputs."""
    inputs = {"num_bits": 8, "type": "int", "strategy": "token", **changes}
    return hub.group_settings("int-quantized", num_bits=8, strategy="channel", input_activations=inputs)


def compressed_with_transform(*locations: Any) -> dict[str, Any]:
    """COMPRESSED with a transform applied at `locations`."""
    applied = [{"targets": ["Linear"], "location": location} for location in locations]
    return {**COMPRESSED, "transform_config": {"config_groups": {"R1": {"type": "hadamard", "apply": applied}}}}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (None, None),
        ({}, None),
        (FP8, Fp8Weights(activations=Activations.DYNAMIC)),
        ({**FP8, "activation_scheme": "static"}, Fp8Weights(activations=Activations.STATIC)),
        ({"quant_method": "fp8"}, Fp8Weights(activations=Activations.DYNAMIC)),
        ({**FP8, "fmt": "e4m3"}, Fp8Weights(activations=Activations.DYNAMIC)),
        ({**FP8, "fmt": "float8_e4m3fn"}, Fp8Weights(activations=Activations.DYNAMIC)),
        (
            {**FP8, "weight_block_size": None, "modules_to_not_convert": ["lm_head"]},
            Fp8Weights(activations=Activations.DYNAMIC),
        ),
        (COMPRESSED, Fp8Weights(activations=Activations.DYNAMIC)),
        ({**COMPRESSED, "kv_cache_scheme": KV_SCHEME}, Fp8Weights(activations=Activations.DYNAMIC)),
        ({**COMPRESSED, "sparsity_config": {"format": "dense"}}, Fp8Weights(activations=Activations.DYNAMIC)),
        ({**COMPRESSED, "transform_config": {}}, Fp8Weights(activations=Activations.DYNAMIC)),
        (compressed_with_transform("weight_input", "weight_output"), Fp8Weights(activations=Activations.DYNAMIC)),
        (compressed_settings("tensor", "static"), Fp8Weights(activations=Activations.STATIC)),
        (compressed_settings("tensor", "none"), Fp8Weights(activations=Activations.UNTOUCHED)),
        (AWQ, Int4Weights(layout=GroupLayout.AWQ, group_size=128, zero_offset=0)),
        (
            {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "version": "GEMM"},
            Int4Weights(layout=GroupLayout.AWQ, group_size=64, zero_offset=0),
        ),
        ({**AWQ, "version": None}, Int4Weights(layout=GroupLayout.AWQ, group_size=128, zero_offset=0)),
        (GPTQ, Int4Weights(layout=GroupLayout.GPTQ, group_size=128, zero_offset=1)),
        ({**GPTQ, "desc_act": True}, Int4Weights(layout=GroupLayout.GPTQ, group_size=128, zero_offset=1, needs_order=True)),
        (
            {**GPTQ, "desc_act": True, "static_groups": True},
            Int4Weights(layout=GroupLayout.GPTQ, group_size=128, zero_offset=1),
        ),
        ({**GPTQ, "desc_act": True, "group_size": -1}, Int4Weights(layout=GroupLayout.GPTQ, group_size=None, zero_offset=1)),
        ({**GPTQ, "pack_dtype": "int32"}, Int4Weights(layout=GroupLayout.GPTQ, group_size=128, zero_offset=1)),
        ({**GPTQ, "format": "gptq_v2"}, Int4Weights(layout=GroupLayout.GPTQ, group_size=128, zero_offset=0)),
        ({**GPTQ, "group_size": -1, "lm_head": True}, Int4Weights(layout=GroupLayout.GPTQ, group_size=None, zero_offset=1)),
        ({**GPTQ, "dynamic": {"-:.*gate": {}}}, Int4Weights(layout=GroupLayout.GPTQ, group_size=128, zero_offset=1)),
        ({**GPTQ, "checkpoint_format": "gptq_v2"}, Int4Weights(layout=GroupLayout.GPTQ, group_size=128, zero_offset=0)),
        (
            {**GPTQ, "bits": 8, "desc_act": True},
            Int8GroupWeights(layout=GroupLayout.GPTQ, group_size=128, zero_offset=1, needs_order=True, key=""),
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
        ({**MODELOPT, "kv_cache_quant_algo": "FP8"}, Fp8Weights(activations=Activations.STATIC)),
        (hub.modelopt_fp8(kv_cache=True).settings, Fp8Weights(activations=Activations.STATIC)),
    ],
)
def test_a_supported_layout_is_parsed(settings: Any, expected: Any) -> None:
    assert parsed_weights(settings) == expected


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
        (
            hub.group_settings("pack-quantized", actorder="rows"),
            "weights.actorder 'rows' .* supported: none, false, weight, static, true, group",
        ),
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
        (int8_with_inputs(type="float"), "input_activations.type 'float'"),
        (int8_with_inputs(strategy="channel"), "input_activations.strategy 'channel'"),
        (hub.group_settings("pack-quantized", symmetric="no"), "weights.symmetric 'no'"),
        ({**MODELOPT, "quant_algo": "NVFP4"}, "quant_algo 'NVFP4' .* supported: FP8"),
        ({**MODELOPT, "quant_algo": None}, "quant_algo None .* supported: FP8"),
        ({**MODELOPT, "kv_cache_quant_algo": "NVFP4"}, "kv_cache_quant_algo 'NVFP4' .* supported: none, FP8"),
        ({**MODELOPT, "kv_cache_scheme": {"num_bits": 4, "type": "float"}}, "kv_cache_scheme.num_bits 4 .* supported: 8"),
        ({**COMPRESSED, "config_groups": {"a": 5}}, "config_groups.a 5 .* supported: an object"),
        ({**COMPRESSED, "config_groups": {}}, r"config_groups \[\] .* one group"),
        ({**COMPRESSED, "config_groups": {"a": GROUP, "b": GROUP}}, r"config_groups \['a', 'b'\]"),
        ({**COMPRESSED, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        ({**COMPRESSED, "transform_config": {"format": "rotation"}}, "transform_config.format"),
        (
            compressed_with_transform("input"),
            "transform_config.config_groups.R1 .* supported: transforms that are in the weights",
        ),
        (compressed_with_transform("weight_input", "output"), "transform_config.config_groups.R1"),
        (compressed_with_transform(["weight_input"]), "transform_config.config_groups.R1"),
        ({**COMPRESSED, "transform_config": {"config_groups": {"R1": {}}}}, "transform_config.config_groups.R1"),
        ({**COMPRESSED, "transform_config": {"config_groups": {"R1": 1}}}, "transform_config.config_groups.R1"),
        ({**COMPRESSED, "transform_config": {"config_groups": {"R1": {"apply": [1]}}}}, "transform_config.config_groups.R1"),
        ({**COMPRESSED, "transform_config": {"config_groups": {"R1": {"apply": 1}}}}, "transform_config.config_groups.R1"),
        ({**COMPRESSED, "kv_cache_scheme": {"num_bits": 4, "type": "int"}}, "kv_cache_scheme.num_bits 4 .* supported: 8"),
        ({**COMPRESSED, "kv_cache_scheme": {**KV_SCHEME, "type": "int"}}, "kv_cache_scheme.type 'int'"),
        ({**COMPRESSED, "kv_cache_scheme": {**KV_SCHEME, "strategy": "channel"}}, "kv_cache_scheme.strategy 'channel'"),
        ({**COMPRESSED, "kv_cache_scheme": {**KV_SCHEME, "symmetric": False}}, "kv_cache_scheme.symmetric False"),
        ({**COMPRESSED, "kv_cache_scheme": {**KV_SCHEME, "dynamic": True}}, "kv_cache_scheme.dynamic True"),
        (compressed_with_group(format="int-quantized"), "weights.type 'float' .* supported: int"),
        (compressed_with_group(targets=["re:.*q_proj"]), "config_groups.group_0.targets .* supported: .'Linear'."),
        (compressed_with_group(output_activations={"num_bits": 8}), "group_0.output_activations"),
        (
            compressed_with_group(weights={**GROUP["weights"], "strategy": "group"}),
            "weights.strategy 'group' .*: tensor, channel, block",
        ),
        (
            compressed_with_group(weights={**GROUP["weights"], "strategy": "block"}),
            "weights.block_structure None .*: two positive integers",
        ),
        (compressed_with_group(weights={**GROUP["weights"], "num_bits": 4}), "weights.num_bits 4"),
        (compressed_with_group(weights={**GROUP["weights"], "symmetric": False}), "weights.symmetric False"),
        (compressed_with_group(weights={**GROUP["weights"], "dynamic": True}), "weights.dynamic True"),
        (compressed_with_group(weights={**GROUP["weights"], "type": "int"}), "weights.type 'int'"),
        (
            compressed_with_group(input_activations={**GROUP["input_activations"], "num_bits": 4}),
            "input_activations.num_bits 4",
        ),
        (
            compressed_with_group(input_activations={**GROUP["input_activations"], "type": "int"}),
            "input_activations.type 'int'",
        ),
        (
            compressed_with_group(input_activations={**GROUP["input_activations"], "symmetric": False}),
            "input_activations.symmetric False",
        ),
        (
            compressed_with_group(input_activations={**GROUP["input_activations"], "dynamic": False}),
            "input_activations.strategy 'token'",
        ),
        (
            compressed_with_group(input_activations={**GROUP["input_activations"], "strategy": "tensor"}),
            "input_activations.strategy 'tensor'",
        ),
        (
            compressed_with_group(input_activations={**GROUP["input_activations"], "dynamic": "local"}),
            "input_activations.dynamic 'local'",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_unsupported_setting_is_refused_by_key_with_the_supported_values(settings: Any, message: str) -> None:
    with pytest.raises(UnsupportedModel, match=rf"config\.json: quantization_config\.(.*\.)?{message}"):
        parsed_weights(settings)


@pytest.mark.parametrize(
    ("weights", "reason"), [({}, "in groups"), ({"strategy": "channel", "symmetric": False}, "with zero points")]
)
def test_int8_weights_that_must_be_decoded_name_the_setting_that_requires_it(weights: dict[str, Any], reason: str) -> None:
    settings = hub.group_settings("pack-quantized", **{"num_bits": 8, "group_size": 32, **weights})
    assert parsed_weights(settings).key == f"config_groups.group_0.weights.num_bits 8 {reason}"


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("order", "is_needed"),
    [(None, False), (False, False), ("weight", False), ("static", False), (True, True), ("group", True), ("dynamic", True)],
)
def test_groups_of_a_column_order_must_be_in_the_files(bits: int, order: object, is_needed: bool) -> None:
    assert parsed_weights(hub.group_settings("pack-quantized", num_bits=bits, actorder=order)).needs_order == is_needed


@pytest.mark.parametrize("size", [32, 64, 128, 256, 512, 1024])
def test_every_documented_group_size_is_read(size: int) -> None:
    assert parsed_weights({**AWQ, "group_size": size}).group_size == size


def test_the_older_key_compression_config_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match="compression_config is not read; supported: the same under quantization_config"):
        parse_quantization({"compression_config": {"format": "float-quantized"}})


ODD_VALUES: tuple[Any, ...] = (
    None, "x", -1, 0, 1.5, [], {}, True, [1], {"a": 1}, "", 10**12, float("nan"), [None], "1", ["Linear"], {"a": {}}
)  # fmt: skip


@pytest.mark.parametrize(
    "settings", [AWQ, GPTQ, FP8, COMPRESSED, MODELOPT], ids=["awq", "gptq", "fp8", "compressed", "modelopt"]
)
def test_odd_values_raise_nothing_but_unsupported_model(settings: dict[str, Any]) -> None:
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
                parsed_weights({**settings, key: value})
    for key in GROUP:
        for value in ODD_VALUES:
            with contextlib.suppress(UnsupportedModel):
                parsed_weights(compressed_with_group(**{key: value}))


@pytest.mark.parametrize("format_name", ["pack-quantized", "int-quantized", "float-quantized"])
def test_odd_values_of_group_weights_raise_nothing_but_unsupported_model(format_name: str) -> None:
    for key in hub.weights_settings():
        for value in (*ODD_VALUES, [0, 128], [128, 128.0], ["a", "b"], [True, 1]):
            for changes in ({}, {"num_bits": 8, "strategy": "channel"}, {"num_bits": 8, "strategy": "block", "type": "float"}):
                with contextlib.suppress(UnsupportedModel):
                    parsed_weights(hub.group_settings(format_name, **{**changes, key: value}))
