"""The scheduler's order and bounds: decodes, chunks, skips, preemption, prefix sharing, cached blocks, steps launched ahead."""

from __future__ import annotations

from unittest import mock

import pytest

import engine.scheduling.scheduler
from engine.errors import EngineConfigError
from engine.protocol import FinishReason
from engine.scheduling import decode_set
from engine.scheduling.block_pool import BlockPool, OutOfBlocks
from engine.scheduling.drafting import NO_DRAFT, Draft
from engine.scheduling.in_flight_batch import InFlightBatch
from engine.scheduling.limits import SchedulerLimits
from engine.scheduling.policy import SCAN_REQUESTS_MAX, SKIPS_MAX
from engine.scheduling.request import IllegalTransition, Request, RequestStatus
from engine.scheduling.scheduled_batch import StepOutput
from engine.scheduling.scheduler import Scheduler
from tests.support.scheduling import BLOCK_SIZE, drain, make_request, make_scheduler, planned_tokens, step


def test_a_step_has_decodes_first_then_chunks_of_started_prompts_then_new_requests() -> None:
    scheduler = make_scheduler(budget=10)
    scheduler.add(make_request("a", 3))
    assert planned_tokens(step(scheduler)) == [("a", 3)]
    scheduler.add(make_request("b", 14))
    scheduler.add(make_request("c", 5))
    assert planned_tokens(step(scheduler)) == [("a", 1), ("b", 9)]
    assert planned_tokens(step(scheduler)) == [("a", 1), ("b", 5), ("c", 4)]
    assert planned_tokens(step(scheduler)) == [("a", 1), ("b", 1), ("c", 1)]


def test_the_list_of_decodes_is_reused_until_a_request_starts_ends_or_is_preempted() -> None:
    scheduler = make_scheduler()
    first, second = make_request("a", 2, max_tokens=9), make_request("b", 2, max_tokens=9)
    scheduler.add(first)
    scheduler.add(second)
    step(scheduler)
    lists = [step(scheduler).decodes for _ in range(4)]  # tables grow meanwhile
    assert all(each is lists[0] for each in lists)
    scheduler.preempt(first)
    alone = step(scheduler)
    assert planned_tokens(alone) == [("b", 1), ("a", 3)]  # its first block was found again
    again = step(scheduler)
    assert planned_tokens(again) == [("b", 1), ("a", 1)]
    scheduler.abort(second)
    assert len({id(each.decodes) for each in (alone, again, step(scheduler))} | {id(lists[0])}) == 4


def test_a_step_names_the_decodes_whose_last_token_it_samples() -> None:
    scheduler = make_scheduler()
    for name, max_tokens in (("a", 1), ("b", 3), ("c", 5)):
        scheduler.add(make_request(name, 2, max_tokens=max_tokens))
    named = [[request.request_id for request in step(scheduler).ending] for _ in range(5)]
    assert named == [[], [], ["b"], [], ["c"]], "a has its only token from its prompt"


def test_a_request_that_ends_before_its_last_step_is_not_kept_until_then() -> None:
    scheduler = make_scheduler()
    request = make_request("a", 2, max_tokens=40)
    scheduler.add(request)
    step(scheduler)
    assert list(scheduler._decodes._ending.values()) == [{request: None}]
    scheduler.abort(request)
    assert not scheduler._decodes._ending


def test_no_more_than_max_num_seqs_requests_run() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for name in "abc":
        scheduler.add(make_request(name, 2, max_tokens=1))
    assert planned_tokens(step(scheduler)) == [("a", 2), ("b", 2)]
    assert planned_tokens(step(scheduler)) == [("c", 2)]


