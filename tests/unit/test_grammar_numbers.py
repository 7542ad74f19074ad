"""Numbers of a JSON grammar: written in one terminal each, or by character where one of them needs a large automaton."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from tests.support.grammars import accepts, compiled, schema_accepts

BOUNDED = {"type": "number", "minimum": 1.5, "maximum": 10}
TANGLED = {"type": "integer", "multipleOf": 97}
"""Needs an automaton that is too large for one terminal."""


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"not": {"type": "array", "items": BOUNDED}}, [[11], [-3], [-3.5], [20, 2], [2, 20], [10.25]], [[2], [10, 1.5]]),
        ({"anyOf": [BOUNDED, {"enum": [1000, -2.5]}]}, [9.75, 10, 1000, -2.5], [100, -2, 1000.5]),
        ({"anyOf": [{"type": "number", "minimum": 5}, {"type": "integer"}]}, [5.5, -12, 12], [-12.5, 4.5]),
        (
            {"oneOf": [{"anyOf": [{"const": {"a": 1}}, {"enum": [-3, {}, ""]}]}, {"not": {"type": ["null", "boolean"]}}]},
            [{"a": 2.5}, {"a": 12}, -35],
            [{"a": 1}, -3, None],
        ),
        (
            {"not": {"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 3}}}},
            [{"a": 2.5}, {"a": 10}],
            [{"a": 12}, {"b": 2.5}],
        ),
        ({"anyOf": [TANGLED, {"type": "number", "maximum": 9.5}]}, [97, 9.25, -3, 970], [98, 9.75, 96.5]),
    ],
)
def test_a_number_may_begin_like_one_of_another_alternative(schema: Any, valid: list[Any], invalid: list[Any]) -> None:
    assert [schema_accepts(schema, value) for value in valid] == [True] * len(valid)
    assert [schema_accepts(schema, value) for value in invalid] == [False] * len(invalid)


@pytest.mark.parametrize("divisor", [11, 13, 17, 23, 37])
def test_multiples_of_a_prime_are_supported(divisor: int) -> None:
    schema = {"type": "integer", "multipleOf": divisor}
    assert [value for value in range(-300, 300) if schema_accepts(schema, value)] == [
        value for value in range(-300, 300) if value % divisor == 0
    ]


@pytest.mark.parametrize(
    "numbers",
    [
        {"type": "number"},
        {"type": "integer"},
        {"type": "number", "minimum": -2, "exclusiveMaximum": 30},
        {"type": "integer", "multipleOf": 4},
        {"type": "number", "multipleOf": 0.5, "not": {"const": 2}},
        {"type": "integer", "multipleOf": 3, "minimum": -20, "not": {"multipleOf": 4}},
        {"type": "number", "minimum": 2, "not": {"anyOf": [{"multipleOf": 0.5}, {"multipleOf": 3}]}},
        {"type": "number", "maximum": 30, "allOf": [{"multipleOf": 2}, {"multipleOf": 3}]},
        *({"const": value} for value in (0, -0.5, 2, 2.5, -12, 120, 0.0, 3e1)),
    ],
    ids=json.dumps,
)
def test_a_number_written_by_character_is_the_same_as_in_one_terminal(numbers: Any) -> None:
    in_one = compiled("json", json.dumps(numbers))
    by_character = compiled("json", json.dumps({"anyOf": [numbers, {"type": "array", "minItems": 1, "items": TANGLED}]}))
    exponents = [
        f"{e}{sign}{digits}" for e in "eE" for sign in ("", "+", "-") for digits in ("", "0", "007", "30", "299", "300")
    ]
    magnitudes = [
        "0",
        "0.0",
        "00",
        "01",
        "2",
        "2.0",
        "2.",
        "2.5",
        "2.50",
        "0.5",
        "12",
        "120",
        "30",
        "30.0",
        "2.25",
        "6",
        "9",
        ".5",
        "",
    ]
    texts = ["".join(parts) for parts in itertools.product(("", "-", "+"), magnitudes, ("", "x", *exponents))]
    assert [t for t in texts if accepts(by_character, t)] == [t for t in texts if accepts(in_one, t)] != []
