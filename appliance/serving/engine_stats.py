"""Live statistics of one model's engine: tokens per second, recent times to first token, and what each tenant has running."""

from __future__ import annotations

from collections import deque

from appliance.serving.batch_size import BatchSize
from appliance.serving.usage_reconciliation import UsageReconciliation
from engine.protocol import EngineFrame, EngineStatus, TenantProgress

RATE_WINDOW_S = 2.0
TTFTS_MAX = 256


class EngineStats:
    """Updated with every status frame and every first token; read about once a second."""

    def __init__(self) -> None:
        self._totals: deque[tuple[float, int]] = deque(maxlen=1024)
        self._ttfts_s: deque[float] = deque(maxlen=TTFTS_MAX)
        self.reconciliation = UsageReconciliation()
        self.batch_size = BatchSize()
        self.tenants: list[TenantProgress] = []
        """What each tenant has running and waiting, as the engine last reported it (a few times per second)."""
        self.probe_id: str | None = None
        """Request id of the latest readiness probe. Its tokens are no tenant's traffic and are left out of rates."""
        self.probe_prompt_tokens = 0
        self._probe_output_tokens = 0

    def note_tokens(self, frame: EngineFrame) -> None:
        """Count the probe's tokens. Called before `note_status` of the same frame, whose totals include them."""
        if self.probe_id is None:
            return
        self._probe_output_tokens += sum(request_id == self.probe_id for request_id, _, _ in frame.decoded)
        for event in frame.events:
            if event.request_id == self.probe_id:
                self._probe_output_tokens += len(event.token_ids)
                if event.finish_reason is not None:
                    self.probe_prompt_tokens += event.num_prompt_tokens_computed

    def note_status(self, status: EngineStatus, monotonic_s: float) -> None:
        """Record the engine's batch and generated tokens at this moment, the tokens without those of probes."""
        total = status.generation_tokens_total - self._probe_output_tokens
        if self._totals and total < self._totals[-1][1]:
            self._totals.clear()  # a new engine process counts from 0
        self._totals.append((monotonic_s, total))
        self.reconciliation.note_status(status)
        self.batch_size.note(status.num_running, monotonic_s)
        if status.tenants is not None:
            self.tenants = status.tenants

    def note_ttft(self, ttft_s: float) -> None:
        """Record the time to first token of one request."""
        self._ttfts_s.append(ttft_s)

    def tokens_per_second(self, monotonic_s: float) -> float:
        """Return generated tokens per second over the last RATE_WINDOW_S."""
        while len(self._totals) > 1 and self._totals[1][0] <= monotonic_s - RATE_WINDOW_S:
            self._totals.popleft()
        if len(self._totals) < 2:
            return 0.0
        elapsed_s = monotonic_s - self._totals[0][0]
        return (self._totals[-1][1] - self._totals[0][1]) / elapsed_s if elapsed_s > 0 else 0.0

    def ttft_quantile_s(self, quantile: float) -> float | None:
        """Return the nearest-rank quantile of the last TTFTS_MAX requests, or None when there were none."""
        if not self._ttfts_s:
            return None
        ordered = sorted(self._ttfts_s)
        return ordered[min(len(ordered) - 1, int(quantile * len(ordered)))]