def test_when_blocks_run_out_the_youngest_request_is_preempted_and_resumes_later() -> None:
    scheduler = make_scheduler(num_blocks=4)
    for _ in range(3):  # short answers so far: both are expected to end at once
        scheduler.add(make_request("short", 1, max_tokens=1))
        step(scheduler)
    old, young = make_request("old", 7, max_tokens=8), make_request("young", 7, max_tokens=8)
    for request in (old, young):
        scheduler.add(request)
    for _ in range(3):
        batch = step(scheduler)
    assert planned_tokens(batch) == [("old", 1)]
    assert (young.status, young.num_preemptions, len(young.block_table)) == (RequestStatus.QUEUED, 1, 0)
    assert scheduler.num_running == 1, "a preempted request has no seat"
    while scheduler.has_requests:
        step(scheduler)
    assert (old.num_preemptions, old.num_output_tokens, young.num_output_tokens) == (0, 8, 8)
    assert scheduler.totals.prompt_tokens == 17, "a prompt that is computed again counts once"
    assert scheduler.totals.generation_tokens == 19
    assert scheduler.totals.recomputed_tokens == 8, "nothing was left of seven and one"


def test_a_request_that_is_predicted_to_run_out_of_blocks_is_not_started() -> None:
    scheduler = make_scheduler(num_blocks=4)
    old, young = make_request("old", 7, max_tokens=8), make_request("young", 7, max_tokens=8)
    for request in (old, young):
        scheduler.add(request)
    while not old.is_finished:
        assert young.status is RequestStatus.QUEUED
        step(scheduler)
    while scheduler.has_requests:
        step(scheduler)
    assert scheduler.totals.preemptions == 0


def test_no_request_starts_while_decodes_alone_fill_a_step() -> None:
    budget = mock.Mock()
    budget.is_crowded.return_value = False
    budget.chunk.side_effect = lambda start, requested: requested
    scheduler = make_scheduler(step_budget=budget)
    first, second = make_request("a", 5), make_request("b", 3)
    scheduler.add(first)
    step(scheduler)
    scheduler.add(second)
    budget.is_crowded.return_value = True
    assert planned_tokens(step(scheduler)) == [("a", 1)]
    assert budget.is_crowded.call_args.args == (1, 6), "one decode with six tokens behind it"
    budget.is_crowded.return_value = False
    assert planned_tokens(step(scheduler)) == [("a", 1), ("b", 3)]


def test_small_requests_pass_one_that_does_not_fit_a_bounded_number_of_times() -> None:
    scheduler = make_scheduler(num_blocks=32, max_num_seqs=8)
    holder, big = make_request("holder", 16, max_tokens=100), make_request("big", 120)
    scheduler.add(holder)
    step(scheduler)
    scheduler.add(big)
    for number in range(SKIPS_MAX + 8):
        scheduler.add(make_request(f"small {number}", 1, max_tokens=1))
    passed = 0
    while big.status is RequestStatus.QUEUED and holder.status is not RequestStatus.FINISHED:
        passed += sum(item.request.request_id.startswith("small") for item in step(scheduler).items)
    assert passed == SKIPS_MAX
    while scheduler.has_requests:
        step(scheduler)
    assert big.num_output_tokens == 4


def test_a_step_scans_a_bounded_part_of_the_queue() -> None:
    scheduler = make_scheduler(num_blocks=8, max_num_seqs=8)
    scheduler.add(make_request("holder", 16, max_tokens=16))
    step(scheduler)
    for number in range(SCAN_REQUESTS_MAX):
        scheduler.add(make_request(f"big {number}", 28))
    scheduler.add(make_request("small", 1))
    assert planned_tokens(step(scheduler)) == [("holder", 1)]


def test_a_pool_smaller_than_the_longest_request_is_refused() -> None:
    limits = SchedulerLimits(max_num_seqs=1, max_num_batched_tokens=1, max_model_len=17, block_size=4)
    with pytest.raises(EngineConfigError, match="max_model_len"):
        Scheduler(limits, BlockPool(4), clock=lambda: 0.0)


def test_full_blocks_of_a_prompt_are_shared_between_requests_of_a_tenant() -> None:
    scheduler = make_scheduler(caches=True)
    first, second = make_request("first", 11), make_request("second", 11)
    scheduler.add(first)
    step(scheduler)
    scheduler.add(second)
    assert planned_tokens(step(scheduler)) == [("first", 1), ("second", 3)]
    assert second.block_table[:2] == first.block_table[:2]
    assert second.num_cached_tokens == 8
    assert scheduler.totals.prefix_cache_hit_tokens == 8
    assert scheduler.totals.prompt_tokens == 22, "cached prompt tokens are prompt tokens"


