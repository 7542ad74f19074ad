"""Compiles constraints outside the step loop, each within a deadline, in the order of `compile_queue`. Knows no request.

A compile runs twice: first in a worker process, which is killed at the deadline; then, once it is known to be quick, in a
thread of this process with the interpreter lock released. So a pathological text costs only its own deadline.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from typing import IO, Any

from engine.errors import EngineOverloaded
from engine.grammar.compile_queue import NO_PROCESS, NO_THREAD, CompileQueue, Job, overloaded
from engine.grammar.matcher import Built, CompiledGrammar, token_trie
from engine.grammar.spec import GrammarError, GrammarSpec
from engine.grammar.stacks import STACK_BYTES, thread_stack_size
from engine.grammar.vocabulary import Vocabulary
from engine.grammar.worker import job_line, vocabulary_line

DEADLINE_S = 5.0
WORKERS = 2
_READ_BYTES = 1 << 16
_START_S = 60.0


class WorkerLost(Exception):
    """The worker process missed its deadline or died; a new one is needed."""


class _WorkerProcess:
    """One worker with its pipes. Owned by one thread."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Raises `WorkerLost` if the process does not start properly, and `OSError` if the system has no room for it."""
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)}
        command = [sys.executable, "-m", "engine.grammar.worker"]
        pipe = subprocess.PIPE
        # A session of its own: an interrupt at the terminal is for the engine to handle.
        self._process = subprocess.Popen(command, bufsize=0, stdin=pipe, stdout=pipe, env=environment, start_new_session=True)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        os.set_blocking(self._input.fileno(), False)
        self._buffer = b""
        try:
            # One trivial job first, so that the start of the interpreter counts against no deadline.
            self._exchange(vocabulary_line(vocabulary) + job_line(GrammarSpec("choice", '["a"]'), _START_S), _START_S)
        except (OSError, WorkerLost):
            self.kill()
            raise

    def compile(self, spec: GrammarSpec, deadline_s: float) -> dict[str, Any]:
        """Have the worker compile `spec`. Returns its answer. Raises `WorkerLost` when there is none within the deadline."""
        answer: dict[str, Any] = json.loads(self._exchange(job_line(spec, deadline_s), deadline_s))
        return answer

    def _exchange(self, request: bytes, deadline_s: float) -> bytes:
        """Write to the worker and return the next line that it writes. A worker that has stopped reads nothing, so writing has
        the same deadline."""
        end = time.monotonic() + deadline_s
        rest = memoryview(request)
        while rest:
            _wait_for(self._input, select.POLLOUT, end, deadline_s)
            rest = rest[os.write(self._input.fileno(), rest) :]
        while b"\n" not in self._buffer:
            _wait_for(self._output, select.POLLIN, end, deadline_s)
            data = os.read(self._output.fileno(), _READ_BYTES)
            if not data:
                raise WorkerLost("crashed its compiler: it exceeds the memory or depth limit for a grammar")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._input.close()
        self._output.close()


def _wait_for(pipe: IO[bytes], event: int, end_s: float, deadline_s: float) -> None:
    """Wait until a pipe is ready. Raises `WorkerLost` at the time `end_s`, `deadline_s` after the start."""
    poll = select.poll()  # accepts any file number, unlike `select.select`
    poll.register(pipe, event)
    if not poll.poll(max(0.0, end_s - time.monotonic()) * 1000):
        raise WorkerLost(f"takes longer than {deadline_s:g} s to compile")


def _kill(process: _WorkerProcess | None) -> None:
    """End a worker process, if there is one and it has not ended."""
    if process is not None:
        process.kill()


