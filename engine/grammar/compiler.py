"""Compiles constraints outside the step loop, each within a deadline, in the order of `compile_lines`. Knows no request.

A compile runs twice: first in a worker process, which is killed at the deadline; then, once it is known to be quick, in a
thread of this process with the interpreter lock released. So a text that explodes costs only its own deadline.
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

from engine.errors import EngineOverloaded
from engine.grammar.compile_lines import NO_PROCESS, NO_THREAD, CompileLines, Job, overloaded
from engine.grammar.matcher import CompiledGrammar, token_trie
from engine.grammar.spec import GrammarError, GrammarSpec
from engine.grammar.stacks import STACK_BYTES, new_threads_get
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
        # A session of its own: an interrupt at the terminal is the engine's to handle.
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, start_new_session=True)
        self._unread = b""
        try:
            self._write(vocabulary_line(vocabulary))
            # One trivial job first, so that the start of the interpreter counts against no deadline.
            self.ask(GrammarSpec("choice", '["a"]'), _START_S)
        except WorkerLost:
            self.kill()
            raise

    def ask(self, spec: GrammarSpec, deadline_s: float) -> dict[str, str]:
        """The worker's answer. Raises `WorkerLost` when there is none within the deadline."""
        end = time.monotonic() + deadline_s
        self._write(job_line(spec, deadline_s))
        assert self._process.stdout is not None
        pipe, poll = self._process.stdout.fileno(), select.poll()  # accepts any file number, unlike `select.select`
        poll.register(pipe, select.POLLIN)
        while b"\n" not in self._unread:
            if not poll.poll(max(0.0, end - time.monotonic()) * 1000):
                raise WorkerLost(f"takes longer than {deadline_s:g} s to compile")
            data = os.read(pipe, _READ_BYTES)
            if not data:
                raise WorkerLost("crashed its compiler: it exceeds the memory or depth limit for a grammar")
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        answer: dict[str, str] = json.loads(line)
        return answer

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue  # what it had not read yet

    def _write(self, line: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise WorkerLost("could not be compiled: no compiler process is available") from error


class GrammarCompiler:
    """Compiled grammars of one model. `submit` may be called from any thread; `close` ends the workers.

    A refusal is cached too, so that sending a text that explodes again costs nothing.
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
        self._lines = CompileLines(waiting_max=None, at_a_time=workers) if has_one_caller else CompileLines()
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._num_idle = 0
        self._closed = False

    def submit(self, spec: GrammarSpec, tenant_id: str) -> Future[CompiledGrammar]:
        """The grammar of `spec`, now or later. The future raises `GrammarError` naming the field, and `EngineOverloaded` when
        too many wait already, or no thread or process can be started."""
        with self._changed:
            known = self._lines.find(tenant_id, spec)
            if known is not None:
                return known
            try:
                self._refuse(spec)
                if self._num_idle <= self._lines.num_waiting and len(self._threads) < self._workers:
                    self._start_worker(spec)
                grammar = self._lines.add(tenant_id, spec)
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
            self._lines.cancel()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _start_worker(self, spec: GrammarSpec) -> None:
        """Start another thread, which begins when the lock is free. If the system cannot start one, the existing threads do its
        work; raises `EngineOverloaded` if there are none."""
        thread = threading.Thread(target=self._work, name="grammar-compiler", daemon=True)
        try:
            with new_threads_get(STACK_BYTES):
                thread.start()
        except RuntimeError as error:
            if not self._threads:
                raise overloaded(spec, NO_THREAD) from error
        else:
            self._threads.append(thread)

    def _refuse(self, spec: GrammarSpec) -> None:
        if self._closed:
            raise GrammarError(spec.param, f"{spec.param} cannot be compiled: the engine is stopping")
        if self._trie is None:
            raise GrammarError(spec.param, f"{spec.param} needs a model that has an end-of-sequence token")

    def _work(self) -> None:
        """One thread, with a worker process of its own from its first job on."""
        process: _WorkerProcess | None = None
        while (job := self._next_job()) is not None:
            try:
                if process is not None and not process.is_alive:  # it died while idle
                    process.kill()
                    process = None
                process = process or self._start_process(job.spec)
                answer = process.ask(job.spec, self._deadline_s)
                job.grammar.set_result(self._build(job.spec, answer))
            except GrammarError as error:
                job.grammar.set_exception(error)
            except WorkerLost as error:
                process = self._without(process)
                job.grammar.set_exception(GrammarError(job.spec.param, f"{job.spec.param} {error}"))
            except Exception as error:  # noqa: BLE001 - owned task: whoever waits is told, the next one gets a new process
                process = self._without(process)
                self._forget(job)
                job.grammar.set_exception(error)
            self._end(job)
        self._without(process)

    def _start_process(self, spec: GrammarSpec) -> _WorkerProcess:
        try:
            return _WorkerProcess(self._vocabulary)
        except OSError as error:
            raise overloaded(spec, NO_PROCESS) from error

    def _without(self, process: _WorkerProcess | None) -> _WorkerProcess | None:
        """End the process, if there is one. Returns None."""
        if process is not None:
            process.kill()
        return None

    def _forget(self, job: Job) -> None:
        with self._changed:
            self._lines.forget(job)

    def _end(self, job: Job) -> None:
        with self._changed:
            self._lines.end(job)
            self._changed.notify()

    def _next_job(self) -> Job | None:
        with self._changed:
            self._num_idle += 1
            while (job := None if self._closed else self._lines.begin()) is None and not self._closed:
                self._changed.wait()
            self._num_idle -= 1
            return job

    def _build(self, spec: GrammarSpec, answer: dict[str, str]) -> CompiledGrammar:
        if "error" in answer:
            raise GrammarError(spec.param, answer["error"])
        assert self._trie is not None
        return CompiledGrammar(self._trie, answer["lark"], spec)
