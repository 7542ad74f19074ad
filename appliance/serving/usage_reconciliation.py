"""Reconciles what the engines of a model counted with what the ledger recorded: the difference is 0 whenever nothing runs.

Every frame of an engine carries its totals. They are compared with the counts of durable usage events plus the output that is
billed to nobody because its answer had already ended. Knows no request.
"""

from __future__ import annotations

from engine.protocol import EngineStatus


class UsageReconciliation:
    """One per model, over all its engine processes in this run. Prompt and output tokens are added up together."""

    def __init__(self) -> None:
        self.counted_tokens = 0
        """Counted by engine processes since they became ready."""
        self.recorded_tokens = 0
        """In durable events, or in events that are known to be missing and are reported elsewhere."""
        self.discarded_tokens = 0
        """Billed to nobody: probes, and output that an engine generated before it learned that the answer had ended."""
        self._total: int | None = None
        self._num_open = 0
        self._difference_when_idle = 0

    @property
    def unexplained_tokens(self) -> int:
        """Return the difference between both sides when last no request was open and so no token was in flight."""
        if not self._num_open:
            self._difference_when_idle = abs(self.counted_tokens - self.recorded_tokens - self.discarded_tokens)
        return self._difference_when_idle

    def note_process_ready(self) -> None:
        """Count a new engine process from its next status on: its tokens while loading belong to no request."""
        self._total = None

    def note_status(self, status: EngineStatus) -> None:
        """Add what the engine process has counted since its previous status."""
        total = status.prompt_tokens_total + status.generation_tokens_total
        if self._total is not None:
            self.counted_tokens += total - self._total
        self._total = total

    def note_submitted(self) -> None:
        """Note that a request is submitted to the engine."""
        self._num_open += 1

    def note_settled(self, *, generated_tokens: int, billed_completion: int, billed_prompt: int) -> None:
        """Note that a request's event is durable, or lost and reported as such. `generated_tokens` is all output of the engine
        for it."""
        self._num_open -= 1
        if self._total is not None:
            self.recorded_tokens += billed_prompt + billed_completion
            self.discarded_tokens += generated_tokens - billed_completion

    def note_discarded(self, tokens: int) -> None:
        """Note output that arrived for a request that is no longer open."""
        self.discarded_tokens += tokens
