"""Decoding of request bodies: errors name the field and use the words of JSON; the work for one body is bounded."""

from __future__ import annotations

import gc
import gzip
import tracemalloc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import structlog

from appliance.api.admin.tenants import NewTenantBody
from appliance.api.admin.usage import NewPriceBody
from appliance.api.bodies import decode_body
from appliance.api.sampling import sampling_params
from appliance.api.schemas import PARTS_MAX, STOP_TOKEN_IDS_MAX, ChatCompletionRequest, check_messages, check_supported
from appliance.base.errors import InvalidValue, UnknownParameter, UnsupportedParameter
from tests.support.api_app import ApiApp


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (rb'{"model": "m", "messages": [{"role": "user", "content": "a\ud800"}]}', "messages"),
        (rb'{"model": "m\\\u00e9\ud83d\ude00", "messages": [], "stop": ["x", "\uDC00"]}', "stop"),
        (rb'{"model": "m", "messages": [{"role": "user", "content": "\ud800', None),
        (b'{"model": "\xff"}', None),
    ],
)
def test_invalid_unicode_is_refused_naming_the_field(body: bytes, param: str | None) -> None:
    with pytest.raises(InvalidValue, match="not valid UTF-8 JSON") as refused:
        decode_body(body, ChatCompletionRequest)

    assert refused.value.param == param


@pytest.mark.parametrize(
    ("body", "fault"), [(gzip.compress(b"{}"), "it is compressed"), (b"\xef\xbb\xbf{}", "it begins with a byte order mark")]
)
def test_a_compressed_body_or_byte_order_mark_is_named(body: bytes, fault: str) -> None:
    with pytest.raises(InvalidValue, match=f"not valid UTF-8 JSON: {fault}"):
        decode_body(body, ChatCompletionRequest)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("prompt", "1.5", "prompt must be a whole number"),
        ("completion", '"many"', "completion must be a whole number"),
        ("cached_prompt", "true", "cached_prompt must be a whole number or null"),
    ],
)
def test_a_value_that_is_not_a_whole_number_is_refused_by_name(field: str, value: str, message: str) -> None:
    fields = {"model": '"m"', "prompt": "1", "completion": "1", field: value}
    body = "{" + ", ".join(f'"{name}": {text}' for name, text in fields.items()) + "}"
    with pytest.raises(InvalidValue) as refused:
        decode_body(body.encode(), NewPriceBody)

    assert (refused.value.message, refused.value.param) == (message, field)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("1e309", "prompt: a number must be between -1.8e308 and 1.8e308"),
        ("9" * 4301, "prompt: a whole number must have at most 4300 characters"),
        ("-" + "9" * 4300, "prompt: a whole number must have at most 4300 characters"),
    ],
    ids=["1e309", "4301 digits", "minus and 4300 digits"],
)
def test_a_number_that_no_decoder_reads_is_refused_with_the_largest_one(value: str, message: str) -> None:
    body = f'{{"model": "m", "prompt": {value}, "completion": 1}}'
    with pytest.raises(InvalidValue) as refused:
        decode_body(body.encode(), NewPriceBody)

    assert (refused.value.message, refused.value.param) == (message, "prompt")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("temperature", '"hot"', "temperature must be a number or null"),
        ("stream", '"yes"', "stream must be true, false or null"),
        ("model", "5", "model must be a string"),
        ("messages", '"hello"', "messages must be a list"),
        ("messages", "[5]", "messages[0] must be an object"),
        ("stop", "5", "stop must be a string, a list or null"),
        ("max_tokens", "1.5", "max_tokens must be a whole number or null"),
        ("messages", '[{"role": "user", "content": null}]', "messages[0].content must be a string or a list of text parts"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_in_terms_of_json(field: str, value: str, message: str) -> None:
    fields = {"model": '"m"', "messages": "[]", field: value}
    body = "{" + ", ".join(f'"{name}": {text}' for name, text in fields.items()) + "}"
    with pytest.raises(InvalidValue) as refused:
        check_messages(decode_body(body.encode(), ChatCompletionRequest).messages)

    assert (refused.value.message, refused.value.param) == (message, message.partition(" ")[0])


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("metadata", '{"a": 1}', "each value of metadata must be a string"),
        ("logit_bias", '{"7": "x"}', "each value of logit_bias must be a number"),
    ],
)
def test_a_wrong_value_inside_an_object_is_described_as_such(field: str, value: str, message: str) -> None:
    with pytest.raises(InvalidValue) as refused:
        decode_body(f'{{"model": "m", "messages": [], "{field}": {value}}}'.encode(), ChatCompletionRequest)

    assert (refused.value.message, refused.value.param) == (message, field)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the body is empty; send a JSON object"),
        (b" \r\n", "the body is empty; send a JSON object"),
        (b"[]", "the body must be an object"),
        (b"model=m", "the body is not valid UTF-8 JSON: invalid character (byte 0)"),
    ],
)
def test_a_body_that_is_not_an_object_is_refused_without_a_field(body: bytes, message: str) -> None:
    with pytest.raises(InvalidValue) as refused:
        decode_body(body, ChatCompletionRequest)

    assert (refused.value.message, refused.value.param) == (message, None)


