"""Block tables of requests: found prefixes, new blocks, forks by copy on write, and the moves that a step must make first.

An admitted request is promised the blocks of its whole prompt, but holds only those of the chunks computed so far: blocks
that wait for later chunks keep their cached content until then. `num_spare` is what is left for others.

A prefix is continued from device blocks into host blocks when copying them in costs less than computing them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.scheduling.accounts import account_of
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.costs import TokenCosts
from engine.scheduling.host_tier import HostTier
from engine.scheduling.prefix_cache import PrefixCache
from engine.scheduling.request import Request, table_of
from engine.scheduling.scheduled_batch import BlockMoves


@dataclass(slots=True)
class FoundPrefix:
    """Blocks that hold the beginning of a request, in order; None stands for a block whose content is in the host tier."""

    blocks: list[int | None] = field(default_factory=list)
    num_on_host: int = 0
    num_unowned: int = 0  # device blocks without an owner, which count as available until they are used


class KvBlocks:
    """The only owner of block tables. A shared block counts once for each of its holders."""

    def __init__(self, pool: BlockPool, *, costs: TokenCosts, prefix_cache: PrefixCache, host_tier: HostTier) -> None:
        self.pool = pool
        self.prefix_cache = prefix_cache
        self.block_size = prefix_cache.block_size
        self.host_tier = host_tier
        self.num_swapped_in = 0
        self.num_swapped_out = 0
        self._costs = costs
        self._num_promised = 0
        self._moves = BlockMoves()
        self._copy_sources: list[int] = []  # kept alive until the moves of this step are complete
        if host_tier.num_blocks:
            pool.on_evict = self._swap_out

    @property
    def num_spare(self) -> int:
        """Blocks that can be allocated without breaking a promise."""
        return self.pool.num_available - self._num_promised

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def find(self, request: Request) -> FoundPrefix:
        """The longest prefix of `request` that need not be computed. Changes nothing."""
        matched = self.prefix_cache.match(request)
        if request.sampling.prompt_logprobs is not None:  # tokens that were never computed have no log-probabilities
            return self._on_device(matched[: request.num_prompt_tokens_computed // self.block_size])
        on_device = self._on_device(matched)
        if not self.host_tier.num_blocks:
            return on_device
        longer = self._continue_on_host(request, on_device)
        num_more = len(longer.blocks) - len(matched)
        swap_ns = self._costs.swap_in_ns(longer.num_on_host)
        recompute_ns = self._costs.prefill_ns(len(matched) * self.block_size, num_more * self.block_size)
        return longer if swap_ns < recompute_ns else on_device

    def _on_device(self, blocks: Sequence[int]) -> FoundPrefix:
        return FoundPrefix([*blocks], num_unowned=self.pool.num_unused(blocks))

    def _continue_on_host(self, request: Request, found: FoundPrefix) -> FoundPrefix:
        """Continue the chain of `found` through both tiers."""
        longer = FoundPrefix(list(found.blocks), 0, found.num_unowned)
        for index in range(len(found.blocks), (request.num_tokens - 1) // self.block_size):
            content_hash = self.prefix_cache.hashes(request, index + 1)[index]
            block_id = self.pool.lookup(content_hash)
            if block_id is None and not self.host_tier.can_fetch(content_hash):
                break
            longer.blocks.append(block_id)
            if block_id is None:
                longer.num_on_host += 1
            elif not self.pool.is_used(block_id):
                longer.num_unowned += 1
        return longer

    def num_needed_blocks(self, request: Request, found: FoundPrefix) -> int:
        """Available blocks that the rest of the prompt takes after its found prefix."""
        return self.blocks_for(request.num_tokens) - len(found.blocks) + found.num_on_host + found.num_unowned

    def has_room(self, request: Request, found: FoundPrefix) -> bool:
        """Whether the whole prompt fits, with all promises kept."""
        return self.num_needed_blocks(request, found) <= self.num_spare

    def attach_prefix(self, request: Request, found: FoundPrefix) -> None:
        """Attach the found prefix to an admitted request, and promise it blocks for the rest of its prompt."""
        self.pool.share(block_id for block_id in found.blocks if block_id is not None)
        tier, hashes = self.host_tier, request.block_hashes
        # All host blocks are pinned before the first is swapped in: the device block that it gets may evict to the host tier.
        on_host = {index: tier.fetch(hashes[index]) for index, block_id in enumerate(found.blocks) if block_id is None}
        table: list[int] = []
        for index, block_id in enumerate(found.blocks):
            table.append(self._swap_in(hashes[index], on_host[index]) if block_id is None else block_id)
        self._append_blocks(request, table)
        request.num_computed_tokens = len(table) * self.block_size
        self._promise(request, self.blocks_for(request.num_tokens) - len(table))

    def _swap_in(self, content_hash: bytes, host_block: int) -> int:
        block_id = self.pool.allocate(1)[0]
        self._moves.swap_in.append((host_block, block_id))
        self.num_swapped_in += 1
        self.pool.register(block_id, content_hash)
        return block_id

    def _swap_out(self, block_id: int, content_hash: bytes) -> None:
        if content_hash in self.host_tier:
            self.host_tier.mark_used(content_hash)
            return
        host_block = self.host_tier.store(content_hash)
        if host_block is not None:
            self._moves.swap_out.append((block_id, host_block))
            self.num_swapped_out += 1

    def fork(self, request: Request, parent: Request) -> None:
        """Let `request` share the prompt blocks of `parent`, all of which are computed. The last token is computed again, in a
        copy of its block."""
        shared = parent.block_table[: self.blocks_for(request.num_prompt_tokens)]
        source, target = shared[-1], self.pool.allocate(1)[0]
        self.pool.share(shared)
        self._moves.copies.append((source, target))
        self._copy_sources.append(source)
        self._append_blocks(request, [*shared[:-1], target])
        request.num_computed_tokens = request.num_prompt_tokens - 1

    def extend(self, request: Request, num_tokens: int) -> None:
        """Hold blocks for the first `num_tokens` tokens, using promised blocks first."""
        missing = self.blocks_for(num_tokens) - len(request.block_table)
        if missing <= 0:
            return
        self._promise(request, -min(missing, request.num_promised_blocks))
        self._append_blocks(request, self.pool.allocate(missing))

    def register(self, request: Request, num_computed_before: int, num_computed: int) -> None:
        """Make findable the blocks of a prompt that became full between these numbers of tokens."""
        if self.prefix_cache.is_shared:
            self.prefix_cache.register(request, num_computed_before, num_computed)

    def grow(self, requests: list[Request]) -> None:
        """Allocate one more block for each of these requests, which have no promised blocks."""
        for request, block_id in zip(requests, self.pool.allocate(len(requests)), strict=True):
            request.block_table.append(block_id)
            account_of(request).num_blocks += 1

    def release(self, request: Request, *, is_preempted: bool = False, is_failed: bool = False) -> None:
        """Release all blocks. Before that, blocks filled by an answer become findable: hardly any request looks them up while
        the answer is being generated, and registering all at once takes a third of the time. A failed request leaves nothing
        findable. A preempted request finds the blocks of its prompt again, even where no other may."""
        is_shared = self.prefix_cache.is_shared
        if not is_failed and (is_shared or is_preempted):
            first = request.num_prompt_tokens if is_shared else 0
            self.prefix_cache.register(request, first, min(request.num_settled_tokens, request.num_tokens - 1))
        self._promise(request, -request.num_promised_blocks)
        self.pool.release(request.block_table, is_wanted=is_preempted if request.num_preemptions else None)
        account_of(request).num_blocks -= len(request.block_table)
        request.block_table = table_of()

    def _append_blocks(self, request: Request, blocks: Sequence[int]) -> None:
        request.block_table.extend(blocks)
        account_of(request).num_blocks += len(blocks)

    def _promise(self, request: Request, num_blocks: int) -> None:
        request.num_promised_blocks += num_blocks
        self._num_promised += num_blocks

    def pop_moves(self) -> BlockMoves:
        """All moves that must be made before the planned step runs; the next step starts with none."""
        moves, self._moves = self._moves, BlockMoves()
        self.pool.release(self._copy_sources)
        self._copy_sources = []
        self.host_tier.end_step()
        if moves.swap_in:
            moves.swap_in = list({target: (source, target) for source, target in moves.swap_in}.values())
        return moves

    def check_invariants(self, live: list[Request]) -> None:
        """Raise `AssertionError` unless tables, promises and both tiers agree."""
        self.pool.check_invariants(request.block_table for request in live)
        assert self._num_promised == sum(request.num_promised_blocks for request in live), "promises do not add up"
        assert self.num_spare >= 0, "more blocks are promised than there are"
        self.host_tier.check_invariants()
