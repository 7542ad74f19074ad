"""Which captured steps are kept where there are more kinds and sizes of steps than places. Knows no torch.

A place belongs to what is met most. Uses are counted, those of a step that has no place as well, and all counts are halved
now and then, so that they tell of the last few minutes. A step takes another's place when it was met so much more often that
the capture pays; what comes and goes never is, and drives nobody out.

This is the replacement by frequency with ageing, LFU-DA (Arlitt and others, "Evaluating Content Management Techniques for Web
Proxy Caches", 2000): who takes a place begins ahead of the one who had it, or two newcomers would drive each other out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

WINDOW = 8192
"""Uses between two times that counts are halved: a minute or two of steps."""

WORTH = 128
"""Uses by which a step must be ahead of another one to be captured in its place. What a step costs without a graph of its own
is a few launches and a capture some hundred times that, which is won back in the minutes that counts tell of."""


class GraphPlaces:
    """Keys that have one of `num_places` places."""

    def __init__(self, num_places: int) -> None:
        self._num_places = num_places
        self._held: dict[Hashable, None] = {}  # in the order of their last use
        self._uses: Counter[Hashable] = Counter()
        self._num_counted = 0

    def __contains__(self, key: Hashable) -> bool:
        return key in self._held

    def __len__(self) -> int:
        return len(self._held)

    def admits(self, key: Hashable) -> bool:
        """Whether a step of this key is to be computed by its own graph, which is there or is worth a place. Asked once a
        step; a no is counted."""
        if key in self._held or len(self._held) < self._num_places:
            return True
        self._count(key)
        uses = self._uses[key]
        return uses >= WORTH and uses >= WORTH + self._uses[self._least()]

    def use(self, key: Hashable) -> None:
        """A step was computed by the graph of this key, which has a place."""
        del self._held[key]
        self._held[key] = None
        self._count(key)

    def make_room(self) -> Hashable | None:
        """Take the place of the key that was used least from it, where none is free; that key."""
        if len(self._held) < self._num_places:
            return None
        least = self._least()
        del self._held[least]
        return least

    def hold(self, key: Hashable, *, instead_of: Hashable | None = None) -> None:
        """Give a free place to a key, or one that `make_room` took from another: it begins as far ahead of that one as it would
        have to be to ask for the place."""
        assert len(self._held) < self._num_places, "no place is free"
        self._held[key] = None
        if instead_of is not None:
            self._uses[key] = max(self._uses[key], self._uses[instead_of] + WORTH)

    def _least(self) -> Hashable:
        return min(self._held, key=self._uses.__getitem__)

    def _count(self, key: Hashable) -> None:
        self._uses[key] += 1
        self._num_counted += 1
        if self._num_counted == WINDOW:
            self._num_counted = 0
            self._uses = Counter({each: uses // 2 for each, uses in self._uses.items() if uses > 1})
