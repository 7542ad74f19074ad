"""Bad words as token ids, for the gateway and `LLM`, which have the tokenizer. Knows no torch and no tokenizer of its own.

Two tokenisations of a word are forbidden: the one at the start of a text, and the one after a space unless it ends with the
first one anyway. Other ways of spelling the word in tokens are not found. vLLM does the same, but omits the second one if it
has another number of tokens, which lets through most words that are rare at the start of a text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


def bad_words_token_ids(words: Sequence[str], encode: Callable[[str], list[int]]) -> list[list[int]]:
    """Token ids of `words`, one or two lists for each. `encode` adds no special tokens."""
    variants: list[list[int]] = []
    for word in words:
        bare = encode(word.lstrip())
        spaced = encode(" " + word.lstrip())
        if bare:
            variants.append(bare)
        if spaced and (not bare or spaced[-len(bare) :] != bare):
            variants.append(spaced)
    return variants
