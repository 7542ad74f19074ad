"""Bad words as token ids, for whoever has the tokenizer: gateway or `LLM`. Knows no torch and no tokenizer of its own.

A word is forbidden as the tokenizer writes it at the start of a text, and as it writes it after a space where that does not
end in the first way anyhow. Other ways of spelling the word in tokens are not found. vLLM does the same, except that it leaves
out the second way when it takes another number of tokens, which lets most words through that are rare at the start of a text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


def bad_words_token_ids(words: Sequence[str], encode: Callable[[str], list[int]]) -> list[list[int]]:
    """Token ids of `words`, one or two lists for each. `encode` adds no special tokens."""
    found: list[list[int]] = []
    for word in words:
        bare = encode(word.lstrip())
        spaced = encode(" " + word.lstrip())
        if bare:
            found.append(bare)
        if spaced and (not bare or spaced[-len(bare) :] != bare):
            found.append(spaced)
    return found
