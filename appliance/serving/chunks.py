"""The pieces in which the text of answers travels from the generation to the response. Values only."""

from __future__ import annotations

import msgspec


class NamedLogprob(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A token as text and bytes with its natural log-probability, and the likeliest ones beside it.

    There are up to 21 for each token, and a stream that nobody reads keeps all of its own: nothing for the collector to see.
    """

    token: str
    token_bytes: bytes
    logprob: float
    top: tuple[NamedLogprob, ...] = ()


class Chunk(msgspec.Struct, frozen=True, kw_only=True):  # one for each token of each stream: cheaper to make than a dataclass
    """What one or more steps added to an answer. Token counts are those of the whole answer so far; `index` says which of the
    request's answers it is. `finish_reason` is set on the last chunk of an answer that ends before its siblings."""

    text: str
    completion_tokens: int
    cached_tokens: int
    logprobs: list[NamedLogprob] = []
    index: int = 0
    finish_reason: str | None = None


def joined(earlier: Chunk, later: Chunk) -> Chunk:
    """Return one chunk that says what both chunks of one answer said."""
    return Chunk(
        text=earlier.text + later.text,
        completion_tokens=later.completion_tokens,
        cached_tokens=later.cached_tokens,
        logprobs=[*earlier.logprobs, *later.logprobs],
        index=later.index,
        finish_reason=later.finish_reason,
    )