class GrammarCompiler:
    """Compiled grammars of one model. `submit` may be called from any thread; `close` ends the workers.

    A refusal is cached too, so that sending a pathological text again costs nothing.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        deadline_s: float = DEADLINE_S,
        workers: int = WORKERS,
        has_one_caller: bool = False,
    ) -> None:
        self._vocabulary = vocabulary
        self._deadline_s = deadline_s
        self._workers = workers
        self._trie = token_trie(vocabulary) if vocabulary.eos_token_ids else None
        self._queue = CompileQueue(waiting_max=None, running_max=workers) if has_one_caller else CompileQueue()
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._num_idle = 0
        self._closed = False

    def submit(self, spec: GrammarSpec, tenant_id: str) -> Future[CompiledGrammar]:
        """The grammar of `spec`, now or later. The future raises `GrammarError` naming the field, and `EngineOverloaded` when
        too many wait already, or no thread or process can be started."""
        with self._changed:
            cached = self._queue.find(tenant_id, spec)
            if cached is not None:
                return cached
            try:
                self._check_can_compile(spec)
                if self._num_idle <= self._queue.num_waiting and len(self._threads) < self._workers:
                    self._start_worker(spec)
                grammar = self._queue.add(tenant_id, spec)
            except (GrammarError, EngineOverloaded) as refusal:
                refused: Future[CompiledGrammar] = Future()
                refused.set_exception(refusal)
                return refused
            self._changed.notify()
            return grammar

    def close(self) -> None:
        """End the workers; compiles that still wait are cancelled."""
        with self._changed:
            self._closed = True
            self._queue.cancel_waiting()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _start_worker(self, spec: GrammarSpec) -> None:
        """Start another thread, which begins when the lock is free. If the system cannot start one, the existing threads do its
        work; raises `EngineOverloaded` if there are none."""
        thread = threading.Thread(target=self._run_worker, name="grammar-compiler", daemon=True)
        try:
            with thread_stack_size(STACK_BYTES):
                thread.start()
        except RuntimeError as error:
            if not self._threads:
                raise overloaded(spec, NO_THREAD) from error
        else:
            self._threads.append(thread)

    def _check_can_compile(self, spec: GrammarSpec) -> None:
        if self._closed:
            raise GrammarError(spec.param, f"{spec.param} cannot be compiled: the engine is stopping")
        if self._trie is None:
            raise GrammarError(spec.param, f"{spec.param} needs a model that has an end-of-sequence token")

    def _run_worker(self) -> None:
        """Run one thread, with a worker process of its own from its first job on."""
        process: _WorkerProcess | None = None
        while (job := self._next_job()) is not None:
            try:
                if process is None or not process.is_alive:  # it was killed, or it died while idle
                    _kill(process)
                    process = self._start_process(job.spec)
                answer = process.compile(job.spec, self._deadline_s)
                job.grammar.set_result(self._build(job.spec, answer))
            except GrammarError as error:
                job.grammar.set_exception(error)
            except WorkerLost as error:
                _kill(process)
                job.grammar.set_exception(GrammarError(job.spec.param, f"{job.spec.param} {error}"))
            except Exception as error:  # noqa: BLE001 - owned task: the waiter gets the error, the next job a new process
                _kill(process)
                self._discard(job)
                job.grammar.set_exception(error)
            self._finish(job)
        _kill(process)

    def _start_process(self, spec: GrammarSpec) -> _WorkerProcess:
        try:
            return _WorkerProcess(self._vocabulary)
        except (OSError, WorkerLost) as error:  # the system's fault, not the grammar's
            raise overloaded(spec, NO_PROCESS) from error

    def _discard(self, job: Job) -> None:
        with self._changed:
            self._queue.discard(job)

    def _finish(self, job: Job) -> None:
        with self._changed:
            self._queue.finish(job)
            self._changed.notify()

    def _next_job(self) -> Job | None:
        """Wait for a compile to run; None when the compiler is closed."""
        job: Job | None = None
        with self._changed:
            self._num_idle += 1
            while job is None and not self._closed:
                job = self._queue.start_next()
                if job is None:
                    self._changed.wait()
            self._num_idle -= 1
        return job

    def _build(self, spec: GrammarSpec, answer: dict[str, Any]) -> CompiledGrammar:
        if "error" in answer:
            raise GrammarError(spec.param, answer["error"])
        assert self._trie is not None
        return CompiledGrammar(self._trie, answer["lark"], spec, Built(*answer["built"]))
