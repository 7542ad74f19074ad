"""Validation of a request's constraint: exactly one, well-formed, within its limits, without a grammar library."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from engine.grammar.spec import (
    CHOICES_MAX,
    MESSAGE_CHARS_MAX,
    REGEX_BYTES_MAX,
    SCHEMA_BYTES_MAX,
    GrammarError,
    GrammarSpec,
    check_schema_text,
    grammar_spec,
)
from engine.protocol import EngineFrame, InvalidOption, TokenEvent
from engine.transport import encode_frame
from tests.support.grammars import compiled


def asked(**fields: Any) -> Any:
    """Sampling parameters, as far as constraints go."""
    return SimpleNamespace(
        **{"guided_json": None, "guided_regex": None, "guided_choice": None, "guided_grammar": None} | fields
    )


def test_a_request_without_a_constraint_has_none() -> None:
    assert grammar_spec(asked()) is None


def test_equal_constraints_are_equal() -> None:
    assert grammar_spec(asked(guided_choice=["a", "b"])) == GrammarSpec("choice", '["a", "b"]')
    assert grammar_spec(asked(guided_json="{}")) == GrammarSpec("json", "{}")
    assert grammar_spec(asked(guided_json="true")) == GrammarSpec("json", "true")


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"guided_json": "{}", "guided_regex": "a"}, "guided_regex", "cannot be combined with guided_json"),
    ({"guided_json": '"' + "x" * 10_000_000 + '"'}, "guided_json", f"at most {SCHEMA_BYTES_MAX} bytes, not 10000002"),
    ({"guided_json": {}}, "guided_json", "must be a string"),
    ({"guided_regex": "a" * (REGEX_BYTES_MAX + 1)}, "guided_regex", f"at most {REGEX_BYTES_MAX} bytes"),
    ({"guided_regex": ""}, "guided_regex", "is empty"),
    ({"guided_regex": "\ud800"}, "guided_regex", "surrogate"),
    ({"guided_choice": []}, "guided_choice", "takes 1 to"),
    ({"guided_choice": ["a"] * (CHOICES_MAX + 1)}, "guided_choice", f"takes 1 to {CHOICES_MAX}"),
    ({"guided_choice": ["a", ""]}, "guided_choice", "empty string"),
    ({"guided_choice": "ab"}, "guided_choice", "list of strings"),
    ({"guided_choice": ["x" * 100_000]}, "guided_choice", "bytes"),
    ({"guided_grammar": "  "}, "guided_grammar", "is empty"),
]


@pytest.mark.parametrize(("fields", "param", "message"), WRONG, ids=[message for _, _, message in WRONG])
def test_a_malformed_constraint_names_its_field(fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(GrammarError, match=message) as caught:
        grammar_spec(asked(**fields))
    assert caught.value.param == param
    assert isinstance(caught.value, InvalidOption)


def test_the_glance_does_not_read_a_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made by the thread that steps; the process that compiles reads what may be 256 KiB."""
    monkeypatch.setattr("engine.grammar.spec.json.loads", lambda *_: pytest.fail("the schema was read"))
    assert grammar_spec(asked(guided_json='{"type": "null"}')) == GrammarSpec("json", '{"type": "null"}')


NO_SCHEMAS = {
    "{": "is not JSON",
    "[]": "must be a JSON object or boolean, not list",
    "12": "must be a JSON object",
    "false": "no text satisfies",
    '{"minimum": NaN}': "is not JSON",
    '{"a":' * 200 + "1" + "}" * 200: "levels deep",
    "[" * 100_000: "the schema is nested more than",
}


@pytest.mark.parametrize(("text", "message"), NO_SCHEMAS.items(), ids=NO_SCHEMAS.values())
def test_a_text_that_holds_no_schema_names_its_field(text: str, message: str) -> None:
    with pytest.raises(GrammarError, match=message) as caught:
        compiled("json", text)
    assert caught.value.param == "guided_json"


def test_a_schema_is_read() -> None:
    assert check_schema_text('{"type": "null"}') == {"type": "null"}


@pytest.mark.parametrize("name", ["\ud800", "x" * 100_000], ids=["half of a surrogate pair", "long"])
def test_what_is_wrong_with_a_schema_fits_a_frame_whatever_it_quotes(name: str) -> None:
    with pytest.raises(GrammarError) as caught:
        compiled("json", json.dumps({"properties": {name: {"type": "none"}}}))
    event = TokenEvent("a", [], 0, 0, error=str(caught.value))
    assert len(encode_frame(EngineFrame(events=[event]))) < 2 * MESSAGE_CHARS_MAX


def test_the_glance_needs_no_grammar_library() -> None:
    program = "import sys, engine.grammar.spec; print(sorted({'llguidance', 'torch', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip() == "[]"
