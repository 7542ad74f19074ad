"""Progress of a long call: one line on a terminal, rewritten twice a second; silent elsewhere. Knows no torch."""

from __future__ import annotations

import sys
import time

PROGRESS_INTERVAL_S = 0.5
CLEAR_LINE = "\r\x1b[K"


class Progress:
    """Counts prompts, and tokens where the caller knows them."""

    def __init__(self, total: int, *, enabled: bool) -> None:
        self._total = total
        self._enabled = enabled and total > 0 and sys.stderr.isatty()
        self._started_s = time.monotonic()
        self._due_s = self._started_s + PROGRESS_INTERVAL_S

    @property
    def is_due(self) -> bool:
        """Whether `show` would write a line now; if not, the caller need not count."""
        return self._enabled and time.monotonic() >= self._due_s

    def show(self, done: int, *, tokens_in: int = 0, tokens_out: int = 0) -> None:
        """Prompts finished so far, prompt tokens read and tokens generated."""
        if self.is_due:
            self._due_s = time.monotonic() + PROGRESS_INTERVAL_S
            self._write(done, tokens_in, tokens_out)

    def end(self, *, tokens_in: int = 0, tokens_out: int = 0) -> None:
        """Write the last line and keep it."""
        if self._enabled:
            self._write(self._total, tokens_in, tokens_out)
            sys.stderr.write("\n")

    def _write(self, done: int, tokens_in: int, tokens_out: int) -> None:
        seconds = max(time.monotonic() - self._started_s, 1e-9)
        rates = f", {tokens_in / seconds:,.0f} tokens/s in, {tokens_out / seconds:,.0f} out" if tokens_in or tokens_out else ""
        sys.stderr.write(f"{CLEAR_LINE}{done} of {self._total} prompts finished{rates}")
        sys.stderr.flush()