INSTEAD_OF_TOOLS = "; for output of a given form use response_format"


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("tools", '[{"type": "function"}]', f"tools is not supported by this version{INSTEAD_OF_TOOLS}"),
        ("functions", "[{}]", f"functions is not supported by this version{INSTEAD_OF_TOOLS}"),
        ("audio", "{}", "audio is not supported by this version"),
        ("prediction", "{}", "prediction is not supported by this version"),
        ("prompt_logprobs", "0", "prompt_logprobs is not supported by this version"),
        ("tool_choice", '"required"', f"tool_choice must be none or auto in this version{INSTEAD_OF_TOOLS}"),
        ("function_call", '{"name": "f"}', f"function_call must be none or auto in this version{INSTEAD_OF_TOOLS}"),
        ("best_of", "2", "best_of must be 1 in this version"),
        ("reasoning_effort", '"high"', "reasoning_effort must be none in this version"),
        ("modalities", '["text", "audio"]', 'modalities must be ["text"] in this version'),
    ],
)
def test_an_unsupported_field_is_refused_by_name(field: str, value: str, message: str) -> None:
    body = decode_body(f'{{"model": "m", "messages": [], "{field}": {value}}}'.encode(), ChatCompletionRequest)
    with pytest.raises(UnsupportedParameter) as refused:
        check_supported(body)

    assert (refused.value.message, refused.value.param) == (message, field)


@pytest.mark.parametrize("annotations", ["null", "[]", '[{"type": "url_citation"}]'])
def test_an_assistant_message_of_openai_is_accepted_with_its_annotations(annotations: str) -> None:
    text = f'[{{"role": "assistant", "content": "hello", "refusal": null, "annotations": {annotations}}}]'
    body = decode_body(f'{{"model": "m", "messages": {text}}}'.encode(), ChatCompletionRequest)
    assert check_messages(body.messages) == [{"role": "assistant", "content": "hello"}]


@pytest.mark.parametrize(
    ("field", "value"), [("tools", "[]"), ("functions", "[]"), ("tools", "null"), ("tool_choice", '"auto"')]
)
def test_an_unsupported_field_with_a_neutral_value_is_accepted(field: str, value: str) -> None:
    check_supported(decode_body(f'{{"model": "m", "messages": [], "{field}": {value}}}'.encode(), ChatCompletionRequest))


@pytest.mark.parametrize(
    ("part", "kind", "param"),
    [
        ('{"type": "text", "text": "a", "cache": {}}', UnknownParameter, "messages[0].content[1].cache"),
        ('{"type": "text", "text": "a", "refusal": "b"}', UnknownParameter, "messages[0].content[1].refusal"),
        ('{"type": ["text"], "text": "a"}', InvalidValue, "messages[0].content[1].type"),
    ],
)
def test_an_unknown_field_of_a_content_part_is_refused_by_name(part: str, kind: type[Exception], param: str) -> None:
    message = f'{{"role": "user", "content": [{{"type": "text", "text": "x"}}, {part}]}}'
    body = decode_body(f'{{"model": "m", "messages": [{message}]}}'.encode(), ChatCompletionRequest)
    with pytest.raises(kind) as refused:
        check_messages(body.messages)

    assert getattr(refused.value, "param", None) == param


