"""Text of a model: tokenizer.json and the chat template of a model directory. Knows no torch and no request.

Templates are programs out of a download: they run in Jinja's sandbox, with nothing of ours in reach.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.decoders import DecodeStream

from engine.config import read_json
from engine.errors import EngineError, NotAModelDirectory

TEMPLATE_CHARS_MAX = 256 * 1024
TEMPLATE_FAULTS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What an expression of a template can raise on messages that it was not written for."""


class ChatTemplateError(EngineError, ValueError):
    """The model has no chat template, or its template refuses these messages."""


class TextStream:
    """Turns the tokens of one request into text as they come; a character cut between tokens waits for its rest."""

    def __init__(self, tokenizer: RustTokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)

    def push(self, token_id: int) -> str:
        """Text that this token completes; empty while a character is incomplete."""
        piece: str | None = self._stream.step(self._tokenizer, token_id)
        return piece or ""


class Tokenizer:
    """Text to token ids and back, by the model's own tokenizer.json."""

    def __init__(self, directory: Path) -> None:
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise NotAModelDirectory(f"{directory} has no tokenizer.json")
        if not isinstance(read_json(path).get("model"), dict):
            raise NotAModelDirectory(f"{path} holds no tokenizer model")
        self._tokenizer = RustTokenizer.from_buffer(path.read_bytes())
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()

    @property
    def vocab_size(self) -> int:
        size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        return size

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special tokens are those that the tokenizer puts around a text, such as the first one."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_to_id(self, token: str) -> int | None:
        token_id: int | None = self._tokenizer.token_to_id(token)
        return token_id

    def id_to_token(self, token_id: int) -> str | None:
        token: str | None = self._tokenizer.id_to_token(token_id)
        return token

    def stream(self) -> TextStream:
        return TextStream(self._tokenizer)


class ChatTemplate:
    """Messages to prompt text by the template of the model."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        if len(source) > TEMPLATE_CHARS_MAX:
            raise ChatTemplateError(
                f"the chat template has {len(source)} characters; at most {TEMPLATE_CHARS_MAX} are accepted"
            )
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the model's chat template cannot be compiled: {error}") from error
        self._special_tokens = dict(special_tokens)

    @classmethod
    def load(cls, directory: Path) -> ChatTemplate:
        """The template of a model directory; `ChatTemplateError` when it has none."""
        settings = _tokenizer_settings(directory)
        source = _template_source(directory, settings)
        if source is None:
            raise ChatTemplateError(f"{directory.name} has no chat template: it is a base model; use completions instead")
        return cls(source, _special_tokens(settings))

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: object) -> str:
        """Prompt text, special tokens included: encode it without adding them again. Raises `ChatTemplateError`."""
        values = {**self._special_tokens, **variables}
        try:
            return self._template.render(messages=messages, add_generation_prompt=add_generation_prompt, **values)
        except (jinja2.TemplateError, *TEMPLATE_FAULTS) as error:
            raise ChatTemplateError(f"the model's chat template refuses these messages: {error}") from error


def _tokenizer_settings(directory: Path) -> dict[str, Any]:
    path = directory / "tokenizer_config.json"
    return read_json(path) if path.is_file() else {}


def _template_source(directory: Path, settings: Mapping[str, Any]) -> str | None:
    """From its own file (as written by transformers 5) or from tokenizer_config.json, single or a list of named ones."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    source = settings.get("chat_template")
    if isinstance(source, list):
        source = next((entry["template"] for entry in source if entry.get("name") == "default"), None)
    return source if isinstance(source, str) else None


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = settings.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            tokens[name] = text
    return tokens


def _to_json(value: object, indent: int | None = None) -> str:
    """Plain JSON: Jinja's own filter escapes for HTML, which models were not trained on."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now(UTC).strftime(pattern)
