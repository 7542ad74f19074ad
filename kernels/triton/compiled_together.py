"""Compiles the variants of kernels that launches ask for, several at a time, before the first of them is needed.

    launches that only ask ─► Triton's binder names a variant ─► a thread compiles it, or finds it on disk ─► loaded

A launch that asks does all but run its kernel, so what the kernel would have written holds anything: passes that ask must take
no index from there. Threads suffice. MLIR, LLVM and the assembler hold no lock of Python's, which takes about a fifth of a
compilation (Triton 3.6 and 3.9).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

from triton import AsyncCompileMode, knobs
from triton.errors import TritonError
from triton.runtime import driver
from triton.runtime.jit import JITCallable, JITFunction

from kernels.triton.tuning import interpreted
from kernels.variants import CompilationFailed, Variants

THREADS_MAX = 8
"""More have to take turns in Python."""


@contextmanager
def compiled_together(report: Callable[[Variants], None]) -> Iterator[None]:
    """Launches of this thread in the block ask for their variants and run nothing; behind it all of these can be launched.

    `report` is told whenever one more is ready. Raises `CompilationFailed` for the first that cannot be compiled or loaded.
    In the interpreter nothing is compiled, and launches run.
    """
    if interpreted():
        yield
        return
    with ExitStack() as stack:
        stack.enter_context(_parsing_in_turn())
        asked = _Asked(stack.enter_context(ThreadPoolExecutor(min(THREADS_MAX, os.cpu_count() or 1), "compiler")))
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
    """CPython 3.11 counts how deep syntax trees are for all threads together: of two that parse at a time one may fail."""
    turn, parse = threading.Lock(), JITCallable.parse

    def parse_in_turn(function: Any) -> Any:
        with turn:
            return parse(function)

    return _replaced(JITCallable, "parse", parse_in_turn)


class _Asked(Executor):
    """The variants that `AsyncCompileMode` wants compiled: Triton tells the name of each right before it submits it."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self._threads = threads
        self._owner = threading.get_ident()
        self._compilers: set[int] = set()
        self._name = ""
        self._names: dict[Future[Any], str] = {}
        self._found: list[str] = []

    def submit(self, compiled: Callable[[], Any], /, *_: Any, **__: Any) -> Future[Any]:
        """Called once for each variant."""
        future = self._threads.submit(self._compile, compiled)
        self._names[future] = self._name
        return future

    def _compile(self, compiled: Callable[[], Any]) -> Any:
        """Triton 3.6 compiles the host's half of a launch, too, and keeps it on disk."""
        self._compilers.add(threading.get_ident())
        kernel = compiled()
        driver.active.launcher_cls(kernel.src, kernel.metadata)
        return kernel

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Triton's hooks are those of the process: others compile with their own."""
        hooks = knobs.runtime.jit_cache_hook, knobs.compilation.listener
        knobs.runtime.jit_cache_hook, knobs.compilation.listener = self._note, self._count
        try:
            yield
        finally:
            knobs.runtime.jit_cache_hook, knobs.compilation.listener = hooks

    def _note(self, *, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        if threading.get_ident() == self._owner:
            self._name = _name(fn.jit_function, compile)
        return False  # go on and compile it

    def _count(self, *, src: Any, cache_hit: bool, **_: Any) -> None:
        if cache_hit and threading.get_ident() in self._compilers:
            self._found.append(src.name)

    def wait(self, report: Callable[[Variants], None]) -> None:
        """Until all are compiled, or one cannot be."""
        for num_ready, future in enumerate(as_completed(self._names), 1):
            error = future.exception()
            if error is not None:
                raise self._failed(future, error) from error
            report(Variants(len(self._names), num_ready, len(self._found)))

    def cancel(self) -> None:
        """Those that no thread has begun."""
        for future in self._names:
            future.cancel()

    def load(self) -> None:
        """Onto the card of this thread, where a first launch would wait for it."""
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
