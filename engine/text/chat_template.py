"""The chat template of a model directory: messages to prompt text. The only renderer, for gateway and `LLM`. Knows no torch.

Templates are downloaded programs: they run in Jinja's sandbox, without access to our objects. They get what templates of
Hugging Face rely on: trimmed blocks, loop controls, `generation` blocks, plain `tojson`, `raise_exception`, `strftime_now`,
special tokens by name, and `tools` and `documents`, which are None.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.config.model import read_json
from engine.errors import EngineError, NotAModelDirectory
from engine.text.loop_limit import compile_counted, iteration_budget

TEMPLATE_CHARS_MAX = 256 * 1024
SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
TEMPLATE_FAULTS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What a template's expression can raise on messages that it was not written for."""


class ChatTemplateError(EngineError, ValueError):
    """The model's chat template cannot be read or compiled, or it refuses these messages."""


class NoChatTemplate(ChatTemplateError):
    """The model has no chat template: it continues text and does not answer messages."""


class GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks answers for training. In a prompt it renders its content, in its own
    scope."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        """The block's statements, without the marks."""
        lineno = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=lineno)


class ChatTemplate:
    """Messages to prompt text by the template of the model."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, origin: str = "the model's chat template") -> None:
        """`origin` names the source in error messages. Raises `ChatTemplateError`."""
        if len(source) > TEMPLATE_CHARS_MAX:
            raise ChatTemplateError(f"{origin} has {len(source)} characters; at most {TEMPLATE_CHARS_MAX} are accepted")
        self._template = _compile(source, origin)
        self.source = source
        self._special_tokens = dict(special_tokens)

    @classmethod
    def load(cls, directory: Path) -> ChatTemplate:
        """The template of a model directory. Raises `NoChatTemplate`, or `ChatTemplateError` naming the file that is wrong."""
        path = directory / "tokenizer_config.json"
        try:
            settings = read_json(path) if path.is_file() else {}
        except NotAModelDirectory as error:
            raise ChatTemplateError(str(error)) from error
        source, origin = _find(directory / "chat_template.jinja", path, settings)
        return cls(source, _special_tokens(settings, path), origin=origin)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        enable_thinking: bool | None = None,
    ) -> str:
        """Prompt text, special tokens included: encode it without adding them again. Raises `ChatTemplateError`.

        `enable_thinking` is the variable by which templates such as Qwen3's turn reasoning off; undefined if None.
        """
        values = {"tools": None, "documents": None, **self._special_tokens, **iteration_budget()}
        if enable_thinking is not None:
            values["enable_thinking"] = enable_thinking
        try:
            return self._template.render(messages=messages, add_generation_prompt=add_generation_prompt, **values)
        except (jinja2.TemplateError, *TEMPLATE_FAULTS) as error:
            raise ChatTemplateError(f"the model's chat template refuses these messages: {error}") from error


def _compile(source: str, origin: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,  # the result is a prompt, not a page
        extensions=["jinja2.ext.loopcontrols", GenerationBlock],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        template = compile_counted(environment, source)
    except jinja2.TemplateSyntaxError as error:
        raise ChatTemplateError(f"{origin} cannot be compiled: line {error.lineno}: {error.message}") from error
    except (SyntaxError, *TEMPLATE_FAULTS) as error:  # raised by Python's compiler for the code that Jinja generated
        raise ChatTemplateError(f"{origin} cannot be compiled: {error}") from error
    template.globals = dict(template.globals)  # every rendering copies them, and a ChainMap is slow to copy
    return template


def _find(own_file: Path, settings_file: Path, settings: Mapping[str, Any]) -> tuple[str, str]:
    """Source and origin: from its own file (as written by transformers 5) or from tokenizer_config.json."""
    if own_file.is_file():
        try:
            return own_file.read_text(encoding="utf-8"), str(own_file)
        except (OSError, UnicodeDecodeError) as error:
            raise ChatTemplateError(f"{own_file} cannot be read: {error}") from error
    entry, origin = settings.get("chat_template"), f"chat_template of {settings_file}"
    if entry is None:
        raise NoChatTemplate(
            f"{own_file.parent.name} has no chat template: it is a base model, which continues text (`LLM.generate`)"
        )
    if isinstance(entry, list):
        return _default_of(entry, origin), origin
    if not isinstance(entry, str):
        raise ChatTemplateError(f"{origin} must be text or a list of named templates, not {type(entry).__name__}")
    return entry, origin


def _default_of(entries: Sequence[Any], origin: str) -> str:
    named: dict[str, str] = {}
    for entry in entries:
        name, source = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(source, str):
            raise ChatTemplateError(f"{origin}: every entry of the list needs a name and a template")
        named[name] = source
    if "default" not in named:
        raise NoChatTemplate(f"{origin} holds no chat template named default, only {', '.join(sorted(named)) or 'none'}")
    return named["default"]


def _special_tokens(settings: Mapping[str, Any], path: Path) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for name in SPECIAL_TOKEN_NAMES:
        value = settings.get(name)
        if value is None:
            continue
        text = value.get("content") if isinstance(value, dict) else value
        if not isinstance(text, str):
            raise ChatTemplateError(f"{name} in {path} must be text, or an object with its text as content")
        tokens[name] = text
    return tokens


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes for HTML, which models were not trained on. The options are those of
    transformers."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)
