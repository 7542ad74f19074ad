"""The answers of one request, each as it grows: token events to text, what of it counts, how it ended. Knows no ledger and no
process."""

from __future__ import annotations

from collections.abc import Sequence

from appliance.serving.chunks import Chunk, NamedLogprob
from appliance.serving.prompting import Prompting
from engine.protocol import FinishReason, SamplingParams, TokenEvent, TokenLogprob

SERVED = ("stop", "length")  # how an answer ends that its client gets


class Answer:
    """One answer. `finish_reason` is None while it grows; `completion_tokens` are those that count, of all `generated_tokens`
    that the engine reported. `stopped` turns true when a stop string was found: then the answer is complete, whatever the
    engine still says of it, and nothing is shown after it."""

    def __init__(self, index: int, prompting: Prompting, sampling: SamplingParams) -> None:
        self.index = index
        self.completion_tokens = 0
        self.generated_tokens = 0
        self.finish_reason: str | None = None
        self.stopped = False
        self._vocabulary = prompting.vocabulary
        self._text = prompting.answer_text(
            stop=sampling.stop, stop_token_ids=sampling.stop_token_ids, min_tokens=sampling.min_tokens
        )
        self._stop_token_ids = frozenset(sampling.stop_token_ids)

    def push(self, event: TokenEvent) -> Chunk:
        """Return what `event` adds. The token that completes a stop string is the last one that counts.

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
        self.completion_tokens = event.num_output_tokens - len(token_ids) + num_taken
        return Chunk(
            text=text,
            completion_tokens=self.completion_tokens,
            cached_tokens=event.num_cached_tokens,
            logprobs=named,
            index=self.index,
        )

    def finish(self, event: TokenEvent) -> Chunk:
        """Return what was held back, at the end that `event` tells of: the answer's last chunk, which may be empty."""
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

    def end(self, reason: str) -> None:
        """Set how the answer ended that nobody gets in whole."""
        self.finish_reason = reason

    def _is_no_text(self, end_token_id: int) -> bool:
        return end_token_id in self._stop_token_ids or self._vocabulary.is_special(end_token_id)

    def _name(self, token_id: int, entry: TokenLogprob) -> NamedLogprob:
        likeliest = zip(entry.top_token_ids, entry.top_logprobs, strict=True)
        return self._single(token_id, entry.logprob, tuple(self._single(*pair) for pair in likeliest))

    def _single(self, token_id: int, logprob: float, top: tuple[NamedLogprob, ...] = ()) -> NamedLogprob:
        token_bytes = self._vocabulary.token_bytes(token_id)
        return NamedLogprob(token=token_bytes.decode("utf-8", "replace"), token_bytes=token_bytes, logprob=logprob, top=top)


def reason_of_all(answers: Sequence[Answer]) -> str:
    """Return how a request ended whose answers have all ended: as the first that was not served, else `length` if one was cut
    there, else `stop`."""
    reasons = [answer.finish_reason or "error" for answer in answers]
    unserved = [reason for reason in reasons if reason not in SERVED]
    return (unserved or [reason for reason in reasons if reason == "length"] or ["stop"])[0]
