"""Compiles the kernel variants that launches ask for, several at a time, before the first of them is needed.

    launches that only ask ─► Triton's binder names a variant ─► a thread compiles it, or finds it on disk ─► loaded

A launch that only asks does everything but run its kernel, so the kernel's outputs are uninitialised: a pass that asks must not
use them as indices. Threads are enough: MLIR, LLVM and the assembler run without Python's lock, which is held for about a fifth
of a compilation (Triton 3.6 and 3.9).
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, InvalidStateError, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

from triton import AsyncCompileMode, knobs
from triton.errors import TritonError
from triton.runtime import driver
from triton.runtime.jit import JITCallable, JITFunction

from kernels.triton.tuning import interpreted
from kernels.variants import CompilationFailed, Variants

THREADS_MAX = 8
"""More would only wait for each other in Python."""

KERNEL_S_MAX = 300.0
"""Most time for one kernel; the slowest takes seconds. Whatever waits for the start gives up later, and could not name it."""

LOOK_S = 0.5
"""Interval at which the times of compilations under way are checked."""


@contextmanager
def compiled_together(report: Callable[[Variants], None]) -> Iterator[None]:
    """Launches of this thread in the block request their variants and run nothing; after it all of these can be launched.

    `report` is called whenever one more is ready. Raises `CompilationFailed` for the first that cannot be compiled or loaded,
    or
    is not compiled after KERNEL_S_MAX. In the interpreter nothing is compiled, and launches run.
    """
    if interpreted():
        yield
        return
    with ExitStack() as stack:
        stack.enter_context(_parsing_in_turn())
        asked = _Asked(min(THREADS_MAX, os.cpu_count() or 1))
        stack.callback(asked.close)
        stack.callback(asked.forget)
        stack.enter_context(AsyncCompileMode(asked, ignore_errors=True))  # `asked` raises them, with names
        stack.callback(asked.cancel)
        stack.enter_context(asked.listening())
        with _only_asking():
            yield
        asked.wait(report)
    asked.load()


@contextmanager
def _replaced(owner: type, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _only_asking() -> AbstractContextManager[None]:
    """Triton's own way to compile without a launch, for all launches of this thread."""
    owner, launcher = threading.get_ident(), JITFunction.__getitem__

    def launcher_of(kernel: Any, grid: Any) -> Any:
        return partial(kernel.warmup, grid=grid) if threading.get_ident() == owner else launcher(kernel, grid)

    return _replaced(JITFunction, "__getitem__", launcher_of)


def _parsing_in_turn() -> AbstractContextManager[None]:
    """CPython 3.11 counts the depth of syntax trees for all threads together: if two parse at a time, one may fail."""
    turn, parse = threading.Lock(), JITCallable.parse

    def parse_in_turn(function: Any) -> Any:
        with turn:
            return parse(function)

    return _replaced(JITCallable, "parse", parse_in_turn)


