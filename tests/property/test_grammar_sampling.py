"""Texts sampled at random under a mask: each that ends satisfies its constraint according to an independent validator."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import pytest

from engine.grammar.matcher import CompiledGrammar
from tests.support.grammars import BYTES, EOS, compiled, empty_mask

TOKENS_MAX = 700
CLOSING_AFTER_TOKENS = 60
CLOSING_TOKENS = {byte + 1 for byte in b'"}]019'}


def sample_text(grammar: CompiledGrammar, rng: random.Random) -> str | None:
    """A text of tokens drawn uniformly from those allowed, later preferably from closing ones; None if it does not end."""
    state, row, written = grammar.start(), empty_mask(), bytearray()
    for step in range(TOKENS_MAX):
        state.fill_mask(row)
        allowed = [32 * word_index + bit for word_index, word in enumerate(row) if word for bit in range(32) if word >> bit & 1]
        assert allowed, bytes(written)
        closing = [token_id for token_id in allowed if token_id == EOS or token_id in CLOSING_TOKENS]
        token_id = rng.choice(closing if closing and step > CLOSING_AFTER_TOKENS * rng.random() else allowed)
        if token_id == EOS:
            assert state.is_complete
            return written.decode()
        state.accept(token_id)
        written += BYTES.tokens[token_id]
    return None


NODE = {"type": "object", "properties": {"v": {"type": "integer"}, "next": {"$ref": "#"}}, "required": ["v"]}
SCHEMAS: list[Any] = [
    True,
    NODE,
    {"type": "object", "additionalProperties": {"type": "string", "pattern": "^[a-z]+$"}, "minProperties": 1},
    {"type": "object", "patternProperties": {"^a": {"type": "null"}, "b$": {"enum": [None, 1]}}, "additionalProperties": False},
    {"oneOf": [{"required": ["a"]}, {"required": ["b"]}], "properties": {"a": {"const": 1}, "b": {"const": 2}}},
    {"oneOf": [{"multipleOf": 4}, {"multipleOf": 6}], "type": "integer"},
    {"type": "array", "items": {"enum": ["x", "y", 3, None]}, "uniqueItems": True, "minItems": 2},
    {"type": "array", "contains": {"type": "integer", "minimum": 10}, "items": {"type": "integer"}, "maxItems": 4},
    {"type": "string", "minLength": 2, "maxLength": 4},
    {"type": "string", "pattern": "a.b", "not": {"pattern": "c"}},
    {"type": "number", "exclusiveMinimum": -3.5, "maximum": 12, "not": {"const": 1}},
    {"if": {"required": ["k"]}, "then": {"required": ["v"]}, "else": {"maxProperties": 1}, "propertyNames": {"maxLength": 1}},
    {"not": {"anyOf": [{"type": "object"}, {"type": "array"}, {"maxLength": 2}, {"type": "number"}]}},
    {"dependentRequired": {"a": ["b"]}, "propertyNames": {"enum": ["a", "b", "c"]}, "type": "object"},
    {"enum": [{"a": [1, {"b": None}]}, ["é\n", 1.5]]},
]  # fmt: skip


def test_sampled_documents_satisfy_their_schema() -> None:
    rng, ended = random.Random(7), 0
    for schema in SCHEMAS:
        grammar, validator = compiled("json", json.dumps(schema)), jsonschema.Draft202012Validator(schema)
        for text in (sample_text(grammar, rng) for _ in range(10)):
            if text is not None:
                ended += 1
                validator.validate(json.loads(text))
    assert ended > 4 * len(SCHEMAS)


PATTERNS = [r"[a-c]{2,5}-\d+", r"(?:foo|ba[rz])*x?", r"\S{3}", r"[^a-y\s]{1,4}", r"(?!0)[0-9]{1,3}(?:\.[05])?", r"\w{2}@\W"]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_sampled_texts_match_their_pattern(pattern: str) -> None:
    grammar, rng = compiled("regex", pattern), random.Random(3)
    texts = [text for text in (sample_text(grammar, rng) for _ in range(20)) if text is not None]
    assert texts
    assert [text for text in texts if not re.fullmatch(pattern, text)] == []


def test_sampled_texts_are_all_of_the_choices() -> None:
    choices = ["yes", "yes, sir", "no", 'né/"\n']
    grammar, rng = compiled("choice", json.dumps(choices)), random.Random(5)
    assert {sample_text(grammar, rng) for _ in range(40)} == set(choices)
