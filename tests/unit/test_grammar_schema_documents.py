"""JSON schemas as documents: references, identifiers, unevaluated keywords, and the place of what is invalid."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.grammar import schema_document
from engine.grammar.spec import GrammarError
from tests.support.grammars import compiled, schema_accepts

DRAFT_4 = "http://json-schema.org/draft-04/schema#"
DRAFT_7 = "http://json-schema.org/draft-07/schema#"
DRAFT_2019 = "https://json-schema.org/draft/2019-09/schema"
TEXT, WHOLE, NULL = {"type": "string"}, {"type": "integer"}, {"type": "null"}

# schema, values that satisfy it, values that do not
UNEVALUATED: list[tuple[str, dict[str, Any], list[Any], list[Any]]] = [
    ("items by position", {"prefixItems": [WHOLE], "unevaluatedItems": False}, [[], [1]], [[1, 2], ["a"]]),
    ("a schema for the other items", {"prefixItems": [WHOLE], "unevaluatedItems": TEXT}, [[1], [1, "a"]], [[1, 2], ["a"]]),
    ("the longest of several lists of items",
     {"prefixItems": [WHOLE], "allOf": [{"prefixItems": [True, TEXT]}], "unevaluatedItems": False},
     [[1], [1, "a"]], [[1, 2], [1, "a", 3]]),
    ("items of an included schema",
     {"allOf": [{"prefixItems": [WHOLE], "items": TEXT}], "unevaluatedItems": False},
     [[1], [1, "a", "b"]], [[1, 2], ["a"]]),
    ("unevaluated items of an included schema",
     {"allOf": [{"prefixItems": [WHOLE], "unevaluatedItems": TEXT}], "unevaluatedItems": False},
     [[1], [1, "a"]], [[1, 2]]),
    ("a tuple in the old spelling",
     {"$schema": DRAFT_2019, "items": [WHOLE], "unevaluatedItems": False},
     [[], [1]], [[1, 2], ["a"]]),
    ("additionalItems of a tuple",
     {"$schema": DRAFT_2019, "items": [WHOLE], "additionalItems": TEXT, "unevaluatedItems": False},
     [[1], [1, "a"]], [[1, 2]]),
    ("additionalItems without a tuple, which evaluates nothing",
     {"$schema": DRAFT_2019, "additionalItems": WHOLE, "unevaluatedItems": TEXT},
     [[], ["a"]], [["a", 1], [1]]),
    ("prefixItems of a draft without it, which evaluates nothing",
     {"$schema": DRAFT_2019, "prefixItems": [True, True], "items": [WHOLE], "unevaluatedItems": False},
     [[], [1]], [[1, 2]]),
    ("names by pattern",
     {"patternProperties": {"^a": True}, "unevaluatedProperties": False},
     [{}, {"ab": 1}], [{"b": 1}]),
    ("a schema for the other properties",
     {"properties": {"a": True}, "unevaluatedProperties": TEXT},
     [{"a": 1}, {"a": 1, "b": "x"}], [{"b": 1}]),
    ("properties of a referenced schema",
     {"$ref": "#/$defs/a", "properties": {"b": True}, "unevaluatedProperties": False,
      "$defs": {"a": {"properties": {"a": True}, "patternProperties": {"^x": True}}}},
     [{"a": 1, "b": 1}, {"x1": 1}], [{"c": 1}]),
    ("additionalProperties of an included schema",
     {"allOf": [{"additionalProperties": WHOLE}], "unevaluatedProperties": False},
     [{"a": 1}], [{"a": "x"}]),
    ("unevaluated properties of an included schema",
     {"allOf": [{"properties": {"b": True}, "unevaluatedProperties": TEXT}], "unevaluatedProperties": False},
     [{"b": 1}, {"c": "x"}], [{"c": 1}]),
    ("a schema that is included twice",
     {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}], "unevaluatedProperties": False,
      "$defs": {"a": {"properties": {"a": True}}}},
     [{"a": 1}], [{"b": 1}]),
    ("a schema without items that is included twice",
     {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}], "unevaluatedItems": False, "$defs": {"a": {"type": "array"}}},
     [[]], [[1]]),
    ("a boolean among the included schemas",
     {"allOf": [True, {"properties": {"a": True}}], "unevaluatedProperties": False},
     [{"a": 1}], [{"b": 1}]),
    ("a keyword that allows everything, beside branches",
     {"anyOf": [{"required": ["a"]}], "unevaluatedProperties": True},
     [{"a": 1, "b": 1}], [{"b": 1}]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"), [case[1:] for case in UNEVALUATED], ids=[case[0] for case in UNEVALUATED]
)
def test_an_unevaluated_keyword_applies_to_what_no_included_schema_evaluates(
    schema: dict[str, Any], valid: list[Any], invalid: list[Any]
) -> None:
    assert [value for value in valid if not schema_accepts(schema, value)] == []
    assert [value for value in invalid if schema_accepts(schema, value)] == []


# the reference of every item, the rest of the schema
REFERENCES: list[tuple[str, str, dict[str, Any]]] = [
    ("a name with a slash", "#/$defs/a~1b", {"$defs": {"a/b": WHOLE, "a~1b": TEXT}}),
    ("a name with a tilde", "#/$defs/a~0b", {"$defs": {"a~b": WHOLE, "a~0b": TEXT}}),
    ("a name that looks like an escape", "#/$defs/~01", {"$defs": {"~1": WHOLE, "/": TEXT}}),
    ("a name with a space", "#/$defs/a%20b", {"$defs": {"a b": WHOLE, "a%20b": TEXT}}),
    ("an element of an array", "#/$defs/a/allOf/1", {"$defs": {"a": {"allOf": [TEXT, WHOLE]}}}),
    ("an identifier", "n.json", {"$defs": {"n": {"$id": "n.json", **WHOLE}}}),
    ("a place within an identified schema", "n.json#/$defs/x", {"$defs": {"n": {"$id": "n.json", "$defs": {"x": WHOLE}}}}),
    ("an anchor within an identified schema",
     "n.json#x",
     {"$defs": {"n": {"$id": "n.json", "$defs": {"x": {"$anchor": "x", **WHOLE}}}, "y": {"$anchor": "x", **TEXT}}}),
    ("an anchor of 2019-09", "#x", {"$schema": DRAFT_2019, "$defs": {"x": {"$anchor": "x", **WHOLE}}}),
    ("an anchor, not the same name in a value",
     "#x",
     {"$defs": {"a": {"const": {"$anchor": "x", **TEXT}}, "b": {"$anchor": "x", **WHOLE}}}),
    ("an identifier, seen from within another identified schema",
     "#/$defs/n/$defs/x",
     {"$id": "http://a.example/",
      "$defs": {"n": {"$id": "n/", "$defs": {"x": {"$ref": "y"}, "y": {"$id": "y", **WHOLE}}}, "y": {"$id": "y", **TEXT}}}),
    ("a plain name of draft 7", "#x", {"$schema": DRAFT_7, "definitions": {"x": {"$id": "#x", **WHOLE}}}),
    ("a plain name of draft 4",
     "#x",
     {"$schema": DRAFT_4, "definitions": {"x": {"id": "#x", **WHOLE}, "y": {"$id": "#x", **TEXT}}}),
    ("an identifier of draft 4", "n", {"$schema": DRAFT_4, "definitions": {"n": {"id": "n", **WHOLE}}}),
]  # fmt: skip


@pytest.mark.parametrize(("reference", "schema"), [case[1:] for case in REFERENCES], ids=[case[0] for case in REFERENCES])
def test_a_reference_leads_to_its_target(reference: str, schema: dict[str, Any]) -> None:
    referring = {**schema, "type": "array", "items": {"$ref": reference}}
    assert schema_accepts(referring, [1])
    assert not schema_accepts(referring, ["a"])


@pytest.mark.parametrize("reference", ["#", "", "r", "http://a.example/r", "#root"])
def test_a_schema_can_be_referred_to_as_a_whole(reference: str) -> None:
    schema = {"$id": "http://a.example/r", "$anchor": "root", "type": "array", "items": {"$ref": reference}}
    assert schema_accepts(schema, [[], [[]]])
    assert not schema_accepts(schema, [1])


def test_an_identifier_beside_a_reference_is_ignored_before_2019() -> None:
    items = {"$id": "http://a.example/other", "$ref": "#/definitions/n"}
    schema = {"$schema": DRAFT_7, "$id": "http://a.example/r", "items": items, "definitions": {"n": WHOLE}, "type": "array"}
    assert schema_accepts(schema, [1])
    assert not schema_accepts(schema, ["a"])


def test_all_siblings_of_a_reference_are_ignored_before_2019() -> None:
    siblings = {
        "properties": {"a": False},
        "items": False,
        "enum": [],
        "unevaluatedProperties": False,
        "dependencies": {"b": False},
    }
    schema = {"$schema": DRAFT_7, **siblings, "$ref": "#/definitions/n", "definitions": {"n": {"type": ["array", "object"]}}}
    assert schema_accepts(schema, {"a": 1, "b": 2})
    assert schema_accepts(schema, [1])
    assert not schema_accepts(schema, 1)


def test_draft_4_has_enum_and_no_const() -> None:
    schema = {"$schema": DRAFT_4, "enum": [1, 2], "const": 1}
    assert [number for number in range(4) if schema_accepts(schema, number)] == [1, 2]


def test_a_schema_of_too_many_schemas_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema_document, "NODES_MAX", 4)
    properties = {f"p{index}": {"maximum": index} for index in range(4)}
    assert schema_accepts({"properties": dict([*properties.items()][:3])}, {})
    with pytest.raises(GrammarError, match="more than 4 schemas"):
        compiled("json", json.dumps({"properties": properties}))


A_COUNT, A_NUMBER, AN_ARRAY = (
    "must be a whole number of at least 0",
    "must be a number",
    "must be an array of at least one schema",
)
NOT_A_SCHEMA = "a schema must be an object or a boolean, not"
INVALID: list[tuple[dict[str, Any], str]] = [
    ({"$ref": 1}, "#: $ref must be a string"),
    ({"$ref": "#nowhere"}, "#: $ref to #nowhere, which is nowhere in the schema"),
    ({"$ref": "#xitems", "items": WHOLE}, "#: $ref to #xitems, which is nowhere in the schema"),
    ({"$ref": "#/$defs/a"}, "#: $ref to #/$defs/a, which is nowhere in the schema"),
    ({"$ref": "#/prefixItems/1", "prefixItems": [WHOLE]}, "#: $ref to #/prefixItems/1, which is nowhere in the schema"),
    ({"$ref": "#/required/a", "required": ["a"]}, "#: $ref to #/required/a, which is nowhere in the schema"),
    ({"$ref": "#/$defs", "$defs": 1}, f"#/$defs: {NOT_A_SCHEMA} a number"),
    ({"$schema": DRAFT_4, "$ref": "#x", "definitions": {"x": {"$id": "#x"}}}, "nowhere"),
    ({"$recursiveRef": "#"}, "#/$recursiveRef: the keyword $recursiveRef"),
    ({"$vocabulary": {}}, "#/$vocabulary: the keyword $vocabulary"),
    ({"properties": {"a/b~c": {"type": "x"}}}, '#/properties/a~1b~0c/type: unknown type "x"'),
    ({"dependentSchemas": {"a/b": {"type": "x"}}}, '#/dependentSchemas/a~1b/type: unknown type "x"'),
    ({"anyOf": [WHOLE, None]}, f"#/anyOf/1: {NOT_A_SCHEMA} null"),
    ({"not": "a"}, f"#/not: {NOT_A_SCHEMA} a string"),
    ({"if": True, "then": []}, f"#/then: {NOT_A_SCHEMA} an array"),
    ({"additionalProperties": None}, f"#/additionalProperties: {NOT_A_SCHEMA} null"),
    ({"unevaluatedItems": 1}, f"#/unevaluatedItems: {NOT_A_SCHEMA} a number"),
    ({"contains": WHOLE, "unevaluatedItems": False}, "#/unevaluatedItems: unevaluatedItems beside contains"),
    ({"if": True, "unevaluatedItems": False}, "#/unevaluatedItems: unevaluatedItems beside if"),
    ({"type": None}, "#/type: unknown type null"),
    ({"type": [WHOLE]}, '#/type: unknown type {"type": "integer"}'),
    ({"enum": 1}, "#/enum: enum must be an array"),
    ({"allOf": []}, f"#/allOf: allOf {AN_ARRAY}"),
    ({"oneOf": WHOLE}, f"#/oneOf: oneOf {AN_ARRAY}"),
    ({"minimum": "3"}, f"#/minimum: minimum {A_NUMBER}"),
    ({"maximum": True}, f"#/maximum: maximum {A_NUMBER}"),
    ({"exclusiveMaximum": None}, f"#/exclusiveMaximum: exclusiveMaximum {A_NUMBER}"),
    ({"multipleOf": -1}, "#/multipleOf: multipleOf must be above 0"),
    ({"minLength": 1.5}, f"#/minLength: minLength {A_COUNT}"),
    ({"maxLength": True}, f"#/maxLength: maxLength {A_COUNT}"),
    ({"maxItems": -1}, f"#/maxItems: maxItems {A_COUNT}"),
    ({"pattern": 1}, "#/pattern: pattern must be a string"),
    ({"required": ["a", 1]}, "#/required: required must hold arrays of strings"),
    ({"dependentRequired": {"a": [1]}}, "#/dependentRequired: dependentRequired must hold arrays of strings"),
]


@pytest.mark.parametrize(("schema", "message"), INVALID, ids=lambda value: str(value)[:50])
def test_an_invalid_value_of_a_keyword_is_refused_with_its_place(schema: dict[str, Any], message: str) -> None:
    with pytest.raises(GrammarError) as caught:
        compiled("json", json.dumps(schema))
    assert message in str(caught.value)


def test_a_count_may_be_written_with_decimals() -> None:
    assert schema_accepts({"minLength": 2.0}, "ab")
    assert not schema_accepts({"minLength": 2.0}, "a")


def test_a_boolean_exclusive_bound_applies_to_the_bound_beside_it() -> None:
    for schema in ({"$schema": DRAFT_4}, {}):
        bounds = {**schema, "type": "integer", "minimum": 1, "exclusiveMinimum": True, "maximum": 5, "exclusiveMaximum": False}
        assert [number for number in range(7) if schema_accepts(bounds, number)] == [2, 3, 4, 5]
