"""Requests that wait for their grammar: each leaves the queue once, and a failure concerns only its own request."""

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


class FakeCompiler:
    """A compiler whose futures the test resolves."""

    def __init__(self) -> None:
        self.futures: list[Future[CompiledGrammar]] = []
        self.is_closed = False

    def submit(self, spec: GrammarSpec, tenant_id: str) -> Future[CompiledGrammar]:
        self.futures.append(Future())
        return self.futures[-1]

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def compiler() -> FakeCompiler:
    return FakeCompiler()


@pytest.fixture
def masks() -> Any:
    return mock.Mock()


@pytest.fixture
def queue(compiler: FakeCompiler, masks: Any) -> GrammarQueue:
    return GrammarQueue(compiler, masks)


def make_answers(name: str, count: int, **options: Any) -> list[Request]:
    return [make_request(name, 3, index=index, **options) for index in range(count)]


def test_waiting_answers_are_counted_until_ready_removed_or_expired(queue: GrammarQueue, compiler: FakeCompiler) -> None:
    ready, removed, expired = make_answers("a", 2), make_answers("b", 2), make_answers("c", 3, queue_deadline_s=5.0)
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


def test_an_answer_is_removed_once_and_its_request_with_the_last_one(queue: GrammarQueue, compiler: FakeCompiler) -> None:
    first, second = make_answers("a", 2)
    queue.park([first, second], SPEC)
    assert [queue.remove(answer) for answer in (first, first, second, second)] == [True, False, True, False]
    compiler.futures[0].set_result(mock.Mock())
    assert queue.pop_ready() == []


@pytest.mark.parametrize(
    ("failure", "error_type"), [(EngineOverloaded("no thread"), EngineOverloaded), (OSError(), EngineError)]
)
def test_a_failure_to_start_masks_is_the_error_of_the_request(
    queue: GrammarQueue, compiler: FakeCompiler, masks: Any, failure: Exception, error_type: type[Exception]
) -> None:
    queue.park(make_answers("a", 1), SPEC)
    masks.start.side_effect = failure
    compiler.futures[0].set_result(mock.Mock())
    ((_, error),) = queue.pop_ready()
    assert type(error) is error_type


def test_closing_the_queue_closes_compiler_and_masks(queue: GrammarQueue, compiler: FakeCompiler, masks: Any) -> None:
    queue.close()
    assert compiler.is_closed
    masks.close.assert_called_once_with()


def test_closing_an_unused_lazy_compiler_does_not_create_one(compiler: FakeCompiler) -> None:
    create = mock.Mock(return_value=compiler)
    lazy = LazyCompiler(create)
    lazy.close()
    create.assert_not_called()


def test_a_lazy_compiler_is_created_once(compiler: FakeCompiler) -> None:
    create = mock.Mock(return_value=compiler)
    lazy = LazyCompiler(create)
    for _ in range(3):
        lazy.submit(SPEC, "alice")
    assert lazy._compiler is not None
    lazy._compiler.result(timeout=60)
    create.assert_called_once_with()


def test_closing_a_used_lazy_compiler_closes_it(compiler: FakeCompiler) -> None:
    lazy = LazyCompiler(lambda: compiler)
    lazy.submit(SPEC, "alice")
    assert lazy._compiler is not None
    lazy._compiler.result(timeout=60)
    lazy.close()
    assert compiler.is_closed