@pytest.mark.parametrize(
    ("body", "body_type", "message"),
    [
        ('{"model": "m", "temprature": 1}', ChatCompletionRequest, "temprature; did you mean 'temperature'?"),
        (
            '{"model": "m", "messages": [{"role": "user", "contnt": "a"}]}',
            ChatCompletionRequest,
            "messages[0].contnt; did you mean 'content'?",
        ),
        (
            '{"response_format": {"type": "json_schema", "json_schema": {"nam": "x"}}}',
            ChatCompletionRequest,
            "response_format.json_schema.nam; did you mean 'name'?",
        ),
        (
            '{"name": "n", "model_limits": {"a.b": {"token_per_minute": 1}}}',
            NewTenantBody,
            "model_limits.token_per_minute; did you mean 'tokens_per_minute'?",
        ),
        ('{"model": "m", "colour": 1}', ChatCompletionRequest, "colour"),
    ],
)
def test_a_mistyped_field_is_refused_with_the_closest_one(body: str, body_type: type[Any], message: str) -> None:
    with pytest.raises(UnknownParameter) as refused:
        decode_body(body.encode(), body_type)

    assert refused.value.message == f"unknown parameter: {message}"


def test_a_mistyped_field_of_a_content_part_is_refused_with_the_closest_one() -> None:
    part = '{"type": "text", "text": "x", "prompt_cache_break": {}}'
    body = decode_body(
        f'{{"model": "m", "messages": [{{"role": "user", "content": [{part}]}}]}}'.encode(), ChatCompletionRequest
    )
    with pytest.raises(UnknownParameter, match="did you mean 'prompt_cache_breakpoint'"):
        check_messages(body.messages)


@pytest.mark.parametrize(
    ("part", "name"), [('{"text": "a"}', "type"), ('{"type": "text"}', "text"), ('{"type": "refusal"}', "refusal")]
)
def test_a_field_that_a_content_part_lacks_is_named_as_missing(part: str, name: str) -> None:
    text = f'{{"model": "m", "messages": [{{"role": "user", "content": [{part}]}}]}}'
    with pytest.raises(InvalidValue) as refused:
        check_messages(decode_body(text.encode(), ChatCompletionRequest).messages)

    param = f"messages[0].content[0].{name}"
    assert (refused.value.message, refused.value.param) == (f"missing parameter: {param}", param)


def test_cache_options_of_openai_are_accepted_and_ignored() -> None:
    content = '[{"type": "text", "text": "x", "prompt_cache_breakpoint": {"mode": "explicit"}, "image_url": null}]'
    messages = f'[{{"role": "user", "content": {content}}}]'
    text = f'{{"model": "m", "messages": {messages}, "prompt_cache_options": {{"mode": "explicit"}}}}'
    body = decode_body(text.encode(), ChatCompletionRequest)

    check_supported(body)
    assert check_messages(body.messages) == [{"role": "user", "content": "x"}]


@pytest.mark.parametrize("path", ["/admin/v1/tenants", "/login"])
async def test_a_client_that_disconnects_while_sending_is_not_logged_as_an_error(api: ApiApp, path: str) -> None:
    events: list[Any] = [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}]
    sent: list[Any] = []

    async def receive() -> Any:
        return events.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    headers = {"host": "a", "content-type": "application/x-www-form-urlencoded", **await api.as_role("owner")}
    scope: Any = {
        "type": "http", "http_version": "1.1", "method": "POST", "scheme": "http", "path": path, "raw_path": path.encode(),
        "query_string": b"", "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80), "state": {},
    }  # fmt: skip
    with structlog.testing.capture_logs() as logs:
        await api.app(scope, receive, send)

    assert sent[0]["status"] == 400
    assert [entry for entry in logs if entry["log_level"] not in ("debug", "info")] == []


class DeepBody(msgspec.Struct, forbid_unknown_fields=True):
    """A body with a field that takes anything."""

    model: str = ""
    tools: Any = None
    metadata: Any = None


