"""Several answers to one request, requests that wait for their grammar, and queue deadlines."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock
from weakref import ref

import pytest

from engine.errors import EngineOverloaded, NotAModelDirectory
from engine.grammar.matcher import CompiledGrammar
from engine.grammar.queue import GrammarQueue, LazyCompiler
from engine.grammar.spec import GrammarError, GrammarSpec
from engine.loop import Engine
from engine.protocol import FinishReason, GenerationRequest, TokenEvent
from engine.sampling.randomness import seed_of_answer
from engine.scheduling.request import Request
from engine.scheduling.scheduled_batch import BlockMoves, ScheduledRequest, StepOutput
from tests.support.clock import FakeClock
from tests.support.engines import generation_request, run_to_end, tokens
from tests.support.fake_runner import EOS, engine_over
from tests.support.scheduling import make_request
from tests.support.thread_limit import forbid_new_threads

GRAMMAR: Any = object()


class SeedRunner:
    """Generates for each answer its seed modulo 8 in every step, or `fixed_token` if that is set."""

    stage = "run"

    def __init__(self) -> None:
        self.copies = 0
        self.fixed_token: int | None = None

    def move(self, moves: BlockMoves) -> None:
        self.copies += len(moves.copies)

    def run(self, items: Sequence[ScheduledRequest]) -> list[StepOutput]:
        return [StepOutput([self._token(item)] if item.samples else []) for item in items]

    def _token(self, item: ScheduledRequest) -> int:
        return (item.request.sampling.seed or 0) % 8 if self.fixed_token is None else self.fixed_token


class FakeMasks:
    """Records the accepted tokens of each started request; token `refused` is an error."""

    def __init__(self) -> None:
        self.accepted: dict[Request, list[int]] = {}
        self.refused = -1

    def start(self, request: Request, grammar: CompiledGrammar) -> None:
        assert grammar is GRAMMAR
        self.accepted[request] = []

    @property
    def are_empty(self) -> bool:
        return not self.accepted

    def accept(self, request: Request, token_ids: Sequence[int]) -> GrammarError | None:
        self.accepted[request] += token_ids
        return GrammarError("guided_regex", "token refused") if self.refused in token_ids else None

    def close(self) -> None:
        self.accepted.clear()


class FakeCompiler:
    """Finishes compiling when the test calls `finish`."""

    def __init__(self) -> None:
        self.submitted: dict[GrammarSpec, Future[CompiledGrammar]] = {}

    def submit(self, spec: GrammarSpec, tenant_id: str) -> Future[CompiledGrammar]:
        return self.submitted.setdefault(spec, Future())

    def close(self) -> None:
        for future in self.submitted.values():
            future.cancel()

    def finish(self) -> None:
        for future in self.submitted.values():
            future.set_result(GRAMMAR)


class Harness:
    """An engine with a clock, a compiler and masks that the test controls."""

    def __init__(self, **limits: Any) -> None:
        self.clock = FakeClock()
        self.runner, self.masks, self.compiler = SeedRunner(), FakeMasks(), FakeCompiler()
        grammars, now_s = GrammarQueue(self.compiler, self.masks), self.clock.monotonic_s
        self.engine = engine_over(self.runner, grammars=grammars, clock=now_s, scheduler_clock=now_s, **limits)

    def run(self, *requests: GenerationRequest) -> list[TokenEvent]:
        return [event for events in run_to_end(self.engine, requests).values() for event in events]


def events_of_answer(events: Sequence[TokenEvent], index: int, request_id: str = "a") -> list[TokenEvent]:
    return [event for event in events if (event.request_id, event.index) == (request_id, index)]


def guided_request(request_id: str, **sampling: Any) -> GenerationRequest:
    return generation_request(request_id, [1, 2], **{"max_tokens": 3, "guided_regex": "[0-9]+", **sampling})


def test_each_answer_has_its_index_its_seed_and_one_end() -> None:
    harness = Harness()
    events = harness.run(generation_request("a", [1, 2, 3, 4, 5, 6], seed=5, max_tokens=2, n=3))
    for index in range(3):
        mine = events_of_answer(events, index)
        assert tokens(mine) == [seed_of_answer(5, index) % 8] * 2
        assert [event.finish_reason for event in mine if event.finish_reason] == [FinishReason.LENGTH]
    assert harness.runner.copies == 2, "the half-full block of the prompt is copied for each answer but the first"
    assert harness.engine.status().prompt_tokens_total == 6


def test_best_of_generates_all_candidate_answers() -> None:
    events = Harness().run(generation_request("a", [1], n=2, best_of=4, max_tokens=1))
    assert {event.index for event in events} == {0, 1, 2, 3}


def test_one_answer_is_aborted_without_the_others_and_abort_ends_the_rest() -> None:
    harness = Harness()
    harness.engine.submit(generation_request("a", [1, 2], n=3, max_tokens=9))
    for _ in range(3):
        harness.engine.step()
    (ended,) = harness.engine.abort_answer("a", 1)
    assert (ended.index, ended.finish_reason) == (1, FinishReason.ABORTED)
    assert harness.engine.abort_answer("a", 1) == []
    harness.engine.check_invariants()
    assert [event.index for event in harness.engine.abort("a")] == [0, 2]
    assert not harness.engine.has_requests
    assert harness.engine.status().kv_blocks_used == 0


def test_a_refused_request_ends_each_of_its_answers() -> None:
    events = Harness().engine.submit(generation_request("a", [], n=3))
    assert [(event.index, event.finish_reason, event.error_param) for event in events] == [
        (index, FinishReason.ERROR, "prompt_token_ids") for index in range(3)
    ]


def test_other_requests_are_served_while_a_grammar_is_compiled() -> None:
    harness = Harness()
    harness.engine.submit(guided_request("guided", n=2))
    events = harness.engine.submit(generation_request("plain", [1], max_tokens=2))
    for _ in range(3):
        events += harness.engine.step()
        harness.engine.check_invariants()
    assert len(tokens(events)) == 2, "the plain request was served"
    assert harness.engine.status().num_waiting == 2
    progress = harness.engine.status(with_requests=True).requests or []
    assert [(row.request_id, row.index, row.state, row.queue_position) for row in progress] == [
        ("guided", 0, "queued", 0), ("guided", 1, "queued", 0),
    ]  # fmt: skip
    harness.compiler.finish()
    events = harness.run()
    assert len(tokens(events_of_answer(events, 0, "guided"))) == len(tokens(events_of_answer(events, 1, "guided"))) == 3
    assert [len(accepted) for accepted in harness.masks.accepted.values()] == [3, 3], (
        "each answer follows the grammar by itself"
    )


def test_an_engine_without_other_work_sleeps_until_a_grammar_is_ready() -> None:
    """Otherwise it would take a core from the processes that compile."""
    harness = Harness()
    with mock.patch.object(GrammarQueue, "wait") as wait:
        harness.engine.submit(guided_request("guided"))
        harness.engine.step()
        assert wait.call_count == 1
        harness.engine.submit(generation_request("plain", [1], max_tokens=2))
        harness.engine.step()
        assert wait.call_count == 1, "no request waits for the grammar of another"


@pytest.mark.parametrize("fails", [False, True])
def test_closing_an_engine_ends_its_requests_and_its_compiler_even_if_it_is_broken(fails: bool) -> None:
    harness = Harness()
    harness.engine.submit(guided_request("guided"))
    with (
        mock.patch.object(Engine, "abort", side_effect=RuntimeError if fails else None, wraps=harness.engine.abort) as abort,
        pytest.raises(RuntimeError) if fails else nullcontext(),
    ):
        harness.engine.close()
    abort.assert_called_once_with("guided")
    assert all(future.cancelled() for future in harness.compiler.submitted.values())


def test_equal_grammars_are_compiled_once() -> None:
    harness = Harness()
    for name in "abc":
        harness.engine.submit(guided_request(name))
    assert len(harness.compiler.submitted) == 1


@pytest.mark.parametrize(
    "refusal",
    [GrammarError("guided_regex", "unclosed"), EngineOverloaded("full"), RuntimeError("a bug")],
    ids=lambda refusal: type(refusal).__name__,
)
def test_a_cached_refusal_does_not_keep_its_requests_alive(refusal: Exception) -> None:
    compiler, spec, request = FakeCompiler(), GrammarSpec("regex", "(a"), make_request("a", 2)
    queue = GrammarQueue(compiler, FakeMasks())
    queue.park([request], spec)
    compiler.submitted[spec].set_exception(refusal)
    ((answers, error),) = queue.pop_ready()
    assert answers == [request]
    assert error is not None
    request_ref = ref(request)
    del request, answers, error
    gc.collect()
    assert request_ref() is None


def test_a_refused_grammar_ends_every_answer_and_names_the_field() -> None:
    harness = Harness()
    harness.engine.submit(guided_request("a", n=2))
    next(iter(harness.compiler.submitted.values())).set_exception(GrammarError("guided_regex", "it explodes"))
    events = harness.run()
    assert [(e.index, e.finish_reason, e.error, e.error_param) for e in events] == [
        (index, FinishReason.ERROR, "it explodes", "guided_regex") for index in range(2)
    ]
    assert not harness.engine.has_requests


def test_a_full_compile_queue_ends_the_request_as_overloaded_without_naming_a_field() -> None:
    harness = Harness()
    assert harness.engine.submit(guided_request("a", n=2)) == []
    for future in harness.compiler.submitted.values():
        future.set_exception(EngineOverloaded("512 grammars are already waiting"))
    events = harness.run()
    assert [(event.finish_reason, event.error, event.error_param) for event in events] == [
        (FinishReason.OVERLOADED, "512 grammars are already waiting", None)
    ] * 2
    assert not harness.engine.has_requests


def test_an_internal_error_while_compiling_ends_only_its_request_without_naming_a_field() -> None:
    harness = Harness()
    harness.engine.submit(guided_request("a", n=2))
    harness.engine.submit(generation_request("b", [1], max_tokens=2))
    harness.compiler.submitted[GrammarSpec("regex", "[0-9]+")].set_exception(OSError("no room for another process"))
    events = harness.run()
    for index in range(2):
        (end,) = events_of_answer(events, index)
        assert (end.finish_reason, end.error_param) == (FinishReason.ERROR, None)
        assert "while compiling the grammar of this request: OSError: no room" in (end.error or "")
    assert len(tokens(events_of_answer(events, 0, "b"))) == 2


def test_answers_of_a_parked_request_can_be_aborted_singly_and_together() -> None:
    harness = Harness()
    harness.engine.submit(guided_request("a", n=3))
    assert [event.index for event in harness.engine.abort_answer("a", 0)] == [0]
    harness.engine.check_invariants()
    assert [event.index for event in harness.engine.abort("a")] == [1, 2]
    harness.compiler.finish()
    assert harness.engine.step() == []
    assert not harness.engine.has_requests


def test_if_the_first_answer_is_aborted_the_next_one_computes_the_prompt() -> None:
    harness = Harness()
    harness.engine.submit(guided_request("a", n=3))
    harness.engine.abort_answer("a", 0)
    harness.compiler.finish()
    events = harness.run()
    assert [len(tokens(events_of_answer(events, index))) for index in range(3)] == [0, 3, 3]


def test_an_answer_whose_matcher_fails_ends_alone() -> None:
    harness = Harness()
    harness.masks.refused = seed_of_answer(1, 1) % 8
    assert harness.masks.refused != 1
    harness.compiler.submitted.clear()
    harness.engine.submit(guided_request("a", n=2, seed=1))
    harness.compiler.finish()
    events = harness.run()
    assert tokens(events_of_answer(events, 0)) == [1, 1, 1]
    assert [(e.finish_reason, e.error_param) for e in events_of_answer(events, 1)] == [(FinishReason.ERROR, "guided_regex")]


def test_only_guided_answers_follow_a_grammar() -> None:
    harness = Harness()
    harness.engine.submit(guided_request("guided"))
    harness.compiler.finish()
    events = harness.run(generation_request("plain", [1, 2], max_tokens=3))
    assert [request.request_id for request in harness.masks.accepted] == ["guided"]
    assert [len(tokens(events_of_answer(events, 0, name))) for name in ("guided", "plain")] == [3, 3]


def test_a_guided_answer_ends_at_the_end_of_text_token_even_with_ignore_eos() -> None:
    harness = Harness()
    harness.runner.fixed_token = EOS
    harness.engine.submit(guided_request("a", ignore_eos=True, max_tokens=9))
    harness.compiler.finish()
    assert tokens(harness.run()) == [EOS]


def test_a_request_still_queued_at_its_deadline_ends_unserved() -> None:
    harness = Harness(max_num_seqs=1)
    harness.engine.submit(generation_request("first", [1], max_tokens=9))
    harness.engine.step()
    late = GenerationRequest(
        request_id="late",
        tenant_id="bob",
        prompt_token_ids=[1],
        sampling=generation_request("x", [1], n=2).sampling,
        queue_deadline_s=2.0,
    )
    harness.engine.submit(late)
    assert all(event.request_id == "first" for event in harness.engine.step())
    harness.clock.advance(2.5)
    ended = [event for event in harness.engine.step() if event.request_id == "late"]
    assert [(event.finish_reason, event.num_output_tokens) for event in ended] == 2 * [(FinishReason.DEADLINE, 0)]
    assert len(tokens([event for event in harness.run() if event.request_id == "first"])) > 0


def test_a_request_still_waiting_for_its_grammar_at_its_deadline_ends_unserved() -> None:
    harness = Harness()
    harness.engine.submit(replace(guided_request("a", n=2), queue_deadline_s=2.0))
    harness.clock.advance(1.5)
    assert not harness.engine.step()
    harness.clock.advance(1.0)
    assert [(event.index, event.finish_reason) for event in harness.engine.step()] == [
        (0, FinishReason.DEADLINE),
        (1, FinishReason.DEADLINE),
    ]
    assert not harness.engine.has_requests
    harness.compiler.finish()
    harness.engine.check_invariants()


def test_without_a_readable_vocabulary_every_grammar_is_refused() -> None:
    def make() -> FakeCompiler:
        raise NotAModelDirectory("the folder has no readable tokenizer.json")

    compiler = LazyCompiler(make)
    for _ in range(2):
        with pytest.raises(GrammarError, match=r"guided_regex cannot be followed with this model: .* no readable tokenizer"):
            compiler.submit(GrammarSpec("regex", "a+"), "alice").result(timeout=60)


def test_a_compiler_that_fails_to_start_fails_the_waiting_grammars() -> None:
    def make() -> FakeCompiler:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        LazyCompiler(make).submit(GrammarSpec("regex", "a+"), "alice").result(timeout=60)


def test_if_no_thread_can_start_the_grammar_is_refused_as_overloaded_and_the_next_one_compiles() -> None:
    made = FakeCompiler()
    compiler, spec = LazyCompiler(lambda: made), GrammarSpec("regex", "a+")
    with forbid_new_threads(), pytest.raises(EngineOverloaded, match="the system starts no more threads"):
        compiler.submit(spec, "alice").result(timeout=60)
    good = compiler.submit(spec, "alice")
    assert compiler._compiler is not None
    compiler._compiler.result(timeout=60)
    made.submitted[spec].set_result(GRAMMAR)
    assert good.result(timeout=60) is GRAMMAR


def test_a_lazily_created_compiler_delivers_grammars_and_refusals() -> None:
    made = FakeCompiler()
    compiler = LazyCompiler(lambda: made)
    good, bad = compiler.submit(GrammarSpec("regex", "a+"), "alice"), compiler.submit(GrammarSpec("regex", "b("), "alice")
    assert compiler._compiler is not None
    compiler._compiler.result(timeout=60)
    made.submitted[GrammarSpec("regex", "a+")].set_result(GRAMMAR)
    made.submitted[GrammarSpec("regex", "b(")].set_exception(GrammarError("guided_regex", "unbalanced"))
    assert good.result(timeout=60) is GRAMMAR
    with pytest.raises(GrammarError, match="unbalanced"):
        bad.result(timeout=60)
