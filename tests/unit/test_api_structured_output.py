"""The constraint on an output: exactly one form, and errors that use the client's name of the field."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from appliance.api.bodies import decode_body
from appliance.api.sampling import field_names
from appliance.api.schemas import ChatCompletionRequest
from appliance.api.structured_output import ANY_OBJECT, Constraint, find_constraint
from appliance.base.errors import BadRequest
from appliance.serving.endings import with_client_field_name

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"const": 10**30}}}
ALL_OF_VLLM = {
    "json": None, "regex": None, "choice": None, "grammar": None, "json_object": None, "structural_tag": None,
    "disable_any_whitespace": False, "disable_additional_properties": False, "whitespace_pattern": None,
}  # fmt: skip
NAMED = {"name": "point", "schema": SCHEMA, "strict": True}


def body(**fields: Any) -> ChatCompletionRequest:
    return decode_body(json.dumps({"model": "m", "messages": [], **fields}).encode(), ChatCompletionRequest)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Constraint("guided_json", ANY_OBJECT, "response_format")),
        (
            {"response_format": {"type": "json_schema", "json_schema": NAMED}},
            Constraint("guided_json", SCHEMA, "response_format"),
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "any"}}},
            Constraint("guided_json", ANY_OBJECT, "response_format"),
        ),
        ({"guided_json": SCHEMA}, Constraint("guided_json", SCHEMA, "guided_json")),
        ({"guided_json": "{}"}, Constraint("guided_json", "{}", "guided_json")),
        ({"guided_regex": "a+"}, Constraint("guided_regex", "a+", "guided_regex")),
        ({"guided_choice": ["a", "b"]}, Constraint("guided_choice", ["a", "b"], "guided_choice")),
        ({"guided_grammar": "start: /a/"}, Constraint("guided_grammar", "start: /a/", "guided_grammar")),
        ({"structured_outputs": None}, None),
        ({"structured_outputs": {"json": SCHEMA}}, Constraint("guided_json", SCHEMA, "structured_outputs.json")),
        ({"structured_outputs": {"regex": "a+"}}, Constraint("guided_regex", "a+", "structured_outputs.regex")),
        ({"structured_outputs": {"choice": ["a"]}}, Constraint("guided_choice", ["a"], "structured_outputs.choice")),
        (
            {"structured_outputs": {"grammar": "start: /a/"}},
            Constraint("guided_grammar", "start: /a/", "structured_outputs.grammar"),
        ),
        (
            {"structured_outputs": {"json_object": True}},
            Constraint("guided_json", ANY_OBJECT, "structured_outputs.json_object"),
        ),
        (
            {"structured_outputs": {**ALL_OF_VLLM, "regex": "a+"}},
            Constraint("guided_regex", "a+", "structured_outputs.regex"),
        ),
    ],
    ids=str,
)
def test_each_form_is_read_as_one_constraint(fields: dict[str, Any], expected: Constraint | None) -> None:
    assert find_constraint(body(**fields)) == expected


def test_the_order_of_properties_is_kept() -> None:
    constraint = find_constraint(body(response_format={"type": "json_schema", "json_schema": NAMED}))

    assert constraint is not None
    assert list(constraint.value["properties"]) == ["b", "a"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_object", "json_schema": NAMED}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": ""}}}, "response_format.json_schema.name"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x" * 65}}}, "response_format.json_schema.name"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.name"),
        ({"response_format": {"type": "json_object", "strict": True}}, "response_format.strict"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": []}}},
            "response_format.json_schema.schema",
        ),
        ({"guided_choice": "a"}, "guided_choice"),
        ({"guided_regex": 5}, "guided_regex"),
        ({"guided_json": [1]}, "guided_json"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex"),
        ({"response_format": {"type": "json_object"}, "guided_json": {}}, "guided_json"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json": {}}, "guided_choice": ["a"]}, "structured_outputs.json"),
        ({"structured_outputs": {"json": {}, "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        ({"structured_outputs": {"json": {}, "disable_any_whitespace": True}}, "structured_outputs.disable_any_whitespace"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice"),
        ({"structured_outputs": {"xml": "a"}}, "structured_outputs.xml"),
    ],
    ids=str,
)
def test_an_invalid_or_second_constraint_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        find_constraint(body(**fields))

    assert refused.value.param == param


def test_errors_use_the_clients_name_of_a_field() -> None:
    names = field_names(body(response_format={"type": "json_object"}, max_completion_tokens=5))

    assert (names["guided_json"], names["max_tokens"], names["logprobs"]) == (
        "response_format", "max_completion_tokens", "top_logprobs",
    )  # fmt: skip
    assert field_names(body(guided_json="{}"))["guided_json"] == "guided_json"


def test_a_message_that_begins_with_the_engines_field_name_gets_the_clients() -> None:
    names = {"guided_json": "response_format"}

    assert with_client_field_name("guided_json takes at most 9 bytes", "guided_json", names) == (
        "response_format takes at most 9 bytes", "response_format",
    )  # fmt: skip
    assert with_client_field_name("the schema has guided_json", "guided_json", names) == (
        "the schema has guided_json",
        "response_format",
    )
    assert with_client_field_name("n must be at least 1", "n", names) == ("n must be at least 1", "n")


def test_the_json_schema_of_requests_can_be_generated() -> None:
    (_,), components = msgspec.json.schema_components([ChatCompletionRequest])

    assert components["ResponseFormat"]["properties"]["json_schema"]