def test_blocks_are_not_shared_between_tenants() -> None:
    scheduler = make_scheduler(caches=True)
    alices, charlies = make_request("a", 11), make_request("c", 11, tenant="charlie")
    scheduler.add(alices)
    step(scheduler)
    scheduler.add(charlies)
    step(scheduler)
    assert charlies.num_cached_tokens == 0
    assert not set(alices.block_table) & set(charlies.block_table)


def test_a_fully_cached_prompt_still_computes_its_last_block() -> None:
    scheduler = make_scheduler(caches=True)
    for name in ("first", "second"):
        scheduler.add(make_request(name, 8, max_tokens=1))
        batch = step(scheduler)
    assert planned_tokens(batch) == [("second", 4)]


def test_cached_blocks_survive_their_request_until_the_space_is_needed() -> None:
    scheduler = make_scheduler(num_blocks=4, caches=True)
    scheduler.add(make_request("a", 9, max_tokens=1))
    step(scheduler)
    assert (scheduler.pool.num_used, scheduler.pool.num_cached, scheduler.pool.num_free) == (0, 2, 2)
    other = make_request("b", 15, max_tokens=1, tenant="bob")
    scheduler.add(other)
    step(scheduler)
    again = make_request("again", 9, max_tokens=1)
    scheduler.add(again)
    step(scheduler)
    assert again.num_cached_tokens == 0


def test_a_chain_of_blocks_is_evicted_from_its_end() -> None:
    pool = BlockPool(3)
    table = pool.allocate(3)
    for index, block_id in enumerate(table):
        pool.register(block_id, bytes([index]))
    pool.release(table)
    assert pool.allocate(1) == [table[2]]
    assert pool.lookup(bytes([0])) == table[0]
    assert pool.lookup(bytes([2])) is None


def test_allocating_more_blocks_than_the_pool_has_raises() -> None:
    pool = BlockPool(2)
    pool.allocate(2)
    with pytest.raises(OutOfBlocks):
        pool.allocate(1)


def test_a_finished_request_cannot_change_its_status() -> None:
    scheduler = make_scheduler()
    request = make_request("a", 2, max_tokens=1)
    scheduler.add(request)
    step(scheduler)
    with pytest.raises(IllegalTransition):
        request.move_to(RequestStatus.DECODE)


def test_check_invariants_detects_a_wrong_forecast_and_a_wrong_calendar_of_decodes() -> None:
    """The idle engine and every test that steps a scheduler rely on these checks."""
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 2, max_tokens=9))
    step(scheduler)
    scheduler.admission._forecast._sum_at_end += 1
    with pytest.raises(AssertionError, match="the sum of all buckets"):
        scheduler.check_invariants()
    scheduler.admission._forecast._sum_at_end -= 1
    scheduler._decodes._ending.clear()
    with pytest.raises(AssertionError, match="a has another last step"):
        scheduler.check_invariants()
    scheduler._decodes._calendar.clear()
    with pytest.raises(AssertionError, match="a is not in the calendar"):
        scheduler.check_invariants()


def drain_ahead(scheduler: Scheduler) -> None:
    """Step until idle, planning each step before the tokens of the previous one are settled."""
    pending: InFlightBatch | None = None
    while scheduler.has_requests:
        batch = scheduler.schedule()
        launched = scheduler.advance(batch) if batch.num_tokens else None
        if pending is not None:
            rows = [StepOutput([7]) if samples else StepOutput() for _, samples in pending.chunks]
            scheduler.settle(pending, [*[7] * pending.num_decodes, *rows])
        scheduler.check_invariants()
        pending = launched


