"""JSON schemas as grammars: exactness of every keyword and format, refused schemas, white space, escapes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from engine.grammar.spec import GrammarError
from tests.support.grammars import accepts, compiled, schema_accepts

DRAFT_4 = "http://json-schema.org/draft-04/schema#"
DRAFT_6 = "http://json-schema.org/draft-06/schema#"
DRAFT_7 = "http://json-schema.org/draft-07/schema#"
DRAFT_2019 = "https://json-schema.org/draft/2019-09/schema"
DRAFT_2020 = "https://json-schema.org/draft/2020-12/schema"
TEXT, WHOLE = {"type": "string"}, {"type": "integer"}
PERSON = {"properties": {"name": TEXT, "age": WHOLE}, "required": ["name"], "additionalProperties": False, "type": "object"}

# schema, values that satisfy it, values that do not
CASES: list[tuple[str, Any, list[Any], list[Any]]] = [
    ("anything", True, [None, 1, "é\n", [{"a": []}], {"": {}}], []),
    ("type", {"type": ["integer", "null"]}, [0, -12, None], [1.5, "1", [], {}]),
    ("number", {"type": "number"}, [0, -1.5, 1e22, 1e-7], ["1", None]),
    ("boolean", {"type": "boolean"}, [True, False], [0, 1, "true"]),
    ("object", PERSON, [{"name": "Ann"}, {"name": "", "age": 3}], [{}, {"age": 3}, {"name": "a", "x": 1}, []]),
    ("open object", {"properties": {"a": WHOLE}}, [{"a": 1, "b": []}, {"b": 1, "a": 2}, "x"], [{"a": "1"}, {"b": 1, "a": "2"}]),
    ("required alone", {"required": ["a", "b"]}, [{"a": 1, "b": 2}, {"b": 2, "a": 1}, 5], [{"a": 1}]),
    ("others typed", {"additionalProperties": WHOLE, "type": "object"}, [{}, {"q": 1}], [{"q": "1"}]),
    ("patternProperties",
     {"patternProperties": {"^a": WHOLE, "b$": {"minimum": 3}}},
     [{"ab": 4, "b": 3.5}], [{"ab": 2}, {"a": "x"}]),
    ("a name and its pattern",
     {"properties": {"ab": {"maximum": 9}}, "patternProperties": {"^a": WHOLE}},
     [{"ab": 8}], [{"ab": 8.5}, {"ab": 10}]),
    ("propertyNames", {"propertyNames": {"pattern": "^[a-z]+$", "maxLength": 3}}, [{"abc": 1}, {}], [{"abcd": 1}, {"A": 1}]),
    ("propertyNames listed or matched",
     {"propertyNames": {"anyOf": [{"enum": ["xx"]}, {"pattern": "^a"}]}},
     [{"xx": 1, "ab": 2}], [{"x": 1}]),
    ("two patterns with one text in common",
     {"allOf": [{"pattern": "^[0-3]$"}, {"pattern": "^[3-9]$"}], "type": "string"},
     ["3"], ["2", "4", "", "33"]),
    ("names of two rules with one in common",
     {"patternProperties": {"^[0-9]$": WHOLE}, "additionalProperties": False, "maxProperties": 2,
      "not": {"anyOf": [{"propertyNames": {"not": {"enum": ["1", "3"]}}}, {"propertyNames": {"not": {"enum": ["2", "3"]}}}]},
      "type": "object"},
     [{"3": 1}, {"1": 1, "2": 2}], [{}, {"1": 1}, {"2": 1, "0": 1}, {"3": "x"}]),
    ("propertyNames of no text", {"propertyNames": {"not": {"type": "string"}}, "type": "object"}, [{}], [{"a": 1}]),
    ("propertyNames listed", {"propertyNames": {"enum": ["a", "b"]}}, [{"b": 1, "a": 2}, {}], [{"c": 1}]),
    ("oneOf of open objects",
     {"oneOf": [{"additionalProperties": TEXT}, {"additionalProperties": WHOLE}], "type": "object"},
     [{"a": "x"}, {"a": 1, "b": 2}], [{}, {"a": "x", "b": 1}, {"a": None}]),
    ("a broken rule among few properties",
     {"maxProperties": 1, "not": {"additionalProperties": WHOLE}},
     [{"a": "x"}], [{}, {"a": 1}, {"a": "x", "b": 1}]),
    ("minProperties", {"minProperties": 1, "type": "object"}, [{"a": 1}], [{}]),
    ("minProperties of listed names",
     {"properties": {"a": WHOLE, "b": WHOLE, "c": TEXT}, "additionalProperties": False, "minProperties": 2, "type": "object"},
     [{"a": 1, "c": "x"}, {"a": 1, "b": 2, "c": ""}], [{}, {"a": 1}]),
    ("minProperties of required names",
     {"required": ["a", "b"], "minProperties": 2, "type": "object"},
     [{"a": 1, "b": 2}, {"b": 1, "c": 0, "a": 2}], [{"a": 1}, {"a": 1, "c": 2}]),
    ("maxProperties", {"maxProperties": 1}, [{}, {"a": 1}], [{"a": 1, "b": 2}]),
    ("dependentRequired", {"dependentRequired": {"a": ["b"]}}, [{"b": 1}, {"a": 1, "b": 2}, {}], [{"a": 1}]),
    ("dependentSchemas", {"dependentSchemas": {"a": {"required": ["b"]}}}, [{"b": 1}, {"a": 1, "b": 2}, 3], [{"a": 1}]),
    ("dependencies",
     {"$schema": DRAFT_7, "dependencies": {"a": ["b"], "c": {"required": ["d"]}}},
     [{"a": 1, "b": 2}], [{"a": 1}]),
    ("not an empty object",
     {"properties": {"a": WHOLE}, "additionalProperties": False, "type": "object", "not": {"const": {}}},
     [{"a": 1}], [{}]),
    ("not patternProperties",
     {"type": "object", "maxProperties": 1, "not": {"patternProperties": {"^a": WHOLE}}},
     [{"ab": "x"}], [{}, {"a": 1}, {"b": "x"}]),
    ("not additionalProperties",
     {"type": "object", "maxProperties": 1, "not": {"properties": {"a": True}, "additionalProperties": WHOLE}},
     [{"b": "x"}], [{}, {"a": "x"}, {"b": 1}]),
    ("not dependentRequired", {"not": {"dependentRequired": {"a": ["b"]}}}, [{"a": 1}], [{}, {"a": 1, "b": 1}, {"b": 1}, 3]),
    ("names of a class that dialects read differently",
     {"patternProperties": {"^\\d$": WHOLE}, "additionalProperties": TEXT, "type": "object"},
     [{"1": 1}, {"a": "x"}], [{"1": "x"}, {"٣": 1}, {"٣": "x"}]),
    ("a listed name of a class that dialects read differently",
     {"properties": {"٣": True}, "patternProperties": {"^\\d$": WHOLE}, "additionalProperties": False, "type": "object"},
     [{"٣": 1}, {"1": 1}], [{"٣": "x"}, {"1": "x"}]),
    ("one of two patterns that dialects read differently",
     {"oneOf": [{"pattern": "^\\d$"}, {"pattern": "^.$"}], "type": "string"}, ["a"], ["1", "٣", "ab"]),
    ("not one of two patterns that dialects read differently",
     {"not": {"oneOf": [{"pattern": "^\\d$"}, {"pattern": "^.$"}]}, "type": "string"}, ["1", "ab"], ["a", "٣"]),
    ("if of a pattern that dialects read differently",
     {"if": {"pattern": "^\\d$"}, "then": {"const": "1"}, "else": {"minLength": 2}, "type": "string"},
     ["1", "ab"], ["2", "٣", "a"]),
    ("contains of a pattern that dialects read differently",
     {"contains": {"pattern": "^\\d$", "type": "string"}, "maxContains": 1, "items": TEXT, "type": "array"},
     [["1", "a"], ["1"]], [["٣"], ["1", "٣"], ["1", "1"]]),
    ("not a name of a class that dialects read differently",
     {"type": "object", "not": {"patternProperties": {"^\\d$": True}, "additionalProperties": False}},
     [{"a": 1}], [{"1": 1}, {"٣": 1}]),
    ("any order",
     {"allOf": [{"properties": {"a": WHOLE}}, {"properties": {"b": WHOLE}, "required": ["b"]}], "type": "object"},
     [{"b": 1}, {"b": 1, "a": 2}, {"a": 1, "b": 2}], [{}, {"a": 1}, {"b": "x"}]),
    ("any order, not empty",
     {"allOf": [{"properties": {"a": WHOLE}}, {"properties": {"b": WHOLE}}], "minProperties": 1, "type": "object"},
     [{"a": 1}, {"b": 1}, {"z": "x"}, {"b": 1, "a": 1}], [{}]),
    ("any order within a limit",
     {"required": ["a", "b"], "maxProperties": 3},
     [{"b": 1, "a": 2}, {"a": 1, "c": 1, "b": 1}], [{"a": 1}, {"a": 1, "c": 2}, {"a": 1, "b": 1, "c": 1, "d": 1}]),
    ("any order of required and other names within a limit",
     {"allOf": [{"properties": {"a": WHOLE}}, {"properties": {"b": WHOLE}, "required": ["b"]}], "maxProperties": 2,
      "type": "object"},
     [{"b": 1}, {"b": 1, "a": 2}, {"a": 2, "b": 1}, {"c": "x", "b": 1}],
     [{}, {"a": 1}, {"a": 1, "c": 1}, {"a": 1, "b": 1, "c": 1}, {"b": "x"}]),
    ("two rules that are broken",
     {"prefixItems": [{"not": {"patternProperties": {"^a": rule}}, "$ref": "#/$defs/ab"} for rule in (TEXT, WHOLE)],
      "$defs": {"ab": {"type": "object", "properties": {"ab": True}, "additionalProperties": False}}, "minItems": 2},
     [[{"ab": 1}, {"ab": "x"}]], [[{"ab": 1}, {"ab": 1}], [{"ab": "x"}, {"ab": "x"}], [{"ab": 1}, {}]]),
    ("some name breaks a rule",
     {"type": "object", "not": {"propertyNames": {"maxLength": 1}}},
     [{"ab": 1, "c": 2}, {"c": 1, "ab": 2}], [{}, {"a": 1}]),
    ("a name and one that breaks a rule",
     {"required": ["a"], "type": "object", "not": {"propertyNames": {"maxLength": 1}}},
     [{"ab": 1, "a": 1}, {"a": 1, "ab": 2, "c": 1}], [{"a": 1}, {"ab": 1}]),
    ("not every property",
     {"type": "object", "not": {"properties": {"a": WHOLE, "b": WHOLE}}},
     [{"a": "x", "b": 1}, {"a": 1, "b": "x"}, {"b": "x"}], [{}, {"a": 1, "b": 2}, {"c": "x"}]),
    ("items", {"items": WHOLE, "type": "array"}, [[], [1, 2, 3]], [["a"], [1, "a"], {}]),
    ("prefixItems", {"prefixItems": [WHOLE, TEXT], "items": False}, [[], [1], [1, "a"]], [["a"], [1, "a", 2]]),
    ("items after positions within limits",
     {"prefixItems": [WHOLE], "items": TEXT, "minItems": 2, "maxItems": 3},
     [[1, "a"], [1, "a", "b"]], [[], [1], [1, 2], [1, "a", "b", "c"]]),
    ("old tuples", {"$schema": DRAFT_7, "items": [WHOLE], "additionalItems": TEXT}, [[1, "a"], []], [["a"], [1, 2]]),
    ("not prefixItems", {"type": "array", "not": {"prefixItems": [WHOLE]}}, [["a"], ["a", 1]], [[], [1], [1, "a"]]),
    ("not an empty array", {"type": "array", "not": {"const": []}}, [[1], [1, 2]], [[]]),
    ("minItems", {"minItems": 2, "maxItems": 3}, [[1, 2], [1, 2, 3], "x"], [[1], [1, 2, 3, 4]]),
    ("contains", {"contains": WHOLE}, [[1], ["a", 2, "b"]], [[], ["a"]]),
    ("minContains", {"contains": WHOLE, "minContains": 2, "maxContains": 3}, [[1, 2], [1, "a", 2, 3]], [[1], [1, 2, 3, 4]]),
    ("contains among few",
     {"contains": WHOLE, "maxContains": 2, "minItems": 2, "maxItems": 3},
     [[1, "a"], ["a", 1, 2]], [[1], ["a", "b"], [1, "a", "b", "c"], [1, 2, 3]]),
    ("contains after others",
     {"prefixItems": [TEXT, True], "contains": WHOLE, "allOf": [{"contains": {"type": "null"}}]},
     [["a", 1, None], ["a", None, None, 1]], [[1, None], ["a", 1], ["a", None, "b"]]),
    ("uniqueItems",
     {"items": {"enum": ["a", "b", "c"]}, "uniqueItems": True, "minItems": 2},
     [["c", "a"]], [["a"], ["a", "a"]]),
    ("not items", {"type": "array", "not": {"items": WHOLE}}, [["a"], [1, "a"]], [[], [1]]),
    ("not contains", {"type": "array", "not": {"contains": WHOLE}}, [[], ["a"]], [[1], ["a", 1]]),
    ("not minContains",
     {"type": "array", "not": {"contains": WHOLE, "minContains": 2, "maxContains": 3}},
     [[], [1, "a"], [1, 1, 1, 1]], [[1, 1], [1, "a", 1, 1]]),
    ("not enum", {"not": {"enum": [[], {}, [1], 5]}}, [[2], {"a": 1}, 6, None], [[], {}, [1], 5]),
    ("uniqueItems within limits",
     {"items": {"enum": ["a", "b", "c"]}, "uniqueItems": True, "minItems": 2, "maxItems": 2},
     [["c", "b"], ["b", "a"]], [[], ["c"], ["a", "b", "c"], ["b", "b"]]),
    ("uniqueItems of all values", {"items": {"enum": [1, 2]}, "uniqueItems": True, "minItems": 2}, [[2, 1]], [[1], [1, 1]]),
    ("uniqueItems of a few integers",
     {"items": {"type": "integer", "minimum": 1, "maximum": 3}, "uniqueItems": True},
     [[3, 1], [1, 2, 3], []], [[1, 1], [4]]),
    ("uniqueItems of at most one", {"items": TEXT, "uniqueItems": True, "maxItems": 1}, [[], ["a"]], [["a", "b"]]),
    ("minimum", {"minimum": -2.5}, [-2.5, -2.4, 0, 100, "x"], [-2.6, -3]),
    ("exclusive bounds", {"exclusiveMinimum": 0, "exclusiveMaximum": 10}, [0.1, 9.9, 5], [0, 10, -1, 11]),
    ("zero with a sign", {"minimum": 0, "maximum": 9.5}, [0, -0.0], [-0.1]),
    ("no zero with a sign", {"exclusiveMaximum": 0}, [-0.1], [0, -0.0]),
    ("draft 4 bounds", {"$schema": DRAFT_4, "maximum": 5, "exclusiveMaximum": True}, [4.9, -7], [5, 6]),
    ("two bounds on a side",
     {"exclusiveMinimum": 1, "minimum": 0, "maximum": 9, "allOf": [{"maximum": 5}, {"exclusiveMaximum": 5}]},
     [1.5, 4.5], [1, 0.5, 5, 6]),
    ("long bounds", {"type": "integer", "minimum": 95, "maximum": 12345}, [95, 100, 12345, 9999], [94, 12346, 0, -100]),
    ("whole by multipleOf", {"multipleOf": 5, "exclusiveMinimum": 0}, [5, 10.0, 25, 1000], [0, 5.5, -5]),
    ("a few integers", {"type": "integer", "minimum": -1, "maximum": 9}, [-1, 0, 9], [10, 0.5]),
    ("a few multiples",
     {"minimum": 0, "exclusiveMaximum": 12, "multipleOf": 2, "allOf": [{"multipleOf": 3}, WHOLE], "not": {"const": 6}},
     [0], [6, 12, 2, 3]),
    ("a few fractions",
     {"exclusiveMinimum": 0, "maximum": 3, "multipleOf": 0.5, "allOf": [{"multipleOf": 0.75}]},
     [1.5, 3], [0, 0.5, 0.75, 1]),
    ("multiples that are none of another",
     {"minimum": 0, "maximum": 1, "multipleOf": 0.25, "not": {"multipleOf": 0.5}},
     [0.25, 0.75], [0, 0.5, 1, 0.1]),
    ("not a decimal multiple", {"type": "number", "not": {"multipleOf": 0.5}}, [0.25, 1.3, 0.501, -7.4], [0, 0.5, 1, -1.5]),
    ("multiples written with decimals", {"type": "number", "multipleOf": 3}, [3.0, 30.0, 6], [2.0, 4.0, 31.0]),
    ("not multiples written with decimals", {"type": "number", "not": {"multipleOf": 3}}, [2.0, 4.0, 7], [3.0, 30.0, 6]),
    ("one number", {"minimum": 2, "maximum": 2, "type": "number"}, [2], [1, 3]),
    ("multipleOf", {"type": "integer", "multipleOf": 7}, [0, 14, -21, 700], [1, 15, 8]),
    ("decimal multipleOf", {"multipleOf": 0.25}, [0.5, 1, -2.75], [0.3, 1.125]),
    ("minLength", {"minLength": 2, "maxLength": 3}, ["ab", "é😀", "abc"], ["a", "abcd", "😀"]),
    ("one length", {"minLength": 2, "maxLength": 2, "type": "string"}, ["ab", "é😀"], ["a", "abc"]),
    ("not a pattern that dialects read differently", {"type": "string", "not": {"pattern": "^\\d$"}}, ["a"], ["1", "٣"]),
    ("not a text", {"type": "string", "not": {"enum": ["a", "bc"]}}, ["", "b", "ab"], ["a", "bc", 1]),
    ("pattern", {"pattern": "^[a-c]+-\\d{2}$"}, ["a-12", "cab-00", 7], ["a-1", "d-12", "a-123"]),
    ("pattern within", {"pattern": "b"}, ["abc", "b"], ["ac", ""]),
    ("lookahead", {"pattern": "^(?!ab)(?=.*z)"}, ["az", "z"], ["abz", "a"]),
    ("enum", {"enum": [1, "a", None, [1], {"k": True}]}, [1, "a", None, [1], {"k": True}], [2, "b", [], {"k": 1}, True]),
    ("enum of decimals", {"enum": [0.25, -1.5, 2.0]}, [0.25, -1.5, 2, 2.0], [0.2, 1.5, -2, 25, 0.251]),
    ("enum and siblings", {"enum": [1, 5, "a"], "minimum": 3}, [5, "a"], [1]),
    ("const", {"const": "é\"\\/"}, ["é\"\\/"], ["e"]),
    ("allOf", {"allOf": [{"minimum": 3}, {"maximum": 5}], "type": "integer"}, [3, 4, 5], [2, 6]),
    ("allOf of objects",
     {"allOf": [PERSON | {"additionalProperties": True}, {"required": ["age"]}]},
     [{"name": "", "age": 1}], [{"name": ""}]),
    ("anyOf", {"anyOf": [WHOLE, {"minLength": 2}]}, [1, "ab"], ["a"]),
    ("oneOf", {"oneOf": [{"multipleOf": 2}, {"multipleOf": 3}], "type": "integer"}, [2, 3, 4], [6, 1, 0]),
    ("oneOf of objects", {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, [{"a": 1}, {"b": 1}], [{"a": 1, "b": 1}, {}]),
    ("not", {"not": {"type": "string", "pattern": "x"}}, [1, "y", []], ["axb"]),
    ("not false", {"type": "integer", "not": False}, [1], ["a"]),
    ("oneOf of a value and integers of which some are excluded",
     {"oneOf": [WHOLE, {"const": []}], "not": {"type": "integer", "multipleOf": 2}}, [[], 1, -3], [2, 0, 1.5, [1], "a"]),
    ("not oneOf",
     {"type": "integer", "not": {"oneOf": [{"multipleOf": 2}, {"multipleOf": 3}]}},
     [1, 6, 0, -5], [2, 3, -4]),
    ("not object", {"not": {"properties": {"a": WHOLE}, "required": ["a"]}}, [{"a": "1"}, {}], [{"a": 1}, 3]),
    ("not const",
     {"type": ["array", "object"], "not": {"enum": [[1, 2], {"a": 1}]}},
     [[1], [2, 1], {"a": 2}, {}], [[1, 2], {"a": 1}]),
    ("if",
     {"if": {"properties": {"k": {"const": 1}}, "required": ["k"]}, "then": {"required": ["v"]}, "else": {"maxProperties": 1}},
     [{"k": 1, "v": 0}, {"k": 2}, {}], [{"k": 1}, {"k": 2, "v": 0}]),
    ("$ref", {"$ref": "#/$defs/n", "maximum": 9, "$defs": {"n": {"minimum": 3}}}, [3, 9], [2, 10]),
    ("$ref alone in draft 7",
     {"$schema": DRAFT_7, "$ref": "#/definitions/n", "maximum": 9, "definitions": {"n": {"minimum": 3}}},
     [3, 10], [2]),
    ("$anchor", {"items": {"$ref": "#here"}, "$defs": {"x": {"$anchor": "here", "type": "integer"}}}, [[1]], [["a"]]),
    ("$id",
     {"$id": "http://a.example/r.json", "items": {"$ref": "o.json"}, "$defs": {"o": {"$id": "o.json", "type": "null"}}},
     [[None]], [[1]]),
    ("recursion",
     {"properties": {"next": {"$ref": "#"}}, "additionalProperties": False, "type": "object"},
     [{}, {"next": {"next": {}}}], [{"next": 1}]),
    ("unevaluatedProperties",
     {"allOf": [{"properties": {"a": True}}], "properties": {"b": True}, "unevaluatedProperties": False},
     [{"a": 1, "b": 2}], [{"c": 1}]),
    ("annotations",
     {"title": "t", "x-vendor": {"type": "no"}, "default": 3, "examples": [], "format": "int32", "type": "integer"},
     [1], ["a"]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "valid", "invalid"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_a_keyword_accepts_valid_values_and_rejects_invalid_ones(schema: Any, valid: list[Any], invalid: list[Any]) -> None:
    assert [value for value in valid if not schema_accepts(schema, value)] == []
    assert [value for value in valid if not schema_accepts(schema, value, ensure_ascii=False)] == []
    assert [value for value in invalid if schema_accepts(schema, value)] == []


def test_items_that_no_number_satisfies_are_not_written_as_empty_text() -> None:
    nothing = {"allOf": [WHOLE, {"not": WHOLE}]}
    grammar = compiled("json", json.dumps({"type": "array", "prefixItems": [True], "items": nothing}))
    assert [text for text in ("[]", "[1]", "[1,]", "[1,1]") if accepts(grammar, text)] == ["[]", "[1]"]


# an exponent in the values, and schemas that refer to themselves or whose other keywords are ignored
UNLISTED = ("number", "recursion", "$ref alone in draft 7")
LISTED = [
    ({**schema, "enum": [*valid, *invalid]}, valid, invalid)
    for name, schema, valid, invalid in CASES
    if isinstance(schema, dict) and "enum" not in schema and name not in UNLISTED
]


@pytest.mark.parametrize(("schema", "valid", "invalid"), LISTED)
def test_of_listed_values_those_are_left_that_satisfy_the_other_keywords(
    schema: Any, valid: list[Any], invalid: list[Any]
) -> None:
    assert [value for value in valid if not schema_accepts(schema, value)] == []
    assert [value for value in invalid if schema_accepts(schema, value)] == []


# a keyword, a value that breaks it, the last draft without the keyword, the first draft with it
FIRST_DRAFTS: list[tuple[dict[str, Any], Any, str, str]] = [
    ({"const": 1}, 2, DRAFT_4, DRAFT_6),
    ({"contains": WHOLE}, [], DRAFT_4, DRAFT_6),
    ({"propertyNames": False}, {"a": 1}, DRAFT_4, DRAFT_6),
    ({"if": True, "then": TEXT}, 1, DRAFT_6, DRAFT_7),
    ({"contains": WHOLE, "minContains": 2}, [1], DRAFT_7, DRAFT_2019),
    ({"contains": WHOLE, "maxContains": 1}, [1, 1], DRAFT_7, DRAFT_2019),
    ({"dependentRequired": {"a": ["b"]}}, {"a": 1}, DRAFT_7, DRAFT_2019),
    ({"dependentSchemas": {"a": False}}, {"a": 1}, DRAFT_7, DRAFT_2019),
    ({"unevaluatedProperties": False}, {"a": 1}, DRAFT_7, DRAFT_2019),
    ({"items": {"$ref": "#/$defs/n", "maximum": 9}, "$defs": {"n": {"minimum": 3}}}, [10], DRAFT_7, DRAFT_2019),
    ({"items": {"$ref": "#n"}, "$defs": {"n": {"$anchor": "n", "minimum": 3}, "m": {"$id": "#n"}}}, [1], DRAFT_7, DRAFT_2019),
    ({"prefixItems": [WHOLE]}, ["a"], DRAFT_2019, DRAFT_2020),
]


@pytest.mark.parametrize(("keywords", "value", "without", "first"), FIRST_DRAFTS)
def test_a_keyword_is_one_from_its_first_draft_on(keywords: dict[str, Any], value: Any, without: str, first: str) -> None:
    assert schema_accepts({"$schema": without, **keywords}, value)
    assert not schema_accepts({"$schema": first, **keywords}, value)


FORMATS = {
    "date": (["2024-02-29", "2000-02-29", "1999-12-31"], ["2023-02-29", "1900-02-29", "2022-13-01", "2022-1-1"]),
    "time": (["12:00:00Z", "23:59:59.5+01:00"], ["12:00:00", "24:00:00Z", "12:60:00Z"]),
    "date-time": (["2022-01-01T12:00:00Z", "2022-01-01T12:00:00.123-08:00"], ["2022-01-01 12:00:00Z", "2022-01-01T12:00:00"]),
    "duration": (["P1D", "PT1H30M", "P1Y2M", "P2W"], ["P", "PT", "1D", "P1H"]),
    "email": (["a.b@c.de", "a+b@localhost"], ["a", "@b", "a@", "a b@c.de"]),
    "hostname": (["a.b-c.example"], ["-a", "a..b", "a" * 64]),
    "ipv4": (["0.0.0.0", "255.1.2.3"], ["256.0.0.1", "1.2.3", "01.2.3.4"]),
    "ipv6": (["::1", "1:2:3:4:5:6:7:8", "::ffff:1.2.3.4"], ["1::2::3", "12345::", "1:2:3"]),
    "uri": (["https://a.b/c?d#e", "mailto:a@b", "urn:x:y"], ["a/b", "://", " x:y", "http://a b"]),
    "uri-reference": (["../a", "", "Core", "//h/p"], ["://", "a b", "\\"]),
    "uri-template": (["http://e.com/{a,b}/{?q*}"], ["http://e.com/{", "{}"]),
    "uuid": (["123e4567-e89b-12d3-a456-426614174000"], ["123e4567e89b12d3a456426614174000"]),
    "json-pointer": (["", "/a~1b/0"], ["a", "/~2"]),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_accepts_valid_texts_and_rejects_invalid_ones(name: str) -> None:
    valid, invalid = FORMATS[name]
    assert [text for text in valid if not schema_accepts({"format": name}, text)] == []
    assert [text for text in invalid if schema_accepts({"format": name}, text)] == []


REFUSED = {
    "uniqueItems": {"items": TEXT, "uniqueItems": True},
    "uniqueItems over items": {"prefixItems": [{"const": 1}], "items": {"const": 2}, "uniqueItems": True},
    "the negation of uniqueItems over": {"items": {"enum": [1, 2]}, "uniqueItems": True, "not": {"uniqueItems": True}},
    "the negation of an array with items of several kinds": {"type": "array", "not": {"prefixItems": [TEXT], "items": WHOLE}},
    "the negation of uniqueItems": {"type": "array", "not": {"uniqueItems": True}},
    "that are not a list of": {"items": {"enum": [1, 2]}, "contains": {"const": 1}, "uniqueItems": True},
    "minProperties above 1": {"minProperties": 2},
    "the negation of a rule for open names": {"type": "object", "not": {"additionalProperties": WHOLE}},
    "a name may repeat": {"type": "object", "maxProperties": 2, "not": {"additionalProperties": WHOLE}},
    "another document": {"$ref": "https://example.com/other.json"},
    "nowhere": {"$ref": "#/definitions/missing"},
    "lookbehind": {"pattern": "(?<=a)b"},
    "back-reference": {"pattern": r"(a)\1"},
    "word boundary": {"pattern": r"\bfoo"},
    "format regex": {"format": "regex"},
    "$dynamicRef": {"$dynamicRef": "#x"},
    'unknown type "any"': {"type": "any"},
    "type must name at least one type": {"type": []},
    "required must": {"required": "a"},
    "multipleOf must be above 0": {"multipleOf": 0},
    "unevaluatedProperties": {"anyOf": [{"properties": {"a": True}}], "unevaluatedProperties": False},
    "residues": {"multipleOf": 7919, "not": {"multipleOf": 7907}},
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_keyword_that_cannot_be_exact_is_refused_by_name(message: str) -> None:
    with pytest.raises(GrammarError, match=message.replace("$", r"\$")) as caught:
        compiled("json", json.dumps({"properties": {"deep": REFUSED[message]}, "required": ["deep"]}))
    assert caught.value.param == "guided_json"


INCLUDED = {"$ref": "#/$defs/a", "unevaluatedProperties": False}


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"$id": "http://a", "items": {"$id": "http://["}}, r"'http://\[' where a URI should be"),
        ({"$id": "http://a", "items": {"$ref": "http://["}}, r"'http://\[' where a URI should be"),
        ({"$ref": "#/prefixItems/²", "prefixItems": [TEXT]}, "nowhere"),
        ({"$ref": f"#/prefixItems/{'1' * 5000}", "prefixItems": [TEXT]}, "nowhere"),
        ({**INCLUDED, "$defs": {"a": {"allOf": 5}}}, "#/$defs/a/allOf: allOf must be an array"),
        ({**INCLUDED, "$defs": {"a": {"properties": 5}}}, "#/$defs/a/properties: properties must be an object"),
        ({**INCLUDED, "$defs": {"a": {"patternProperties": [[]]}}}, "patternProperties must be an object"),
        ({"$schema": DRAFT_6, "exclusiveMinimum": True}, "exclusiveMinimum must be a number"),
        ({"uniqueItems": 1}, "uniqueItems must be a boolean"),
        ({"contains": TEXT, "minContains": -1}, "minContains must be a whole number"),
        ({"contains": TEXT, "maxContains": "2"}, "maxContains must be a whole number"),
        ({"items": None}, "#/items: a schema must be an object or a boolean, not null"),
        ({"$schema": DRAFT_7, "items": [TEXT], "additionalItems": None}, "#/additionalItems: a schema must be"),
        ({"items": [TEXT, None]}, "#/items/1: a schema must be an object or a boolean, not null"),
        ({"prefixItems": None}, "#/prefixItems: prefixItems must be an array of schemas"),
        ({"prefixItems": [TEXT, 5]}, "#/prefixItems/1: a schema must be an object or a boolean, not a number"),
        ({"$schema": None}, "the dialect null"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_an_invalid_schema_is_refused_with_the_place(schema: Any, message: str) -> None:
    with pytest.raises(GrammarError, match=message.replace("$", r"\$")):
        compiled("json", json.dumps(schema))


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"$schema": "http://json-schema.org/draft-03/schema#"}, "dialect"),
        ({"type": "string", "enum": [1]}, "cannot be satisfied"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "cannot be satisfied"),
        (
            {
                "allOf": [{"properties": {"a": {"$ref": "#"}}}, {"properties": {"b": WHOLE}}],
                "required": ["a"],
                "type": "object",
            },
            "cannot be satisfied",
        ),
        ({"type": "string", "pattern": "^a", "allOf": [{"pattern": "^b"}]}, "cannot be satisfied"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "cannot be satisfied"),
        ({"type": "number", "minimum": 2, "exclusiveMaximum": 2}, "cannot be satisfied"),
        ({"type": "number", "minimum": 5, "maximum": 5, "multipleOf": 2}, "cannot be satisfied"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "cannot be satisfied"),
        ({"type": "array", "maxItems": 1, "not": {"uniqueItems": True}}, "cannot be satisfied"),
        ({"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "minItems": 3}, "cannot be satisfied"),
        ({"type": "object", "required": ["a"], "propertyNames": {"maxLength": 0}}, "cannot be satisfied"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_an_unsatisfiable_schema_or_unknown_dialect_is_refused(schema: Any, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        compiled("json", json.dumps(schema))


ITSELF = {"$ref": "#"}


@pytest.mark.parametrize(
    "schema",
    [
        ITSELF | {"enum": [1]},
        {"allOf": [WHOLE, ITSELF]},
        {"anyOf": [WHOLE, ITSELF]},
        {"oneOf": [WHOLE, ITSELF]},
        {"not": ITSELF},
        ITSELF | {"unevaluatedProperties": False},
        {"if": ITSELF, "then": WHOLE},
        {"if": WHOLE, "else": ITSELF},
        {"dependentSchemas": {"a": ITSELF}},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"anyOf": [WHOLE, {"$ref": "#/$defs/a"}]}}},
        {"items": {"$ref": "#/$defs/a"}, "$defs": {"a": {"$ref": "#/$defs/a"}}},
    ],
    ids=str,
)
def test_a_schema_that_leads_back_to_itself_for_the_same_value_is_refused(schema: Any) -> None:
    with pytest.raises(GrammarError, match=r"at #(/\$defs/a)?: it applies to the same value again, without end"):
        compiled("json", json.dumps(schema))


def test_a_schema_may_apply_to_a_value_in_several_ways() -> None:
    definitions = {"a": WHOLE, "b": {"$ref": "#/$defs/c"}, "c": {"allOf": [{"$ref": "#/$defs/a"}, {"minimum": 5}]}}
    schema = {"allOf": [{"$ref": "#/$defs/a"}, {"not": {"$ref": "#/$defs/b"}}], "$defs": definitions}
    assert schema_accepts(schema, 4)
    assert not schema_accepts(schema, 5)


def test_a_long_chain_of_references_is_followed() -> None:
    links = {f"a{index}": {"$ref": f"#/$defs/a{index + 1}"} for index in range(3000)}
    assert schema_accepts({"$ref": "#/$defs/a0", "$defs": {**links, "a3000": WHOLE}}, 1)


def test_an_error_names_the_place_in_the_schema() -> None:
    with pytest.raises(GrammarError, match="#/properties/a/items/pattern"):
        compiled("json", json.dumps({"properties": {"a": {"items": {"pattern": "(?<!x)"}}}}))


def test_a_limit_that_cannot_be_enforced_is_refused_at_its_own_place() -> None:
    with pytest.raises(GrammarError, match="at #/minProperties: minProperties above 1 where names are open"):
        compiled("json", json.dumps({"properties": {"a": WHOLE}, "minProperties": 2, "type": "object"}))


def test_unused_definitions_are_not_checked() -> None:
    assert schema_accepts({"type": "null", "$defs": {"unused": {"uniqueItems": True}}}, None)


def test_an_escaped_property_name_is_the_same_name() -> None:
    grammar = compiled("json", json.dumps({"properties": {"é": WHOLE}}))
    assert accepts(grammar, '{"\\u00e9":1}')
    assert not accepts(grammar, '{"\\u00E9":"x"}')


RANGES = [
    (0x7F, 0xFFF),
    (0x1234, 0x2345),
    (0x1234, 0x2FFF),
    (0xABC, 0xABD),
    (0xFFF0, 0x1000F),
    (0x1F600, 0x1F64F),
    (0x103FE, 0x10401),
]


@pytest.mark.parametrize(("low", "high"), [*RANGES, (0x10123, 0x20FED), (0x10000, 0x10FFFF)], ids=hex)
def test_a_class_accepts_every_spelling_of_its_characters_and_of_no_others(low: int, high: int) -> None:
    grammar = compiled("json", json.dumps({"type": "string", "pattern": f"^[\\u{{{low:x}}}-\\u{{{high:x}}}]$"}))
    points = {
        *range(low - 2, low + 3),
        *range(high - 2, high + 3),
        *range(low, high, (high - low) // 40 + 1),
        *range(1, 0x11FFFF, 0x3FFF),
    }
    for point in sorted(points):
        if point > 0x10FFFF or 0xD800 <= point <= 0xDFFF:
            continue
        escaped = json.dumps(chr(point)) if point > 0x7F else f'"\\u{point:04x}"'
        upper = escaped.upper().replace("\\U", "\\u")
        spellings = [escaped, upper] + ([json.dumps(chr(point), ensure_ascii=False)] if point > 0x7F else [])
        assert [accepts(grammar, text) for text in spellings] == [low <= point <= high] * len(spellings), hex(point)


def test_a_lone_surrogate_is_rejected() -> None:
    grammar = compiled("json", json.dumps(TEXT))
    assert accepts(grammar, '"\\ud83d\\ude00"')
    assert not accepts(grammar, '"\\ud83d"')


@pytest.mark.parametrize("indent", [None, 0, 1, 2, 4, 8, "\t", "\t\t"])
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_white_space_of_common_json_writers_is_accepted(indent: int | str | None, line_end: str) -> None:
    grammar = compiled("json", json.dumps({"items": {"properties": {"a": {"items": WHOLE}, "b": WHOLE}}, "type": "array"}))
    text = json.dumps([{"a": [1, 2], "b": 3}, {}], indent=indent)
    assert accepts(grammar, text.replace("\n", line_end))
    assert accepts(grammar, json.dumps([{"a": [1, 2], "b": 3}], separators=(" , ", " : ")))
    assert accepts(grammar, '[ { "a": [ 1, 2 ], "b" : 3 }, { } ]')


@pytest.mark.parametrize(
    "text",
    ["[\n\n\n1]", "[\n \n \n1]", "[  1]", "[1\n,2]", "[\n" + " " * 65 + "1]", '[{"a"\n:1}]', '[{"a":\n1}]', '[{"a":  1}]'],
)
def test_unbounded_white_space_is_rejected(text: str) -> None:
    schema = {"items": {"anyOf": [WHOLE, {"properties": {"a": WHOLE}, "type": "object"}]}, "type": "array"}
    assert json.loads(text)
    assert not accepts(compiled("json", json.dumps(schema)), text)


@pytest.mark.parametrize("bounds", [{}, {"minimum": 0}, {"minimum": 0, "maximum": 3}, {"multipleOf": 2}, {"not": {"const": 7}}])
def test_an_integer_has_no_decimals(bounds: dict[str, Any]) -> None:
    grammar = compiled("json", json.dumps(WHOLE | bounds))
    assert accepts(grammar, "2")
    assert not accepts(grammar, "2.0")


@pytest.mark.parametrize("text", ["1..5", ".5", "-.5", "1.5.2", "1.", "01", "-01", "-", "--1", "+1", ""])
def test_a_number_under_bounds_is_written_as_json_writes_it(text: str) -> None:
    grammar = compiled("json", json.dumps({"type": "number", "minimum": -100}))
    assert accepts(grammar, "1.5")
    assert not accepts(grammar, text)


def test_properties_come_in_the_order_of_the_schema() -> None:
    schema = {"properties": {"b": WHOLE, "a": WHOLE}}
    assert schema_accepts(schema, {"b": 1, "a": 2})
    assert not schema_accepts(schema, {"a": 2, "b": 1})


@pytest.mark.parametrize(
    "limits",
    [
        {"properties": {"a": WHOLE}},
        {"required": ["a"]},
        {"required": ["a"], "maxProperties": 3},
        {"propertyNames": {"enum": ["a", "b"]}},
    ],
)
def test_a_property_may_occur_only_once(limits: dict[str, Any]) -> None:
    grammar = compiled("json", json.dumps(limits))
    assert accepts(grammar, '{"a":1,"b":2}')
    assert not accepts(grammar, '{"a":1,"a":2}')


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"type": "string", "pattern": "^a", "not": {"minLength": 1}}}, "additionalProperties": False},
        {"patternProperties": {"^(?!a).$": WHOLE}, "additionalProperties": False, "propertyNames": {"pattern": "^a"}},
        {"properties": {"a": False}, "patternProperties": {"^a$": WHOLE}, "additionalProperties": False},
    ],
    ids=str,
)
def test_a_property_that_cannot_be_completed_does_not_begin(schema: dict[str, Any]) -> None:
    matcher = compiled("json", json.dumps({"anyOf": [schema, WHOLE], "type": ["object", "integer"]})).matcher()
    assert matcher.try_consume_tokens([byte + 1 for byte in b'{"']) < 2


def test_an_error_refers_to_the_schema_as_the_schema() -> None:
    with pytest.raises(GrammarError) as refused:
        compiled("json", '{"type": "strin"}')
    assert str(refused.value) == 'the schema cannot be enforced at #/type: unknown type "strin"'


def test_a_schema_gives_the_same_grammar_in_every_process() -> None:
    """Hashes of strings differ between processes, so the order of rules may not depend on a set of names."""
    script = "import sys; from engine.grammar.lark import schema_to_lark; print(schema_to_lark(sys.argv[1]))"
    evaluated = {"properties": dict.fromkeys("abcd", True), "patternProperties": dict.fromkeys(("^e", "^f", "^g"), True)}
    schema = {"allOf": [evaluated], "unevaluatedProperties": {"additionalProperties": {"items": WHOLE}}}
    command = [sys.executable, "-c", script, json.dumps(schema)]
    environments = [{**os.environ, "PYTHONHASHSEED": seed} for seed in "123"]
    texts = [subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout for env in environments]
    assert len({*texts}) == 1


@pytest.mark.parametrize("first", [[], [{"const": 1}], [{"const": 1}, {"const": 2}]])
def test_an_array_may_end_before_items_that_no_finite_text_satisfies(first: list[Any]) -> None:
    endless = {"type": "object", "required": ["x"], "properties": {"x": {"$ref": "#/$defs/endless"}}}
    schema = {"type": "array", "prefixItems": first, "items": {"$ref": "#/$defs/endless"}, "$defs": {"endless": endless}}
    values = [item["const"] for item in first]
    assert schema_accepts(schema, values)
    with pytest.raises(GrammarError, match="cannot be satisfied by any text"):
        schema_accepts(schema | {"minItems": len(first) + 1}, values)


def test_an_array_too_short_for_what_it_must_contain_has_no_value() -> None:
    impossible = {"type": "array", "maxItems": 0, "contains": True}
    assert schema_accepts({"type": "array", "items": impossible}, [])
    assert not accepts(
        compiled("json", json.dumps({"type": "array", "items": impossible, "prefixItems": [{"const": 1}]})), "[1,]"
    )


def test_a_choice_beside_what_is_no_integer_keeps_its_other_types() -> None:
    schema = {"allOf": [{"oneOf": [{"type": "string"}, {"type": "number"}]}, {"not": {"type": "integer"}}]}
    assert [schema_accepts(schema, value) for value in ("", 1.5, 1, True)] == [True, True, False, False]
