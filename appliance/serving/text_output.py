"""Token events to text: detokenises, applies stop strings, names single tokens where log-probabilities were asked for."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from appliance.serving.prompting import Prompting
from engine.protocol import FinishReason, TokenEvent, TokenLogprob


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


class TextOutput:
    """The answer of one request as it grows. `stopped` turns true when a stop string was found; nothing is shown after it."""

    def __init__(
        self, prompting: Prompting, *, stop: Sequence[str], min_tokens: int, stop_token_ids: Sequence[int] = ()
    ) -> None:
        self._vocabulary = prompting.vocabulary
        self._text = prompting.answer_text(stop=stop, stop_token_ids=stop_token_ids, min_tokens=min_tokens)
        self._stop_token_ids = frozenset(stop_token_ids)
        self.stopped = False

    def push(self, event: TokenEvent) -> Chunk:
        """Return what `event` adds. The chunk counts the token that completed a stop string and none behind it.

        Log-probabilities are those of tokens of the text. A token that ended it, by itself or by a stop string, has none.
        """
        token_ids = event.token_ids
        ends_by_token = event.finish_reason is FinishReason.STOP
        text, num_taken = self._text.push(token_ids, ends_by_token=ends_by_token)
        self.stopped = self._text.matched is not None
        named: list[NamedLogprob] = []
        if event.logprobs:
            ended = self.stopped or (ends_by_token and self._is_no_text(token_ids[-1]))
            named = [self._name(*pair) for pair in zip(token_ids[: num_taken - ended], event.logprobs, strict=False)]
        return Chunk(
            text=text,
            completion_tokens=event.num_output_tokens - len(token_ids) + num_taken,
            cached_tokens=event.num_cached_tokens,
            logprobs=named,
        )

    def flush(self) -> str:
        """Return the text that was held back, at the end of an answer that no stop string ended."""
        text = self._text.flush()
        self.stopped = self._text.matched is not None
        return text

    def _is_no_text(self, end_token_id: int) -> bool:
        return end_token_id in self._stop_token_ids or self._vocabulary.is_special(end_token_id)

    def _name(self, token_id: int, entry: TokenLogprob) -> NamedLogprob:
        likeliest = zip(entry.top_token_ids, entry.top_logprobs, strict=True)
        return self._single(token_id, entry.logprob, tuple(self._single(*pair) for pair in likeliest))

    def _single(self, token_id: int, logprob: float, top: tuple[NamedLogprob, ...] = ()) -> NamedLogprob:
        token_bytes = self._vocabulary.token_bytes(token_id)
        return NamedLogprob(token=token_bytes.decode("utf-8", "replace"), token_bytes=token_bytes, logprob=logprob, top=top)
