"""The queue of grammars to compile: a tenant that floods it waits behind itself, and every grammar ends once."""

from __future__ import annotations

from concurrent.futures import Future

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
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_queue, "CACHED_GRAMMARS_MAX", 9)


def text(number: int) -> GrammarSpec:
    return GrammarSpec("regex", str(number))


def begun(queue: CompileQueue) -> Job:
    job = queue.start_next()
    assert job is not None
    return job


def compiled(queue: CompileQueue, tenant: str, number: int) -> Future[CompiledGrammar]:
    grammar = queue.add(tenant, text(number))
    job = begun(queue)
    grammar.set_exception(ValueError())
    queue.finish(job)
    return grammar


def test_tenants_take_turns_and_each_has_one_compile_under_way() -> None:
    queue = CompileQueue(waiting_max=6)
    for tenant, number in (("alice", 1), ("alice", 2), ("alice", 3), ("bob", 4), ("bob", 5)):
        queue.add(tenant, text(number))
    first, second = begun(queue), begun(queue)
    assert [first.spec, second.spec] == [text(1), text(4)]
    assert queue.start_next() is None
    queue.finish(second)
    third = begun(queue)
    assert third.spec == text(5), "alice's first compile is still under way"
    queue.finish(first)
    assert begun(queue).spec == text(2)


def test_a_tenant_that_was_served_comes_after_the_others() -> None:
    queue = CompileQueue()
    for tenant, number in (("alice", 1), ("alice", 2), ("bob", 3), ("bob", 4)):
        queue.add(tenant, text(number))
    served = []
    for _ in range(4):
        job = begun(queue)
        served.append(job.tenant_id)
        queue.finish(job)
    assert served == ["alice", "bob", "alice", "bob"]


def test_between_lines_that_differ_by_one_neither_gives_way() -> None:
    queue = CompileQueue(waiting_max=3)
    for tenant, number in (("alice", 1), ("alice", 2), ("bob", 3)):
        queue.add(tenant, text(number))
    with pytest.raises(EngineOverloaded):
        queue.add("bob", text(4))


def test_when_the_engine_stops_what_waits_is_cancelled_and_never_begins() -> None:
    queue = CompileQueue(running_max=2)
    compiling, waiting = queue.add("alice", text(1)), queue.add("alice", text(2))
    begun(queue)
    queue.cancel_waiting()
    assert (compiling.cancelled(), waiting.cancelled(), queue.start_next()) == (False, True, None)


def test_where_no_more_may_wait_the_longest_line_gives_way_from_its_end() -> None:
    queue = CompileQueue(waiting_max=6)
    flood = [queue.add("alice", text(number)) for number in range(6)]
    with pytest.raises(EngineOverloaded, match="6 grammars are already waiting"):
        queue.add("alice", text(6))
    for number in (7, 8, 9):
        queue.add("bob", text(number))
    assert [grammar.done() for grammar in flood] == [False, False, False, True, True, True]
    assert isinstance(flood[5].exception(), EngineOverloaded)
    with pytest.raises(EngineOverloaded):
        queue.add("bob", text(10))
    assert queue.find("alice", text(5)) is None, "it may be asked for again"


def test_what_one_tenant_compiles_drives_out_its_own_grammars() -> None:
    queue = CompileQueue(waiting_max=6)
    kept = compiled(queue, "bob", 0)
    for number in range(1, 40):
        grammar = compiled(queue, "alice", number)
    assert queue.find("bob", text(0)) is kept
    assert queue.find("alice", text(39)) is grammar
    assert queue.find("alice", text(1)) is None


@pytest.mark.parametrize("num_compiled", [8, 15])
def test_what_waits_drives_out_nothing_and_does_not_let_others_keep_more(num_compiled: int) -> None:
    queue = CompileQueue(waiting_max=None)
    for number in range(20):
        queue.add("alice", text(number))
    alices = begun(queue)
    for number in range(num_compiled):
        compiled(queue, "bob", number)
    queue.add("alice", text(20))
    kept = [number for number in range(num_compiled) if queue.find("bob", text(number)) is not None]
    assert kept == [*range(num_compiled)][-9:]
    assert not alices.grammar.done()


def test_a_grammar_that_is_found_again_is_kept_longer() -> None:
    queue = CompileQueue()
    for number in range(9):
        compiled(queue, "alice", number)
    queue.find("alice", text(0))
    compiled(queue, "alice", 9)
    assert queue.find("alice", text(0)) is not None
    assert queue.find("alice", text(1)) is None


def test_what_waits_is_not_driven_out_however_long_ago_it_came() -> None:
    queue = CompileQueue()
    for number in range(9):
        compiled(queue, "alice", number)
    grammar, waiting = queue.add("alice", text(9)), queue.add("alice", text(10))
    job = begun(queue)
    for number in range(10):
        queue.find("alice", text(number))
    grammar.set_exception(ValueError())
    queue.finish(job)
    assert queue.find("alice", text(10)) is waiting
    assert queue.find("alice", text(0)) is None


def test_of_a_tenant_whose_last_grammar_was_driven_out_nothing_is_left() -> None:
    queue = CompileQueue()
    for number in range(10):
        compiled(queue, f"tenant {number}", number)
    assert len(queue._queues) == 9


def test_two_compiles_of_a_tenant_that_are_forgotten_end_one_after_the_other() -> None:
    queue = CompileQueue(running_max=2)
    queue.add("alice", text(1))
    queue.add("alice", text(2))
    jobs = [begun(queue), begun(queue)]
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
def test_whatever_happens_every_grammar_ends_once_and_nothing_is_left(steps: list[tuple[str, str, int]]) -> None:
    queue = CompileQueue(waiting_max=6)
    made: list[Future[CompiledGrammar]] = []
    under_way: list[Job] = []

    def finish(job: Job, *, forget: bool) -> None:
        if forget:
            queue.discard(job)
        job.grammar.set_exception(ValueError())
        queue.finish(job)

    for step, tenant, number in steps:
        if step == "add" and queue.find(tenant, text(number)) is None:
            try:
                made.append(queue.add(tenant, text(number)))
            except EngineOverloaded:
                assert sum(len(tenant_queue.waiting) for tenant_queue in queue._queues.values()) == 6
        elif step == "begin" and (job := queue.start_next()) is not None:
            assert job.tenant_id not in [other.tenant_id for other in under_way]
            under_way.append(job)
        elif step in ("end", "forget") and under_way:
            finish(under_way.pop(number % len(under_way)), forget=step == "forget")
        waiting = [len(tenant_queue.waiting) for tenant_queue in queue._queues.values()]
        assert sum(waiting) <= 6
        assert all(tenant_queue.futures or tenant_queue.num_running for tenant_queue in queue._queues.values())
        assert sum(grammar.done() for tenant_queue in queue._queues.values() for grammar in tenant_queue.futures.values()) <= 9
    for job in under_way:
        finish(job, forget=True)
    while (rest := queue.start_next()) is not None:
        finish(rest, forget=True)
    assert all(grammar.done() for grammar in made)
    assert not any(tenant_queue.waiting or tenant_queue.num_running for tenant_queue in queue._queues.values())
