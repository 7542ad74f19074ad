"""Blocks: who holds them, who is evicted first, what is wasted."""

from __future__ import annotations

import random

from engine.protocol import Priority
from engine.scheduling.block_pool import BlockPool
from tests.support.scheduling import BLOCK_SIZE, drain, finish, make_request, make_scheduler, step


def cached(pool: BlockPool, *names: bytes) -> list[int]:
    blocks = pool.allocate(len(names))
    for block_id, name in zip(blocks, names, strict=True):
        pool.register(block_id, name)
    pool.release(blocks)
    return blocks


def test_content_that_was_found_again_outlives_newer_content_that_was_not() -> None:
    pool = BlockPool(4, protected_percent=50)
    (found,) = cached(pool, b"found")
    pool.share(found)
    pool.release([found])
    cached(pool, b"x", b"y", b"z")
    pool.release(pool.allocate(3))
    assert pool.lookup(b"found") == found
    assert pool.lookup(b"z") is None
    pool.check_invariants([])


def test_protected_content_is_bounded_and_falls_back_to_the_others() -> None:
    pool = BlockPool(4, protected_percent=25)
    for block_id in cached(pool, b"a", b"b"):
        pool.share(block_id)
        pool.release([block_id])
    pool.check_invariants([])
    assert pool.num_cached == 2


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
    block_id = pool.lend()
    assert block_id == 0
    assert pool.lend() is None
    pool.release([0])
    pool.check_invariants([])


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
        finish(scheduler, batch)
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
    assert told["alice"].service_s > 0
