"""Which captured graphs to keep where there are more kinds and sizes of steps than graphs: least frequently used, with dynamic
ageing. Knows no torch.

Uses of every key are counted, those of keys without a graph as well, and all counts are halved every `WINDOW` uses, so that
they cover the last few minutes. A key replaces another once it was used so much more often that the capture
pays. Keys that come and go never do.

The method is LFU-DA (Arlitt and others, "Evaluating Content Management Techniques for Web Proxy Caches", 2000): an admitted key
begins ahead of the one that was evicted for it, or two new keys would evict each other in turn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

WINDOW = 8192
"""Uses between two times that counts are halved: a minute or two of steps."""

WORTH = 128
"""Uses by which a key must be ahead of another one to replace it. A step without a graph of its own costs a few launches more,
a capture some hundred times that, which is won back in the minutes that are counted."""


class GraphEviction:
    """The keys that have a graph, at most `max_graphs` of them."""

    def __init__(self, max_graphs: int) -> None:
        self._max_graphs = max_graphs
        self._keys: dict[Hashable, None] = {}  # in the order of their last use
        self._uses: Counter[Hashable] = Counter()
        self._num_counted = 0

    def __contains__(self, key: Hashable) -> bool:
        return key in self._keys

    def admits(self, key: Hashable) -> bool:
        """Whether a step of this key is to be computed by its own graph, which is there or is worth a capture. Call once a
        step; False is counted as a use."""
        if key in self._keys or len(self._keys) < self._max_graphs:
            return True
        self._count(key)
        uses = self._uses[key]
        return uses >= WORTH and uses >= WORTH + self._uses[self._least_used()]  # which is searched for seldom

    def record_use(self, key: Hashable) -> None:
        """Count a step that was computed by the graph of this key."""
        del self._keys[key]
        self._keys[key] = None
        self._count(key)

    def evict_if_full(self) -> Hashable | None:
        """Evict the least used key if there are `max_graphs`; that key, or None."""
        if len(self._keys) < self._max_graphs:
            return None
        victim = self._least_used()
        del self._keys[victim]
        return victim

    def add(self, key: Hashable, *, evicted: Hashable | None = None) -> None:
        """Add a key, after `evict_if_full`. It begins `WORTH` uses ahead of `evicted`, the key that was evicted for it."""
        assert len(self._keys) < self._max_graphs, "there are as many graphs as there may be"
        self._keys[key] = None
        if evicted is not None:
            self._uses[key] = max(self._uses[key], self._uses[evicted] + WORTH)

    def discard(self, key: Hashable) -> None:
        """Remove a key, if it is there; its uses stay counted."""
        self._keys.pop(key, None)

    def _least_used(self) -> Hashable:
        return min(self._keys, key=self._uses.__getitem__)

    def _count(self, key: Hashable) -> None:
        self._uses[key] += 1
        self._num_counted += 1
        if self._num_counted == WINDOW:
            self._num_counted = 0
            self._uses = Counter({each: uses // 2 for each, uses in self._uses.items() if uses > 1})
