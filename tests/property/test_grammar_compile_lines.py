"""Queues of grammars to compile: a flood delays only itself, and every grammar ends once."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import EngineOverloaded
from engine.grammar import compile_lines
from engine.grammar.compile_lines import CompileLines, Job
from engine.grammar.matcher import CompiledGrammar
from engine.grammar.spec import GrammarSpec

TENANTS = ("alice", "bob", "charlie")


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_lines, "CACHED_GRAMMARS_MAX", 9)


def text(number: int) -> GrammarSpec:
    return GrammarSpec("regex", str(number))


def begun(lines: CompileLines) -> Job:
    job = lines.begin()
    assert job is not None
    return job


def test_tenants_take_turns_and_each_has_one_compile_under_way() -> None:
    lines = CompileLines(waiting_max=6)
    for tenant, number in (("alice", 1), ("alice", 2), ("alice", 3), ("bob", 4), ("bob", 5)):
        lines.add(tenant, text(number))
    first, second = begun(lines), begun(lines)
    assert [first.spec, second.spec] == [text(1), text(4)]
    assert lines.begin() is None
    lines.end(second)
    third = begun(lines)
    assert third.spec == text(5), "alice's first compile is still under way"
    lines.end(first)
    assert begun(lines).spec == text(2)


def test_where_no_more_may_wait_the_longest_line_gives_way_from_its_end() -> None:
    lines = CompileLines(waiting_max=6)
    flood = [lines.add("alice", text(number)) for number in range(6)]
    with pytest.raises(EngineOverloaded, match="6 grammars are already waiting"):
        lines.add("alice", text(6))
    for number in (7, 8, 9):
        lines.add("bob", text(number))
    assert [grammar.done() for grammar in flood] == [False, False, False, True, True, True]
    assert isinstance(flood[5].exception(), EngineOverloaded)
    with pytest.raises(EngineOverloaded):
        lines.add("bob", text(10))
    assert lines.find("alice", text(5)) is None, "it may be asked for again"


def test_what_one_tenant_compiles_drives_out_its_own_grammars() -> None:
    lines = CompileLines(waiting_max=6)
    kept = lines.add("bob", text(0))
    job = begun(lines)
    kept.set_exception(ValueError())
    lines.end(job)
    for number in range(1, 40):
        grammar = lines.add("alice", text(number))
        job = begun(lines)
        grammar.set_exception(ValueError())
        lines.end(job)
    assert lines.find("bob", text(0)) is kept
    assert lines.find("alice", text(39)) is grammar
    assert lines.find("alice", text(1)) is None


@pytest.mark.parametrize("num_compiled", [8, 15])
def test_what_waits_drives_out_nothing_and_does_not_let_others_keep_more(num_compiled: int) -> None:
    lines = CompileLines(waiting_max=None)
    for number in range(20):
        lines.add("alice", text(number))
    alices = begun(lines)
    for number in range(num_compiled):
        grammar = lines.add("bob", text(number))
        job = begun(lines)
        grammar.set_exception(ValueError())
        lines.end(job)
    lines.add("alice", text(20))
    kept = [number for number in range(num_compiled) if lines.find("bob", text(number)) is not None]
    assert kept == [*range(num_compiled)][-9:]
    assert not alices.grammar.done()


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(("add", "begin", "end", "forget")), st.sampled_from(TENANTS), st.integers(0, 20)), max_size=80
    )
)
def test_whatever_happens_every_grammar_ends_once_and_nothing_is_left(steps: list[tuple[str, str, int]]) -> None:
    lines = CompileLines(waiting_max=6)
    made: list[Future[CompiledGrammar]] = []
    under_way: list[Job] = []

    def finish(job: Job, *, forget: bool) -> None:
        if forget:
            lines.forget(job)
        job.grammar.set_exception(ValueError())
        lines.end(job)

    for step, tenant, number in steps:
        if step == "add" and lines.find(tenant, text(number)) is None:
            try:
                made.append(lines.add(tenant, text(number)))
            except EngineOverloaded:
                assert sum(len(line.waiting) for line in lines._lines.values()) == 6
        elif step == "begin" and (job := lines.begin()) is not None:
            assert job.tenant_id not in [other.tenant_id for other in under_way]
            under_way.append(job)
        elif step in ("end", "forget") and under_way:
            finish(under_way.pop(number % len(under_way)), forget=step == "forget")
        waiting = [len(line.waiting) for line in lines._lines.values()]
        assert sum(waiting) <= 6
        assert all(line.known or line.num_served for line in lines._lines.values())
        assert sum(grammar.done() for line in lines._lines.values() for grammar in line.known.values()) <= 9
    for job in under_way:
        finish(job, forget=True)
    while (rest := lines.begin()) is not None:
        finish(rest, forget=True)
    assert all(grammar.done() for grammar in made)
    assert not any(line.waiting or line.num_served for line in lines._lines.values())
