"""The fields of `POST /v1/chat/completions`: those that are supported, refused by name, or accepted and ignored.

Ignored, as documented: `store`, `metadata`, `user`, `safety_identifier`, `prompt_cache_key`, `prompt_cache_retention`,
`prompt_cache_options`, `verbosity`, `parallel_tool_calls`, `stream_options.include_obfuscation`, a message's `annotations`,
`parsed`, `provider_specific_fields` and its `type` if it is `text`, and `prompt_cache_breakpoint` of a content part.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

import msgspec

from appliance.api.field_types import at_least, chars, entries, items, matching, one_of, sampling, within
from appliance.base.errors import InvalidValue, UnknownParameter, UnsupportedParameter
from appliance.base.texts import did_you_mean
from appliance.metering.limits.admission_request import SERVICE_TIERS, is_batch_work
from engine.protocol import (
    BAD_WORDS_CHARS_MAX,
    BAD_WORDS_MAX,
    GUIDED_BYTES_MAX,
    GUIDED_CHOICES_MAX,
    LOGIT_BIAS_MAX,
    STOP_STRINGS_MAX,
)

MESSAGES_MAX = 4096
PARTS_MAX = 16_384  # content parts in all messages together: some 50 ms of CPU time, for which all other requests wait
STOP_CHARS_MAX = 1000
STOP_TOKEN_IDS_MAX = 256
TOKEN_ID_DIGITS_MAX = 10
SEED_BITS = 63  # the engine's seeds are not negative
FORMATS = ("text", "json_object", "json_schema")
SCHEMA_NAME = "[a-zA-Z0-9_-]{1,64}"
TEXT_ROLES = ("developer", "system", "user", "assistant")
OPENAI_ROLES = (*TEXT_ROLES, "tool", "function")
CONTENT_PARTS = ("text", "refusal")
PART_FIELDS_IGNORED = ("prompt_cache_breakpoint",)
NEVER_SUPPORTED = ("tools", "functions", "audio", "prediction", "web_search_options", "moderation", "prompt_logprobs")
# The values that are supported of fields that request something else with any other.
ONLY_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
}
TOOL_FIELDS = ("tools", "functions", "tool_choice", "function_call")

GuidedJson = Annotated[str, chars(1, GUIDED_BYTES_MAX["guided_json"])]
GuidedRegex = Annotated[str, chars(1, GUIDED_BYTES_MAX["guided_regex"])]
GuidedGrammar = Annotated[str, chars(1, GUIDED_BYTES_MAX["guided_grammar"])]
GuidedChoice = Annotated[str, chars(1, GUIDED_BYTES_MAX["guided_choice"] - len('[""]'))]
GuidedChoices = Annotated[list[GuidedChoice], items(1, GUIDED_CHOICES_MAX)]
StopString = Annotated[str, chars(1, STOP_CHARS_MAX)]
TokenIds = Annotated[list[Annotated[int, at_least(0)]], items(0, STOP_TOKEN_IDS_MAX)]
Biases = Annotated[
    dict[str, Annotated[float, sampling("logit_bias")]],
    entries(LOGIT_BIAS_MAX, propertyNames={"pattern": f"^[0-9]{{1,{TOKEN_ID_DIGITS_MAX}}}$"}),
]
BadWords = Annotated[list[Annotated[str, chars(1, BAD_WORDS_CHARS_MAX)]], items(0, BAD_WORDS_MAX)]


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a stream reports in addition to text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class Message(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A message of the conversation. Only text is supported."""

    role: Annotated[str, one_of(TEXT_ROLES)]
    type: Annotated[str, one_of(["text"])] | None = None  # lm-eval 0.4.9 sends `text`
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None  # part of OpenAI's responses, which clients send back
    parsed: Any = None  # added to a response by the official clients' `parse`, and sent back
    provider_specific_fields: Any = None  # added to a response by LiteLLM, and sent back
    reasoning_content: str | None = None  # sent back, often empty, by clients for reasoning models
    tool_calls: list[Any] | None = None
    tool_call_id: str | None = None
    function_call: Any = None
    audio: Any = None


