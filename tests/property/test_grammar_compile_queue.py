"""The queue of grammars to compile: turns of tenants, limits, the cache, and completion of every grammar."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import EngineOverloaded
from engine.grammar import compile_queue
from engine.grammar.compile_queue import CompileQueue, Job
from engine.grammar.matcher import CompiledGrammar
from engine.grammar.spec import GrammarSpec

TENANTS = ("alice", "bob", "charlie")


@pytest.fixture(autouse=True)
def _small_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_queue, "CACHED_GRAMMARS_MAX", 9)
    monkeypatch.setattr(compile_queue, "CACHED_BYTES_MAX", 100)


def regex_spec(number: int) -> GrammarSpec:
    return GrammarSpec("regex", str(number))


def start_next(queue: CompileQueue) -> Job:
    job = queue.start_next()
    assert job is not None
    return job


def add_compiled(queue: CompileQueue, tenant: str, number: int) -> Future[CompiledGrammar]:
    grammar = queue.add(tenant, regex_spec(number))
    job = start_next(queue)
    grammar.set_exception(ValueError())
    queue.finish(job)
    return grammar


def test_tenants_take_turns_and_each_compiles_one_grammar_at_a_time() -> None:
    queue = CompileQueue(waiting_max=6)
    for tenant, number in (("alice", 1), ("alice", 2), ("alice", 3), ("bob", 4), ("bob", 5)):
        queue.add(tenant, regex_spec(number))
    first, second = start_next(queue), start_next(queue)
    assert [first.spec, second.spec] == [regex_spec(1), regex_spec(4)]
    assert queue.start_next() is None
    queue.finish(second)
    third = start_next(queue)
    assert third.spec == regex_spec(5), "alice's first compile is still under way"
    queue.finish(first)
    assert start_next(queue).spec == regex_spec(2)


def test_a_tenant_that_was_served_comes_after_the_others() -> None:
    queue = CompileQueue()
    for tenant, number in (("alice", 1), ("alice", 2), ("bob", 3), ("bob", 4)):
        queue.add(tenant, regex_spec(number))
    served = []
    for _ in range(4):
        job = start_next(queue)
        served.append(job.tenant_id)
        queue.finish(job)
    assert served == ["alice", "bob", "alice", "bob"]


def test_queues_whose_lengths_differ_by_one_do_not_displace_each_other() -> None:
    queue = CompileQueue(waiting_max=3)
    for tenant, number in (("alice", 1), ("alice", 2), ("bob", 3)):
        queue.add(tenant, regex_spec(number))
    with pytest.raises(EngineOverloaded):
        queue.add("bob", regex_spec(4))


def test_cancel_waiting_cancels_grammars_that_have_not_started() -> None:
    queue = CompileQueue(running_max=2)
    compiling, waiting = queue.add("alice", regex_spec(1)), queue.add("alice", regex_spec(2))
    start_next(queue)
    queue.cancel_waiting()
    assert (compiling.cancelled(), waiting.cancelled(), queue.start_next()) == (False, True, None)


def test_at_the_limit_the_longest_queue_loses_its_last_grammar() -> None:
    queue = CompileQueue(waiting_max=6)
    flood = [queue.add("alice", regex_spec(number)) for number in range(6)]
    with pytest.raises(EngineOverloaded, match="6 grammars are already waiting"):
        queue.add("alice", regex_spec(6))
    for number in (7, 8, 9):
        queue.add("bob", regex_spec(number))
    assert [grammar.done() for grammar in flood] == [False, False, False, True, True, True]
    assert isinstance(flood[5].exception(), EngineOverloaded)
    with pytest.raises(EngineOverloaded):
        queue.add("bob", regex_spec(10))
    assert queue.find("alice", regex_spec(5)) is None, "it may be asked for again"


def test_a_tenant_evicts_only_its_own_cached_grammars() -> None:
    queue = CompileQueue(waiting_max=6)
    kept = add_compiled(queue, "bob", 0)
    for number in range(1, 40):
        grammar = add_compiled(queue, "alice", number)
    assert queue.find("bob", regex_spec(0)) is kept
    assert queue.find("alice", regex_spec(39)) is grammar
    assert queue.find("alice", regex_spec(1)) is None


@pytest.mark.parametrize("num_compiled", [8, 15])
def test_waiting_grammars_do_not_change_the_limit_of_cached_ones(num_compiled: int) -> None:
    queue = CompileQueue(waiting_max=None)
    for number in range(20):
        queue.add("alice", regex_spec(number))
    alices = start_next(queue)
    for number in range(num_compiled):
        add_compiled(queue, "bob", number)
    queue.add("alice", regex_spec(20))
    kept = [number for number in range(num_compiled) if queue.find("bob", regex_spec(number)) is not None]
    assert kept == [*range(num_compiled)][-9:]
    assert not alices.grammar.done()


def test_a_cached_grammar_that_is_used_again_is_evicted_later() -> None:
    queue = CompileQueue()
    for number in range(9):
        add_compiled(queue, "alice", number)
    queue.find("alice", regex_spec(0))
    add_compiled(queue, "alice", 9)
    assert queue.find("alice", regex_spec(0)) is not None
    assert queue.find("alice", regex_spec(1)) is None


def test_a_waiting_grammar_is_not_evicted() -> None:
    queue = CompileQueue()
    for number in range(9):
        add_compiled(queue, "alice", number)
    grammar, waiting = queue.add("alice", regex_spec(9)), queue.add("alice", regex_spec(10))
    job = start_next(queue)
    for number in range(10):
        queue.find("alice", regex_spec(number))
    grammar.set_exception(ValueError())
    queue.finish(job)
    assert queue.find("alice", regex_spec(10)) is waiting
    assert queue.find("alice", regex_spec(0)) is None


def add_with_size(queue: CompileQueue, tenant: str, number: int, num_bytes: int) -> SimpleNamespace:
    grammar = queue.add(tenant, regex_spec(number))
    job = start_next(queue)
    compiled = SimpleNamespace(is_used_up=False, table_number=0, num_bytes=num_bytes)
    grammar.set_result(cast(CompiledGrammar, compiled))
    queue.finish(job)
    return compiled


def cached_numbers(queue: CompileQueue, tenant: str) -> list[int]:
    return [number for number in range(20) if queue.find(tenant, regex_spec(number)) is not None]


def test_the_tenant_whose_grammars_take_the_most_memory_loses_its_oldest_ones() -> None:
    queue = CompileQueue()
    add_compiled(queue, "alice", 0)
    for number in (1, 2, 3):
        add_with_size(queue, "alice", number, 30)
    add_with_size(queue, "bob", 4, 10)
    assert cached_numbers(queue, "alice") == [0, 1, 2, 3], "100 bytes are allowed"
    add_with_size(queue, "bob", 5, 30)
    assert (cached_numbers(queue, "alice"), cached_numbers(queue, "bob")) == ([0, 2, 3], [4, 5])


def test_a_grammar_that_has_grown_counts_with_its_new_size_at_its_next_request() -> None:
    queue = CompileQueue()
    first = add_with_size(queue, "alice", 1, 40)
    add_with_size(queue, "alice", 2, 40)
    first.num_bytes, first.table_number = 61, 1
    assert cached_numbers(queue, "alice") == [1]


def test_a_grammar_larger_than_the_cache_is_compiled_but_not_kept() -> None:
    queue = CompileQueue()
    add_with_size(queue, "alice", 1, 101)
    assert not queue._queues


def test_a_grammar_that_was_cancelled_is_no_obstacle_to_the_eviction_of_others() -> None:
    queue = CompileQueue()
    for number in (1, 2):
        queue.add("alice", regex_spec(number))
    job = start_next(queue)
    queue.cancel_waiting()
    queue.find("alice", regex_spec(1))
    job.grammar.set_result(cast(CompiledGrammar, SimpleNamespace(num_bytes=101)))
    queue.finish(job)
    assert cached_numbers(queue, "alice") == [2]


def test_a_tenant_without_grammars_leaves_no_queue() -> None:
    queue = CompileQueue()
    for number in range(10):
        add_compiled(queue, f"tenant {number}", number)
    assert len(queue._queues) == 9


def test_discarded_compilations_of_a_tenant_end_one_after_the_other() -> None:
    queue = CompileQueue(running_max=2)
    queue.add("alice", regex_spec(1))
    queue.add("alice", regex_spec(2))
    jobs = [start_next(queue), start_next(queue)]
    for job in jobs:
        queue.discard(job)
    for job in jobs:
        queue.finish(job)
    assert not queue._queues


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(("add", "begin", "end", "forget")), st.sampled_from(TENANTS), st.integers(0, 20)), max_size=80
    )
)
def test_every_grammar_ends_once_and_nothing_is_left_after_random_operations(steps: list[tuple[str, str, int]]) -> None:
    queue = CompileQueue(waiting_max=6)
    made: list[Future[CompiledGrammar]] = []
    running: list[Job] = []

    def finish(job: Job, *, forget: bool) -> None:
        if forget:
            queue.discard(job)
        job.grammar.set_exception(ValueError())
        queue.finish(job)

    for step, tenant, number in steps:
        if step == "add" and queue.find(tenant, regex_spec(number)) is None:
            try:
                made.append(queue.add(tenant, regex_spec(number)))
            except EngineOverloaded:
                assert sum(len(tenant_queue.waiting) for tenant_queue in queue._queues.values()) == 6
        elif step == "begin" and (job := queue.start_next()) is not None:
            assert job.tenant_id not in [other.tenant_id for other in running]
            running.append(job)
        elif step in ("end", "forget") and running:
            finish(running.pop(number % len(running)), forget=step == "forget")
        waiting = [len(tenant_queue.waiting) for tenant_queue in queue._queues.values()]
        assert sum(waiting) <= 6
        assert all(tenant_queue.futures or tenant_queue.num_running for tenant_queue in queue._queues.values())
        assert sum(grammar.done() for tenant_queue in queue._queues.values() for grammar in tenant_queue.futures.values()) <= 9
    for job in running:
        finish(job, forget=True)
    while (rest := queue.start_next()) is not None:
        finish(rest, forget=True)
    assert all(grammar.done() for grammar in made)
    assert not any(tenant_queue.waiting or tenant_queue.num_running for tenant_queue in queue._queues.values())
