"""Stop strings and detokenisation of streamed answers: matches across token boundaries, held-back text, minimum length."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest

from engine.text.detokenizer import PENDING_TOKENS_MAX, REPLACEMENT, SHOWN_TOKENS_MAX, AnswerText, Detokenizer, StopStrings


def push_pieces(stops: list[str], pieces: list[str]) -> tuple[list[str], StopStrings]:
    """Push text into a matcher piece by piece; return the text emitted after each, and the matcher."""
    matcher = StopStrings(stops)
    return [matcher.push(piece) for piece in pieces], matcher


def test_text_passes_through_at_once_without_stop_strings() -> None:
    assert push_pieces([], ["a", "b"])[0] == ["a", "b"]


def test_a_stop_string_split_over_three_pieces_is_removed_from_the_text() -> None:
    pieces, matcher = push_pieces(["###"], ["ab#", "#", "# rest"])

    assert pieces == ["ab", "", ""]
    assert matcher.matched == "###"
    assert matcher.flush() == ""


def test_a_false_start_of_a_stop_string_is_emitted_once_it_fails_to_match() -> None:
    pieces, matcher = push_pieces(["<end>"], ["x<en", "t", "y"])

    assert pieces == ["x", "<ent", "y"]
    assert matcher.matched is None


def test_flush_emits_held_back_text_when_the_answer_ends() -> None:
    pieces, matcher = push_pieces(["stop"], ["do not sto"])

    assert pieces == ["do not "]
    assert matcher.flush() == "sto"


def test_of_two_stop_strings_that_end_at_the_same_character_the_longer_one_matches() -> None:
    pieces, matcher = push_pieces(["bc", "abc"], ["xabc"])

    assert pieces == ["x"]
    assert matcher.matched == "abc"


def test_of_two_stop_strings_of_equal_length_the_one_in_the_text_matches() -> None:
    pieces, matcher = push_pieces(["ab", "cd"], ["xcd"])

    assert pieces == ["x"]
    assert matcher.matched == "cd"


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
def test_a_self_overlapping_stop_string_matches_at_its_first_occurrence(length: int) -> None:
    texts = ["".join(letters) for letters in product("ab", repeat=8)]
    for stop in map("".join, product("ab", repeat=length)):
        for text in texts:
            pieces, matcher = push_pieces([stop], [text])
            assert pieces[0] + matcher.flush() == text.partition(stop)[0]
            assert (matcher.matched == stop) == (stop in text)


def test_no_text_is_emitted_after_a_match() -> None:
    pieces, _ = push_pieces(["."], ["one.two", "three"])

    assert pieces == ["one", ""]


@pytest.mark.parametrize("split_at", range(1, 9))
def test_a_stop_string_matches_wherever_the_text_is_split(split_at: int) -> None:
    text = "go on\nEND"
    pieces, matcher = push_pieces(["\nEND"], [text[:split_at], text[split_at:]])

    assert "".join(pieces) == "go on"
    assert matcher.matched == "\nEND"


def word_answer(*words: str) -> AnswerText:
    """An answer whose token n decodes to the n-th of `words`; it stops at END or token 1, after three tokens or later."""
    return AnswerText(lambda ids: "".join(words[i] for i in ids), stop=["END"], stop_token_ids=[1], min_tokens=3)


def test_tokens_after_the_one_that_completes_a_stop_string_are_not_counted() -> None:
    answer = word_answer("a ", "b ", "EN", "D", "c")

    assert answer.push([0, 1, 2, 3, 4, 0]) == ("a b ", 4)
    assert answer.matched == "END"
    assert answer.push([0]) == ("", 0)


def test_a_stop_string_is_plain_text_until_min_tokens_is_reached() -> None:
    answer = word_answer("END", " ", "x")

    assert answer.push([0, 1, 2]) == ("END x", 3)
    assert answer.matched is None
    assert answer.push([0]) == ("", 1)
    assert answer.matched == "END"


def test_min_tokens_counts_from_the_first_token_of_the_answer() -> None:
    answer = word_answer("END", "x")

    assert answer.push([1, 0]) == ("xEND", 2)
    assert answer.matched is None


def test_a_stop_token_that_does_not_end_the_answer_keeps_its_text() -> None:
    assert word_answer("a", "stop").push([1, 1], ends_by_token=True) == ("stop", 2)


def test_a_stop_token_that_ends_the_answer_is_counted_and_has_no_text() -> None:
    answer = word_answer("a", "stop", "b")

    assert answer.push([0, 1]) == ("astop", 2)
    assert answer.push([2, 1], ends_by_token=True) == ("b", 2)
    assert answer.flush() == ""


def decode_bytes(ids: Sequence[int]) -> str:
    """Each token is a byte."""
    return bytes(ids).decode(errors="replace")


def test_an_incomplete_character_at_the_end_is_emitted_once_as_a_replacement_character() -> None:
    detokenizer = Detokenizer(decode_bytes)

    assert detokenizer.push(b"ab" + "🦜".encode()[:2]) == "ab"
    assert [detokenizer.flush(), detokenizer.flush()] == [REPLACEMENT, ""]


def test_invalid_utf8_is_held_back_for_a_bounded_number_of_tokens() -> None:
    detokenizer = Detokenizer(decode_bytes)
    pieces = [detokenizer.push([0x80]) for _ in range(PENDING_TOKENS_MAX + 1)]

    assert pieces == [*[""] * PENDING_TOKENS_MAX, REPLACEMENT * (PENDING_TOKENS_MAX + 1)]
    assert detokenizer.push(b"a") == "a"


def test_the_cost_of_detokenising_a_token_does_not_grow_with_the_answer() -> None:
    lengths: list[int] = []

    def decode(ids: Sequence[int]) -> str:
        lengths.append(len(ids))
        return decode_bytes(ids)

    detokenizer = Detokenizer(decode)
    assert "".join(detokenizer.push([byte]) for byte in b"word " * 40) == "word " * 40
    assert max(lengths) <= SHOWN_TOKENS_MAX + 1
    assert len(lengths) <= 2 * 200


def test_a_token_with_a_text_of_its_own_is_not_decoded_again() -> None:
    decoded: list[Sequence[int]] = []

    def decode(ids: Sequence[int]) -> str:
        decoded.append(ids)
        return decode_bytes(ids)

    detokenizer = Detokenizer(decode, lambda byte: decode_bytes([byte]))

    assert "".join(detokenizer.push([byte]) for byte in "a 🦜 b".encode()) == "a 🦜 b"
    assert max(map(len, decoded)) == len("🦜".encode())
