"""Parts of messages for people."""

from __future__ import annotations

import pytest

from appliance.base.texts import counted, did_you_mean


@pytest.mark.parametrize(("number", "text"), [(0, "0 events"), (1, "1 event"), (2, "2 events")])
def test_a_noun_agrees_with_its_number(number: int, text: str) -> None:
    assert counted(number, "event") == text


def test_a_noun_may_have_its_own_plural() -> None:
    assert [counted(number, "entry", plural="entries") for number in (1, 2)] == ["1 entry", "2 entries"]


def test_only_a_similar_name_is_suggested() -> None:
    known = ("port", "host", "default_max_tokens")
    assert did_you_mean("prot", known) == "; did you mean 'port'?"
    assert did_you_mean("colour", known) == ""


def test_a_very_long_name_has_no_suggestion() -> None:
    known = ["a" * 1000]
    assert did_you_mean("a" * 999, known) == ""
