"""The fields of `POST /v1/chat/completions`: which are honoured, which are refused by name, which are taken and ignored.

Ignored by documented choice: `store`, `metadata`, `user`, `safety_identifier`, `prompt_cache_key`, `prompt_cache_retention`,
`prompt_cache_options`, `verbosity`, `parallel_tool_calls`, `stream_options.include_obfuscation`, `annotations` and the `type`
`text` of a message, `prompt_cache_breakpoint` of a content part.
"""

from __future__ import annotations

from typing import Any

import msgspec

from appliance.base.errors import InvalidValue, UnknownParameter, UnsupportedParameter
from appliance.metering.limits.admission_request import is_batch_work

MESSAGES_MAX = 4096
PARTS_MAX = 16_384  # content parts in all messages together: some 50 ms of processor time, in which everybody else waits
STOP_CHARS_MAX = 1000
TEXT_ROLES = ("developer", "system", "user", "assistant")
OPENAI_ROLES = (*TEXT_ROLES, "tool", "function")
CONTENT_PARTS = ("text", "refusal")
PART_FIELDS_IGNORED = ("prompt_cache_breakpoint",)
NEVER_SUPPORTED = ("tools", "functions", "audio", "prediction", "web_search_options", "moderation", "prompt_logprobs")


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a stream reports besides text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class Message(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A message of the conversation. Only text is supported."""

    role: str
    type: str | None = None  # lm-eval 0.4.9 sends `text`
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None  # OpenAI's answers have them, and clients send those back
    tool_calls: list[Any] | None = None
    tool_call_id: str | None = None
    function_call: Any = None
    audio: Any = None


class JsonSchema(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A named JSON schema. It is always enforced exactly."""

    name: str
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The format of the answer."""

    type: str
    json_schema: JsonSchema | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The format of the answer, under the names that vLLM uses now. Set exactly one of `json`, `regex`, `choice`, `grammar` and
    `json_object`; the other fields are accepted only with a value that changes nothing."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None


class ChatCompletionRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A chat completion to create."""

    model: str
    messages: list[Message]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    n: int | None = None
    response_format: ResponseFormat | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    functions: list[Any] | None = None
    function_call: Any = None
    modalities: list[str] | None = None
    service_tier: str | None = None
    reasoning_effort: str | None = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    moderation: Any = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    best_of: int | None = None
    typical_p: float | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    verbosity: str | None = None
    parallel_tool_calls: bool | None = None


def check_supported(body: ChatCompletionRequest) -> None:
    """Raise UnsupportedParameter for the first field that asks for something this version cannot do.

    Raises InvalidValue for `stream_options` without a stream.
    """
    if body.stream_options is not None and not body.stream:
        raise InvalidValue("stream_options needs stream to be true", param="stream_options")
    for name in NEVER_SUPPORTED:
        if getattr(body, name) not in (None, []):
            raise UnsupportedParameter(f"{name} is not supported by this version", param=name)
    asked = {
        "best_of": body.best_of not in (None, 1),
        "tool_choice": body.tool_choice not in (None, "none", "auto"),
        "function_call": body.function_call not in (None, "none", "auto"),
        "modalities": body.modalities not in (None, ["text"]),
        "reasoning_effort": body.reasoning_effort not in (None, "none"),
    }
    for name, unsupported in asked.items():
        if unsupported:
            raise UnsupportedParameter(f"{name} with this value is not supported by this version", param=name)


def service_tier_of(body: ChatCompletionRequest) -> str | None:
    """Return the service tier that serves the request, flex or default; None when the request names none.

    Raises InvalidValue for an unknown one.
    """
    if body.service_tier is None:
        return None
    return "flex" if is_batch_work(body.service_tier) else "default"


def check_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """Return the messages as a chat template takes them: role, text, name. `developer` becomes `system`.

    Raises InvalidValue or UnsupportedParameter naming the message.
    """
    if not 1 <= len(messages) <= MESSAGES_MAX:
        raise InvalidValue(f"messages must hold 1 to {MESSAGES_MAX} messages, not {len(messages)}", param="messages")
    parts = sum(len(message.content) for message in messages if isinstance(message.content, list))
    if parts > PARTS_MAX:
        raise InvalidValue(f"messages must hold at most {PARTS_MAX} content parts in all, not {parts}", param="messages")
    return [_checked_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _checked_message(message: Message, path: str) -> dict[str, Any]:
    if message.role not in OPENAI_ROLES:
        raise InvalidValue(f"{path}.role must be one of {', '.join(TEXT_ROLES)}", param=f"{path}.role")
    if message.role not in TEXT_ROLES:
        raise UnsupportedParameter(f"{path}.role {message.role} is not supported by this version", param=f"{path}.role")
    if message.type not in (None, "text"):
        raise UnsupportedParameter(f"{path}.type {message.type!r} is not supported; send text", param=f"{path}.type")
    for name in ("tool_calls", "function_call", "audio", "tool_call_id"):
        if getattr(message, name):
            raise UnsupportedParameter(f"{path}.{name} is not supported by this version", param=f"{path}.{name}")
    role = "system" if message.role == "developer" else message.role
    checked: dict[str, Any] = {"role": role, "content": _text(message, path)}
    if message.name is not None:
        checked["name"] = message.name
    return checked


def _text(message: Message, path: str) -> str:
    content = message.content
    if isinstance(content, str):
        return content
    if content is None:
        if message.role != "assistant":
            raise InvalidValue(f"{path}.content must be a string or a list of text parts", param=f"{path}.content")
        return message.refusal or ""
    return "\n".join(_part_text(part, f"{path}.content[{index}]") for index, part in enumerate(content))


def _part_text(part: dict[str, Any], path: str) -> str:
    kind = part.get("type")
    if not isinstance(kind, str):
        raise InvalidValue(f"{path}.type must be a string", param=f"{path}.type")
    if kind not in CONTENT_PARTS:
        raise UnsupportedParameter(f"{path}: content of type {kind!r} is not supported; send text", param=f"{path}.type")
    for name, value in part.items():
        if value is not None and name not in ("type", kind, *PART_FIELDS_IGNORED):
            raise UnknownParameter(f"unknown parameter: {path}.{name}", param=f"{path}.{name}")
    text = part.get(kind)
    if not isinstance(text, str):
        raise InvalidValue(f"{path}.{kind} must be a string", param=f"{path}.{kind}")
    return text
