"""The KV block pool: reference counts, order of eviction, protection of content that was reused, and internal fragmentation."""

from __future__ import annotations

import random
from unittest import mock

import pytest

from engine.protocol import Priority
from engine.scheduling.block_pool import BlockPool, OutOfBlocks
from engine.scheduling.costs import TokenCosts
from engine.scheduling.host_tier import HostTier
from engine.scheduling.kv_blocks import KvBlocks
from engine.scheduling.prefix_cache import FIRST_LOOKUP_BLOCKS, PrefixCache
from tests.support.scheduling import BLOCK_SIZE, apply_outputs, drain, make_request, make_scheduler, step


def add_cached(pool: BlockPool, *names: bytes) -> list[int]:
    blocks = pool.allocate(len(names))
    for block_id, name in zip(blocks, names, strict=True):
        pool.register(block_id, name)
    pool.release(blocks)
    return blocks


def test_reused_content_outlives_newer_content_that_was_never_reused() -> None:
    pool = BlockPool(4, protected_percent=50)
    (found,) = add_cached(pool, b"found")
    pool.share([found])
    pool.release([found])
    add_cached(pool, b"x", b"y", b"z")
    pool.release(pool.allocate(3))
    assert pool.lookup(b"found") == found
    assert pool.lookup(b"z") is None
    pool.check_invariants([])


def test_content_beyond_the_protected_share_stays_cached_unprotected() -> None:
    pool = BlockPool(4, protected_percent=25)
    for block_id in add_cached(pool, b"a", b"b"):
        pool.share([block_id])
        pool.release([block_id])
    pool.check_invariants([])
    assert pool.num_cached == 2


def test_of_reused_content_the_least_recently_used_is_evicted_first() -> None:
    pool = BlockPool(4, protected_percent=50)
    for block_id in add_cached(pool, b"a", b"b", b"c"):
        pool.share([block_id])
        pool.release([block_id])
    pool.allocate(2)
    assert [pool.lookup(name) is not None for name in (b"a", b"b", b"c")] == [False, True, True]


@pytest.mark.parametrize(("percent", "num_reused", "evicted"), [(50, 2, b"d"), (50, 3, b"a"), (0, 3, b"a")])
def test_no_more_than_the_protected_share_of_the_pool_is_protected(percent: int, num_reused: int, evicted: bytes) -> None:
    pool, names = BlockPool(4, protected_percent=percent), [b"a", b"b", b"c", b"d"]
    for block_id in add_cached(pool, *names[:num_reused]):
        for _ in range(2):
            pool.share([block_id])
            assert pool.num_used == 1
            pool.release([block_id])
    add_cached(pool, *names[num_reused:])
    pool.check_invariants([])
    pool.allocate(1)
    assert [name for name in names if pool.lookup(name) is None] == [evicted]


def test_a_block_keeps_its_first_content_hash_and_a_hash_its_first_block() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.register(first, b"a")
    pool.register(first, b"b")
    pool.register(second, b"a")
    assert [pool.lookup(b"a"), pool.lookup(b"b")] == [first, None]
    pool.check_invariants([[first, second]])


def test_content_released_as_wanted_is_protected_until_it_is_released_as_unwanted() -> None:
    pool = BlockPool(4, protected_percent=50)
    for is_wanted in (True, False):
        (block_id,) = pool.allocate(1)
        pool.register(block_id, b"own")
        pool.release([block_id], is_wanted=is_wanted)
        add_cached(pool, b"x", b"y", b"z")
        pool.release(pool.allocate(3))
        assert (pool.lookup(b"own") is not None) == is_wanted
        pool.release(pool.allocate(4))


def test_new_content_of_a_block_does_not_inherit_the_protection_of_old_content() -> None:
    pool = BlockPool(2, protected_percent=50)
    (found,) = add_cached(pool, b"found")
    pool.share([found])
    pool.release([found])
    pool.release(pool.allocate(2))
    add_cached(pool, b"new", b"newer")
    assert pool.num_cached == 2
    pool.allocate(1)
    assert pool.lookup(b"newer") is None
    pool.allocate(1)
    assert pool.lookup(b"new") is None


def test_on_evict_is_called_for_the_last_block_of_a_chain_first() -> None:
    pool = BlockPool(2)
    evicted: list[tuple[int, bytes]] = []
    pool.on_evict = lambda block_id, content_hash: evicted.append((block_id, content_hash))
    blocks = add_cached(pool, b"a", b"b")
    pool.allocate(1)
    assert evicted == [(blocks[1], b"b")], "the end of a chain goes first"


def test_scratch_allocation_evicts_without_calling_on_evict() -> None:
    pool = BlockPool(1)
    pool.on_evict = mock.Mock(side_effect=AssertionError("on_evict was called"))
    add_cached(pool, b"a")
    block_id = pool.allocate_scratch()
    assert block_id == 0
    with pytest.raises(OutOfBlocks):
        pool.allocate_scratch()
    pool.release([0])
    assert pool.lookup(b"a") is None, "it was written over"
    pool.check_invariants([])


