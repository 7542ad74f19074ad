"""How long a text is at least in tokens, without tokenising it: for gateway and `LLM`. Knows no tokenizer and no torch."""

from __future__ import annotations

NORMALISED_CHARS_MAX = 4
"""No more characters than this become one by Unicode normalisation in any text of people."""


def fewest_tokens(text: str, *, longest_token_chars: int) -> int:
    """How many tokens `text` has at least: so many that the longest ones could cover it.

    Normalisation may shorten a text. A tokenizer that drops spaces could take more of them than this allows: nobody needs
    them, and tokenising them costs as much as tokenising words.
    """
    return -(-(len(text) // NORMALISED_CHARS_MAX) // longest_token_chars)
