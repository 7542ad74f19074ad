"""Checkpoints as llm-compressor, DeepSeek, Qwen and ModelOpt publish them give what transformers gives with the same numbers.

The writer shares no code with the engine (tests/support/hub_checkpoints.py). Forms that are decoded while they are read are
compared twice: decoded to float32 with transformers, and quantised again with the twin that is quantised in the same way.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.config.model import load_model_config
from tests.support import hub_checkpoints as hub
from tests.support import quantised_checkpoints as layouts
from tests.support.checkpoint_logprobs import (
    FAMILIES,
    assert_logprobs_equal,
    expected_logprobs,
    make_sources,
    prompt_logprobs,
)
from tests.support.engines import small_engine

MULTIPLIED: dict[str, layouts.Layout] = {
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


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_sources(tmp_path_factory.mktemp("sources"))


@pytest.mark.parametrize("name", MULTIPLIED)
def test_a_checkpoint_multiplied_as_stored_equals_its_dequantised_weights(
    name: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    written = layouts.write(sources["llama"], tmp_path / name, MULTIPLIED[name])
    assert_logprobs_equal(prompt_logprobs(written.directory), expected_logprobs(written.reference()), written.layout)


@pytest.mark.parametrize("name", DECODED)
def test_a_decoded_checkpoint_equals_its_dequantised_weights(name: str, sources: dict[str, Path], tmp_path: Path) -> None:
    written = layouts.write(sources["llama"], tmp_path / name, DECODED[name])
    found = prompt_logprobs(written.directory, quantization="none")
    assert_logprobs_equal(found, expected_logprobs(written.reference()), written.layout)


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
@pytest.mark.parametrize("name", DECODED)
def test_a_requantised_checkpoint_equals_the_quantisation_of_its_decoded_weights(
    name: str, quantization: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    written = layouts.write(sources["llama"], tmp_path / name, DECODED[name])
    found, expected = (prompt_logprobs(each, quantization=quantization) for each in (written.directory, written.twin))
    assert [row.tolist() for row in found] == [row.tolist() for row in expected]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["packed-4-zeros", "packed-4-ordered", "packed-8", "int8-row"])
def test_biases_fused_projections_experts_and_tied_heads_are_read(
    name: str, family: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    written = layouts.write(sources[family], tmp_path / name, MULTIPLIED[name])
    assert_logprobs_equal(prompt_logprobs(written.directory), expected_logprobs(written.reference()), written.layout)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["fp8-blocks", "gptq-8-ordered"])
def test_biases_fused_projections_experts_and_tied_heads_are_decoded(
    name: str, family: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    written = layouts.write(sources[family], tmp_path / name, DECODED[name])
    found = prompt_logprobs(written.directory, quantization="none")
    assert_logprobs_equal(found, expected_logprobs(written.reference()), written.layout)


SKIPPED = ("lm_head", "k_proj", "up_proj", "layers.0.mlp.down_proj")


@pytest.mark.parametrize("name", ["packed-4", "int8-row", "fp8-blocks", "gptq-8"])
def test_modules_that_are_not_quantised_are_read_between_those_that_are(
    name: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    written = layouts.write(sources["llama"], tmp_path / name, {**MULTIPLIED, **DECODED}[name], skipped=SKIPPED)
    found = prompt_logprobs(written.directory, quantization="none" if name in DECODED else None)
    assert_logprobs_equal(found, expected_logprobs(written.reference()), written.layout)


@pytest.mark.parametrize("name", ["packed-4", "packed-8", "fp8-blocks"])
def test_a_quantised_output_head_is_read(name: str, sources: dict[str, Path], tmp_path: Path) -> None:
    written = layouts.write(sources["llama"], tmp_path / name, {**MULTIPLIED, **DECODED}[name], skipped=())
    assert "lm_head" in written.modules
    found = prompt_logprobs(written.directory, quantization="none" if name in DECODED else None)
    assert_logprobs_equal(found, expected_logprobs(written.reference()), written.layout)


@pytest.mark.parametrize("head", ["int8", "none"])
def test_head_quantization_applies_to_a_head_stored_in_blocks(head: str, sources: dict[str, Path], tmp_path: Path) -> None:
    written = layouts.write(sources["llama"], tmp_path / "blocks", DECODED["fp8-blocks"], skipped=())
    options = {"quantization": "int8", "head_quantization": head}
    found, expected = (prompt_logprobs(each, **options) for each in (written.directory, written.twin))
    assert [row.tolist() for row in found] == [row.tolist() for row in expected]


@pytest.mark.parametrize("name", ["packed-4-ordered", "int8-row", "modelopt", "fp8-blocks"])
def test_batch_invariant_logprobs_are_bit_identical_in_any_batch(name: str, sources: dict[str, Path], tmp_path: Path) -> None:
    written = layouts.write(sources["llama"], tmp_path / name, {**MULTIPLIED, **DECODED}[name])
    options = {"batch_invariant": True, "quantization": "int8" if name in DECODED else None}
    together = prompt_logprobs(written.directory, **options)
    alone = prompt_logprobs(written.directory, **options, max_num_seqs=1, max_num_batched_tokens=5)
    assert [row.tolist() for row in together] == [row.tolist() for row in alone]


def test_all_int8_codes_are_read(sources: dict[str, Path], tmp_path: Path) -> None:
    """Including -128, which our own quantisation never produces."""

    def store(module: str, weight: torch.Tensor) -> tuple[layouts.Tensors, torch.Tensor]:
        codes = (torch.arange(weight.numel()).view(weight.shape) * 37 + len(module)) % 256 - 128
        scale = torch.full((weight.shape[0], 1), 2.0**-9)
        return {"weight": codes.to(torch.int8), "weight_scale": scale}, codes * scale

    written = layouts.write(sources["llama"], tmp_path / "codes", replace(MULTIPLIED["int8-row"], store=store))
    assert_logprobs_equal(prompt_logprobs(written.directory), expected_logprobs(written.reference()), written.layout)


def test_modelopt_settings_may_be_in_hf_quant_config_json(sources: dict[str, Path], tmp_path: Path) -> None:
    folder = layouts.write(sources["llama"], tmp_path / "modelopt", hub.modelopt_fp8(kv_cache=True)).directory
    described = load_model_config(folder).quantization
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    assert load_model_config(folder).quantization is None
    (folder / "hf_quant_config.json").write_text(json.dumps(hub.modelopt_file()))
    assert load_model_config(folder).quantization == described


def test_kv_scales_of_modelopt_are_used(sources: dict[str, Path], tmp_path: Path) -> None:
    scales = {
        f"model.layers.{layer}.self_attn.{name}": torch.tensor(0.5 + layer)
        for layer in range(2)
        for name in ("k_proj.k_scale", "v_proj.v_scale")
    }
    written = layouts.write(sources["llama"], tmp_path / "modelopt", hub.modelopt_fp8(kv_cache=True), extra=scales)
    assert small_engine(written.directory, kv_cache_dtype="fp8").info.kv_scales == "checkpoint"