def test_scratch_allocation_takes_the_least_recently_used_block_if_all_were_reused() -> None:
    pool = BlockPool(2, protected_percent=100)
    first, second = add_cached(pool, b"a", b"b")
    for block_id in (first, second):
        pool.share([block_id])
        pool.release([block_id])
    assert pool.allocate_scratch() == first
    assert (pool.lookup(b"a"), pool.lookup(b"b")) == (None, second)
    pool.check_invariants([[first]])


def test_a_prompt_in_chunks_holds_blocks_of_its_computed_chunks_only() -> None:
    scheduler = make_scheduler(num_blocks=32, budget=8)
    request = make_request("long", 40)
    scheduler.add(request)
    step(scheduler)
    assert (len(request.block_table), request.num_promised_blocks) == (2, 8)
    assert scheduler.kv.num_spare == 22
    scheduler.abort(request)
    scheduler.check_invariants()
    assert scheduler.kv.num_spare == 32


def test_less_than_four_percent_of_held_token_positions_are_empty_at_saturation() -> None:
    scheduler = make_scheduler(num_blocks=2500, max_num_seqs=64, budget=512)
    rng = random.Random(5)
    empty_shares: list[float] = []
    for number in range(200):
        scheduler.add(make_request(str(number), rng.randint(50, 400), max_tokens=rng.randint(10, 300)))
    while scheduler.num_waiting:
        batch = scheduler.schedule()
        apply_outputs(scheduler, batch)
        if scheduler.pool.num_used > 1500:
            num_filled = sum(request.num_computed_tokens for request in scheduler.running)
            empty_shares.append(1 - num_filled / (scheduler.pool.num_used * BLOCK_SIZE))
    assert len(empty_shares) > 50
    assert max(empty_shares) < 0.04
    drain(scheduler, 3000)


def test_tenant_status_counts_running_and_waiting_requests_blocks_and_service() -> None:
    scheduler = make_scheduler(num_blocks=32, max_num_seqs=2, budget=64)
    for name, tenant in (("a", "alice"), ("b", "bob"), ("b2", "bob")):
        scheduler.add(make_request(name, 9, tenant=tenant))
    scheduler.add(make_request("b3", 9, tenant="bob", priority=Priority.BATCH))
    step(scheduler)
    status = {tenant.tenant_id: tenant for tenant in scheduler.accounts.progress()}
    assert (status["alice"].num_running, status["alice"].num_waiting, status["alice"].kv_blocks) == (1, 0, 3)
    assert (status["bob"].num_running, status["bob"].num_waiting, status["bob"].kv_blocks) == (1, 2, 3)
    assert status["alice"].service_s == pytest.approx(scheduler.costs.prefill_ps(0, 9) / 1e12)


def test_a_prompt_without_a_cache_hit_has_only_its_first_blocks_hashed() -> None:
    request = make_request("a", 100 * BLOCK_SIZE)
    assert PrefixCache(BlockPool(8), BLOCK_SIZE).match(request) == []
    assert len(request.block_hashes) == FIRST_LOOKUP_BLOCKS


def test_idle_blocks_behind_a_block_in_the_host_tier_count_as_needed() -> None:
    pool, tier = BlockPool(5), HostTier(1)
    cache = PrefixCache(pool, BLOCK_SIZE)
    kv = KvBlocks(pool, costs=TokenCosts(), prefix_cache=cache, host_tier=tier)
    request = make_request("a", 5 * BLOCK_SIZE)
    first, second, third, fourth, _ = cache.hashes(request, 5)
    tier.store(first)
    tier.end_step()
    idle = [*add_cached(pool, second), *add_cached(pool, third)]
    (held,) = pool.allocate(1)
    pool.register(held, fourth)
    found = kv.find(request)
    assert found.blocks == [None, *idle, held]
    assert kv.num_needed_blocks(request, found) == 4, "one for what is copied in, two that nobody holds, and the last one"
    assert kv.has_room(request, found)
    pool.allocate(1)
    assert not kv.has_room(request, kv.find(request))


@pytest.mark.parametrize(("swap_in_block_ps", "num_found"), [(BLOCK_SIZE * 10 - 1, 3), (BLOCK_SIZE * 10, 2)])
def test_fetching_from_the_host_tier_is_weighed_only_against_tokens_it_saves(swap_in_block_ps: int, num_found: int) -> None:
    """Computing a block costs 40 ns, fetching it as much or less. The two blocks before it are on the device."""
    costs = TokenCosts(prefill_token_ps=10_000, prefill_pair_ps=0, swap_in_block_ps=1000 * swap_in_block_ps)
    pool, tier = BlockPool(5), HostTier(1)
    cache = PrefixCache(pool, BLOCK_SIZE)
    kv = KvBlocks(pool, costs=costs, prefix_cache=cache, host_tier=tier)
    request = make_request("a", 4 * BLOCK_SIZE)
    first, second, third, _ = cache.hashes(request, 4)
    add_cached(pool, first, second)
    tier.store(third)
    tier.end_step()
    assert len(kv.find(request).blocks) == num_found


def test_extending_to_fewer_tokens_than_are_held_changes_nothing() -> None:
    scheduler = make_scheduler(num_blocks=32, budget=8)
    request = make_request("long", 40)
    scheduler.add(request)
    step(scheduler)
    scheduler.kv.extend(request, 1)
    assert (len(request.block_table), request.num_promised_blocks, scheduler.kv.num_spare) == (2, 8, 22)
