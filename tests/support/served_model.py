"""A complete model folder that can be served: random weights, a byte-level tokenizer, a chat template, a short context."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL_TOKENS = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CORPUS = ["the quick brown fox jumps over the lazy dog", "pack my box with five dozen liquor jugs"] * 4
VOCAB_SIZE = 320
CONTEXT_LEN = 1024


def make_tokenizer() -> Tokenizer:
    """Return a byte-level BPE tokenizer that can spell every text."""
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


def make_served_model(folder: Path, *, context_len: int = CONTEXT_LEN) -> Path:
    """Write a servable model and return its folder. Needs torch, which its tests run in another process than the gateway."""
    from tests.support.tiny_models import make_model

    make_model("llama", folder, vocab_size=VOCAB_SIZE, max_position_embeddings=context_len, eos_token_id=0, bos_token_id=None)
    write_text_files(folder)
    return folder


def make_hollow_model(folder: Path, *, context_len: int = CONTEXT_LEN) -> Path:
    """Write a folder that passes as a model for everything but an engine: for tests whose engine is a stand-in."""
    write_text_files(folder)
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": context_len}), "utf-8")
    (folder / "model.safetensors").write_bytes(b"")
    return folder
