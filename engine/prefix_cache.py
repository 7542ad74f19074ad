"""Names for the content of full blocks, so that a prefix computed once is found again by the same tenant. Integers and bytes.

The name of block i is a keyed hash of its token ids and of the name of block i-1; the first one starts from the tenant's
salt. So equal names mean equal prefixes, and one tenant can neither hit nor time another tenant's blocks. The key is
random per process: names are worthless outside it.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Sequence
from hashlib import blake2b

from engine.block_pool import BlockPool
from engine.request import Request

HASH_BYTES = 16


class PrefixCache:
    """Finds and registers full blocks of requests in a `BlockPool`."""

    def __init__(self, pool: BlockPool, block_size: int, *, key: bytes | None = None) -> None:
        self._pool = pool
        self._block_size = block_size
        self._key = secrets.token_bytes(32) if key is None else key

    def match(self, request: Request) -> list[int]:
        """Blocks that hold the longest cached prefix of `request`, in order. The last token is always left to compute."""
        num_full_blocks = (request.num_tokens - 1) // self._block_size
        self._extend_hashes(request, num_full_blocks)
        matched: list[int] = []
        for content_hash in request.block_hashes[:num_full_blocks]:
            block_id = self._pool.lookup(content_hash)
            if block_id is None:
                break
            matched.append(block_id)
        return matched

    def register(self, request: Request, num_computed_before: int) -> None:
        """Make the blocks findable that became full since `num_computed_before`."""
        first = num_computed_before // self._block_size
        num_full_blocks = request.num_computed_tokens // self._block_size
        if num_full_blocks <= first:
            return
        self._extend_hashes(request, num_full_blocks)
        for index in range(first, num_full_blocks):
            self._pool.register(request.block_table[index], request.block_hashes[index])

    def _extend_hashes(self, request: Request, num_full_blocks: int) -> None:
        hashes, size = request.block_hashes, self._block_size
        while len(hashes) < num_full_blocks:
            parent = hashes[-1] if hashes else self._salt(request.tenant_id)
            start = len(hashes) * size
            hashes.append(self._name(parent, request.token_ids[start : start + size]))

    def _salt(self, tenant_id: str) -> bytes:
        return blake2b(tenant_id.encode(), digest_size=HASH_BYTES, key=self._key, person=b"tenant").digest()

    def _name(self, parent: bytes, token_ids: Sequence[int]) -> bytes:
        return blake2b(parent + array("I", token_ids).tobytes(), digest_size=HASH_BYTES, key=self._key).digest()
