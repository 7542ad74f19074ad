"""The prefix cache: a tenant's prefix, computed once, is found again by hashes of its full blocks. Integers and bytes.

The hash of block i is a keyed hash of the tenant's salt and all tokens up to the end of the block, read off one running hash.
So equal hashes mean equal prefixes, and one tenant can neither hit nor time another tenant's blocks. The salt comes from the
authenticated tenant, never from the request. The key is random per process, so hashes are worthless outside.

Globally shared prefixes are an exception made by the operator: a prompt that begins with blocks of one is hashed under a salt
common to all tenants, up to the first block that is not shared. There the tenant's salt is mixed in.

Hashes are computed only as far as they are compared, so a prompt that hits nothing costs those of its first few blocks.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from itertools import count
from typing import Any

from engine.scheduling.block_pool import BlockPool
from engine.scheduling.request import Request

HASH_BYTES = 16
FIRST_LOOKUP_BLOCKS = 4


class PrefixCache:
    """Finds and registers full blocks of requests in a `BlockPool`.

    `is_shared=False`: nothing is found by others, but a preempted request finds its own blocks again.
    """

    def __init__(self, pool: BlockPool, block_size: int, *, is_shared: bool = True) -> None:
        self.is_shared = is_shared
        self._pool = pool
        self.block_size = block_size
        self._key = secrets.token_bytes(32)
        self._global_hashes: set[bytes] = set()
        self._sequence = count()

    def share_globally(self, token_ids: Sequence[int]) -> None:
        """Share the full blocks of this prefix between all tenants, from now on."""
        chain = self._hasher(b"", b"global")
        for start in range(0, len(token_ids) - self.block_size + 1, self.block_size):
            chain.update(array("I", token_ids[start : start + self.block_size]))
            self._global_hashes.add(chain.digest())

    def match(self, request: Request) -> list[int]:
        """Blocks that hold the longest cached prefix of `request`, in order. The last token is always left to be computed."""
        limit = (request.num_tokens - 1) // self.block_size
        matched: list[int] = []
        known = 0
        while known < limit:
            known = min(limit, max(FIRST_LOOKUP_BLOCKS, 4 * known))
            matched += self._pool.lookup_first(self.hashes(request, known)[len(matched) : known])
            if len(matched) < known:
                break
        return matched

    def match_len(self, request: Request) -> int:
        """About how many blocks `match` would find, by bisection: chains are evicted from their end."""
        limit = (request.num_tokens - 1) // self.block_size
        hashes = request.block_hashes
        if len(hashes) < limit and (not hashes or self._pool.lookup(hashes[-1]) is not None):
            return len(self.match(request))
        low, high = 0, min(limit, len(hashes))
        while low < high:
            middle = (low + high) // 2
            if self._pool.lookup(hashes[middle]) is None:
                high = middle
            else:
                low = middle + 1
        return low

    def hashes(self, request: Request, num_blocks: int) -> list[bytes]:
        """The hashes of the first `num_blocks` blocks, all of which must be full. May return more."""
        if len(request.block_hashes) < num_blocks:
            self._extend(request, num_blocks)
        return request.block_hashes

    def register(self, request: Request, num_computed_before: int, num_computed: int) -> None:
        """Make findable the blocks that became full since `num_computed_before`; all their tokens must be the request's."""
        first = num_computed_before // self.block_size
        num_full_blocks = min(num_computed, request.num_tokens) // self.block_size
        if num_full_blocks <= first:
            return
        hashes = self.hashes(request, num_full_blocks)
        for index in range(first, num_full_blocks):
            self._pool.register(request.block_table[index], hashes[index])

    def _extend(self, request: Request, num_blocks: int) -> None:
        if request.prefix_hash is None and request.forked_from is not None and self.is_shared:
            self._copy_parent_hashes(request, request.forked_from)
        hashes, size = request.block_hashes, self.block_size
        start = len(hashes) * size
        tokens = array("I", request.token_ids[start : num_blocks * size]).tobytes()
        if request.prefix_hash is None:
            request.prefix_hash, request.prefix_is_global = self._initial_hash(request)
            if hashes:  # of a caller that hashes contents itself: continue from its last
                request.prefix_hash.update(hashes[-1])
        step = size * 4  # bytes of the ids of one block
        at = 0
        while request.prefix_is_global and at < len(tokens):
            hashes.append(self._next_global(request, tokens[at : at + step]))
            at += step
        update, digest, append = request.prefix_hash.update, request.prefix_hash.digest, hashes.append
        for first in range(at, len(tokens), step):
            update(tokens[first : first + step])
            append(digest())

    def _next_global(self, request: Request, block: bytes) -> bytes:
        """The hash of the next block of a chain that all tenants have shared so far."""
        chain = request.prefix_hash.copy()
        chain.update(block)
        shared: bytes = chain.digest()
        if shared in self._global_hashes:
            request.prefix_hash = chain
            return shared
        request.prefix_is_global = False
        request.prefix_hash.update(self._salt(request.tenant_id))
        request.prefix_hash.update(block)
        private: bytes = request.prefix_hash.digest()
        return private

    def _copy_parent_hashes(self, request: Request, parent: Request) -> None:
        """All answers to a prompt share the hashes of its blocks. A parent that has hashed its answer too is past them."""
        if parent.prefix_hash is not None and len(parent.block_hashes) * self.block_size <= request.num_prompt_tokens:
            request.block_hashes = parent.block_hashes.copy()
            request.prefix_hash, request.prefix_is_global = parent.prefix_hash.copy(), parent.prefix_is_global

    def _initial_hash(self, request: Request) -> tuple[Any, bool]:
        """The running hash before the first block, and whether all tenants share the chain so far."""
        if not self.is_shared:
            return self._hasher(next(self._sequence).to_bytes(8, "big"), b"private"), False
        if self._global_hashes:
            return self._hasher(b"", b"global"), True
        return self._hasher(self._salt(request.tenant_id), b""), False

    def _hasher(self, salt: bytes, person: bytes) -> Any:
        chain = blake2b(digest_size=HASH_BYTES, key=self._key, person=person)
        chain.update(salt)
        return chain

    def _salt(self, tenant_id: str) -> bytes:
        return blake2b(tenant_id.encode(), digest_size=HASH_BYTES, key=self._key, person=b"tenant").digest()


class NextPrefillBlocks:
    """The block that each running prefill computes next, by hash, so that no other prefill computes it at the same time."""

    def __init__(self, prefix_cache: PrefixCache) -> None:
        self._prefix_cache = prefix_cache
        self._block_size = prefix_cache.block_size
        self._owners: dict[bytes, Request] = {}
        self._hashes: dict[Request, bytes] = {}

    def update(self, request: Request) -> None:
        """Record the next block of a prefill that has started or advanced."""
        self.remove(request)
        index = request.num_computed_tokens // self._block_size
        if self._prefix_cache.is_shared and index < request.num_tokens // self._block_size:
            content_hash = self._prefix_cache.hashes(request, index + 1)[index]
            if content_hash not in self._owners:
                self._owners[content_hash] = request
                self._hashes[request] = content_hash

    def remove(self, request: Request) -> None:
        content_hash = self._hashes.pop(request, None)
        if content_hash is not None:
            del self._owners[content_hash]

    def owner(self, request: Request, num_found_blocks: int) -> Request | None:
        """The request whose prefill computes the first block that `request` has not found."""
        if not self._owners or num_found_blocks >= (request.num_tokens - 1) // self._block_size:
            return None
        return self._owners.get(self._prefix_cache.hashes(request, num_found_blocks + 1)[num_found_blocks])
