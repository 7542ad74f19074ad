"""Schemas that list their values: which of them the other keywords leave, and when two of them are the same value."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.grammar.spec import GrammarError
from tests.support.grammars import compiled, schema_accepts

TEXT, WHOLE = {"type": "string"}, {"type": "integer"}

# schema, values that satisfy it, values that do not
CASES: list[tuple[str, dict[str, Any], list[Any], list[Any]]] = [
    ("arrays and objects that two lists share",
     {"enum": [[1], [2], {"a": 1}, {"a": 2}], "allOf": [{"enum": [[2.0], {"a": 2.0}]}]},
     [[2], {"a": 2}], [[1], {"a": 1}]),
    ("objects that two lists share, whatever the order of their members",
     {"enum": [{"a": 1, "b": 2}, {"a": 2}], "allOf": [{"enum": [{"b": 2, "a": 1}]}]},
     [{"a": 1, "b": 2}], [{"a": 2}]),
    ("numbers and booleans", {"enum": [0, 1, True, "1"], "not": {"enum": [True, 0]}}, [1, "1"], [True, 0]),
    ("arrays of different items", {"enum": [[[1], [2]], [[1], [1.0]], [1, True]], "uniqueItems": True},
     [[[1], [2]], [1, True]], [[[1], [1.0]]]),
    ("texts of a format", {"enum": ["2024-02-29", "2023-02-29", 5], "format": "date"}, ["2024-02-29", 5], ["2023-02-29"]),
    ("a format that is an annotation", {"enum": ["x"], "format": "int32"}, ["x"], ["y"]),
    ("integers", {"type": "integer", "oneOf": [{"enum": [1, 1.5]}, {"enum": [2, 1]}]}, [2], [1, 1.5]),
    ("arrays that break a rule for a position",
     {"type": "array", "not": {"prefixItems": [WHOLE]}, "oneOf": [{"enum": [[], ["a"], [1]]}, {"enum": [["b"], [1]]}]},
     [["a"], ["b"]], [[], [1]]),
    ("objects that break a rule for a name",
     {"type": "object", "not": {"properties": {"a": WHOLE}},
      "oneOf": [{"enum": [{}, {"a": "x"}, {"a": 1}]}, {"enum": [{"a": 1}, {"b": 1}, {"a": "y"}]}]},
     [{"a": "x"}, {"a": "y"}], [{}, {"a": 1}, {"b": 1}]),
    ("objects that break a rule for other names",
     {"type": "object", "maxProperties": 1, "not": {"additionalProperties": WHOLE},
      "oneOf": [{"enum": [{"a": "x"}, {"b": 1}]}, {"enum": [{"c": "y"}, {}]}]},
     [{"a": "x"}, {"c": "y"}], [{"b": 1}, {}]),
    ("all alternatives and none", {"enum": [1, 2, 3, "a"], "not": {"allOf": [{"minimum": 2}, WHOLE]}}, [1, "a"], [2, 3]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "valid", "invalid"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_of_listed_values_those_are_left_that_are_valid(schema: dict[str, Any], valid: list[Any], invalid: list[Any]) -> None:
    assert [value for value in valid if not schema_accepts(schema, value)] == []
    assert [value for value in invalid if schema_accepts(schema, value)] == []


@pytest.mark.parametrize("name", ["regex", "idn-hostname", "idn-email"])
def test_a_format_that_cannot_be_enforced_is_refused_for_listed_texts_too(name: str) -> None:
    with pytest.raises(GrammarError, match=f"at #/items/format: the format {name}"):
        compiled("json", json.dumps({"items": {"enum": ["(", "a"], "format": name}}))
