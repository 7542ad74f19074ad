"""The answers of one request: text from token events, which tokens count, and how each answer ended. Knows no ledger and no
process."""

from __future__ import annotations

from collections.abc import Sequence

from appliance.serving.chunks import Chunk, NamedLogprob
from appliance.serving.tokenizer import ModelTokenizer
from engine.protocol import FinishReason, SamplingParams, TokenEvent, TokenLogprob

COMPLETE = ("stop", "length")  # finish reasons of answers that were not cut off by an error or from outside


class Answer:
    """One answer. `finish_reason` is None while it is being generated. `completion_tokens` are billed; `generated_tokens` also
    include what the engine generated past a stop string. `stopped` turns true when a stop string is found: the answer is then
    complete, and later tokens are ignored."""

    def __init__(self, index: int, tokenizer: ModelTokenizer, sampling: SamplingParams) -> None:
        self.index = index
        self.completion_tokens = 0
        self.generated_tokens = 0
        self.finish_reason: str | None = None
        self.stopped = False
        self._vocabulary = tokenizer.vocabulary
        self._text = tokenizer.answer_text(
            stop=sampling.stop, stop_token_ids=sampling.stop_token_ids, min_tokens=sampling.min_tokens
        )
        self._stop_token_ids = frozenset(sampling.stop_token_ids)

    def push(self, event: TokenEvent) -> Chunk:
        """Return what `event` adds. The token that completes a stop string is the last one that counts.

        A token that ends the answer, as a stop token or by completing a stop string, has no log-probability in the chunk.
        """
        token_ids = event.token_ids
        ends_by_token = event.finish_reason is FinishReason.STOP
        text, num_taken = self._text.push(token_ids, ends_by_token=ends_by_token)
        self.stopped = self._text.matched is not None
        named: list[NamedLogprob] = []
        if event.logprobs:
            has_end_token = self.stopped or (ends_by_token and self._is_hidden(token_ids[-1]))
            pairs = zip(token_ids[: num_taken - has_end_token], event.logprobs, strict=False)
            named = [self._named_logprob(*pair) for pair in pairs]
        self.completion_tokens = event.num_output_tokens - len(token_ids) + num_taken
        return Chunk(
            text=text,
            completion_tokens=self.completion_tokens,
            cached_tokens=event.num_cached_tokens,
            logprobs=named,
            index=self.index,
        )

    def finish(self, event: TokenEvent) -> Chunk:
        """Return the answer's last chunk: the text held back so far, which may be empty. `event` is the final event."""
        rest = "" if self.stopped else self._text.flush()
        self.stopped = self._text.matched is not None
        self.finish_reason = "stop" if self.stopped else str(event.finish_reason)
        return Chunk(
            text=rest,
            completion_tokens=self.completion_tokens,
            cached_tokens=event.num_cached_tokens,
            index=self.index,
            finish_reason=self.finish_reason,
        )

    def _is_hidden(self, end_token_id: int) -> bool:
        return end_token_id in self._stop_token_ids or self._vocabulary.is_special(end_token_id)

    def _named_logprob(self, token_id: int, entry: TokenLogprob) -> NamedLogprob:
        top = zip(entry.top_token_ids, entry.top_logprobs, strict=True)
        return self._named(token_id, entry.logprob, tuple(self._named(*pair) for pair in top))

    def _named(self, token_id: int, logprob: float, top: tuple[NamedLogprob, ...] = ()) -> NamedLogprob:
        token_bytes = self._vocabulary.token_bytes(token_id)
        return NamedLogprob(token=token_bytes.decode("utf-8", "replace"), token_bytes=token_bytes, logprob=logprob, top=top)


def combined_finish_reason(answers: Sequence[Answer]) -> str:
    """Return the finish reason of a request whose answers have all ended: that of the first incomplete one, else `length` if
    any answer reached its length limit, else `stop`."""
    reasons = [answer.finish_reason or "error" for answer in answers]
    incomplete = [reason for reason in reasons if reason not in COMPLETE]
    return (incomplete or [reason for reason in reasons if reason == "length"] or ["stop"])[0]
