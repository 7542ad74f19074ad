"""Requests that wait for their grammar, apart from the scheduler's queue, so that no step waits for a compiler. No torch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Protocol

from engine.errors import EngineError, EngineOverloaded, ModelError
from engine.fault_isolation import failure
from engine.grammar.compile_lines import NO_THREAD, overloaded
from engine.grammar.matcher import CompiledGrammar
from engine.grammar.spec import GrammarError, GrammarSpec
from engine.scheduling.request import Request

log = logging.getLogger("gatehouse.engine")


class Compiler(Protocol):
    """The part of `GrammarCompiler` that the queue needs."""

    def submit(self, spec: GrammarSpec, tenant_id: str) -> Future[CompiledGrammar]: ...

    def close(self) -> None: ...


class Masks(Protocol):
    """The part of `GrammarMasks` that the queue needs: the states of running answers."""

    def start(self, request: Request, grammar: CompiledGrammar) -> None: ...

    def accept(self, request: Request, token_ids: Sequence[int]) -> GrammarError | None: ...

    @property
    def are_empty(self) -> bool: ...

    def close(self) -> None: ...


class LateCompiler:
    """Makes the compiler in a thread when the first request needs one: a vocabulary of 128,000 tokens takes seconds to read."""

    def __init__(self, make: Callable[[], Compiler]) -> None:
        self._make = make
        self._made: Future[Compiler] | None = None

    def submit(self, spec: GrammarSpec, tenant_id: str) -> Future[CompiledGrammar]:
        """As of `GrammarCompiler`. A model whose vocabulary cannot be read refuses every grammar, saying why."""
        compiled: Future[CompiledGrammar] = Future()
        if self._made is None:
            worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar-vocabulary")
            try:
                self._made = worker.submit(self._make)
            except RuntimeError:  # the next request tries again
                compiled.set_exception(overloaded(spec, NO_THREAD))
                return compiled
            finally:
                worker.shutdown(wait=False)
        self._made.add_done_callback(lambda made: _pass_on(made, spec, tenant_id, compiled))
        return compiled

    def close(self) -> None:
        """End the compiler's processes, if there are any; one that is still being made ends as soon as it is there."""
        if self._made is not None:
            self._made.add_done_callback(_close)


def _pass_on(made: Future[Compiler], spec: GrammarSpec, tenant_id: str, compiled: Future[CompiledGrammar]) -> None:
    error = made.exception()
    if error is None:
        made.result().submit(spec, tenant_id).add_done_callback(lambda grammar: _copy(grammar, compiled))
    elif isinstance(error, ModelError):
        compiled.set_exception(GrammarError(spec.param, f"{spec.param} cannot be followed with this model: {error}"))
    else:
        compiled.set_exception(error)


def _close(made: Future[Compiler]) -> None:
    if made.exception() is None:
        made.result().close()


def _copy(source: Future[CompiledGrammar], target: Future[CompiledGrammar]) -> None:
    if source.cancelled():
        target.cancel()
    elif (error := source.exception()) is not None:
        target.set_exception(error)
    else:
        target.set_result(source.result())


@dataclass(frozen=True, slots=True)
class _Parked:
    """`deadline_s` is when the request has waited for too long, None if it never does."""

    answers: list[Request]
    param: str
    grammar: Future[CompiledGrammar]
    deadline_s: float | None


class GrammarQueue:
    """Requests that wait for their grammar, by id, each with all of its answers. Moves running answers through grammars."""

    def __init__(self, compiler: Compiler, masks: Masks) -> None:
        self._compiler = compiler
        self._masks = masks
        self._parked: dict[str, _Parked] = {}
        self._num_answers = 0

    def __len__(self) -> int:
        """Parked answers."""
        return self._num_answers

    def close(self) -> None:
        """Close the compiler and the masks; no request may be parked any more."""
        self._compiler.close()
        self._masks.close()

    def park(self, answers: Sequence[Request], spec: GrammarSpec) -> None:
        """Have the grammar compiled, or find it compiled, and keep the answers until then."""
        first = answers[0]
        grammar = self._compiler.submit(spec, first.tenant_id)
        self._parked[first.request_id] = _Parked(list(answers), spec.param, grammar, first.queue_deadline_s)
        self._num_answers += len(answers)

    def remove(self, request: Request) -> bool:
        """Remove one answer; whether it was here."""
        parked = self._parked.get(request.request_id)
        if parked is None or request not in parked.answers:
            return False
        parked.answers.remove(request)
        self._num_answers -= 1
        if not parked.answers:
            del self._parked[request.request_id]
        return True

    def requests(self) -> Iterator[Request]:
        """All parked answers in the order of their arrival."""
        for parked in self._parked.values():
            yield from parked.answers

    def take_ready(self) -> list[tuple[list[Request], GrammarError | EngineError | None]]:
        """Answers whose grammar is compiled, ready to run, or refused, with the reason. They are parked no longer. An
        `EngineError` is the fault of no field."""
        done = [request_id for request_id, parked in self._parked.items() if parked.grammar.done()]
        return [self._start(self._parked.pop(request_id)) for request_id in done]

    def take_expired(self, now_s: float) -> list[Request]:
        """The answers of requests that have waited for too long. They are parked no longer."""
        parked = self._parked.items()
        late = [request_id for request_id, each in parked if each.deadline_s is not None and each.deadline_s <= now_s]
        expired = [request for request_id in late for request in self._parked.pop(request_id).answers]
        self._num_answers -= len(expired)
        return expired

    def _start(self, parked: _Parked) -> tuple[list[Request], GrammarError | EngineError | None]:
        """A refusal is kept for those who ask again. So it is not raised: it would keep the frames of each raise, with every
        request in them."""
        self._num_answers -= len(parked.answers)
        if parked.grammar.cancelled():
            return parked.answers, GrammarError(parked.param, f"{parked.param} was not compiled: the engine is stopping")
        error = parked.grammar.exception()
        try:
            if error is None:
                grammar = parked.grammar.result()
                for request in parked.answers:
                    self._masks.start(request, grammar)
        except Exception as failed:  # noqa: BLE001 - of the task that compiles: whoever waits for it ends alone
            error = failed
        if error is None or isinstance(error, GrammarError | EngineOverloaded):
            return parked.answers, error
        told = parked.param, parked.answers[0].request_id
        log.error("a grammar could not be compiled param=%s request_id=%s", *told, exc_info=error)
        return parked.answers, EngineError(failure("compile", error))

    @property
    def guides(self) -> bool:
        """Whether any running answer has a grammar."""
        return not self._masks.are_empty

    def wait(self, timeout_s: float) -> None:
        """Sleep until the first grammar is ready, but not for longer."""
        wait([parked.grammar for parked in self._parked.values()], timeout=timeout_s, return_when=FIRST_COMPLETED)

    def accept(self, request: Request, token_ids: Sequence[int]) -> GrammarError | None:
        """Move an answer on by tokens that were sampled; the error that ends it, when its grammar cannot be followed."""
        return self._masks.accept(request, token_ids)
