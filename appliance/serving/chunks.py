"""Chunks: the pieces in which the text of answers travels from the generation to the response. Values only."""

from __future__ import annotations

import msgspec


class NamedLogprob(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A token as text and bytes with its natural log-probability, and the likeliest alternatives in `top`.

    There are up to 21 per token, and an unread stream keeps all of them: hence `gc=False`, which hides them from the collector.
    """

    token: str
    token_bytes: bytes
    logprob: float
    top: tuple[NamedLogprob, ...] = ()


class Chunk(msgspec.Struct, frozen=True, kw_only=True):  # made for every token of every stream: cheaper than a dataclass
    """What one or more engine steps added to the request's answer `index`. Token counts are those of the whole answer so far.
    `finish_reason` is set on the last chunk of an answer that ends before its siblings."""

    text: str
    completion_tokens: int
    cached_tokens: int
    logprobs: list[NamedLogprob] = []
    index: int = 0
    finish_reason: str | None = None


def merge_chunks(earlier: Chunk, later: Chunk) -> Chunk:
    """Return one chunk equivalent to two consecutive ones of the same answer."""
    return Chunk(
        text=earlier.text + later.text,
        completion_tokens=later.completion_tokens,
        cached_tokens=later.cached_tokens,
        logprobs=[*earlier.logprobs, *later.logprobs],
        index=later.index,
        finish_reason=later.finish_reason,
    )
