"""Counts changes to rows that are kept in memory, so that a copy tells whether it still is what the database has."""

from __future__ import annotations

from collections.abc import Callable

NAMES_MAX = 10_000


class ChangeCount:
    """The number of (possible) changes so far, and of the last one that concerned a name: the id of a tenant or key, or a whole
    table. Some changes concern everything, and so does one that would be that of too many names."""

    def __init__(self) -> None:
        self.value = 0
        self.listeners: list[Callable[[], None]] = []
        self._of_all = 0
        self._of: dict[str, int] = {}  # by name, since the last change of everything

    def bump(self, changed: str | None = None) -> None:
        """Count a possible change of a name, or of everything when None. Called after COMMIT and before the caller learns its
        result."""
        self.value += 1
        if changed is None or len(self._of) >= NAMES_MAX:
            self._of_all = self.value
            self._of.clear()
        else:
            self._of[changed] = self.value
        for listener in self.listeners:
            listener()

    def is_current(self, count: int | None, *names: str) -> bool:
        """Return whether what was read at `count` (None: unknown when) and belongs to `names` has not changed since."""
        return count is not None and count >= max(self._of_all, *(self._of.get(name, 0) for name in names))
