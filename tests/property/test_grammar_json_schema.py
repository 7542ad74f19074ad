"""Random schemas against random values: the grammar accepts what an independent validator finds valid, and nothing else."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.grammar.spec import GrammarError
from tests.support.grammars import schema_accepts

NAMES = ["a", "b", "c"]
PATTERNS = ["^a", "b$", "^[ab]+$", "c", "^.{2}$", "^(?!a)", "a|^b"]
TEXTS = ["", "a", "b", "ab", "abc", "ccc", "ba", "é", "\n", "2024-02-29"]
NUMBERS = [-3, -1, 0, 1, 2, 3, 5, 6, 10, 100, 0.5, -2.5, 1.25]


def scalars() -> st.SearchStrategy[Any]:
    return st.one_of(st.none(), st.booleans(), st.sampled_from(NUMBERS), st.sampled_from(TEXTS))


def ordered(members: dict[str, Any]) -> dict[str, Any]:
    """Named properties in the order of the schemas below, which list them alphabetically."""
    return dict(sorted(members.items()))


def values() -> st.SearchStrategy[Any]:
    return st.recursive(
        scalars(),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3), st.dictionaries(st.sampled_from([*NAMES, "x", "ab"]), inner, max_size=3).map(ordered)
        ),
        max_leaves=5,
    )


def keywords(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Schemas of one or two keywords."""
    branches = st.lists(inner, min_size=1, max_size=3)
    named = st.dictionaries(st.sampled_from(NAMES), inner, max_size=3).map(ordered)
    types = st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"])
    small = st.integers(0, 3)
    members = {
        "type": st.one_of(types, st.lists(types, min_size=1, max_size=3, unique=True)),
        "enum": st.lists(values(), min_size=1, max_size=3),
        "const": values(),
        "allOf": branches,
        "anyOf": branches,
        "oneOf": branches,
        "not": inner,
        "if": inner,
        "then": inner,
        "else": inner,
        "minimum": st.sampled_from(NUMBERS),
        "maximum": st.sampled_from(NUMBERS),
        "exclusiveMinimum": st.sampled_from(NUMBERS),
        "exclusiveMaximum": st.sampled_from(NUMBERS),
        "multipleOf": st.sampled_from([1, 2, 3, 0.5, 5]),
        "minLength": small,
        "maxLength": small,
        "pattern": st.sampled_from(PATTERNS),
        "properties": named,
        "required": st.lists(st.sampled_from(NAMES), max_size=2, unique=True),
        "patternProperties": st.dictionaries(st.sampled_from(PATTERNS), inner, max_size=2),
        "additionalProperties": inner,
        "propertyNames": inner,
        "minProperties": small,
        "maxProperties": small,
        "dependentRequired": st.dictionaries(st.sampled_from(NAMES), st.just(["c"]), max_size=2),
        "dependentSchemas": st.dictionaries(st.sampled_from(NAMES), inner, max_size=1),
        "prefixItems": branches,
        "items": inner,
        "minItems": small,
        "maxItems": small,
        "contains": inner,
        "minContains": small,
        "maxContains": small,
        "uniqueItems": st.booleans(),
    }
    pair = st.lists(st.sampled_from(sorted(members)), min_size=1, max_size=3, unique=True)
    return pair.flatmap(lambda names: st.fixed_dictionaries({name: members[name] for name in names}))


def schemas() -> st.SearchStrategy[Any]:
    return st.recursive(st.one_of(st.booleans(), keywords(st.booleans())), keywords, max_leaves=6)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(schema=schemas(), instances=st.lists(values(), min_size=8, max_size=8))
def test_a_grammar_accepts_exactly_the_values_that_a_validator_accepts(schema: Any, instances: list[Any]) -> None:
    validator = jsonschema.Draft202012Validator(schema)
    for value in instances:
        try:
            accepted = schema_accepts(schema, value)
        except GrammarError as error:
            if "satisf" not in str(error):
                return  # refused by name
            accepted = False
        assert accepted == validator.is_valid(value), json.dumps([schema, value])