class _Asked(Executor):
    """The variants that `AsyncCompileMode` wants compiled: Triton reports the name of each right before it submits it."""

    def __init__(self, num_threads: int) -> None:
        """Daemon threads, so that the process can end while one hangs; it cannot with those of `ThreadPoolExecutor`."""
        self._waiting: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._work, name="compiler", daemon=True) for _ in range(num_threads)]
        for thread in self._threads:
            thread.start()
        self._owner = threading.get_ident()
        self._begun_s: dict[Future[Any], float] = {}
        self._compilers: set[int] = set()
        self._name = ""
        self._place: tuple[dict[str, Any], str] = {}, ""
        self._names: dict[Future[Any], str] = {}
        self._places: dict[Future[Any], tuple[dict[str, Any], str]] = {}
        self._found: list[str] = []

    def submit(self, compiled: Callable[[], Any], /, *_: Any, **__: Any) -> Future[Any]:
        """Called once for each variant, whose future is among its kernel's variants from then on. Triton 3.6 adds a variant
        only when it is compiled, and would request it again for each layer of a model; it waits for the `result` of an entry
        that has one. Later versions replace this entry by their own."""
        future: Future[Any] = Future()
        self._names[future], self._places[future] = self._name, self._place
        variants, key = self._place
        variants[key] = future
        self._waiting.put((future, compiled))
        return future

    def close(self) -> None:
        """Threads end when the queue is empty."""
        for _ in self._threads:
            self._waiting.put(None)

    def _work(self) -> None:
        while (asked := self._waiting.get()) is not None:
            future, compiled = asked
            if not future.set_running_or_notify_cancel():
                continue
            self._begun_s[future] = time.monotonic()
            with suppress(InvalidStateError):  # no longer awaited
                try:
                    future.set_result(self._compile(compiled))
                except Exception as error:  # noqa: BLE001 - whoever waits for it raises it
                    future.set_exception(error)

    def _compile(self, compiled: Callable[[], Any]) -> Any:
        """Triton 3.6 compiles the host's half of a launch too, and keeps it on disk."""
        self._compilers.add(threading.get_ident())
        kernel = compiled()
        driver.active.launcher_cls(kernel.src, kernel.metadata)
        return kernel

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Triton's hooks are global to the process: compilations of other threads have to be told apart."""
        hooks = knobs.runtime.jit_cache_hook, knobs.compilation.listener
        knobs.runtime.jit_cache_hook, knobs.compilation.listener = self._note, self._count
        try:
            yield
        finally:
            knobs.runtime.jit_cache_hook, knobs.compilation.listener = hooks

    def _note(self, *, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        """Returns False: compile it."""
        if threading.get_ident() == self._owner:
            self._name = _name(fn.jit_function, compile)
            self._place = fn.jit_function.device_caches[compile["device"]][0], compile["key"]
        return False

    def _count(self, *, src: Any, cache_hit: bool, **_: Any) -> None:
        if cache_hit and threading.get_ident() in self._compilers:
            self._found.append(src.name)

    def wait(self, report: Callable[[Variants], None]) -> None:
        """Wait until all are compiled, or one cannot be."""
        missing, num_ready = set(self._names), 0
        while missing:
            ready, missing = wait(missing, timeout=LOOK_S, return_when=FIRST_COMPLETED)
            for future in ready:
                error = future.exception()
                if error is not None:
                    raise self._failed(future, error) from error
                num_ready += 1
                report(Variants(len(self._names), num_ready, len(self._found)))
            self._give_up_late(missing)

    def _give_up_late(self, missing: set[Future[Any]]) -> None:
        """When one compilation takes too long, stop waiting for all that are under way."""
        begun_s = {future: self._begun_s[future] for future in missing if future in self._begun_s}
        if not begun_s or time.monotonic() - min(begun_s.values()) <= KERNEL_S_MAX:
            return
        oldest = self._names[min(begun_s, key=begun_s.__getitem__)]
        error = CompilationFailed(f"{oldest}: its compiler has not ended after {KERNEL_S_MAX:.0f} s")
        self.cancel()
        for future in missing:
            with suppress(InvalidStateError):
                future.set_exception(error)
        raise error

    def cancel(self) -> None:
        """Cancel the variants that no thread has begun."""
        for future in self._names:
            future.cancel()

    def forget(self) -> None:
        """Remove variants that were not compiled, so that they can be requested again."""
        for future, (variants, key) in self._places.items():
            if variants.get(key) is future:
                del variants[key]

    def load(self) -> None:
        """Load them onto the card of this thread; otherwise a first launch would wait for that."""
        for future in self._names:
            try:
                _ = future.result().run  # a property that loads
            except (TritonError, RuntimeError) as error:
                raise self._failed(future, error) from error

    def _failed(self, future: Future[Any], error: BaseException) -> CompilationFailed:
        return CompilationFailed(f"{self._names[future]}: {type(error).__name__}: {error}")


def _name(kernel: Any, launch: dict[str, Any]) -> str:
    """`copy_kernel(source=*bf16, rows=i32, BLOCK=64, num_warps=4, num_stages=3)`"""
    passed = {name: kind for name, kind in launch["signature"].items() if kind != "constexpr"}
    constants = {kernel.arg_names[place]: value for (place, *_), value in launch["constants"].items()}
    options = {name: launch[name] for name in ("num_warps", "num_stages")}
    said = ", ".join(f"{name}={value}" for name, value in (passed | constants | options).items())
    return f"{kernel.__name__}({said})"
