"""How long each part of a start took, for the log. Knows no torch."""

from __future__ import annotations

import time
from collections.abc import Callable


class StartTimes:
    """Seconds between one `record` and the next, by name."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started_s = self._last_s = clock()
        self._parts: dict[str, float] = {}

    def record(self, part: str) -> None:
        """Attribute the time since the last call to `part`."""
        now_s = self._clock()
        self._parts[part] = self._parts.get(part, 0.0) + now_s - self._last_s
        self._last_s = now_s

    @property
    def total_s(self) -> float:
        return self._clock() - self._started_s

    def __str__(self) -> str:
        """`weights_s=3.120 cache_s=0.204 … total_s=4.001`"""
        return " ".join(f"{part}_s={seconds:.3f}" for part, seconds in [*self._parts.items(), ("total", self.total_s)])
