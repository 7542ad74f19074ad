"""Blocks shared between requests: answers of one prompt, equal prompts, global prefixes, preempted requests, the host tier."""

from __future__ import annotations

from weakref import ref

import pytest

from engine.protocol import FinishReason
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.costs import TokenCosts
from engine.scheduling.host_tier import HostTier
from engine.scheduling.prefix_cache import PrefixCache
from engine.scheduling.request import RequestStatus
from engine.scheduling.scheduled_batch import StepOutput
from tests.support.scheduling import BLOCK_SIZE, apply_outputs, drain, make_request, make_scheduler, planned_tokens, step


def test_forks_share_the_blocks_of_the_prompt_and_copy_the_partial_one() -> None:
    scheduler = make_scheduler(budget=32)
    first = make_request("a", 10)
    forks = [make_request("a", 10, index=index, forked_from=first) for index in (1, 2)]
    scheduler.add(first)
    for fork in forks:
        scheduler.add(fork)
    assert planned_tokens(step(scheduler)) == [("a", 10)]
    batch = scheduler.schedule()
    assert planned_tokens(batch) == [("a", 1), ("a", 1), ("a", 1)]
    assert [item.start for item in batch.prefills] == [9, 9], "only the last prompt token is computed again"
    assert batch.moves.copies == [(first.block_table[2], fork.block_table[2]) for fork in forks]
    for fork in forks:
        assert fork.block_table[:2] == first.block_table[:2]
        assert (fork.num_cached_tokens, fork.num_prompt_tokens_computed) == (9, 9)
    events = apply_outputs(scheduler, batch)
    assert {event.index for event in events} == {0, 1, 2}
    drain(scheduler)
    assert scheduler.totals.prompt_tokens == 10, "the prompt of several answers counts once"


def test_if_the_first_answer_is_aborted_a_fork_computes_the_prompt() -> None:
    scheduler = make_scheduler()
    first = make_request("a", 12)
    fork = make_request("a", 12, index=1, forked_from=first)
    scheduler.add(first)
    scheduler.add(fork)
    assert scheduler.num_waiting == 2
    scheduler.abort(first)
    assert planned_tokens(step(scheduler)) == [("a", 12)]
    drain(scheduler)
    assert fork.finish_reason is FinishReason.LENGTH


def test_a_late_fork_shares_the_prompt_of_a_live_answer_or_computes_it() -> None:
    scheduler = make_scheduler(budget=32)
    first = make_request("a", 10)
    scheduler.add(first)
    step(scheduler)
    scheduler.add(make_request("a", 10, index=1, forked_from=first))
    assert planned_tokens(step(scheduler)) == [("a", 1), ("a", 1)]
    drain(scheduler)
    scheduler.add(make_request("a", 10, index=2, forked_from=first))
    assert planned_tokens(step(scheduler)) == [("a", 10)]
    drain(scheduler)


def test_parked_forks_end_with_the_first_answer_at_the_deadline() -> None:
    now = [0.0]
    scheduler = make_scheduler(max_num_seqs=1, clock=lambda: now[0])
    first = make_request("a", 12, queue_deadline_s=5.0)
    scheduler.add(make_request("holder", 4, max_tokens=20))
    scheduler.add(first)
    for index in (1, 2):
        scheduler.add(make_request("a", 12, index=index, forked_from=first))
    step(scheduler)
    now[0] = 5.0
    assert sorted(event.index for event in scheduler.expire()) == [0, 1, 2]
    assert scheduler.num_waiting == 0
    drain(scheduler)


def test_a_parked_fork_can_be_aborted() -> None:
    scheduler = make_scheduler()
    first = make_request("a", 12)
    fork = make_request("a", 12, index=1, forked_from=first)
    scheduler.add(first)
    scheduler.add(fork)
    event = scheduler.abort(fork)
    assert event is not None
    assert (event.index, event.finish_reason) == (1, FinishReason.ABORTED)
    drain(scheduler)


def test_equal_prompts_that_arrive_together_are_computed_once() -> None:
    scheduler = make_scheduler(num_blocks=64, budget=8, caches=True)
    first, second = make_request("first", 24), make_request("second", 24)
    scheduler.add(first)
    scheduler.add(second)
    computed = 0
    while second.status is not RequestStatus.DECODE:
        computed += sum(item.num_tokens for item in step(scheduler).prefills)
    assert computed == 24 + BLOCK_SIZE, "the second computes its last block only"
    assert second.num_cached_tokens == 20


def test_a_different_prompt_does_not_wait_for_equal_ones() -> None:
    scheduler = make_scheduler(num_blocks=64, budget=8, caches=True)
    for name, first_token in (("first", 100), ("second", 100), ("other", 500)):
        scheduler.add(make_request(name, 6, first_token=first_token))
    assert planned_tokens(step(scheduler)) == [("first", 6), ("other", 2)]


