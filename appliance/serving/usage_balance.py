"""Compares what the engines of a model counted with what stands in the ledger. The difference is zero whenever nothing runs.

The engine's own totals come with every frame; here they are set against the counts of durable events, and against output that
nobody is billed for because its answer had ended before. Knows no request.
"""

from __future__ import annotations

from engine.protocol import EngineStatus


class UsageBalance:
    """One per model, over all engine processes of this run. Prompt and output count alike, as tokens."""

    def __init__(self) -> None:
        self.counted_tokens = 0
        """By engines, since they were ready."""
        self.recorded_tokens = 0
        """In events that are durable, or that are known to be missing and are told of elsewhere."""
        self.discarded_tokens = 0
        """Probes, and output behind the end of an answer, generated before the engine heard of that end: billed to nobody."""
        self._total: int | None = None
        self._open = 0
        self._at_rest = 0

    @property
    def unexplained_tokens(self) -> int:
        """Return how far both sides are apart, as it was when last no request was open: then there is nothing on the way."""
        if not self._open:
            self._at_rest = abs(self.counted_tokens - self.recorded_tokens - self.discarded_tokens)
        return self._at_rest

    def process_ready(self) -> None:
        """A new engine process counts from its next status on: what it did while loading was for nobody."""
        self._total = None

    def note_status(self, status: EngineStatus) -> None:
        """Take over the totals of the running process."""
        total = status.prompt_tokens_total + status.generation_tokens_total
        if self._total is not None:
            self.counted_tokens += total - self._total
        self._total = total

    def opened(self) -> None:
        """A request goes to the engine."""
        self._open += 1

    def closed(self, *, generated_tokens: int, billed_completion: int, billed_prompt: int) -> None:
        """Its event is durable, or lost and counted as such. `generated_tokens` is all output that the engine told of."""
        self._open -= 1
        if self._total is not None:
            self.recorded_tokens += billed_prompt + billed_completion
            self.discarded_tokens += generated_tokens - billed_completion

    def discarded(self, tokens: int) -> None:
        """Tokens of a probe, or output that came for a request nobody follows any more."""
        self.discarded_tokens += tokens
