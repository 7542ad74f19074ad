"""Random-weight model directories of every supported family, made by transformers, small enough to run in milliseconds.

`FAMILY_SETTINGS` lists everything that must equal transformers. Windows are shorter than the tests' prompts, soft-caps have the
size of the scores, scaled rotary embeddings are used beyond their original length, and routers are far from ties.
"""

from __future__ import annotations

import atexit
import copy
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from kernels.simd.vectors import LANES
from tests.support import tiny_tokenizer

VOCAB_SIZE = 128
EOS = 2

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "pad_token_id": 0,
    "initializer_range": 0.25,  # wide enough to avoid near-ties of greedy choices
}

WIDE_HEADS: dict[str, Any] = {"head_dim": LANES, "hidden_size": 4 * LANES}
"""Sizes of models with heads that compiled attention supports: their decode steps are recorded."""

YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 8.0,
}
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 256,
    "short_factor": [1.0, 1.1, 1.3, 1.7],
    "long_factor": [2.0, 3.0, 5.0, 9.0],
}

FAMILY_SETTINGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-biased": {"attention_bias": True, "mlp_bias": True},
    "llama-linear-rope": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
    "llama-dynamic-rope": {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
    "llama-llama3-rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "llama-yarn-rope": {"rope_parameters": YARN},
    "llama-yarn-mscale": {"rope_parameters": {**YARN, "mscale": 1.4, "mscale_all_dim": 0.5, "truncate": False}},
    "mistral": {"sliding_window": None, "head_dim": 16},
    "mistral-window": {"sliding_window": 21, "head_dim": 16},
    "qwen2": {},
    "qwen2-window": {"use_sliding_window": True, "sliding_window": 13, "max_window_layers": 1, "num_hidden_layers": 3},
    "qwen2-yarn": {"rope_parameters": {**YARN, "attention_factor": 1.25}, "max_position_embeddings": 32},
    "qwen3": {"head_dim": 16},
    "qwen3-window": {
        "head_dim": 16,
        "use_sliding_window": True,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gemma2": {
        "head_dim": 16,
        "num_hidden_layers": 3,
        "sliding_window": 18,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 5.0,
    },
    "gemma3_text": {
        "head_dim": 16,
        "num_hidden_layers": 4,
        "sliding_window": 18,
        "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 24,
        "final_logit_softcapping": 5.0,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "phi3": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    "phi3-window": {"sliding_window": 21},
    "phi3-longrope": {
        "rope_parameters": {**LONGROPE, "partial_rotary_factor": 0.67, "attention_factor": 1.19},
        "original_max_position_embeddings": 256,
    },
    "granite": {
        "embedding_multiplier": 6.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.11,
        "logits_scaling": 3.0,
    },
    "olmo2": {},
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "mixtral-window": {"num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": 21},
    "qwen3_moe": {
        "head_dim": 16,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 3,
        "mlp_only_layers": [1],
    },
    "qwen3_moe-normalised": {
        "head_dim": 16,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "decoder_sparse_step": 2,
        "use_sliding_window": True,
        "sliding_window": 21,
    },
}


def make_model(family: str, directory: Path, *, sharded: bool = False, **changes: Any) -> Any:
    """Save a seeded model of `family` to `directory` and return the transformers model in evaluation mode."""
    name = family.split("-", maxsplit=1)[0]
    settings = {**SIZES, **FAMILY_SETTINGS[family], **changes}
    config = transformers.AutoConfig.for_model(name, **settings)
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    _randomise(model)
    model.save_pretrained(directory, **({"max_shard_size": "60KB"} if sharded else {}))
    return model


class SavedModel(NamedTuple):
    """A model directory, only to be read, and the model of transformers with the same weights."""

    directory: Path
    reference: Any


@cache
def _folder() -> Path:
    folder = tempfile.TemporaryDirectory(prefix="gatehouse-models-")
    atexit.register(folder.cleanup)
    return Path(folder.name)


_SAVED: dict[str, SavedModel] = {}


def saved_model(family: str, **changes: Any) -> SavedModel:
    """Return the model of `make_model`, which is made once per process."""
    key = f"{family} {sorted(changes.items())}"
    if key not in _SAVED:
        directory = _folder() / f"{len(_SAVED)}-{family}"
        _SAVED[key] = SavedModel(directory, make_model(family, directory, **changes))
    return _SAVED[key]


def saved_first_layer(family: str, **changes: Any) -> Path:
    """Return a directory, only to be read, with a draft model that often agrees with `saved_model`: its first layer alone."""
    model, reference = saved_model(family, **changes)
    directory = model.with_name(f"{model.name}-first-layer")
    if not directory.is_dir():
        config = copy.deepcopy(reference.config)
        config.num_hidden_layers = 1
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:1]
        short = transformers.AutoModelForCausalLM.from_config(config).eval()
        short.load_state_dict(reference.state_dict(), strict=False)
        short.save_pretrained(directory)
    return directory


@cache
def saved_text_model() -> Path:
    """Return a directory, only to be read, with a Llama and a tokenizer for any text."""
    directory = _folder() / "llama-with-tokenizer"
    make_model("llama", directory, vocab_size=tiny_tokenizer.VOCAB_SIZE)
    tiny_tokenizer.write_tokenizer(directory)
    return directory


def make_gemma3_with_images(directory: Path) -> Any:
    """Save a seeded model of Gemma 3 with an image encoder to `directory` and return the transformers model."""
    text = {**SIZES, **FAMILY_SETTINGS["gemma3_text"]}
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 8,
    }
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=1, eos_token_id=EOS)
    torch.manual_seed(7)
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    _randomise(model)
    model.save_pretrained(directory)
    return model


def make_encoder(architecture: str, directory: Path, **changes: Any) -> Any:
    """Save a seeded encoder of at most 128 positions to `directory` and return the transformers model."""
    settings = {**SIZES, "max_position_embeddings": 128, **changes}
    del settings["num_key_value_heads"]
    if architecture == "bert-tanh":
        architecture, settings["hidden_act"] = "bert", "gelu_new"
    settings["pad_token_id"] = 0 if architecture == "bert" else 1
    torch.manual_seed(7)
    model = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(architecture, **settings)).eval()
    _randomise(model)
    model.save_pretrained(directory)
    return model


def _randomise(model: Any) -> None:
    """Add noise to biases and norm weights, initially zeros and ones, so that ignoring one changes the output.

    Routers get wide weights, so that the choice of experts never depends on a rounding error.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name.lower():
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif name.endswith("mlp.gate.weight"):
                parameter.copy_(torch.randn_like(parameter))


def greedy(model: Any, prompt: list[int], max_tokens: int) -> list[int]:
    """Output token ids of `transformers.generate` without sampling."""
    with torch.inference_mode():
        ids = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    output: list[int] = ids[0, len(prompt) :].tolist()
    return output
