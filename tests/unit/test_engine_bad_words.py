"""Tokenisation of `bad_words`: a word is forbidden at the start of a text and after a space."""

from __future__ import annotations

import pytest

from engine.text.bad_words import bad_words_token_ids

TOKEN_IDS = {"cat": [1], " cat": [2], "dog": [3, 4], " dog": [9, 3, 4], "emu": [5, 6], " emu": [7], "": [], " ": [9]}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["cat"], [[1], [2]]),
        ([" cat"], [[1], [2]]),
        (["dog"], [[3, 4]]),
        (["emu"], [[5, 6], [7]]),
        (["cat", "dog"], [[1], [2], [3, 4]]),
        ([], []),
    ],
    ids=str,
)
def test_each_word_is_tokenised_with_and_without_a_leading_space(words: list[str], expected: list[list[int]]) -> None:
    assert bad_words_token_ids(words, TOKEN_IDS.__getitem__) == expected
