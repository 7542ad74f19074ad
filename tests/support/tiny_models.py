"""Random-weight model directories of every supported family, made by transformers, small enough to run in milliseconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

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
    "initializer_range": 0.25,  # wide enough that greedy choices are no near-ties
}

FAMILY_SETTINGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-biased": {"attention_bias": True, "mlp_bias": True},
    "llama-linear-rope": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
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
    "mistral": {"sliding_window": None, "head_dim": 16},
    "mistral-window": {"sliding_window": 21, "head_dim": 16},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
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


def _randomise(model: Any) -> None:
    """Biases and norm weights start as zeros and ones: noise makes sure that none of them is forgotten."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)


def greedy(model: Any, prompt: list[int], max_tokens: int, *, stops_at_eos: bool = False) -> list[int]:
    """Output token ids of `transformers.generate` without sampling."""
    with torch.inference_mode():
        ids = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=EOS if stops_at_eos else None,
            pad_token_id=0,
        )
    output: list[int] = ids[0, len(prompt) :].tolist()
    return output
