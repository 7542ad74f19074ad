"""Stop strings end an answer wherever the token borders fall, and nothing of them is shown."""

from __future__ import annotations

import pytest

from appliance.serving.stop_strings import StopStrings


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
