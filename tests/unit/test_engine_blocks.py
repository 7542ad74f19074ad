"""Blocks: ownership, order of eviction, and waste."""

from __future__ import annotations

import random

import pytest

from engine.protocol import Priority
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.costs import TokenCosts
from engine.scheduling.host_tier import HostTier
from engine.scheduling.kv_blocks import KvBlocks
from engine.scheduling.prefix_cache import FIRST_LOOKUP_BLOCKS, PrefixCache
from tests.support.scheduling import BLOCK_SIZE, apply_outputs, drain, make_request, make_scheduler, step


def cached(pool: BlockPool, *names: bytes) -> list[int]:
    blocks = pool.allocate(len(names))
    for block_id, name in zip(blocks, names, strict=True):
        pool.register(block_id, name)
    pool.release(blocks)
    return blocks


def test_content_that_was_found_again_outlives_newer_content_that_was_not() -> None:
    pool = BlockPool(4, protected_percent=50)
    (found,) = cached(pool, b"found")
    pool.share([found])
    pool.release([found])
    cached(pool, b"x", b"y", b"z")
    pool.release(pool.allocate(3))
    assert pool.lookup(b"found") == found
    assert pool.lookup(b"z") is None
    pool.check_invariants([])


def test_protected_content_is_bounded_and_falls_back_to_the_others() -> None:
    pool = BlockPool(4, protected_percent=25)
    for block_id in cached(pool, b"a", b"b"):
        pool.share([block_id])
        pool.release([block_id])
    pool.check_invariants([])
    assert pool.num_cached == 2


def test_of_content_that_was_found_again_the_latest_is_kept() -> None:
    pool = BlockPool(4, protected_percent=50)
    for block_id in cached(pool, b"a", b"b", b"c"):
        pool.share([block_id])
        pool.release([block_id])
    pool.allocate(2)
    assert [pool.lookup(name) is not None for name in (b"a", b"b", b"c")] == [False, True, True]


@pytest.mark.parametrize(("percent", "num_found", "evicted"), [(50, 2, b"d"), (50, 3, b"a"), (0, 3, b"a")])
def test_of_content_that_was_found_again_its_share_of_the_pool_is_protected_and_no_more(
    percent: int, num_found: int, evicted: bytes
) -> None:
    pool, names = BlockPool(4, protected_percent=percent), [b"a", b"b", b"c", b"d"]
    for block_id in cached(pool, *names[:num_found]):
        for _ in range(2):
            pool.share([block_id])
            assert pool.num_used == 1
            pool.release([block_id])
    cached(pool, *names[num_found:])
    pool.check_invariants([])
    pool.allocate(1)
    assert [name for name in names if pool.lookup(name) is None] == [evicted]


def test_a_block_is_found_by_its_first_content_hash_and_a_hash_finds_its_first_block() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.register(first, b"a")
    pool.register(first, b"b")
    pool.register(second, b"a")
    assert [pool.lookup(b"a"), pool.lookup(b"b")] == [first, None]
    pool.check_invariants([[first, second]])


def test_content_that_its_owner_will_come_back_for_outlives_the_rest_until_the_owner_has_been_back() -> None:
    pool = BlockPool(4, protected_percent=50)
    for is_wanted in (True, False):
        (block_id,) = pool.allocate(1)
        pool.register(block_id, b"own")
        pool.release([block_id], is_wanted=is_wanted)
        cached(pool, b"x", b"y", b"z")
        pool.release(pool.allocate(3))
        assert (pool.lookup(b"own") is not None) == is_wanted
        pool.release(pool.allocate(4))


def test_new_content_of_a_block_is_not_kept_for_what_was_found_in_it_before() -> None:
    pool = BlockPool(2, protected_percent=50)
    (found,) = cached(pool, b"found")
    pool.share([found])
    pool.release([found])
    pool.release(pool.allocate(2))
    cached(pool, b"new", b"newer")
    assert pool.num_cached == 2
    pool.allocate(1)
    assert pool.lookup(b"newer") is None
    pool.allocate(1)
    assert pool.lookup(b"new") is None


def test_evicted_content_is_announced_before_its_block_is_given_away() -> None:
    pool = BlockPool(2)
    told: list[tuple[int, bytes]] = []
    pool.on_evict = lambda block_id, content_hash: told.append((block_id, content_hash))
    blocks = cached(pool, b"a", b"b")
    pool.allocate(1)
    assert told == [(blocks[1], b"b")], "the end of a chain goes first"


def test_a_lent_block_is_taken_without_a_word() -> None:
    pool = BlockPool(1)
    pool.on_evict = lambda block_id, content_hash: (_ for _ in ()).throw(AssertionError("told"))
    cached(pool, b"a")
    block_id = pool.allocate_scratch()
    assert block_id == 0
    assert pool.allocate_scratch() is None
    pool.release([0])
    assert pool.lookup(b"a") is None, "it was written over"
    pool.check_invariants([])


