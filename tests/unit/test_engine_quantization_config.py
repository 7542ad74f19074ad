"""`quantization_config`: supported layouts are accepted, all others rejected with the offending key."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from engine.config.quantization import parse_quantization
from engine.config.stored_weights import Activations, Fp8Weights, Int4Layout, Int4Weights
from engine.errors import UnsupportedModel
from tests.support.quantised_checkpoints import compressed_settings

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
COMPRESSED = compressed_settings("channel", "dynamic")
GROUP = COMPRESSED["config_groups"]["group_0"]


def parsed(settings: Any) -> Any:
    found = parse_quantization({"quantization_config": settings})
    return None if found is None else found.weights


def group(**changes: Any) -> dict[str, Any]:
    """COMPRESSED with some settings of its group replaced."""
    return {**COMPRESSED, "config_groups": {"group_0": {**GROUP, **changes}}}


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
        (compressed_settings("tensor", "static"), Fp8Weights(activations=Activations.STATIC)),
        (compressed_settings("tensor", "none"), Fp8Weights(activations=Activations.UNTOUCHED)),
        (AWQ, Int4Weights(layout=Int4Layout.AWQ, group_size=128, zero_offset=0)),
        (
            {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "version": "GEMM"},
            Int4Weights(layout=Int4Layout.AWQ, group_size=64, zero_offset=0),
        ),
        (GPTQ, Int4Weights(layout=Int4Layout.GPTQ, group_size=128, zero_offset=1)),
        ({**GPTQ, "group_size": -1, "lm_head": True}, Int4Weights(layout=Int4Layout.GPTQ, group_size=None, zero_offset=1)),
        ({**GPTQ, "dynamic": {"-:.*gate": {}}}, Int4Weights(layout=Int4Layout.GPTQ, group_size=128, zero_offset=1)),
        ({**GPTQ, "checkpoint_format": "gptq_v2"}, Int4Weights(layout=Int4Layout.GPTQ, group_size=128, zero_offset=0)),
    ],
)
def test_a_supported_layout_is_understood(settings: Any, expected: Any) -> None:
    assert parsed(settings) == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' .* supported: fp8, compressed-tensors, awq, gptq"),
        ({"bits": 4}, "quant_method None"),
        ({**FP8, "weight_block_size": [128, 128]}, r"weight_block_size \[128, 128\] .* supported: none"),
        ({**FP8, "activation_scheme": "both"}, "activation_scheme 'both' .* supported: none, dynamic, static"),
        ({**FP8, "fmt": "e5m2"}, "fmt 'e5m2'"),
        ({**AWQ, "bits": 3}, "bits 3 .* supported: 4"),
        ({**AWQ, "version": "gemv"}, "version 'gemv' .* supported: gemm"),
        ({**AWQ, "group_size": 48}, "group_size 48 .* supported: 32, 64, 128"),
        ({**GPTQ, "bits": 8}, "bits 8 .* supported: 4"),
        ({**GPTQ, "group_size": 16}, "group_size 16"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin' .* supported: gptq, gptq_v2"),
        ({**GPTQ, "is_marlin_format": True}, "is_marlin_format True"),
        ({**GPTQ, "pack_dtype": "int64"}, "pack_dtype 'int64'"),
        (
            {**GPTQ, "dynamic": {"-:.*gate": {}, "+:.*up": {"bits": 8}}},
            r"dynamic \['\+:\.\*up'\] .* the same bits and group_size",
        ),
        ({**GPTQ, "dynamic": {".*up": {"bits": 8}}}, "dynamic .* exceptions begin with -:"),
        ({**COMPRESSED, "format": "pack-quantized"}, "format 'pack-quantized' .* supported: float-quantized"),
        ({**COMPRESSED, "config_groups": {}}, r"config_groups \[\] .* one group"),
        ({**COMPRESSED, "config_groups": {"a": GROUP, "b": GROUP}}, r"config_groups \['a', 'b'\]"),
        ({**COMPRESSED, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        ({**COMPRESSED, "transform_config": {"format": "rotation"}}, "transform_config"),
        ({**COMPRESSED, "kv_cache_scheme": {"num_bits": 4, "type": "int"}}, "kv_cache_scheme.num_bits 4 .* supported: 8"),
        (group(format="int-quantized"), "format 'int-quantized'"),
        (group(targets=["re:.*q_proj"]), "config_groups.group_0.targets .* supported: .'linear'."),
        (group(output_activations={"num_bits": 8}), "group_0.output_activations"),
        (group(weights={**GROUP["weights"], "strategy": "block"}), "weights.strategy 'block' .* supported: tensor, channel"),
        (group(weights={**GROUP["weights"], "num_bits": 4}), "weights.num_bits 4"),
        (group(weights={**GROUP["weights"], "symmetric": False}), "weights.symmetric False"),
        (group(input_activations={**GROUP["input_activations"], "strategy": "tensor"}), "input_activations.strategy 'tensor'"),
        (group(input_activations={**GROUP["input_activations"], "dynamic": "local"}), "input_activations.dynamic 'local'"),
    ],
)
def test_a_layout_that_is_not_computed_is_refused_by_its_key_with_what_is(settings: Any, message: str) -> None:
    with pytest.raises(UnsupportedModel, match=rf"config\.json: quantization_config\.(.*\.)?{message}"):
        parsed(settings)


def test_the_older_place_of_the_settings_is_named() -> None:
    with pytest.raises(UnsupportedModel, match="compression_config is not read; supported: the same under quantization_config"):
        parse_quantization({"compression_config": {"format": "float-quantized"}})


ODD_VALUES: tuple[Any, ...] = (
    None, "x", -1, 0, 1.5, [], {}, True, [1], {"a": 1}, "", 10**12, float("nan"), [None], "1", ["Linear"], {"a": {}}
)  # fmt: skip


@pytest.mark.parametrize("settings", [AWQ, GPTQ, FP8, COMPRESSED], ids=["awq", "gptq", "fp8", "compressed"])
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
