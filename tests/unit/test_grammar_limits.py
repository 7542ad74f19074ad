"""Limits of grammars: accepted at the limit, refused beyond it with the limit in the error."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from engine.grammar import gbnf, json_grammar, lark_rules, numbers, patterns, schema_cases, schema_nodes
from engine.grammar.lark import to_lark
from engine.grammar.spec import GrammarError, GrammarSpec, Kind
from engine.grammar.term_shapes import UNIQUE_VALUES_MAX


def nested(number: int) -> str:
    return "(" * number + '"a"' + ")" * number


def chained_rules(number: int) -> str:
    """`number` rules, of which each refers to the next; the first is `root`."""
    names = ["root", *(f"r{index}" for index in range(1, number))]
    return "\n".join([*(f"{name} ::= {after}" for name, after in pairwise(names)), f'{names[-1]} ::= "a"'])


def unique_list(number: int) -> dict[str, Any]:
    return {"items": {"enum": list(range(number))}, "uniqueItems": True}


def schema(**keywords: Any) -> str:
    return json.dumps(keywords)


LIMITS: list[tuple[Kind, str, str, str]] = [
    ("grammar", chained_rules(gbnf.RULES_MAX), chained_rules(gbnf.RULES_MAX + 1), "more than 5000 rules"),
    ("grammar", f'root ::= "a"{{{gbnf.REPEAT_MAX}}}', f'root ::= "a"{{{gbnf.REPEAT_MAX + 1}}}', "more than 10000"),
    ("grammar", f"root ::= {nested(gbnf.NESTING_MAX)}", f"root ::= {nested(gbnf.NESTING_MAX + 1)}", "more than 60 deep"),
    ("regex", f"a{{{patterns.REPEAT_MAX}}}", f"a{{{patterns.REPEAT_MAX + 1}}}", "more than 100000"),
    ("regex", nested(patterns.GROUP_DEPTH_MAX), nested(patterns.GROUP_DEPTH_MAX + 1), "more than 60 deep"),
    ("regex", f"({'|'.join(['^a'] * patterns.ALTERNATIVES_MAX)})b",
     f"({'|'.join(['^a'] * (patterns.ALTERNATIVES_MAX + 1))})b", "more than 256 alternatives"),
    ("json", schema(type="array", minItems=json_grammar.REPEATED_MAX),
     schema(type="array", minItems=json_grammar.REPEATED_MAX + 1), "above 100000"),
    ("json", schema(patternProperties=dict.fromkeys("abcdef", True)), schema(patternProperties=dict.fromkeys("abcdefg", True)),
     "overlap in more than 64 ways"),
    ("json", schema(**unique_list(UNIQUE_VALUES_MAX)), schema(**unique_list(UNIQUE_VALUES_MAX + 1)), "at most 60 values"),
    ("json", f'{{"default": 1e{schema_nodes.NUMBER_EXPONENT_MAX}}}',
     f'{{"default": 1e{schema_nodes.NUMBER_EXPONENT_MAX + 1}}}', "exponents go to 400"),
    ("json", f'{{"multipleOf": 1e-{numbers.DECIMALS_MAX}}}', f'{{"multipleOf": 1e-{numbers.DECIMALS_MAX + 1}}}',
     "more than 40 decimals"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "allowed", "beyond", "message"), LIMITS, ids=[message for *_, message in LIMITS])
def test_a_grammar_at_a_limit_is_accepted_and_one_beyond_it_refused(
    kind: Kind, allowed: str, beyond: str, message: str
) -> None:
    assert to_lark(GrammarSpec(kind, allowed))
    with pytest.raises(GrammarError, match=message) as refused:
        to_lark(GrammarSpec(kind, beyond))
    assert refused.value.param == f"guided_{kind}"


def test_groups_side_by_side_are_not_nested() -> None:
    beside = '("a")' * (gbnf.NESTING_MAX + 1)
    assert to_lark(GrammarSpec("grammar", f"root ::= {beside} {nested(gbnf.NESTING_MAX)}"))
    with pytest.raises(GrammarError, match="groups nested more than"):
        to_lark(GrammarSpec("grammar", f"root ::= {beside} {nested(gbnf.NESTING_MAX + 1)}"))


MANY = {f"p{index}": {"type": "string"} for index in range(80)}
CHOICES = [{"anyOf": [{"required": [f"a{place}_{index}"]} for index in range(13)]} for place in range(3)]


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        (
            {"type": "object", "properties": MANY, "minProperties": 70, "additionalProperties": False},
            "object .* 5000 states",
        ),
        ({"type": "array", "contains": {"type": "string"}, "minContains": 5001}, "array .* 5000 states"),
        ({"allOf": CHOICES}, "more than 2000 cases"),
    ],
)
def test_a_schema_with_too_many_combinations_is_refused(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        to_lark(GrammarSpec("json", json.dumps(keywords)))


def test_a_schema_with_too_many_rules_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lark_rules, "RULES_MAX", 20)
    assert to_lark(GrammarSpec("json", json.dumps({"enum": list(range(15))})))
    with pytest.raises(GrammarError, match="more than 20 rules"):
        to_lark(GrammarSpec("json", json.dumps({"properties": MANY})))


def test_a_schema_whose_alternatives_combine_too_often_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema_cases, "SPLITS_MAX", 14)  # 2 + 4 + 8
    choices = [{"anyOf": [{"minimum": number}, {"maxLength": number}]} for number in range(4)]
    assert to_lark(GrammarSpec("json", json.dumps({"allOf": choices[:3]})))
    with pytest.raises(GrammarError, match="combine in more than 14 ways"):
        to_lark(GrammarSpec("json", json.dumps({"allOf": choices})))