def test_a_global_prefix_is_shared_between_tenants_but_nothing_after_it() -> None:
    system = list(range(100, 108))
    scheduler = make_scheduler(num_blocks=32, budget=32, caches=True, global_prefix=system)
    alices, charlies = make_request("a", 15), make_request("c", 15, tenant="charlie")
    scheduler.add(alices)
    step(scheduler)
    scheduler.add(charlies)
    step(scheduler)
    assert charlies.num_cached_tokens == 8
    assert charlies.block_table[:2] == alices.block_table[:2]
    assert charlies.block_table[2] != alices.block_table[2]


def test_a_prompt_that_diverges_within_the_global_prefix_shares_the_blocks_before() -> None:
    cache = PrefixCache(BlockPool(8), BLOCK_SIZE)
    cache.share_globally(list(range(100, 112)))
    mine, theirs = make_request("a", 12), make_request("c", 12, tenant="charlie")
    theirs.token_ids[6] = 5
    own, other = cache.hashes(mine, 3), cache.hashes(theirs, 3)
    assert own[0] == other[0]
    assert own[1] != other[1]
    again = make_request("b", 12, tenant="bob")
    again.token_ids[6] = 5
    assert cache.hashes(again, 3)[1:] != other[1:], "behind the shared part the tenant decides"


def test_hashes_computed_in_parts_equal_those_computed_at_once() -> None:
    cache = PrefixCache(BlockPool(8), BLOCK_SIZE)
    at_once, in_parts = make_request("a", 24), make_request("b", 24)
    cache.hashes(at_once, 6)
    for num_blocks in (1, 2, 5, 6):
        cache.hashes(in_parts, num_blocks)
    assert in_parts.block_hashes == at_once.block_hashes


@pytest.mark.parametrize("num_left", [6, 5, 3, 1, 0])
def test_match_len_counts_cached_tokens_without_allocating_blocks(num_left: int) -> None:
    pool = BlockPool(6)
    cache = PrefixCache(pool, BLOCK_SIZE)
    first = make_request("a", 24)
    first.block_table.extend(pool.allocate(6))
    cache.register(first, 0, 24)
    pool.release(first.block_table)
    unread, read_in_part, read = (make_request(name, 24) for name in "bcd")
    cache.hashes(read_in_part, 2)
    cache.hashes(read, 6)
    pool.allocate(6 - num_left)
    assert [cache.match_len(each) for each in (unread, read_in_part, read)] == [min(num_left, 5)] * 3, "the last is computed"
    assert len(cache.match(unread)) == min(num_left, 5)


def test_a_finished_request_with_a_chunked_prompt_is_not_kept_alive() -> None:
    scheduler = make_scheduler(num_blocks=32, budget=8, caches=True)
    request = make_request("a", 40)
    request_ref = ref(request)
    scheduler.add(request)
    step(scheduler)
    step(scheduler)
    scheduler.preempt(request)
    drain(scheduler)
    del request
    scheduler.add(make_request("b", 10, first_token=500))
    drain(scheduler)
    assert request_ref() is None


def test_a_preempted_request_reuses_its_own_blocks_without_a_prefix_cache() -> None:
    scheduler = make_scheduler(budget=32)
    request = make_request("a", 10, max_tokens=8)
    scheduler.add(request)
    for _ in range(3):
        step(scheduler)
    scheduler.preempt(request)
    scheduler.check_invariants()
    assert (request.num_computed_tokens, scheduler.pool.num_used) == (0, 0)
    batch = step(scheduler)
    assert [(item.start, item.num_tokens) for item in batch.prefills] == [(12, 1)]
    other = make_request("b", 10)
    scheduler.add(other)
    step(scheduler)
    assert other.num_cached_tokens == 0, "nothing is shared with others"
    drain(scheduler)


@pytest.mark.parametrize(("end", "num_found"), [("length", 16), ("abort", 16), ("preempt", 16), ("error", 8)])
def test_blocks_of_an_answer_are_cached_unless_the_answer_failed(end: str, num_found: int) -> None:
    scheduler = make_scheduler(num_blocks=32, caches=True)
    request = make_request("a", 10, max_tokens=7 if end == "length" else 9)
    scheduler.add(request)
    for _ in range(7):
        step(scheduler)
    next_prefill = make_request("b", 10)
    next_prefill.token_ids = [*request.token_ids, 1, 2, 3, 4]
    next_prefill.num_prompt_tokens = len(next_prefill.token_ids)
    next_prefill.max_total_tokens = next_prefill.num_prompt_tokens + 4
    if end == "abort":
        scheduler.abort(request)
    elif end == "preempt":
        scheduler.preempt(request)
    elif end == "error":
        scheduler.apply(scheduler.schedule(), [StepOutput(error="broken")])
    assert request.is_finished or end == "preempt"
    scheduler.add(next_prefill)
    step(scheduler)
    assert next_prefill.num_cached_tokens == num_found
    drain(scheduler)


