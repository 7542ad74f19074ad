"""The answers of one request, each as it grows: its text, what of it counts, how it ended. Knows no ledger and no engine."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from appliance.serving.text_output import Chunk, TextOutput
from engine.protocol import TokenEvent

SERVED = ("stop", "length")  # how an answer ends that its client gets


class Answer:
    """One answer. `finish_reason` is None while it grows; `completion_tokens` are those that count, of `generated_tokens` that
    the engine told of."""

    def __init__(self, index: int, output: TextOutput) -> None:
        self.index = index
        self.completion_tokens = 0
        self.generated_tokens = 0
        self.finish_reason: str | None = None
        self._output = output

    @property
    def stopped(self) -> bool:
        """Return whether a stop string was found: the answer is complete, whatever the engine still says of it."""
        return self._output.stopped

    def push(self, event: TokenEvent) -> Chunk:
        """Return what `event` adds. The token that completes a stop string is the last one that counts."""
        chunk = self._output.push(event)
        self.completion_tokens = chunk.completion_tokens
        return self._mine(chunk)

    def finish(self, event: TokenEvent) -> Chunk:
        """Return what was held back, at the end that `event` tells of: the answer's last chunk, which may be empty."""
        rest = "" if self.stopped else self._output.flush()
        self.finish_reason = "stop" if self.stopped else str(event.finish_reason)
        return self._mine(
            Chunk(
                text=rest,
                completion_tokens=self.completion_tokens,
                cached_tokens=event.num_cached_tokens,
                finish_reason=self.finish_reason,
            )
        )

    def end(self, reason: str) -> None:
        """Set how the answer ended that nobody gets in whole."""
        self.finish_reason = reason

    def _mine(self, chunk: Chunk) -> Chunk:
        return msgspec.structs.replace(chunk, index=self.index) if self.index else chunk


def reason_of_all(answers: Sequence[Answer]) -> str:
    """Return how a request ended whose answers have all ended: as the first that was not served, else `length` if one was cut
    there, else `stop`."""
    reasons = [answer.finish_reason or "error" for answer in answers]
    unserved = [reason for reason in reasons if reason not in SERVED]
    return (unserved or [reason for reason in reasons if reason == "length"] or ["stop"])[0]
