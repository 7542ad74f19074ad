"""Compares what the engines of a model counted with what the ledger holds. The difference is zero whenever nothing runs.

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
        """In events that are durable, or are known to be missing and reported elsewhere."""
        self.discarded_tokens = 0
        """Probes, and output past the end of an answer, generated before the engine heard of that end: billed to nobody."""
        self._total: int | None = None
        self._open = 0
        self._at_rest = 0

    @property
    def unexplained_tokens(self) -> int:
        """Return how far both sides are apart, as of the last time that no request was open: then nothing is in flight."""
        if not self._open:
            self._at_rest = abs(self.counted_tokens - self.recorded_tokens - self.discarded_tokens)
        return self._at_rest

    def process_ready(self) -> None:
        """Count a new engine process from its next status on: what it did while loading was for nobody."""
        self._total = None

    def note_status(self, status: EngineStatus) -> None:
        """Count up to the totals of the running process."""
        total = status.prompt_tokens_total + status.generation_tokens_total
        if self._total is not None:
            self.counted_tokens += total - self._total
        self._total = total

    def opened(self) -> None:
        """Note that a request goes to the engine."""
        self._open += 1

    def closed(self, *, generated_tokens: int, billed_completion: int, billed_prompt: int) -> None:
        """Note that its event is durable, or lost and counted as such. `generated_tokens` is all output the engine reported."""
        self._open -= 1
        if self._total is not None:
            self.recorded_tokens += billed_prompt + billed_completion
            self.discarded_tokens += generated_tokens - billed_completion

    def discarded(self, tokens: int) -> None:
        """Count output that came for a request nobody follows any more."""
        self.discarded_tokens += tokens
