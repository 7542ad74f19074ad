"""Hit tokens of other caches for the same prompts: least recently used, and one that knows the future. Knows no torch.

Both process the prompts in order of arrival and hold whole blocks of 512 tokens, as many as the KV cache has room for; neither
uses any of that for answers or running requests. The clairvoyant one evicts the block whose next use is farthest away, possibly
the newcomer (Belady, "A study of replacement algorithms", IBM Systems Journal 1966): no cache of its size has more hits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from engine.simulator.trace import HASH_BLOCK_TOKENS, TracedRequest

NEVER = 1 << 60
Block = tuple[str, int]


@dataclass(frozen=True, slots=True)
class CacheBounds:
    """Prompt tokens, and how many of them each cache would hit; the last token of a prompt is always computed."""

    prompt_tokens: int
    lru_tokens: int
    clairvoyant_tokens: int
    unbounded_tokens: int


def cache_bounds(requests: Sequence[TracedRequest], num_tokens: int) -> CacheBounds | None:
    """Bounds for a cache of `num_tokens`; None when the prompts' blocks are unknown."""
    if not any(request.block_ids for request in requests):
        return None
    num_blocks = num_tokens // HASH_BLOCK_TOKENS
    chains = [[(request.tenant, block) for block in request.block_ids] for request in requests]
    lengths = [request.input_tokens for request in requests]
    return CacheBounds(
        sum(lengths),
        _lru(chains, lengths, num_blocks),
        _clairvoyant(chains, lengths, num_blocks),
        _lru(chains, lengths, NEVER),
    )


def _hit_tokens(num_hits: int, length: int) -> int:
    return min(num_hits * HASH_BLOCK_TOKENS, length - 1)


def _lru(chains: Sequence[Sequence[Block]], lengths: Sequence[int], num_blocks: int) -> int:
    """A chain is touched from its end to its start, so that it is evicted from its end."""
    cached: OrderedDict[Block, None] = OrderedDict()
    total = 0
    for chain, length in zip(chains, lengths, strict=True):
        num_hits = next((index for index, block in enumerate(chain) if block not in cached), len(chain))
        total += _hit_tokens(num_hits, length)
        for block in reversed(chain):
            cached[block] = None
            cached.move_to_end(block)
        while len(cached) > num_blocks:
            cached.popitem(last=False)
    return total


def _clairvoyant(chains: Sequence[Sequence[Block]], lengths: Sequence[int], num_blocks: int) -> int:
    next_uses = _next_uses(chains)
    cached: dict[Block, int] = {}
    heap: list[tuple[int, int, Block]] = []  # (-next use, -depth, block); entries whose next use has changed are stale
    total = 0
    for chain, length, uses in zip(chains, lengths, next_uses, strict=True):
        num_hits = next((index for index, block in enumerate(chain) if block not in cached), len(chain))
        total += _hit_tokens(num_hits, length)
        for depth, (block, use) in enumerate(zip(chain, uses, strict=True)):
            cached[block] = use
            heappush(heap, (-use, -depth, block))
        while len(cached) > num_blocks:
            use, _, block = heappop(heap)
            if cached.get(block) == -use:
                del cached[block]
    return total


def _next_uses(chains: Sequence[Sequence[Block]]) -> list[list[int]]:
    """For each block of each chain, the index of the next chain that contains it."""
    last: dict[Block, int] = {}
    uses = []
    for index in range(len(chains) - 1, -1, -1):
        uses.append([last.get(block, NEVER) for block in chains[index]])
        for block in chains[index]:
            last[block] = index
    uses.reverse()
    return uses
