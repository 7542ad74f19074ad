"""Which failures of work that is retried to log: the first, then one a minute, and the end."""

from __future__ import annotations

import time
from collections.abc import Callable

LOG_INTERVAL_S = 60.0


class ConsecutiveFailures:
    """Counts the failures of one kind of work since it last succeeded."""

    def __init__(self, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self._monotonic_s = monotonic_s
        self._number = 0
        self._logged_s = 0.0

    def count(self) -> int:
        """Count a failure. Return how many there have been if this one is to be logged, else 0."""
        self._number += 1
        now_s = self._monotonic_s()
        if self._number > 1 and now_s - self._logged_s < LOG_INTERVAL_S:
            return 0
        self._logged_s = now_s
        return self._number

    def end(self) -> int:
        """Return how many failures preceded a success, and begin again. A number above 0 is to be logged."""
        number, self._number = self._number, 0
        return number
