"""Token events to text: detokenises, applies stop strings, names single tokens where log-probabilities were asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from appliance.serving.prompting import Prompting
from appliance.serving.stop_strings import StopStrings
from engine.protocol import TokenEvent, TokenLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedLogprob:
    """A token as text and bytes with its natural log-probability, and the likeliest ones beside it."""

    token: str
    token_bytes: bytes
    logprob: float
    top: list[NamedLogprob] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """What one or more steps added to an answer. Token counts are those of the whole answer so far; `index` says which of the
    request's answers it is. `finish_reason` is set on the last chunk of an answer that ends before its siblings."""

    text: str
    completion_tokens: int
    cached_tokens: int
    logprobs: list[NamedLogprob] = field(default_factory=list)
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

    def __init__(self, prompting: Prompting, *, stop: Sequence[str], min_tokens: int) -> None:
        self._vocabulary = prompting.vocabulary
        self._detokenizer = prompting.detokenizer()
        self._stop = StopStrings(stop)
        self._min_tokens = min_tokens

    @property
    def stopped(self) -> bool:
        """Return whether a stop string was found."""
        return self._stop.matched is not None

    def push(self, event: TokenEvent) -> Chunk:
        """Return what `event` adds. Stop strings count only after `min_tokens` tokens.

        Tokens are taken one by one: where a stop string ends, and so what is billed, must not depend on how many of them
        came in one event. The chunk counts the token that completed the stop string and none behind it.
        """
        text = ""
        completion_tokens = event.num_output_tokens - len(event.token_ids)
        named: list[NamedLogprob] = []
        for index, token_id in enumerate(event.token_ids):
            completion_tokens += 1
            new = self._detokenizer.push([token_id])
            text += new if completion_tokens < self._min_tokens else self._stop.push(new)
            if self.stopped:
                break
            if event.logprobs is not None:
                named.append(self._name(token_id, event.logprobs[index]))
        return Chunk(text=text, completion_tokens=completion_tokens, cached_tokens=event.num_cached_tokens, logprobs=named)

    def flush(self) -> str:
        """Return the text that was held back, at the end of an answer that no stop string ended."""
        rest = self._stop.push(self._detokenizer.flush())
        return rest + self._stop.flush()

    def _name(self, token_id: int, entry: TokenLogprob) -> NamedLogprob:
        top = [self._single(top_id, logprob) for top_id, logprob in zip(entry.top_token_ids, entry.top_logprobs, strict=True)]
        return self._single(token_id, entry.logprob, top)

    def _single(self, token_id: int, logprob: float, top: list[NamedLogprob] | None = None) -> NamedLogprob:
        token_bytes = self._vocabulary.token_bytes(token_id)
        return NamedLogprob(
            token=token_bytes.decode("utf-8", "replace"), token_bytes=token_bytes, logprob=logprob, top=top or []
        )