def test_steps_launched_ahead_count_and_cache_the_same_tokens() -> None:
    counted = []
    for run in (drain, drain_ahead):
        scheduler = make_scheduler(num_blocks=64, budget=8, caches=True)
        counts = []
        for name, length, max_tokens in (("a", 22, 6), ("b", 30, 1), ("c", 34, 3)):
            request = make_request(name, length, max_tokens=max_tokens)
            scheduler.add(request)
            run(scheduler)
            counts += [request.num_cached_tokens, request.num_prompt_tokens_computed, request.num_output_tokens]
            assert (request.num_in_flight_tokens, request.num_unknown_tokens) == (0, 0)
        counted.append((counts, scheduler.totals))
    assert counted[0] == counted[1]
    assert counted[0][0] == [0, 22, 6, 20, 30, 1, 28, 34, 3]
    assert (counted[0][1].prompt_tokens, counted[0][1].generation_tokens) == (22 + 30 + 34, 10)


class WrongDrafter:
    """Drafts one wrong token for every request whose last block has room."""

    def pays(self, num_running: int) -> bool:
        return True

    def draft(self, request: Request, *, limit: int, num_running: int) -> Draft:
        return Draft(1, [1]) if limit and request.num_tokens % BLOCK_SIZE else NO_DRAFT

    def read(self, num_running: int) -> None:
        """It has no text to read."""

    def observe(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        """All drafts are wrong."""


@pytest.mark.parametrize("last_token", [9, 7])
def test_a_block_is_not_shared_while_the_step_that_fills_it_may_fail(last_token: int) -> None:
    """The answer ends with a stop token, or is aborted, while the next step is pending."""
    scheduler = make_scheduler(caches=True)
    request = make_request("a", 4, max_tokens=20)
    request.stop_ids = frozenset({9})
    scheduler.add(request)
    pending = scheduler.advance(scheduler.schedule())
    for token_id in (7, 7, 7, last_token):
        launched = scheduler.advance(scheduler.schedule())
        scheduler.settle(pending, [token_id])
        pending = launched
    scheduler.abort(request)
    assert request.finish_reason is (FinishReason.STOP if last_token == 9 else FinishReason.ABORTED)
    assert request.num_computed_tokens == 8
    later = make_request("b", 9)
    later.token_ids = [*request.token_ids[:8], 1]
    assert len(scheduler.kv.find(later).blocks) == 1
    scheduler.settle(pending, [None])
    scheduler.check_invariants()


def test_rejected_drafts_leave_no_unneeded_blocks() -> None:
    scheduler = make_scheduler(drafter=WrongDrafter())
    request = make_request("a", 5, max_tokens=30)
    scheduler.add(request)
    while not request.is_finished:
        assert len(request.block_table) <= -(-request.num_tokens // BLOCK_SIZE)
        step(scheduler)


def num_held_blocks(requests: list[Request]) -> int:
    return sum(len(request.block_table) for request in requests)


@pytest.mark.parametrize("together", [True, False])
def test_decodes_are_extended_together_if_many_blocks_are_spare(*, together: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_set, "EARLY_GROWTH_STEPS", BLOCK_SIZE)
    if not together:
        monkeypatch.setattr(engine.scheduling.scheduler, "SPARE_PER_EARLY_BLOCK", 1000)
    scheduler = make_scheduler(num_blocks=200, max_num_seqs=4, budget=32)
    requests = [make_request(str(length), length, max_tokens=14) for length in range(1, 5)]
    for request in requests:
        scheduler.add(request)
    step(scheduler)
    grown = []
    while scheduler.num_running == len(requests):
        before = num_held_blocks(requests)
        step(scheduler)
        grown.append(num_held_blocks(requests) - before)
        for request in requests:
            assert len(request.block_table) <= -(-(request.max_total_tokens - 1) // BLOCK_SIZE), (
                "nobody computes the last token"
            )
    grown = grown[BLOCK_SIZE : 2 * BLOCK_SIZE]
    assert sum(grown) == len(requests), "one block each in as many steps as it has tokens"
    assert sorted(grown) == ([0, 0, 0, 4] if together else [1, 1, 1, 1])