def test_where_all_content_was_found_again_the_one_not_used_for_longest_is_lent() -> None:
    pool = BlockPool(2, protected_percent=100)
    first, second = cached(pool, b"a", b"b")
    for block_id in (first, second):
        pool.share([block_id])
        pool.release([block_id])
    assert pool.allocate_scratch() == first
    assert (pool.lookup(b"a"), pool.lookup(b"b")) == (None, second)
    pool.check_invariants([[first]])


def test_a_prompt_holds_the_blocks_of_its_computed_chunks_only() -> None:
    scheduler = make_scheduler(num_blocks=32, budget=8)
    request = make_request("long", 40)
    scheduler.add(request)
    step(scheduler)
    assert (len(request.block_table), request.num_promised_blocks) == (2, 8)
    assert scheduler.kv.num_spare == 22
    scheduler.abort(request)
    scheduler.check_invariants()
    assert scheduler.kv.num_spare == 32


def test_less_than_four_percent_of_the_held_slots_are_empty_at_saturation() -> None:
    scheduler = make_scheduler(num_blocks=2500, max_num_seqs=64, budget=512)
    numbers = random.Random(5)
    shares: list[float] = []
    for number in range(200):
        scheduler.add(make_request(str(number), numbers.randint(50, 400), max_tokens=numbers.randint(10, 300)))
    while scheduler.num_waiting:
        batch = scheduler.schedule()
        apply_outputs(scheduler, batch)
        if scheduler.pool.num_used > 1500:
            held = sum(request.num_computed_tokens for request in scheduler.running)
            shares.append(1 - held / (scheduler.pool.num_used * BLOCK_SIZE))
    assert len(shares) > 50
    assert max(shares) < 0.04
    drain(scheduler, 3000)


def test_a_tenant_is_told_what_it_holds() -> None:
    scheduler = make_scheduler(num_blocks=32, max_num_seqs=2, budget=64)
    for name, tenant in (("a", "alice"), ("b", "bob"), ("b2", "bob")):
        scheduler.add(make_request(name, 9, tenant=tenant))
    scheduler.add(make_request("b3", 9, tenant="bob", priority=Priority.BATCH))
    step(scheduler)
    told = {tenant.tenant_id: tenant for tenant in scheduler.tenants()}
    assert (told["alice"].num_running, told["alice"].num_waiting, told["alice"].kv_blocks) == (1, 0, 3)
    assert (told["bob"].num_running, told["bob"].num_waiting, told["bob"].kv_blocks) == (1, 2, 3)
    assert told["alice"].service_s == pytest.approx(scheduler.costs.prefill_ps(0, 9) / 1e12)


def test_of_a_prompt_that_hits_nothing_only_the_first_few_blocks_are_hashed() -> None:
    request = make_request("a", 100 * BLOCK_SIZE)
    assert PrefixCache(BlockPool(8), BLOCK_SIZE).match(request) == []
    assert len(request.block_hashes) == FIRST_LOOKUP_BLOCKS


def test_a_block_that_nobody_holds_is_counted_behind_one_in_main_memory_too() -> None:
    pool, tier = BlockPool(5), HostTier(1)
    cache = PrefixCache(pool, BLOCK_SIZE)
    kv = KvBlocks(pool, costs=TokenCosts(), prefix_cache=cache, host_tier=tier)
    request = make_request("a", 5 * BLOCK_SIZE)
    first, second, third, fourth, _ = cache.hashes(request, 5)
    tier.store(first)
    tier.end_step()
    idle = [*cached(pool, second), *cached(pool, third)]
    (held,) = pool.allocate(1)
    pool.register(held, fourth)
    found = kv.find(request)
    assert found.blocks == [None, *idle, held]
    assert kv.num_needed_blocks(request, found) == 4, "one for what is copied in, two that nobody holds, and the last one"
    assert kv.has_room(request, found)
    pool.allocate(1)
    assert not kv.has_room(request, kv.find(request))


@pytest.mark.parametrize(("swap_in_block_ps", "num_found"), [(BLOCK_SIZE * 10 - 1, 3), (BLOCK_SIZE * 10, 2)])
def test_only_what_lies_behind_the_blocks_on_the_device_is_weighed_against_main_memory(
    swap_in_block_ps: int, num_found: int
) -> None:
    """A block costs 40 ns computed and as much or less moved; two before it are there in any case."""
    costs = TokenCosts(prefill_token_ps=10_000, prefill_pair_ps=0, swap_in_block_ps=1000 * swap_in_block_ps)
    pool, tier = BlockPool(5), HostTier(1)
    cache = PrefixCache(pool, BLOCK_SIZE)
    kv = KvBlocks(pool, costs=costs, prefix_cache=cache, host_tier=tier)
    request = make_request("a", 4 * BLOCK_SIZE)
    first, second, third, _ = cache.hashes(request, 4)
    cached(pool, first, second)
    tier.store(third)
    tier.end_step()
    assert len(kv.find(request).blocks) == num_found


def test_blocks_for_fewer_tokens_than_are_held_change_no_promise() -> None:
    scheduler = make_scheduler(num_blocks=32, budget=8)
    request = make_request("long", 40)
    scheduler.add(request)
    step(scheduler)
    scheduler.kv.extend(request, 1)
    assert (len(request.block_table), request.num_promised_blocks, scheduler.kv.num_spare) == (2, 8, 22)
