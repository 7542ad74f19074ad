"""Quantised checkpoints in the published layouts give what transformers gives with the same numbers in float32.

The writer of the checkpoints places codes into words one by one (tests/support/quantised_checkpoints.py). Where inputs are
rounded to 8 bits as well, sums in another order may round one of them to the neighbour: such layouts have a wider tolerance.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from engine.config.model import load_model_config
from tests.support import quantised_checkpoints as layouts
from tests.support.checkpoint_logprobs import (
    FAMILIES,
    assert_logprobs_equal,
    expected_logprobs,
    make_sources,
    prompt_logprobs,
)
from tests.support.engines import small_engine

LAYOUTS: dict[str, layouts.Layout] = {
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
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_sources(tmp_path_factory.mktemp("sources"))


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_published_layout_equals_its_dequantised_weights(name: str, sources: dict[str, Path], tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    written = layouts.write(sources["llama"], tmp_path / name, layout)
    assert_logprobs_equal(prompt_logprobs(written.directory), expected_logprobs(written.reference()), layout)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["compressed-row-weights-only", "awq", "gptq-ordered"])
def test_biases_fused_projections_experts_and_tied_heads_are_read(
    name: str, family: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    written = layouts.write(sources[family], tmp_path / name, LAYOUTS[name])
    assert_logprobs_equal(prompt_logprobs(written.directory), expected_logprobs(written.reference()), written.layout)


@pytest.mark.parametrize("name", ["compressed-row-weights-only", "fp8-tensor-static", "awq", "gptq"])
def test_modules_that_are_not_quantised_are_read_between_those_that_are(
    name: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    settings = {**LAYOUTS[name].settings, "modules_to_not_convert": ["k_proj", "up_proj", "layers.0.mlp.down_proj"]}
    layout = replace(LAYOUTS[name], settings=settings)
    written = layouts.write(
        sources["llama"], tmp_path / name, layout, skipped=("lm_head", "k_proj", "up_proj", "layers.0.mlp.down_proj")
    )
    assert_logprobs_equal(prompt_logprobs(written.directory), expected_logprobs(written.reference()), layout)


def test_gptq_settings_may_be_in_quantize_config_json(sources: dict[str, Path], tmp_path: Path) -> None:
    """Early versions of AutoGPTQ wrote this file without quant_method."""
    folder = layouts.write(sources["llama"], tmp_path / "gptq", LAYOUTS["gptq"]).directory
    described = load_model_config(folder).quantization
    config = json.loads((folder / "config.json").read_text())
    settings = config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(config))
    assert load_model_config(folder).quantization is None
    del settings["quant_method"]
    (folder / "quantize_config.json").write_text(json.dumps({**settings, "true_sequential": True}))
    assert load_model_config(folder).quantization == described


@pytest.mark.parametrize("name", ["compressed-row-weights-only", "gptq"])
def test_a_quantised_output_head_is_read(name: str, sources: dict[str, Path], tmp_path: Path) -> None:
    written = layouts.write(sources["llama"], tmp_path / name, LAYOUTS[name], skipped=())
    assert "lm_head" in written.modules
    assert_logprobs_equal(prompt_logprobs(written.directory), expected_logprobs(written.reference()), written.layout)


@pytest.mark.parametrize("name", ["compressed-row-dynamic", "awq", "gptq-ordered-apart"])
def test_batch_invariant_logprobs_are_bit_identical_in_any_batch(name: str, sources: dict[str, Path], tmp_path: Path) -> None:
    written = layouts.write(sources["llama"], tmp_path / name, LAYOUTS[name])
    together = prompt_logprobs(written.directory, batch_invariant=True)
    alone = prompt_logprobs(written.directory, batch_invariant=True, max_num_seqs=1, max_num_batched_tokens=5)
    assert [row.tolist() for row in together] == [row.tolist() for row in alone]


def test_int4_weights_are_kept_packed_and_reported(sources: dict[str, Path], tmp_path: Path) -> None:
    written = layouts.write(sources["llama"], tmp_path / "awq", LAYOUTS["awq"])
    quantised, plain = small_engine(written.directory), small_engine(written.twin)
    assert (quantised.info.quantization, plain.info.quantization) == ("awq", "none")
    assert quantised.info.num_parameters == plain.info.num_parameters
    assert quantised.info.weights_bytes < plain.info.weights_bytes / 2
