"""Messages to prompt token ids: the model's own chat template in a sandbox, then its own tokenizer. Exact, because it is ours.

The template environment follows what Hugging Face chat templates are written for: trimmed blocks, loop controls, `tojson`,
`raise_exception`, `strftime_now`, special tokens as variables.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from appliance.base.errors import ContextLengthExceeded, InvalidValue
from appliance.serving.detokenizer import Detokenizer
from appliance.serving.vocabulary import Vocabulary

INLINE_CHARS_MAX = 20_000  # longer prompts are tokenised in a thread, so that nobody's stream stutters
NORMALISED_CHARS_MAX = 4  # no more characters than this become one by Unicode normalisation in any text of people
SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


class TemplateRefusal(Exception):
    """The chat template called `raise_exception`: it does not take these messages."""


# What a template that meets unforeseen messages can raise: Jinja's own errors and those of the operations in it.
_TEMPLATE_FAILURES = (
    TemplateError,
    TemplateRefusal,
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
    RecursionError,
)


class Prompting:
    """Tokenizer and chat template of one model."""

    def __init__(self, tokenizer: Tokenizer, template: Template | None, special_tokens: Mapping[str, str]) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._special_tokens = dict(special_tokens)
        self.vocabulary = Vocabulary(tokenizer)

    @classmethod
    def load(cls, folder: Path) -> Prompting:
        """Read tokenizer.json, tokenizer_config.json and chat_template.jinja of a model folder."""
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        config = _read_json(folder / "tokenizer_config.json")
        source = _template_source(folder, config)
        template = None if source is None else _environment().from_string(source)
        return cls(tokenizer, template, _special_tokens(config))

    async def chat_prompt(self, messages: Sequence[Mapping[str, Any]], *, max_model_len: int) -> list[int]:
        """Return the prompt's token ids; their number is left to the caller to check.

        Raises InvalidValue when the model's template does not take the messages, and ContextLengthExceeded when the text is
        so long that it need not be tokenised to know that it does not fit.
        """
        size = sum(len(str(message.get("content") or "")) for message in messages)
        if size <= INLINE_CHARS_MAX:
            return self._chat_prompt(messages, max_model_len)
        return await asyncio.to_thread(self._chat_prompt, messages, max_model_len)

    def detokenizer(self) -> Detokenizer:
        """Return a fresh detokenizer for one request."""
        return Detokenizer(self._decode)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def _chat_prompt(self, messages: Sequence[Mapping[str, Any]], max_model_len: int) -> list[int]:
        if self._template is None:
            raise InvalidValue("this model has no chat template, so it cannot answer chat messages", param="model")
        try:
            text = self._template.render(messages=messages, add_generation_prompt=True, tools=None, **self._special_tokens)
        except _TEMPLATE_FAILURES as error:
            raise InvalidValue(f"the model's chat template does not take these messages: {error}", param="messages") from error
        if len(text) > INLINE_CHARS_MAX:
            self._check_could_fit(text, max_model_len)
        token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return token_ids

    def _check_could_fit(self, text: str, max_model_len: int) -> None:
        """Raise ContextLengthExceeded when even the longest tokens could not cover `text`.

        Spaces are not counted, because a token may swallow any number of them; normalisation may shorten what is left.
        """
        solid_chars = len("".join(text.split())) // NORMALISED_CHARS_MAX
        fewest_tokens = -(-solid_chars // self.vocabulary.longest_token_chars)
        if fewest_tokens >= max_model_len:
            raise ContextLengthExceeded(
                f"the prompt has at least {fewest_tokens} tokens: this model's context is {max_model_len} tokens",
                param="messages",
            )


def output_room(*, prompt_tokens: int, max_tokens: int | None, max_model_len: int) -> int:
    """Return how many tokens may be generated: `max_tokens`, or the rest of the context when it is None.

    Raises ContextLengthExceeded, with the numbers, when prompt and output do not fit.
    """
    room = max_model_len - prompt_tokens
    if room < 1:
        raise ContextLengthExceeded(
            f"the prompt has {prompt_tokens} tokens and leaves no room for an answer: this model's context is"
            f" {max_model_len} tokens",
            param="messages",
        )
    if max_tokens is not None and max_tokens > room:
        raise ContextLengthExceeded(
            f"the prompt has {prompt_tokens} tokens and {max_tokens} were asked for, {prompt_tokens + max_tokens} in all:"
            f" this model's context is {max_model_len} tokens",
            param="max_tokens",
        )
    return room if max_tokens is None else max_tokens


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,  # the result is a prompt, not a page
        extensions=["jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(value: Any, indent: int | None = None, **_options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise TemplateRefusal(message)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    content: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return content


def _template_source(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Return the chat template: its own file first, then tokenizer_config.json (the one named `default` of several)."""
    own_file = folder / "chat_template.jinja"
    if own_file.is_file():
        return own_file.read_text("utf-8")
    entry = config.get("chat_template")
    if isinstance(entry, list):
        entry = next((named["template"] for named in entry if named.get("name") == "default"), None)
    return entry


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens = {}
    for name in SPECIAL_TOKEN_NAMES:
        entry = config.get(name)
        if entry is not None:
            tokens[name] = str(entry["content"]) if isinstance(entry, dict) else str(entry)
    return tokens
