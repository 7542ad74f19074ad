"""Random-weight Llama models of real shapes, the same for every engine: a directory with config.json and model.safetensors.

Weights have a large standard deviation (0.1), so that at most steps the best token is clearly ahead of the second and greedy
choices of two float32 programs agree; with the usual 0.02 they diverge at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

SEED = 0
DEVIATION = 0.1
MAX_MODEL_LEN = 1024
SHAPES: dict[str, dict[str, Any]] = {
    "8M": {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4,
           "intermediate_size": 768, "vocab_size": 4096, "tie_word_embeddings": False},
    "100M": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 4,
             "intermediate_size": 2048, "vocab_size": 32000, "tie_word_embeddings": True},
}  # fmt: skip


def config_of(shape: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", **shape, "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "max_position_embeddings": MAX_MODEL_LEN, "attention_bias": False, "mlp_bias": False,
        "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float32",
    }  # fmt: skip


def weight_shapes(shape: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of every tensor of the model, in a fixed order."""
    hidden, inner, vocab_size = shape["hidden_size"], shape["intermediate_size"], shape["vocab_size"]
    kv = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]
    yield "model.embed_tokens.weight", (vocab_size, hidden)
    for layer in range(shape["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.self_attn.q_proj.weight", (hidden, hidden)
        yield f"{prefix}.self_attn.k_proj.weight", (kv, hidden)
        yield f"{prefix}.self_attn.v_proj.weight", (kv, hidden)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, hidden)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        yield f"{prefix}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{prefix}.mlp.up_proj.weight", (inner, hidden)
        yield f"{prefix}.mlp.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)
    if not shape["tie_word_embeddings"]:
        yield "lm_head.weight", (vocab_size, hidden)


def make_model(shape: dict[str, Any], folder: Path) -> None:
    """Write the model of a shape, always the same, into the directory."""
    generator = torch.Generator().manual_seed(SEED)
    weights = {
        name: torch.ones(size) if len(size) == 1 else torch.randn(size, generator=generator) * DEVIATION
        for name, size in weight_shapes(shape)
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config_of(shape), indent=2) + "\n", "utf-8")
