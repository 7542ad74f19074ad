"""Normalises the forms in which `LLM` takes prompts, conversations and their parameters. Knows no torch.

One prompt or a list of them: text, token ids, `{"prompt": text}`, `{"prompt_token_ids": ids}`, or both in one mapping.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from engine.errors import PromptError
from engine.sampling_params import InvalidOption, SamplingParams

Prompt = str | Sequence[int] | Mapping[str, Any]
PROMPT_FIELDS = ("prompt", "prompt_token_ids")


def as_list(prompts: Any) -> list[Any]:
    """The prompts as a list; a single prompt becomes a list of one. Raises `PromptError` for anything else."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, bytes | bytearray):
        raise PromptError(f"prompts must be text, token ids, a mapping or a list of these, not {type(prompts).__name__}")
    prompt_list = list(prompts)
    return [prompt_list] if prompt_list and _is_number(prompt_list[0]) else prompt_list


def _is_number(value: Any) -> bool:
    """Whether it is a number, or a scalar of numpy or torch, of which arrays of one prompt's ids consist."""
    return isinstance(value, int | float) or getattr(value, "ndim", None) == 0


def read_prompt(prompt: Any, encode: Callable[[str], list[int]]) -> tuple[str | None, list[int]]:
    """Text, where it is known, and token ids of one prompt. Whether the ids are valid is checked by the engine.

    Raises `PromptError`.
    """
    if isinstance(prompt, str):
        return prompt, encode(prompt)
    if not isinstance(prompt, Mapping):
        return None, _token_ids(prompt)
    unknown = set(prompt) - set(PROMPT_FIELDS)
    if unknown:
        raise PromptError(f"a prompt has unknown fields: {', '.join(sorted(map(str, unknown)))}")
    text = prompt.get("prompt")
    if text is not None and not isinstance(text, str):
        raise PromptError(f"prompt must be text, not {type(text).__name__}")
    if prompt.get("prompt_token_ids") is not None:
        return text, _token_ids(prompt["prompt_token_ids"])
    if text is None:
        raise PromptError("a prompt needs prompt or prompt_token_ids")
    return text, encode(text)


def _token_ids(ids: Any) -> list[int]:
    """Token ids as integers. Anything with `__index__` counts, as numpy's integers do; booleans and floats do not."""
    if not isinstance(ids, Iterable) or isinstance(ids, bytes | bytearray):
        raise PromptError(f"a prompt must be text or token ids, not {type(ids).__name__}")
    token_ids = list(ids)
    kinds = set(map(type, token_ids))
    if kinds <= {int}:
        return token_ids
    if any(issubclass(kind, bool) or not hasattr(kind, "__index__") for kind in kinds):
        names = ", ".join(sorted(kind.__name__ for kind in kinds - {int}))
        raise PromptError(f"the prompt has token ids that are not integers: {names}")
    try:
        return [operator.index(value) for value in token_ids]
    except TypeError as error:
        raise PromptError(f"the prompt has token ids that are not integers: {error}") from error


def conversations(messages: Any) -> list[Any]:
    """The conversations as a list; a single one becomes a list of one. Raises `PromptError` for anything but text messages."""
    chats = as_list(messages)
    chats = [chats] if chats and isinstance(chats[0], Mapping) else chats
    for index, conversation in enumerate(chats):
        is_list = isinstance(conversation, Sequence) and not isinstance(conversation, str | bytes)
        if not is_list or not all(isinstance(message, Mapping) for message in conversation):
            raise PromptError(f"conversation {index} must be a list of messages, each a mapping with role and content")
    return [[_with_joined_text(index, message) for message in conversation] for index, conversation in enumerate(chats)]


def _with_joined_text(index: int, message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message; where its content is a list of parts, with their texts, joined as the gateway joins them. Templates of text
    models would write the list itself into the prompt."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return message
    parts = content if isinstance(content, list | tuple) else [content]
    texts = [part["text"] for part in parts if _is_text_part(part)]
    if len(texts) < len(parts):
        raise PromptError(f'conversation {index}: a content must be text or a list of texts, {{"type": "text", "text": ...}}')
    return {**message, "content": "\n".join(texts)}


def _is_text_part(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def params_for(params: Any, count: int) -> list[SamplingParams]:
    """The parameters of each of `count` prompts: the same for all, or one each. Raises `InvalidOption` and `PromptError`."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, list | tuple) or not all(isinstance(item, SamplingParams) for item in params):
        raise InvalidOption("sampling_params", "sampling_params must be SamplingParams or a list of them")
    if len(params) != count:
        raise PromptError(f"{len(params)} sampling_params were given for {count} prompts")
    return list(params)
