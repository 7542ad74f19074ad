"""A complete model folder that can be served: random weights, a byte-level tokenizer, a chat template, a short context."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL_TOKENS = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}<|end|>{% endif %}"
)
CORPUS = ["the quick brown fox jumps over the lazy dog", "pack my box with five dozen liquor jugs"] * 4
VOCAB_SIZE = 320
CONTEXT_LEN = 1024
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32", "hidden_act": "silu",
    "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 12, "rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip


def make_tokenizer() -> Tokenizer:
    """Return a byte-level BPE tokenizer that can encode any text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def write_text_files(folder: Path, *, template: str | None = TEMPLATE) -> None:
    """Write tokenizer and chat template into a model folder."""
    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer().save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|end|>", **({} if template is None else {"chat_template": template})}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")


def make_served_model(folder: Path) -> Path:
    """Write a servable model, a two-layer Llama as saved by transformers, and return its folder. Does not import torch or
    transformers, which would take longer than all other imports of the gateway's tests."""
    write_text_files(folder)
    config = {**LLAMA, "vocab_size": VOCAB_SIZE, "max_position_embeddings": CONTEXT_LEN}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    numbers = np.random.default_rng(7)
    weights = {
        name: (numbers.normal(1.0, 0.2, shape) if len(shape) == 1 else numbers.normal(0.0, 0.25, shape)).astype(np.float32)
        for name, shape in _llama_shapes().items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _llama_shapes() -> dict[str, tuple[int, ...]]:
    hidden, inner, of_keys = LLAMA["hidden_size"], LLAMA["intermediate_size"], LLAMA["num_key_value_heads"] * LLAMA["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(LLAMA["num_hidden_layers"]):
        of_layer = {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (of_keys, hidden),
            "self_attn.v_proj": (of_keys, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in of_layer.items()}
    whole = {"model.embed_tokens": (VOCAB_SIZE, hidden), "model.norm": (hidden,), "lm_head": (VOCAB_SIZE, hidden)}
    return shapes | {f"{name}.weight": shape for name, shape in whole.items()}


def make_hollow_model(folder: Path) -> Path:
    """Write a folder that everything but an engine accepts as a model: for tests with a fake engine."""
    write_text_files(folder)
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": CONTEXT_LEN}), "utf-8")
    (folder / "model.safetensors").write_bytes(b"")
    return folder
