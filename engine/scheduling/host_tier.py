"""The host tier: evicted KV blocks in main memory by content hash, least recently used first. Integers and bytes only.

The tier is inclusive: a block that is swapped in stays here as well, so that its eviction from the device costs no second copy.
Blocks in the moves of the step being planned are pinned: they are read or written when the step runs, so their content may not
be replaced before.
"""

from __future__ import annotations

from collections import OrderedDict


class HostTier:
    """`num_blocks` blocks of host memory, which may be none. The runner owns the bytes; this is the index."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._by_hash: OrderedDict[bytes, int] = OrderedDict()  # oldest use first
        self._unused = list(range(num_blocks - 1, -1, -1))
        self._pinned: set[bytes] = set()
        self._arriving: set[bytes] = set()  # stored by this step: not to be read before the next

    @property
    def num_used(self) -> int:
        return len(self._by_hash)

    def __contains__(self, content_hash: bytes) -> bool:
        return content_hash in self._by_hash

    def store(self, content_hash: bytes) -> int | None:
        """A host block for content that is not stored yet; None when every block is pinned by this step."""
        assert content_hash not in self._by_hash, "content was stored twice"
        block_id = self._unused.pop() if self._unused else self._evict()
        if block_id is not None:
            self._by_hash[content_hash] = block_id
            self._pinned.add(content_hash)
            self._arriving.add(content_hash)
        return block_id

    def can_fetch(self, content_hash: bytes) -> bool:
        """Whether content is stored, and was stored before this step."""
        return content_hash in self._by_hash and content_hash not in self._arriving

    def _evict(self) -> int | None:
        """O(1), except for pinned blocks at the old end: they are moved to the new end, each at most once a step."""
        for _ in range(len(self._pinned) + 1):
            if not self._by_hash:
                return None
            content_hash, block_id = self._by_hash.popitem(last=False)
            if content_hash not in self._pinned:
                return block_id
            self._by_hash[content_hash] = block_id
        return None

    def fetch(self, content_hash: bytes) -> int:
        """The host block with this content, which is stored; pinned until the end of the step."""
        self._by_hash.move_to_end(content_hash)
        self._pinned.add(content_hash)
        return self._by_hash[content_hash]

    def mark_used(self, content_hash: bytes) -> None:
        """Count a use of stored content."""
        self._by_hash.move_to_end(content_hash)

    def end_step(self) -> None:
        """The step's moves are complete: the blocks that they named may be replaced from the next step on."""
        self._pinned.clear()
        self._arriving.clear()

    def check_invariants(self) -> None:
        """Raise `AssertionError` unless every host block is held once or unused once."""
        block_ids = sorted([*self._by_hash.values(), *self._unused])
        assert block_ids == list(range(self.num_blocks)), "host blocks leaked"
        assert self._pinned <= set(self._by_hash), "pinned content was dropped"