def test_evicted_blocks_are_swapped_out_and_swapped_in_again() -> None:
    scheduler = make_scheduler(num_blocks=4, budget=16, caches=True, host_blocks=8)
    scheduler.add(make_request("a", 9, max_tokens=1))
    step(scheduler)
    scheduler.add(make_request("b", 15, max_tokens=1, tenant="bob"))
    batch = scheduler.schedule()
    assert len(batch.moves.swap_out) == 2, "both full blocks of the first prompt were evicted"
    apply_outputs(scheduler, batch)
    again = make_request("again", 9, max_tokens=1)
    scheduler.add(again)
    batch = scheduler.schedule()
    assert len(batch.moves.swap_in) == 2
    assert {target for _, target in batch.moves.swap_in} == set(again.block_table[:2])
    assert again.num_cached_tokens == 8
    apply_outputs(scheduler, batch)
    assert (scheduler.kv.num_swapped_out, scheduler.kv.num_swapped_in) == (4, 2)
    scheduler.add(make_request("third", 9, max_tokens=1))
    assert not scheduler.schedule().moves, "they are on the device again"


def test_blocks_are_recomputed_if_that_is_cheaper_than_swapping_in() -> None:
    scheduler = make_scheduler(num_blocks=4, caches=True, host_blocks=8, costs=TokenCosts(swap_in_block_ps=10**12))
    scheduler.add(make_request("a", 9, max_tokens=1))
    step(scheduler)
    scheduler.add(make_request("b", 15, max_tokens=1, tenant="bob"))
    step(scheduler)
    again = make_request("again", 9, max_tokens=1)
    scheduler.add(again)
    assert not scheduler.schedule().moves.swap_in
    assert again.num_cached_tokens == 0


def test_the_host_tier_evicts_the_least_recently_used_block_not_used_by_this_step() -> None:
    tier = HostTier(2)
    a, b, c, d = (bytes([number]) for number in range(4))
    assert {tier.store(a), tier.store(b)} == {0, 1}
    assert not tier.can_fetch(a), "it is only being written by this step"
    assert tier.store(c) is None, "both are named by this step"
    tier.end_step()
    assert tier.fetch(a) in (0, 1)
    assert tier.store(c) is not None
    assert b not in tier
    assert tier.store(d) is None
    tier.check_invariants()


def test_the_host_tier_stores_nothing_if_this_step_uses_all_its_blocks() -> None:
    tier = HostTier(3)
    for content in (b"a", b"b", b"c"):
        tier.store(content)
    tier.end_step()
    tier.fetch(b"a")
    tier.end_step()
    assert tier.store(b"d") == 1, "b is the least recently used"
    tier.mark_used(b"c")
    tier.end_step()
    assert tier.store(b"e") == 0, "a is"
    tier.end_step()
    tier.fetch(b"d"), tier.fetch(b"c")
    tier.mark_used(b"e")
    assert tier.store(b"f") == 0, "the others were used before, but this step names them"
    assert tier.store(b"g") is None


def test_a_probe_drops_evicted_content_instead_of_swapping_it_out() -> None:
    scheduler = make_scheduler(num_blocks=4, caches=True, host_blocks=4)
    scheduler.add(make_request("a", 15, max_tokens=1))
    step(scheduler)
    with scheduler.probe() as first, scheduler.probe() as second:
        assert first is not None
        assert second is not None
        assert first.request.block_table != second.request.block_table
    scheduler.check_invariants()
    scheduler.add(make_request("b", 1, max_tokens=1))
    assert not scheduler.schedule().moves


def test_shared_blocks_of_a_running_request_are_counted_once_in_the_forecast() -> None:
    scheduler = make_scheduler(num_blocks=16, budget=64, caches=True)
    scheduler.add(make_request("a", 32, max_tokens=8))
    step(scheduler)
    second = make_request("b", 33, max_tokens=8)
    scheduler.add(second)
    step(scheduler)
    assert second.status is RequestStatus.DECODE, "40 slots and 12 of its own are fewer than 64"


def test_cached_blocks_without_a_running_request_are_counted_for_the_next_one() -> None:
    scheduler = make_scheduler(num_blocks=32, budget=64, caches=True)
    first = make_request("a", 33)
    scheduler.add(first)
    step(scheduler)
    scheduler.abort(first)
    scheduler.add(make_request("long", 60, max_tokens=20, first_token=500))
    second = make_request("b", 33, max_tokens=20)
    step(scheduler)
    scheduler.add(second)
    step(scheduler)
    assert second.status is RequestStatus.QUEUED, "80 slots and 56 are more than 128"
    drain(scheduler)
    assert second.num_cached_tokens == 32