@pytest.mark.parametrize(("start", "end"), [("[", "]"), ('{"a":', "}")])
def test_a_field_that_is_nested_too_deeply_is_named(start: str, end: str) -> None:
    deep = start * 3000 + "1" + end * 3000
    body = f'{{"model": "a \\" [[[", "metadata": {{"tools": [[["x"]]]}}, "tools": {deep}}}'
    with pytest.raises(InvalidValue, match="tools is nested too deeply") as refused:
        decode_body(body.encode(), DeepBody)
    assert refused.value.param == "tools"


def test_of_several_nested_fields_the_deepest_is_named() -> None:
    body = '{"metadata": ' + "[" * 300 + "]" * 300 + ', "t\\u006fols": ' + "[" * 3000 + "]" * 3000 + "}"
    with pytest.raises(InvalidValue, match="tools is nested too deeply"):
        decode_body(body.encode(), DeepBody)


@pytest.mark.parametrize("text", [b"a", b"\\n"])
def test_skipping_a_long_text_copies_nothing(text: bytes) -> None:
    body = b'{"model": "' + text * 2_000_000 + b'", "tools": ' + b"[" * 3000 + b"]" * 3000 + b"}"
    tracemalloc.start()
    with pytest.raises(InvalidValue, match="nested too deeply"):
        decode_body(body, DeepBody)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 3 * len(body)


def test_the_search_for_the_nested_field_is_bounded() -> None:
    body = b'{"metadata": [' + b"[]," * 200_000 + b'1], "tools": ' + b"[" * 3000 + b"]" * 3000 + b"}"
    with pytest.raises(InvalidValue, match="the body is nested too deeply"):
        decode_body(body, DeepBody)


def test_the_last_of_two_values_of_a_field_is_used() -> None:
    assert decode_body(b'{"model": "a", "model": "b"}', DeepBody).model == "b"


@pytest.mark.parametrize("end", [b"]}", b"]"])
def test_garbage_collection_does_not_run_while_a_body_is_decoded(end: bytes) -> None:
    body = b'{"model": "m", "tools": [' + b",".join([b"[[]]"] * 50_000) + end
    phases: list[str] = []

    def note(phase: str, _info: dict[str, int]) -> None:
        phases.append(phase)

    gc.callbacks.append(note)
    try:
        if end == b"]}":
            decode_body(body, DeepBody)
        else:
            with pytest.raises(InvalidValue, match="not valid UTF-8 JSON"):
                decode_body(body, DeepBody)
    finally:
        gc.callbacks.remove(note)

    assert phases.count("start") <= 2, "garbage may be collected after decoding, not during it"
    assert gc.isenabled()


def test_content_parts_are_limited_over_all_messages() -> None:
    half = ",".join(['{"type": "text", "text": ""}'] * (PARTS_MAX // 2))
    body = '{"model": "m", "messages": [{"role": "user", "content": [%s]}, {"role": "user", "content": [%s]}]}'
    assert len(check_messages(decode_body((body % (half, half)).encode(), ChatCompletionRequest).messages)) == 2

    more = half + ', {"type": "text", "text": ""}'
    with pytest.raises(InvalidValue, match=f"at most {PARTS_MAX} content parts in all, not {PARTS_MAX + 1}") as refused:
        check_messages(decode_body((body % (half, more)).encode(), ChatCompletionRequest).messages)
    assert refused.value.param == "messages"


def test_too_many_stop_token_ids_are_refused_before_they_are_read() -> None:
    class Unread(list[int]):
        def __iter__(self) -> Iterator[int]:
            raise AssertionError("the ids were read")

    body = decode_body(b'{"model": "m", "messages": []}', ChatCompletionRequest)
    body.stop_token_ids = Unread([1] * (STOP_TOKEN_IDS_MAX + 1))
    info = cast(Any, SimpleNamespace(max_model_len=100, vocab_size=9))
    with pytest.raises(InvalidValue, match="stop_token_ids takes at most"):
        sampling_params(body, info, {}, default_max_tokens=None, prompt_tokens=1)
