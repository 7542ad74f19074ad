"""Requests that wait for their grammar: each leaves the queue once, and what goes wrong concerns its own waiters alone."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any
from unittest import mock

import pytest

from engine.errors import EngineError, EngineOverloaded
from engine.grammar.matcher import CompiledGrammar
from engine.grammar.queue import GrammarQueue, LazyCompiler
from engine.grammar.spec import GrammarSpec
from engine.scheduling.request import Request
from tests.support.scheduling import make_request

SPEC = GrammarSpec("regex", "a")


class Compiler:
    """Gives futures that the test resolves."""

    def __init__(self) -> None:
        self.futures: list[Future[CompiledGrammar]] = []
        self.is_closed = False

    def submit(self, spec: GrammarSpec, tenant_id: str) -> Future[CompiledGrammar]:
        self.futures.append(Future())
        return self.futures[-1]

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def compiler() -> Compiler:
    return Compiler()


@pytest.fixture
def masks() -> Any:
    return mock.Mock()


@pytest.fixture
def queue(compiler: Compiler, masks: Any) -> GrammarQueue:
    return GrammarQueue(compiler, masks)


def answers_of(name: str, count: int, **options: Any) -> list[Request]:
    return [make_request(name, 3, index=index, **options) for index in range(count)]


def test_answers_are_counted_until_they_are_ready_removed_or_expired(queue: GrammarQueue, compiler: Compiler) -> None:
    ready, removed, expired = answers_of("a", 2), answers_of("b", 2), answers_of("c", 3, queue_deadline_s=5.0)
    for answers in (ready, removed, expired):
        queue.park(answers, SPEC)
    assert len(queue) == 7
    assert queue.remove(removed[0])
    assert len(queue) == 6
    compiler.futures[0].set_result(mock.Mock())
    assert queue.pop_ready() == [(ready, None)]
    assert queue.pop_expired(4.9) == []
    assert queue.pop_expired(5.0) == expired
    assert len(queue) == 1


def test_an_answer_is_removed_once_and_with_the_last_one_its_request(queue: GrammarQueue, compiler: Compiler) -> None:
    first, second = answers_of("a", 2)
    queue.park([first, second], SPEC)
    assert [queue.remove(answer) for answer in (first, first, second, second)] == [True, False, True, False]
    compiler.futures[0].set_result(mock.Mock())
    assert queue.pop_ready() == []


@pytest.mark.parametrize(("failure", "told"), [(EngineOverloaded("no thread"), EngineOverloaded), (OSError(), EngineError)])
def test_an_answer_whose_masks_cannot_be_filled_is_refused_with_the_reason(
    queue: GrammarQueue, compiler: Compiler, masks: Any, failure: Exception, told: type[Exception]
) -> None:
    queue.park(answers_of("a", 1), SPEC)
    masks.start.side_effect = failure
    compiler.futures[0].set_result(mock.Mock())
    ((_, error),) = queue.pop_ready()
    assert type(error) is told


def test_compiler_and_masks_are_closed_with_the_queue(queue: GrammarQueue, compiler: Compiler, masks: Any) -> None:
    queue.close()
    assert compiler.is_closed
    masks.close.assert_called_once_with()


def test_a_compiler_that_was_never_needed_is_not_made_to_be_closed(compiler: Compiler) -> None:
    create = mock.Mock(return_value=compiler)
    lazy = LazyCompiler(create)
    lazy.close()
    create.assert_not_called()


def test_a_compiler_that_was_needed_is_closed(compiler: Compiler) -> None:
    lazy = LazyCompiler(lambda: compiler)
    lazy.submit(SPEC, "alice")
    assert lazy._compiler is not None
    lazy._compiler.result(timeout=60)
    lazy.close()
    assert compiler.is_closed
