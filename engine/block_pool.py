"""Which KV block belongs to whom: reference counts, an LRU free list and the content hashes of full blocks. Integers only.

A block is in exactly one of three states:

    used    reference count > 0: part of one or more block tables
    cached  reference count 0, but its content is known by hash: found again by `lookup`, or evicted when space is short
    free    reference count 0 and nothing worth keeping

`used + cached + free == num_blocks` always. Allocation and release of one block cost O(1): the free list is an ordered
dictionary that hands out its front; blocks without content return to the front, blocks with content to the back, so that
eviction follows least recent use.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


class OutOfBlocks(AssertionError):
    """A bug: more blocks were asked for than `num_available` promised."""


@dataclass(slots=True)
class Block:
    """One block of `block_size` token slots in every layer's cache."""

    block_id: int
    ref_count: int = 0
    content_hash: bytes | None = None


class BlockPool:
    """All blocks of one engine. Only the scheduler calls the mutating methods."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._blocks = [Block(block_id) for block_id in range(num_blocks)]
        self._unused: OrderedDict[int, None] = OrderedDict((block_id, None) for block_id in range(num_blocks))
        self._by_hash: dict[bytes, int] = {}
        self._num_unused_with_content = 0

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out: free ones and cached ones."""
        return len(self._unused)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._unused)

    @property
    def num_cached(self) -> int:
        return self._num_unused_with_content

    @property
    def num_free(self) -> int:
        return len(self._unused) - self._num_unused_with_content

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks with a reference count of one each, evicting the least recently used content if need be."""
        if count > len(self._unused):
            raise OutOfBlocks(f"asked for {count} of {len(self._unused)} available blocks")
        return [self._allocate_one() for _ in range(count)]

    def _allocate_one(self) -> int:
        block_id, _ = self._unused.popitem(last=False)
        block = self._blocks[block_id]
        assert block.ref_count == 0, f"block {block_id} was on the free list with {block.ref_count} references"
        if block.content_hash is not None:
            del self._by_hash[block.content_hash]
            block.content_hash = None
            self._num_unused_with_content -= 1
        block.ref_count = 1
        return block_id

    def share(self, block_id: int) -> None:
        """Add one owner to a block that is used or cached."""
        block = self._blocks[block_id]
        if block.ref_count == 0:
            assert block.content_hash is not None, f"block {block_id} has no content to share"
            del self._unused[block_id]
            self._num_unused_with_content -= 1
        block.ref_count += 1

    def release(self, block_table: Sequence[int]) -> None:
        """Give back one owner's blocks. Tail blocks go first, so that a chain is evicted from its end."""
        for block_id in reversed(block_table):
            self._release_one(self._blocks[block_id])

    def _release_one(self, block: Block) -> None:
        assert block.ref_count > 0, f"block {block.block_id} was released more often than taken"
        block.ref_count -= 1
        if block.ref_count:
            return
        self._unused[block.block_id] = None
        if block.content_hash is None:
            self._unused.move_to_end(block.block_id, last=False)
        else:
            self._num_unused_with_content += 1

    def register(self, block_id: int, content_hash: bytes) -> None:
        """Make a used, full block findable. The first block with a content wins; later twins stay private."""
        block = self._blocks[block_id]
        assert block.ref_count > 0, f"block {block_id} is registered without an owner"
        if block.content_hash is None and content_hash not in self._by_hash:
            block.content_hash = content_hash
            self._by_hash[content_hash] = block_id

    def lookup(self, content_hash: bytes) -> int | None:
        return self._by_hash.get(content_hash)

    def is_used(self, block_id: int) -> bool:
        return self._blocks[block_id].ref_count > 0

    def check_invariants(self, block_tables: Iterable[Sequence[int]]) -> None:
        """Raise `AssertionError` unless the pool agrees with all live block tables."""
        owners = Counter(block_id for table in block_tables for block_id in table)
        for block in self._blocks:
            assert block.ref_count == owners[block.block_id], (
                f"block {block.block_id} counts {block.ref_count} owners but has {owners[block.block_id]}"
            )
            assert (block.ref_count == 0) == (block.block_id in self._unused), f"block {block.block_id} is on the wrong list"
        hashed = {b.content_hash: b.block_id for b in self._blocks if b.content_hash is not None}
        assert hashed == self._by_hash, "the hash index and the blocks disagree"
        idle_with_content = sum(1 for b in self._blocks if b.ref_count == 0 and b.content_hash is not None)
        assert idle_with_content == self._num_unused_with_content, "the count of cached blocks is wrong"
        assert self.num_used + self.num_cached + self.num_free == self.num_blocks, "blocks leaked"
