"""Stop strings end an answer wherever token boundaries fall, and are never shown, not even in part."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest

from engine.text.detokenizer import PENDING_TOKENS_MAX, REPLACEMENT, SHOWN_TOKENS_MAX, AnswerText, Detokenizer, StopStrings


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
    assert matcher.flush() == ""


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


def test_of_two_of_one_length_the_one_that_ends_here_counts() -> None:
    pieces, matcher = shown(["ab", "cd"], ["xcd"])

    assert pieces == ["x"]
    assert matcher.matched == "cd"


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
def test_a_stop_string_that_overlaps_itself_is_found_wherever_it_ends_first(length: int) -> None:
    texts = ["".join(letters) for letters in product("ab", repeat=8)]
    for stop in map("".join, product("ab", repeat=length)):
        for text in texts:
            pieces, matcher = shown([stop], [text])
            assert pieces[0] + matcher.flush() == text.partition(stop)[0]
            assert (matcher.matched == stop) == (stop in text)


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


def test_the_minimum_of_tokens_is_counted_from_the_first() -> None:
    answer = words_of("END", "x")

    assert answer.push([1, 0]) == ("xEND", 2)
    assert answer.matched is None


def test_a_stop_token_that_did_not_end_the_answer_has_its_text() -> None:
    assert words_of("a", "stop").push([1, 1], ends_by_token=True) == ("stop", 2)


def test_a_stop_token_is_counted_and_has_no_text_where_it_ends_the_answer() -> None:
    answer = words_of("a", "stop", "b")

    assert answer.push([0, 1]) == ("astop", 2)
    assert answer.push([2, 1], ends_by_token=True) == ("b", 2)
    assert answer.flush() == ""


def of_bytes(ids: Sequence[int]) -> str:
    """Each token is a byte."""
    return bytes(ids).decode(errors="replace")


def test_half_a_character_at_the_end_of_an_answer_is_shown_once() -> None:
    detokenizer = Detokenizer(of_bytes)

    assert detokenizer.push(b"ab" + "🦜".encode()[:2]) == "ab"
    assert [detokenizer.flush(), detokenizer.flush()] == [REPLACEMENT, ""]


def test_bytes_that_are_no_text_are_held_back_for_eight_tokens_and_shown_once() -> None:
    detokenizer = Detokenizer(of_bytes)
    pieces = [detokenizer.push([0x80]) for _ in range(PENDING_TOKENS_MAX + 1)]

    assert pieces == [*[""] * PENDING_TOKENS_MAX, REPLACEMENT * (PENDING_TOKENS_MAX + 1)]
    assert detokenizer.push(b"a") == "a"


def test_the_last_token_of_a_long_answer_costs_what_the_first_did() -> None:
    lengths: list[int] = []

    def decode(ids: Sequence[int]) -> str:
        lengths.append(len(ids))
        return of_bytes(ids)

    detokenizer = Detokenizer(decode)
    assert "".join(detokenizer.push([byte]) for byte in b"word " * 40) == "word " * 40
    assert max(lengths) <= SHOWN_TOKENS_MAX + 1
    assert len(lengths) <= 2 * 200
