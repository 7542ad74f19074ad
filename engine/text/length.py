"""A lower bound for the number of tokens of a text, without tokenising it: for gateway and `LLM`. Knows no tokenizer and no
torch."""

from __future__ import annotations

NORMALISED_CHARS_MAX = 4
"""In real text, Unicode normalisation turns at most this many characters into one."""


def fewest_tokens(text: str, *, longest_token_chars: int) -> int:
    """A lower bound for the number of tokens of `text`: as many as it takes to cover it with the longest token.

    Normalisation may shorten a text. A tokenizer that drops spaces could accept more of them than this bound allows; such
    prompts have no use, and tokenising the spaces costs as much as tokenising words.
    """
    return -(-(len(text) // NORMALISED_CHARS_MAX) // longest_token_chars)
