"""The text decoder of a model with images (Gemma 3 from 4B on) equals transformers, for all spellings of tensor names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine import LLM, SamplingParams
from engine.config.families import FAMILIES
from engine.config.model import load_model_config
from engine.errors import UnsupportedModel, WeightsError
from engine.weights import rename_prefix
from tests.support import hub_checkpoints as hub
from tests.support.tiny_models import greedy, make_gemma3_with_images

PROMPTS = [[1, 17, 99, 3], list(range(5, 45))]
HUB_NAMES = (
    ("model.language_model.", "language_model.model."),
    ("lm_head.", "language_model.lm_head."),
    ("model.vision_tower.", "vision_tower."),
    ("model.multi_modal_projector.", "multi_modal_projector."),
)
"""Prefixes of tensor names in current transformers, and in the files that Google published."""


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("gemma3")
    return folder, make_gemma3_with_images(folder)


def rewrite(folder: Path, target: Path, *, hub_names: bool) -> Path:
    """A copy of the model with published or current tensor names, whichever of them transformers wrote."""
    target.mkdir()
    (target / "config.json").write_text((folder / "config.json").read_text())
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        current_name = rename_prefix(name, tuple((published, current_name) for current_name, published in HUB_NAMES))
        tensors[rename_prefix(current_name, HUB_NAMES) if hub_names else current_name] = tensor
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def greedy_tokens(folder: Path, **options: Any) -> list[list[int]]:
    with LLM(folder, max_model_len=128, max_num_seqs=2, **options) as llm:
        answers = llm.generate(PROMPTS, SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True), use_tqdm=False)
    return [answer.outputs[0].token_ids for answer in answers]


@pytest.mark.parametrize("hub_names", [False, True])
def test_greedy_tokens_equal_those_of_transformers(hub_names: bool, saved_model: tuple[Path, Any], tmp_path: Path) -> None:
    folder, model = saved_model
    found = greedy_tokens(rewrite(folder, tmp_path / "model", hub_names=hub_names))
    assert found == [greedy(model, prompt, 8) for prompt in PROMPTS]


@pytest.mark.parametrize("name", ["int8", "fp8_blocks"])
def test_quantised_checkpoints_with_published_names_equal_their_dequantised_weights(
    name: str, saved_model: tuple[Path, Any], tmp_path: Path
) -> None:
    """Quantised modules are found by tensor names; the scales of an fp8 cache are read beside them."""
    layout, options = {"int8": (hub.int8(), {}), "fp8_blocks": (hub.fp8_blocks(), {"quantization": "none"})}[name]
    plain = rewrite(saved_model[0], tmp_path / "plain", hub_names=True)
    tensors, numbers = load_file(plain / "model.safetensors"), {}
    for weight in [each for each in tensors if each.startswith("language_model.") and each.endswith("_proj.weight")]:
        module = weight.removesuffix(".weight")
        parts, numbers[weight] = layout.store(module, tensors.pop(weight))
        tensors |= {f"{module}.{last}": part.contiguous() for last, part in parts.items()}
        if module.endswith("k_proj"):
            tensors[f"{module}.k_scale"] = torch.tensor(0.5)
    quantised = tmp_path / "quantised"
    quantised.mkdir()
    config = json.loads((plain / "config.json").read_text())
    (quantised / "config.json").write_text(json.dumps({**config, "quantization_config": layout.settings}))
    save_file(tensors, quantised / "model.safetensors")
    save_file({**load_file(plain / "model.safetensors"), **numbers}, plain / "model.safetensors")
    assert greedy_tokens(quantised, **options) == greedy_tokens(plain)


def test_defaults_for_omitted_settings_are_those_of_transformers() -> None:
    part = FAMILIES["Gemma3ForConditionalGeneration"].text_part
    assert part is not None
    defaults = transformers.Gemma3TextConfig()
    assert dict(part.defaults) == {key: getattr(defaults, key) for key in part.defaults}


def test_the_published_config_of_the_4b_model_is_read(tmp_path: Path) -> None:
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    whole = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": [1, 106],
        "model_type": "gemma3",
        "text_config": text,
        "torch_dtype": "bfloat16",
        "vision_config": {"hidden_size": 1152},
    }
    (tmp_path / "config.json").write_text(json.dumps(whole))
    config = load_model_config(tmp_path)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (34, 8, 4, 256)
    assert (config.vocab_size, config.max_position_len, config.torch_dtype) == (262208, 131072, "bfloat16")
    assert config.eos_token_ids == (1, 106)
    assert sorted(config.windows, key=str) == [1024, None]
    del whole["text_config"]
    (tmp_path / "config.json").write_text(json.dumps(whole))
    with pytest.raises(UnsupportedModel, match="text_config is missing, which Gemma3ForConditionalGeneration must have"):
        load_model_config(tmp_path)


def test_unexpected_tensors_are_refused(saved_model: tuple[Path, Any], tmp_path: Path) -> None:
    folder = rewrite(saved_model[0], tmp_path / "model", hub_names=True)
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "audio_tower.weight": torch.zeros(1)}, folder / "model.safetensors")
    with pytest.raises(WeightsError, match=r"1 tensor belongs to no part of this model: audio_tower\.weight"):
        LLM(folder, max_model_len=128, max_num_seqs=2)
