"""Requests that wait for their grammar, outside the scheduler's queue, so that no step waits for a compiler. No torch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Protocol

from engine.errors import EngineError, EngineOverloaded, ModelError
from engine.fault_isolation import failure_message
from engine.grammar.compile_queue import NO_THREAD, overloaded
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


class LazyCompiler:
    """Creates the compiler in a thread when the first request needs it: reading a vocabulary of 128,000 tokens takes
    seconds."""

    def __init__(self, create: Callable[[], Compiler]) -> None:
        self._create = create
        self._compiler: Future[Compiler] | None = None

    def submit(self, spec: GrammarSpec, tenant_id: str) -> Future[CompiledGrammar]:
        """See `GrammarCompiler`. If the model's vocabulary cannot be read, every grammar is refused, with the reason."""
        compiled: Future[CompiledGrammar] = Future()
        if self._compiler is None:
            worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar-vocabulary")
            try:
                self._compiler = worker.submit(self._create)
            except RuntimeError:  # the next request tries again
                compiled.set_exception(overloaded(spec, NO_THREAD))
                return compiled
            finally:
                worker.shutdown(wait=False)
        self._compiler.add_done_callback(lambda compiler: _forward_submit(compiler, spec, tenant_id, compiled))
        return compiled

    def close(self) -> None:
        """End the compiler's processes, if there are any; a compiler that is still being created ends as soon as it is
        ready."""
        if self._compiler is not None:
            self._compiler.add_done_callback(_close)


def _forward_submit(compiler: Future[Compiler], spec: GrammarSpec, tenant_id: str, compiled: Future[CompiledGrammar]) -> None:
    error = compiler.exception()
    if error is None:
        compiler.result().submit(spec, tenant_id).add_done_callback(lambda grammar: _copy_result(grammar, compiled))
    elif isinstance(error, ModelError):
        compiled.set_exception(GrammarError(spec.param, f"{spec.param} cannot be followed with this model: {error}"))
    else:
        compiled.set_exception(error)


def _close(compiler: Future[Compiler]) -> None:
    if compiler.exception() is None:
        compiler.result().close()


def _copy_result(source: Future[CompiledGrammar], target: Future[CompiledGrammar]) -> None:
    if source.cancelled():
        target.cancel()
    elif (error := source.exception()) is not None:
        target.set_exception(error)
    else:
        target.set_result(source.result())


@dataclass(frozen=True, slots=True)
class _Parked:
    """`deadline_s` is the time at which the request has waited too long; None if there is no such time."""

    answers: list[Request]
    param: str
    grammar: Future[CompiledGrammar]
    deadline_s: float | None


class GrammarQueue:
    """Requests that wait for their grammar, by id, each with all its answers. Also advances running answers."""

    def __init__(self, compiler: Compiler, masks: Masks) -> None:
        self._compiler = compiler
        self._masks = masks
        self._parked: dict[str, _Parked] = {}

    def __len__(self) -> int:
        """Number of parked answers."""
        return sum(len(parked.answers) for parked in self._parked.values())

    def close(self) -> None:
        """Close the compiler and the masks; no request may be parked any more."""
        self._compiler.close()
        self._masks.close()

    def park(self, answers: Sequence[Request], spec: GrammarSpec) -> None:
        """Have the grammar compiled, or find it in the cache, and keep the answers until then."""
        first = answers[0]
        grammar = self._compiler.submit(spec, first.tenant_id)
        self._parked[first.request_id] = _Parked(list(answers), spec.param, grammar, first.queue_deadline_s)

    def remove(self, request: Request) -> bool:
        """Remove one answer. Returns whether it was here."""
        parked = self._parked.get(request.request_id)
        if parked is None or request not in parked.answers:
            return False
        parked.answers.remove(request)
        if not parked.answers:
            del self._parked[request.request_id]
        return True

    def requests(self) -> Iterator[Request]:
        """All parked answers in order of arrival."""
        for parked in self._parked.values():
            yield from parked.answers

    def pop_ready(self) -> list[tuple[list[Request], GrammarError | EngineError | None]]:
        """Remove and return the answers whose grammar is compiled, ready to run, or refused, with the reason. An `EngineError`
        is not the fault of any field."""
        done = [request_id for request_id, parked in self._parked.items() if parked.grammar.done()]
        return [self._start(self._parked.pop(request_id)) for request_id in done]

    def pop_expired(self, now_s: float) -> list[Request]:
        """Remove and return the answers of requests that have waited too long."""
        parked = self._parked.items()
        expired_ids = [request_id for request_id, entry in parked if entry.deadline_s is not None and entry.deadline_s <= now_s]
        return [request for request_id in expired_ids for request in self._parked.pop(request_id).answers]

    def _start(self, parked: _Parked) -> tuple[list[Request], GrammarError | EngineError | None]:
        """A refusal is cached, so it is returned and not raised: each raise would attach its frames to it, with every request
        in them."""
        if parked.grammar.cancelled():
            return parked.answers, GrammarError(parked.param, f"{parked.param} was not compiled: the engine is stopping")
        error = parked.grammar.exception()
        try:
            if error is None:
                grammar = parked.grammar.result()
                for request in parked.answers:
                    self._masks.start(request, grammar)
        except Exception as failed:  # noqa: BLE001 - from the compiling task: only its waiters fail
            error = failed
        if error is None or isinstance(error, GrammarError | EngineOverloaded):
            return parked.answers, error
        log_args = parked.param, parked.answers[0].request_id
        log.error("a grammar could not be compiled param=%s request_id=%s", *log_args, exc_info=error)
        return parked.answers, EngineError(failure_message("compile", error))

    @property
    def has_guided_answers(self) -> bool:
        """Whether any running answer has a grammar to follow."""
        return not self._masks.are_empty

    def wait(self, timeout_s: float) -> None:
        """Sleep until the first grammar is ready, at most `timeout_s`."""
        wait([parked.grammar for parked in self._parked.values()], timeout=timeout_s, return_when=FIRST_COMPLETED)

    def accept(self, request: Request, token_ids: Sequence[int]) -> GrammarError | None:
        """Advance an answer by sampled tokens. Returns the error that ends it if its grammar cannot be followed further."""
        return self._masks.accept(request, token_ids)
