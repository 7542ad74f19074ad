"""Prompts that an operator shares between all tenants in the prefix cache: read from files, as token ids.

A file holds the text of a system prompt. Requests contain it either as it is or as the system message of a conversation, so
both forms are shared; of the conversation, only the part that does not depend on the user's message.
"""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path

from engine.errors import EngineConfigError, ModelError
from engine.options import EngineOptions
from engine.text.chat_template import ChatTemplate, ChatTemplateError
from engine.text.tokenizer import Tokenizer

PREFIX_BYTES_MAX = 1 << 20


def shared_prefixes(options: EngineOptions) -> list[list[int]]:
    """Token ids of the prefixes. Raises `EngineConfigError` for a file that cannot be read, or a model without a tokenizer."""
    if not options.shared_prefixes:
        return []
    if not options.enable_prefix_caching:
        raise EngineConfigError("shared_prefixes", "need prefix caching, which is off")
    try:
        tokenizer = Tokenizer(options.model)
    except ModelError as error:
        raise EngineConfigError("shared_prefixes", f"need the model's tokenizer: {error}") from error
    prefixes: list[list[int]] = []
    for path in options.shared_prefixes:
        text = _read(path)
        prefixes.append(tokenizer.encode(text))
        prefixes += _in_conversation(options.model, tokenizer, text)
    return prefixes


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(PREFIX_BYTES_MAX + 1)
        if len(content) > PREFIX_BYTES_MAX:
            raise EngineConfigError("shared_prefixes", f"file {path} is larger than {PREFIX_BYTES_MAX} bytes")
        return content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise EngineConfigError("shared_prefixes", f"file {path} cannot be read as UTF-8 text: {error}") from error


def _in_conversation(model: Path, tokenizer: Tokenizer, text: str) -> list[list[int]]:
    """The common beginning of two conversations with this system message, if the model has a chat template."""
    try:
        template = ChatTemplate.load(model)
        rendered = [
            template.render([{"role": "system", "content": text}, {"role": "user", "content": word}]) for word in ("a", "1")
        ]
    except (ChatTemplateError, ModelError):
        return []
    token_ids = [tokenizer.encode(prompt, add_special_tokens=False) for prompt in rendered]
    return [[first for first, second in takewhile(lambda pair: pair[0] == pair[1], zip(*token_ids, strict=False))]]
