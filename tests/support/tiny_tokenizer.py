"""A byte-level tokenizer with a chat template, written into a model directory; every byte is a token, so any text encodes."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>")
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)


def write_tokenizer(directory: Path, *, template: str | None = TEMPLATE) -> None:
    """tokenizer.json and tokenizer_config.json: ids 0 to 2 are special, then one id per byte."""
    vocabulary = {token: index for index, token in enumerate(SPECIAL_TOKENS)}
    for byte in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[byte] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", **({"chat_template": template} if template else {})}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
