"""Stop strings end an answer wherever the token borders fall, and nothing of them is shown."""

from __future__ import annotations

import pytest

from engine.text.detokenizer import AnswerText, StopStrings


def shown(stops: list[str], pieces: list[str]) -> tuple[list[str], StopStrings]:
    """Return what is shown after each piece, and the matcher."""
    matcher = StopStrings(stops)
    return [matcher.push(piece) for piece in pieces], matcher


def test_text_without_stop_strings_passes_at_once() -> None:
    assert shown([], ["a", "b"])[0] == ["a", "b"]


def test_a_stop_string_across_three_pieces_is_never_shown() -> None:
    pieces, matcher = shown(["###"], ["ab#", "#", "# rest"])

    assert pieces == ["ab", "", ""]
    assert matcher.matched == "###"


def test_a_beginning_that_comes_to_nothing_is_shown_later() -> None:
    pieces, matcher = shown(["<end>"], ["x<en", "t", "y"])

    assert pieces == ["x", "<ent", "y"]
    assert matcher.matched is None


def test_what_is_held_back_is_shown_at_the_end() -> None:
    pieces, matcher = shown(["stop"], ["do not sto"])

    assert pieces == ["do not "]
    assert matcher.flush() == "sto"


def test_of_two_that_end_together_the_one_that_began_first_counts() -> None:
    pieces, matcher = shown(["bc", "abc"], ["xabc"])

    assert pieces == ["x"]
    assert matcher.matched == "abc"


def test_a_stop_string_that_overlaps_itself_is_found() -> None:
    pieces, matcher = shown(["aab"], ["aa", "aab"])

    assert "".join(pieces) == "aa"
    assert matcher.matched == "aab"


def test_nothing_is_shown_after_a_match() -> None:
    pieces, _ = shown(["."], ["one.two", "three"])

    assert pieces == ["one", ""]


@pytest.mark.parametrize("border", range(1, 9))
def test_the_border_between_pieces_does_not_matter(border: int) -> None:
    text = "go on\nEND"
    pieces, matcher = shown(["\nEND"], [text[:border], text[border:]])

    assert "".join(pieces) == "go on"
    assert matcher.matched == "\nEND"


def words_of(*words: str) -> AnswerText:
    """Token n is the n-th word."""
    return AnswerText(lambda ids: "".join(words[i] for i in ids), stop=["END"], stop_token_ids=[1], min_tokens=3)


def test_the_token_that_completes_a_stop_string_is_the_last_one_that_counts() -> None:
    answer = words_of("a ", "b ", "EN", "D", "c")

    assert answer.push([0, 1, 2, 3, 4, 0]) == ("a b ", 4)
    assert answer.matched == "END"
    assert answer.push([0]) == ("", 0)


def test_a_stop_string_below_the_minimum_of_tokens_is_text() -> None:
    answer = words_of("END", " ", "x")

    assert answer.push([0, 1, 2]) == ("END x", 3)
    assert answer.matched is None
    assert answer.push([0]) == ("", 1)
    assert answer.matched == "END"


def test_a_stop_token_is_counted_and_has_no_text_where_it_ends_the_answer() -> None:
    answer = words_of("a", "stop", "b")

    assert answer.push([0, 1]) == ("astop", 2)
    assert answer.push([2, 1], ends_by_token=True) == ("b", 2)
    assert answer.flush() == ""
