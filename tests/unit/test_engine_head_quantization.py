"""`head_quantization`: an 8-bit output head beside layers in any format, and an unquantised one by default."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config.model import load_model_config
from engine.errors import EngineConfigError
from engine.formats import formats_of
from engine.options import EngineOptions
from engine.runner.text_models import load_text_model
from kernels.quantised_weights import pack_int8
from kernels.reference.quantised import dequantise
from tests.support import quantised_checkpoints as layouts
from tests.support.checkpoint_logprobs import llm_logprobs
from tests.support.engines import small_engine
from tests.support.tiny_models import make_encoder, saved_model

ROUNDING = 1e-4  # the same numbers in float32, added in another order


@pytest.fixture(scope="module", params=["own head", "tied"])
def model(request: pytest.FixtureRequest) -> Path:
    return saved_model("llama", **layouts.SIZES, tie_word_embeddings=request.param == "tied").directory


def with_rounded_head(directory: Path, target: Path) -> Path:
    """A copy of the model with an untied output head, rounded to the values of its 8-bit format."""
    shutil.copytree(directory, target)
    tensors = load_file(target / "model.safetensors")
    head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    save_file({**tensors, "lm_head.weight": dequantise(pack_int8(head))}, target / "model.safetensors", {"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    return target


@pytest.mark.parametrize("layout", [None, layouts.awq(), layouts.gptq(desc_act=True)], ids=["plain", "awq", "gptq"])
def test_int8_head_equals_a_model_whose_head_was_rounded_beforehand(
    layout: layouts.Layout | None, model: Path, tmp_path: Path
) -> None:
    directory = model if layout is None else layouts.write(model, tmp_path / "written", layout).directory
    stored, rounded = llm_logprobs(directory), llm_logprobs(directory, head_quantization="int8")
    expected = llm_logprobs(with_rounded_head(directory, tmp_path / "rounded"))
    assert float((rounded - expected).abs().max()) < ROUNDING < float((rounded - stored).abs().max())


def test_head_quantization_none_keeps_the_head_while_the_layers_are_quantised(model: Path) -> None:
    """Logprobs differ both from the unquantised model and from one quantised with its head."""
    plain, whole = llm_logprobs(model), llm_logprobs(model, quantization="int8")
    layers = llm_logprobs(model, quantization="int8", head_quantization="none")
    assert not torch.equal(layers, plain)
    assert not torch.equal(layers, whole)
    assert torch.equal(whole, llm_logprobs(model, quantization="int8", head_quantization="int8"))


def test_batch_invariant_logprobs_do_not_depend_on_the_chunks_of_the_prompt(model: Path) -> None:
    options = {"head_quantization": "int8", "batch_invariant": True}
    assert torch.equal(llm_logprobs(model, **options), llm_logprobs(model, **options, max_num_batched_tokens=7, max_num_seqs=4))


def test_engine_info_names_the_quantised_head_and_its_memory_is_predicted(model: Path) -> None:
    stored, rounded = small_engine(model), small_engine(model, head_quantization="int8")
    assert "output head in int8" in rounded.info.kernels
    assert "output head" not in stored.info.kernels
    assert "output head not quantised" in small_engine(model, quantization="int8", head_quantization="none").info.kernels
    assert (rounded.info.quantization, rounded.info.num_parameters) == ("none", stored.info.num_parameters)
    (weights,) = (part for part in rounded.info.memory if part.name == "weights")
    config = load_model_config(model)
    if config.tie_word_embeddings:
        twin = config.vocab_size * config.hidden_size
        assert weights.predicted_bytes == stored.info.weights_bytes + twin, "the embedding stays beside it"
    else:
        assert weights.predicted_bytes == rounded.info.weights_bytes < stored.info.weights_bytes


@pytest.mark.parametrize(
    ("quantization", "head", "bits"),
    [(None, "int8", 8), ("int8", None, 8), ("int8", "none", 0), ("fp8", "int8", 8), (None, None, 0)],
)
def test_memory_is_planned_for_the_format_of_the_head(
    quantization: str | None, head: str | None, bits: int, model: Path
) -> None:
    options = EngineOptions(model=model, quantization=quantization, head_quantization=head)
    assert formats_of(load_model_config(model), options, "bfloat16").weights.head_bits == bits


def test_a_head_that_is_quantised_in_the_checkpoint_cannot_be_quantised_again(tmp_path: Path) -> None:
    plain = saved_model("llama", **layouts.SIZES, tie_word_embeddings=False).directory
    written = layouts.write(plain, tmp_path / "gptq", layouts.gptq(), skipped=())
    for head in ("int8", "none"):
        with pytest.raises(EngineConfigError, match=r"head_quantization .*output head is quantised already"):
            small_engine(written.directory, head_quantization=head)


def test_an_encoder_and_an_unknown_format_are_refused(tmp_path: Path) -> None:
    make_encoder("bert", tmp_path)
    with pytest.raises(EngineConfigError, match="head_quantization is not supported for encoders"):
        load_text_model(EngineOptions(model=tmp_path, head_quantization="int8"))
    with pytest.raises(EngineConfigError, match="head_quantization must be one of none, int8, not 'fp8'"):
        EngineOptions(model=tmp_path, head_quantization="fp8")
