"""Checkpoints in the published layouts give what transformers gives with the same numbers in float32.

The writers share no code with the engine (tests/support: quantised_checkpoints.py, hub_checkpoints.py). Where inputs are
rounded to 8 bits as well, sums in another order may round one of them to the neighbour: such layouts have a wider tolerance.
Forms that are decoded while they are read are also quantised again and compared with the twin quantised in the same way.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config.model import load_model_config
from tests.support import hub_checkpoints as hub
from tests.support import quantised_checkpoints as layouts
from tests.support.checkpoint_logprobs import (
    FAMILIES,
    assert_logprobs_equal,
    expected_logprobs,
    prompt_logprobs,
    unquantised,
)
from tests.support.engines import small_engine

MULTIPLIED: dict[str, layouts.Layout] = {
    "fp8-tensor-dynamic": layouts.fp8(per_row=False, activations="dynamic", compressed=False),
    "fp8-tensor-static": layouts.fp8(per_row=False, activations="static", compressed=False),
    "compressed-row-dynamic": layouts.fp8(per_row=True, activations="dynamic", compressed=True),
    "compressed-row-weights-only": layouts.fp8(per_row=True, activations="none", compressed=True),
    "compressed-tensor-static": layouts.fp8(per_row=False, activations="static", compressed=True),
    "awq": layouts.awq(),
    "awq-one-group": layouts.awq(group_size=-1),
    "gptq": layouts.gptq(),
    "gptq-symmetric-one-group": layouts.gptq(symmetric=True, group_size=-1),
    "gptq-signed-scales": layouts.gptq(symmetric=True, signed_scales=True),
    "gptq-v2": layouts.gptq(version="gptq_v2"),
    "gptq-ordered": layouts.gptq(desc_act=True),
    "gptq-ordered-apart": layouts.gptq(desc_act=True, same_order=False),
    "packed-4": hub.packed_4_bits(),
    "packed-4-zeros": hub.packed_4_bits(symmetric=False),
    "packed-4-channel": hub.packed_4_bits(group_size=-1),
    "packed-4-channel-zeros": hub.packed_4_bits(group_size=-1, symmetric=False),
    "packed-4-ordered": hub.packed_4_bits(order_seed=3),
    "packed-8": hub.packed_8_bits(),
    "int8-row": hub.int8(),
    "int8-tensor-static": hub.int8(per_row=False, activations="static"),
    "int8-weights-only": hub.int8(activations="none"),
    "modelopt": hub.modelopt_fp8(),
}
DECODED: dict[str, layouts.Layout] = {
    "fp8-blocks": hub.fp8_blocks(),
    "fp8-blocks-128-bf16": hub.fp8_blocks(block=(128, 128), dtype=torch.bfloat16),
    "fp8-blocks-compressed": hub.fp8_blocks(compressed=True),
    "packed-8-groups": hub.packed_8_bit_groups(),
    "packed-8-groups-symmetric": hub.packed_8_bit_groups(symmetric=True),
    "gptq-8": hub.gptq_8_bits(),
    "gptq-8-ordered": hub.gptq_8_bits(desc_act=True),
}
LAYOUTS = MULTIPLIED | DECODED


def modelopt_file() -> dict[str, Any]:
    """What ModelOpt writes into `hf_quant_config.json`."""
    quantization = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    return {"producer": {"name": "modelopt", "version": "0.19.0"}, "quantization": quantization}


def assert_equals_its_dequantised_weights(name: str, written: layouts.WrittenCheckpoint) -> None:
    """Compare with transformers; forms that are decoded are served in float32."""
    found = prompt_logprobs(written.directory, quantization="none" if name in DECODED else None)
    assert_logprobs_equal(found, expected_logprobs(written.reference()), written.layout)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_checkpoint_equals_its_dequantised_weights(name: str, tmp_path: Path) -> None:
    assert_equals_its_dequantised_weights(name, layouts.write(unquantised("llama"), tmp_path / name, LAYOUTS[name]))


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
@pytest.mark.parametrize("name", DECODED)
def test_a_requantised_checkpoint_equals_the_quantisation_of_its_decoded_weights(
    name: str, quantization: str, tmp_path: Path
) -> None:
    written = layouts.write(unquantised("llama"), tmp_path / name, DECODED[name])
    found, expected = (prompt_logprobs(each, quantization=quantization) for each in (written.directory, written.twin))
    assert [row.tolist() for row in found] == [row.tolist() for row in expected]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "name",
    [
        *("compressed-row-weights-only", "awq", "gptq-ordered"),
        *("packed-4-zeros", "packed-4-ordered", "packed-8", "int8-row", "fp8-blocks", "gptq-8-ordered"),
    ],
)
def test_biases_fused_projections_experts_and_tied_heads_are_read(name: str, family: str, tmp_path: Path) -> None:
    assert_equals_its_dequantised_weights(name, layouts.write(unquantised(family), tmp_path / name, LAYOUTS[name]))


SKIPPED = ("lm_head", "k_proj", "up_proj", "layers.0.mlp.down_proj")


@pytest.mark.parametrize("name", ["packed-4", "int8-row", "fp8-blocks", "gptq-8"])
def test_modules_that_are_not_quantised_are_read_between_those_that_are(name: str, tmp_path: Path) -> None:
    written = layouts.write(unquantised("llama"), tmp_path / name, LAYOUTS[name], skipped=SKIPPED)
    assert_equals_its_dequantised_weights(name, written)


@pytest.mark.parametrize("name", ["compressed-row-weights-only", "fp8-tensor-static", "awq", "gptq"])
def test_modules_that_the_settings_exclude_are_read_as_they_are(name: str, tmp_path: Path) -> None:
    settings = {**LAYOUTS[name].settings, "modules_to_not_convert": list(SKIPPED[1:])}
    layout = replace(LAYOUTS[name], settings=settings)
    assert_equals_its_dequantised_weights(name, layouts.write(unquantised("llama"), tmp_path / name, layout, skipped=SKIPPED))


@pytest.mark.parametrize("name", ["compressed-row-weights-only", "gptq", "packed-4", "packed-8", "fp8-blocks"])
def test_a_quantised_output_head_is_read(name: str, tmp_path: Path) -> None:
    written = layouts.write(unquantised("llama"), tmp_path / name, LAYOUTS[name], skipped=())
    assert "lm_head" in written.modules
    assert_equals_its_dequantised_weights(name, written)


@pytest.mark.parametrize("head", ["int8", "none"])
def test_head_quantization_applies_to_a_head_stored_in_blocks(head: str, tmp_path: Path) -> None:
    written = layouts.write(unquantised("llama"), tmp_path / "blocks", DECODED["fp8-blocks"], skipped=())
    options = {"quantization": "int8", "head_quantization": head}
    found, expected = (prompt_logprobs(each, **options) for each in (written.directory, written.twin))
    assert [row.tolist() for row in found] == [row.tolist() for row in expected]


@pytest.mark.parametrize(
    "name",
    [
        *("compressed-row-dynamic", "awq", "gptq-ordered-apart"),
        *("packed-4-ordered", "int8-row", "modelopt", "fp8-blocks"),
    ],
)
def test_batch_invariant_logprobs_are_bit_identical_in_any_batch(name: str, tmp_path: Path) -> None:
    written = layouts.write(unquantised("llama"), tmp_path / name, LAYOUTS[name])
    options = {"batch_invariant": True, "quantization": "int8" if name in DECODED else None}
    together = prompt_logprobs(written.directory, **options)
    alone = prompt_logprobs(written.directory, **options, max_num_seqs=1, max_num_batched_tokens=5)
    assert [row.tolist() for row in together] == [row.tolist() for row in alone]


def test_all_int8_codes_are_read(tmp_path: Path) -> None:
    """Including -128, which our own quantisation never produces."""

    def store(module: str, weight: torch.Tensor) -> tuple[layouts.Tensors, torch.Tensor]:
        codes = (torch.arange(weight.numel()).view(weight.shape) * 37 + len(module)) % 256 - 128
        scale = torch.full((weight.shape[0], 1), 2.0**-9)
        return {"weight": codes.to(torch.int8), "weight_scale": scale}, codes * scale

    written = layouts.write(unquantised("llama"), tmp_path / "codes", replace(MULTIPLIED["int8-row"], store=store))
    assert_logprobs_equal(prompt_logprobs(written.directory), expected_logprobs(written.reference()), written.layout)


def test_gptq_settings_may_be_in_quantize_config_json(tmp_path: Path) -> None:
    """Early versions of AutoGPTQ wrote this file without quant_method."""
    folder = layouts.write(unquantised("llama"), tmp_path / "gptq", LAYOUTS["gptq"]).directory
    described = load_model_config(folder).quantization
    config = json.loads((folder / "config.json").read_text())
    settings = config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(config))
    assert load_model_config(folder).quantization is None
    del settings["quant_method"]
    (folder / "quantize_config.json").write_text(json.dumps({**settings, "true_sequential": True}))
    assert load_model_config(folder).quantization == described


def test_modelopt_settings_may_be_in_hf_quant_config_json(tmp_path: Path) -> None:
    folder = layouts.write(unquantised("llama"), tmp_path / "modelopt", hub.modelopt_fp8(kv_cache=True)).directory
    described = load_model_config(folder).quantization
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    assert load_model_config(folder).quantization is None
    (folder / "hf_quant_config.json").write_text(json.dumps(modelopt_file()))
    assert load_model_config(folder).quantization == described


def test_kv_scales_of_modelopt_are_used(tmp_path: Path) -> None:
    scales = {
        f"model.layers.{layer}.self_attn.{name}": torch.tensor(0.5 + layer)
        for layer in range(2)
        for name in ("k_proj.k_scale", "v_proj.v_scale")
    }
    written = layouts.write(unquantised("llama"), tmp_path / "modelopt", hub.modelopt_fp8(kv_cache=True), extra=scales)
    assert small_engine(written.directory, kv_cache_dtype="fp8").info.kv_scales == "checkpoint"


def test_int4_weights_are_kept_packed_and_reported(tmp_path: Path) -> None:
    written = layouts.write(unquantised("llama"), tmp_path / "awq", LAYOUTS["awq"])
    quantised, plain = small_engine(written.directory), small_engine(written.twin)
    assert (quantised.info.quantization, plain.info.quantization) == ("awq", "none")
    assert quantised.info.num_parameters == plain.info.num_parameters
    assert quantised.info.weights_bytes < plain.info.weights_bytes / 2