class JsonSchema(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A named JSON schema. It is always enforced exactly."""

    name: Annotated[str, matching(f"^{SCHEMA_NAME}$")]
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The required format of the output."""

    type: Annotated[str, one_of(FORMATS)]
    json_schema: JsonSchema | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The required format of the output, under the names that vLLM uses now. Set exactly one of `json`, `regex`, `choice`,
    `grammar` and `json_object`; the other fields are accepted only with a value that has no effect."""

    json: GuidedJson | dict[str, Any] | None = None
    regex: GuidedRegex | None = None
    choice: GuidedChoices | None = None
    grammar: GuidedGrammar | None = None
    json_object: bool | None = None
    structural_tag: Any = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None


class ChatCompletionRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A chat completion to create."""

    model: str
    messages: Annotated[list[Message], items(1, MESSAGES_MAX)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, at_least(1)] | None = None
    max_completion_tokens: Annotated[int, at_least(1)] | None = None
    min_tokens: Annotated[int, at_least(0)] | None = None
    temperature: Annotated[float, sampling("temperature")] | None = None
    top_p: Annotated[float, sampling("top_p")] | None = None
    top_k: Annotated[int, sampling("top_k")] | None = None
    min_p: Annotated[float, sampling("min_p")] | None = None
    seed: Annotated[int, within(-(1 << SEED_BITS), (1 << SEED_BITS) - 1)] | None = None
    stop: StopString | Annotated[list[StopString], items(0, STOP_STRINGS_MAX)] | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    presence_penalty: Annotated[float, sampling("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, sampling("frequency_penalty")] | None = None
    repetition_penalty: Annotated[float, sampling("repetition_penalty")] | None = None
    logit_bias: Biases | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, sampling("logprobs")] | None = None
    n: Annotated[int, sampling("n")] | None = None
    response_format: ResponseFormat | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    functions: list[Any] | None = None
    function_call: Any = None
    modalities: Annotated[list[Annotated[str, one_of(["text"])]], items(1, 1)] | None = None
    service_tier: Annotated[str, one_of(SERVICE_TIERS)] | None = None
    reasoning_effort: Annotated[str, one_of(["none"])] | None = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    moderation: Any = None
    guided_json: GuidedJson | dict[str, Any] | None = None
    guided_regex: GuidedRegex | None = None
    guided_choice: GuidedChoices | None = None
    guided_grammar: GuidedGrammar | None = None
    structured_outputs: StructuredOutputs | None = None
    best_of: Annotated[int, within(1, 1)] | None = None
    typical_p: Annotated[float, sampling("typical_p")] | None = None
    bad_words: BadWords | None = None
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
    """Raise UnsupportedParameter for the first field that requests something this version cannot do, and InvalidValue for
    `stream_options` without `stream`."""
    if body.stream_options is not None and not body.stream:
        raise InvalidValue("stream_options needs stream to be true", param="stream_options")
    for name in NEVER_SUPPORTED:
        if getattr(body, name) not in (None, []):
            raise _unsupported(name, "is not supported by this version")
    for name, supported in ONLY_SUPPORTED.items():
        if getattr(body, name) not in (None, *supported):
            values = " or ".join(value if isinstance(value, str) else json.dumps(value) for value in supported)
            raise _unsupported(name, f"must be {values} in this version")


def _unsupported(name: str, problem: str) -> UnsupportedParameter:
    alternative = "; for output of a given form use response_format" if name in TOOL_FIELDS else ""
    return UnsupportedParameter(f"{name} {problem}{alternative}", param=name)


def service_tier_of(body: ChatCompletionRequest) -> str | None:
    """Return the service tier of the request, `flex` or `default`; None if unset. Raises InvalidValue for an unknown one."""
    if body.service_tier is None:
        return None
    return "flex" if is_batch_work(body.service_tier) else "default"


def check_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """Return the messages in the form that chat templates take: role, text, name. `developer` becomes `system`.

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
    for name in ("tool_calls", "function_call", "audio", "tool_call_id", "reasoning_content"):
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
    kind = _required_string(part, "type", path)
    if kind not in CONTENT_PARTS:
        raise UnsupportedParameter(f"{path}: content of type {kind!r} is not supported; send text", param=f"{path}.type")
    known = ("type", kind, *PART_FIELDS_IGNORED)
    for name, value in part.items():
        if value is not None and name not in known:
            hint = did_you_mean(name, known)
            raise UnknownParameter(f"unknown parameter: {path}.{name}{hint}", param=f"{path}.{name}")
    return _required_string(part, kind, path)


def _required_string(part: dict[str, Any], name: str, path: str) -> str:
    value, field = part.get(name), f"{path}.{name}"
    if not isinstance(value, str):
        problem = f"{field} must be a string" if name in part else f"missing parameter: {field}"
        raise InvalidValue(problem, param=field)
    return value
