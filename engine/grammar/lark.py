"""A constraint as grammar text for the library: JSON schemas, regular expressions, choices, and grammars of the caller."""

from __future__ import annotations

import json

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from engine.grammar.spec import GrammarError, GrammarSpec


def to_lark(spec: GrammarSpec) -> str:
    """Raises `GrammarError` for what cannot be expressed, naming it."""
    if spec.kind == "json":
        return LLMatcher.grammar_from_json_schema(spec.text)
    if spec.kind == "regex":
        return LLMatcher.grammar_from_regex(spec.text)
    if spec.kind == "choice":
        return "start: " + " | ".join(json.dumps(choice) for choice in json.loads(spec.text))
    try:
        return any_to_lark(spec.text)
    except Exception as error:
        raise GrammarError(spec.param, f"guided_grammar cannot be read: {error}") from error
