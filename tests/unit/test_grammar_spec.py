"""Validation of a request's constraint on submission, without a grammar library, and of schema texts on compilation."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from engine.grammar.spec import MESSAGE_CHARS_MAX, SCHEMA_DEPTH_MAX, GrammarError, GrammarSpec, check_schema_text, grammar_spec
from engine.protocol import GUIDED_BYTES_MAX, EngineFrame, InvalidOption, SamplingParams, TokenEvent
from engine.transport import encode_frame
from tests.support.grammars import compiled


def test_a_request_without_constraint_has_no_spec() -> None:
    assert grammar_spec(SamplingParams()) is None


def test_constraints_become_normalised_specs() -> None:
    assert grammar_spec(SamplingParams(guided_choice=["a", "b"])) == GrammarSpec("choice", '["a", "b"]')
    as_tuple: Any = ("a", "b")  # accepted as a tuple of `stop` strings is
    assert grammar_spec(SamplingParams(guided_choice=as_tuple)) == GrammarSpec("choice", '["a", "b"]')
    assert grammar_spec(SamplingParams(guided_json="{}")) == GrammarSpec("json", "{}")
    assert grammar_spec(SamplingParams(guided_json="true")) == GrammarSpec("json", "true")


SCHEMA, REGEX = GUIDED_BYTES_MAX["guided_json"], GUIDED_BYTES_MAX["guided_regex"]
MALFORMED: list[tuple[dict[str, Any], str, str]] = [
    ({"guided_json": '"' + "ü" * (SCHEMA // 2) + '"'}, "guided_json", f"at most {SCHEMA} bytes, not {SCHEMA + 2}"),
    ({"guided_regex": "a" * (REGEX + 1)}, "guided_regex", f"at most {REGEX} bytes"),
    ({"guided_regex": ""}, "guided_regex", "is empty"),
    ({"guided_regex": "\ud800"}, "guided_regex", "surrogate"),
    ({"guided_choice": ["\ud800"]}, "guided_choice", "surrogate"),
    ({"guided_choice": ["x" * 100_000]}, "guided_choice", "bytes"),
    ({"guided_grammar": "  "}, "guided_grammar", "is empty"),
    ({"guided_json": "\n"}, "guided_json", "guided_json is empty"),
]


@pytest.mark.parametrize(("fields", "param", "message"), MALFORMED, ids=[message for _, _, message in MALFORMED])
def test_a_malformed_constraint_is_refused_by_field(fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(GrammarError, match=message) as caught:
        grammar_spec(SamplingParams(**fields))
    assert caught.value.param == param
    assert isinstance(caught.value, InvalidOption)


def test_a_constraint_may_have_as_many_bytes_as_its_limit() -> None:
    text = "ü" * (REGEX // 2)
    assert grammar_spec(SamplingParams(guided_regex=text)) == GrammarSpec("regex", text)


def test_the_schema_text_is_not_parsed_on_submission(monkeypatch: pytest.MonkeyPatch) -> None:
    """Submission runs in the thread that steps the engine, and a schema may have 256 KiB; the compiler process parses it."""
    monkeypatch.setattr("engine.grammar.spec.json.loads", lambda *_: pytest.fail("the schema was read"))
    assert grammar_spec(SamplingParams(guided_json='{"type": "null"}')) == GrammarSpec("json", '{"type": "null"}')


def test_a_schema_may_be_nested_to_the_limit_and_no_deeper() -> None:
    def nested(levels: int) -> str:
        return '{"not":' * (levels - 1) + "{}" + "}" * (levels - 1)

    assert check_schema_text(nested(SCHEMA_DEPTH_MAX))
    with pytest.raises(GrammarError, match=f"more than {SCHEMA_DEPTH_MAX} levels deep"):
        check_schema_text(nested(SCHEMA_DEPTH_MAX + 1))


INVALID_SCHEMA_TEXTS = {
    "{": "is not JSON",
    "[]": "must be a JSON object or boolean, not list",
    "12": "must be a JSON object",
    "false": "no text satisfies",
    '{"minimum": NaN}': "is not JSON",
    '{"a":' * 200 + "1" + "}" * 200: "levels deep",
    "[" * 100_000: "the schema is nested more than",
}


@pytest.mark.parametrize(("text", "message"), INVALID_SCHEMA_TEXTS.items(), ids=INVALID_SCHEMA_TEXTS.values())
def test_a_text_that_is_not_a_schema_is_refused_by_field(text: str, message: str) -> None:
    with pytest.raises(GrammarError, match=message) as caught:
        compiled("json", text)
    assert caught.value.param == "guided_json"


def test_a_valid_schema_text_is_parsed() -> None:
    assert check_schema_text('{"type": "null"}') == {"type": "null"}


def test_half_of_a_surrogate_pair_is_found_behind_an_escape() -> None:
    assert check_schema_text('{"const": "\\ud83d\\ude00"}') == {"const": "😀"}
    for schema in ('{"const": "\\ud83d"}', '{"required": ["\\uDE00"]}', '{"properties": {"\\ud83dx": {}}}'):
        with pytest.raises(GrammarError, match="guided_json holds half of a surrogate pair, which is not text"):
            check_schema_text(schema)


def test_a_message_is_cut_only_beyond_its_limit() -> None:
    assert str(GrammarError("guided_json", "x" * MESSAGE_CHARS_MAX)) == "x" * MESSAGE_CHARS_MAX
    assert str(GrammarError("guided_json", "x" * (MESSAGE_CHARS_MAX + 1))) == "x" * MESSAGE_CHARS_MAX + "…"


@pytest.mark.parametrize("name", ["\ud800", "x" * 100_000], ids=["half of a surrogate pair", "long"])
def test_an_error_about_a_schema_fits_a_frame_whatever_it_quotes(name: str) -> None:
    with pytest.raises(GrammarError) as caught:
        compiled("json", json.dumps({"properties": {name: {"type": "none"}}}))
    event = TokenEvent("a", [], 0, 0, error=str(caught.value))
    assert len(encode_frame(EngineFrame(events=[event]))) < 2 * MESSAGE_CHARS_MAX


def test_validation_imports_neither_llguidance_nor_torch_nor_numpy() -> None:
    program = "import sys, engine.grammar.spec; print(sorted({'llguidance', 'torch', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip() == "[]"
