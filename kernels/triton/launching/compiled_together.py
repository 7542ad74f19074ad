"""Compiles the kernel variants of dry launches in parallel, before the first of them is needed.

    dry launches ─► Triton's binder names a variant ─► a thread compiles it, or finds it on disk ─► loaded

A dry launch does everything but run its kernel, so the kernel's outputs are uninitialised: a pass of dry launches must not use
them as indices. Threads suffice: MLIR, LLVM and the assembler run without the GIL, which is held for about a fifth of a
compilation (Triton 3.6 and 3.9).
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

from kernels.triton.launching.card_properties import interpreted
from kernels.variants import CompilationFailed, Variants

THREADS_MAX = 8
"""More would only wait for the GIL."""

KERNEL_S_MAX = 300.0
"""Time limit for one kernel; the slowest takes seconds. Shorter than the limits for the whole start, which could not name the
kernel."""

POLL_S = 0.5
"""Interval at which running compilations are checked against the time limit."""


@contextmanager
def compiled_together(report: Callable[[Variants], None]) -> Iterator[None]:
    """Launches of this thread in the block only request their variants; after the block all of these are compiled and loaded.

    `report` is called whenever one more is ready. Raises `CompilationFailed` for the first that cannot be compiled or loaded,
    or is not compiled after KERNEL_S_MAX. In the interpreter nothing is compiled, and launches run.
    """
    if interpreted():
        yield
        return
    with ExitStack() as stack:
        stack.enter_context(_serialised_parsing())
        pool = _CompilePool(min(THREADS_MAX, os.cpu_count() or 1))
        stack.callback(pool.close)
        stack.callback(pool.discard_unfinished)
        stack.enter_context(AsyncCompileMode(pool, ignore_errors=True))  # `pool` raises errors, with names
        stack.callback(pool.cancel)
        stack.enter_context(pool.hooks_installed())
        with _warmups_only():
            yield
        pool.wait(report)
    pool.load()


@contextmanager
def _replaced(owner: type, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _warmups_only() -> AbstractContextManager[None]:
    """Turns all launches of this thread into Triton's `warmup`, which compiles without launching."""
    owner, launcher = threading.get_ident(), JITFunction.__getitem__

    def warmup_or_launch(kernel: Any, grid: Any) -> Any:
        return partial(kernel.warmup, grid=grid) if threading.get_ident() == owner else launcher(kernel, grid)

    return _replaced(JITFunction, "__getitem__", warmup_or_launch)


def _serialised_parsing() -> AbstractContextManager[None]:
    """Lets one thread parse at a time: CPython 3.11 counts the depth of syntax trees for all threads together, so that one of
    two concurrent parses may fail."""
    lock, parse = threading.Lock(), JITCallable.parse

    def parse_serially(function: Any) -> Any:
        with lock:
            return parse(function)

    return _replaced(JITCallable, "parse", parse_serially)


class _CompilePool(Executor):
    """Executor for `AsyncCompileMode`: Triton reports the name of each variant right before it submits it."""

    def __init__(self, num_threads: int) -> None:
        """Uses daemon threads, so that the process can exit while one hangs; with those of `ThreadPoolExecutor` it cannot."""
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._work, name="compiler", daemon=True) for _ in range(num_threads)]
        for thread in self._threads:
            thread.start()
        self._owner = threading.get_ident()
        self._started_s: dict[Future[Any], float] = {}
        self._compilers: set[int] = set()
        self._variant_name = ""
        self._entry: tuple[dict[str, Any], str] = {}, ""
        self._names: dict[Future[Any], str] = {}
        self._entries: dict[Future[Any], tuple[dict[str, Any], str]] = {}
        self._cache_hits: list[str] = []

    def submit(self, compile_variant: Callable[[], Any], /, *_: Any, **__: Any) -> Future[Any]:
        """Queues a variant and enters its future into its kernel's cache. Triton 3.6 enters a variant only once it is compiled,
        and would request it again for each layer of a model; it waits for the `result` of an entry that has one. Later versions
        replace this entry by their own."""
        future: Future[Any] = Future()
        self._names[future], self._entries[future] = self._variant_name, self._entry
        variants, key = self._entry
        variants[key] = future
        self._queue.put((future, compile_variant))
        return future

    def close(self) -> None:
        """Lets the threads end once the queue is empty."""
        for _ in self._threads:
            self._queue.put(None)

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            future, compile_variant = job
            if not future.set_running_or_notify_cancel():
                continue
            self._started_s[future] = time.monotonic()
            with suppress(InvalidStateError):  # nothing waits for it any more
                try:
                    future.set_result(self._compile(compile_variant))
                except Exception as error:  # noqa: BLE001 - raised where the future is awaited
                    future.set_exception(error)

    def _compile(self, compile_variant: Callable[[], Any]) -> Any:
        """Compiles the kernel, and its launcher: Triton 3.6 compiles the host code of a launch too, and caches it on disk."""
        self._compilers.add(threading.get_ident())
        kernel = compile_variant()
        driver.active.launcher_cls(kernel.src, kernel.metadata)
        return kernel

    @contextmanager
    def hooks_installed(self) -> Iterator[None]:
        """Installs Triton's hooks. They are global to the process, so they must ignore compilations of other threads."""
        hooks = knobs.runtime.jit_cache_hook, knobs.compilation.listener
        knobs.runtime.jit_cache_hook, knobs.compilation.listener = self._record_variant, self._count_cache_hit
        try:
            yield
        finally:
            knobs.runtime.jit_cache_hook, knobs.compilation.listener = hooks

    def _record_variant(self, *, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        """Notes the name and the cache entry of the variant that `submit` gets next. Returns False, so that it is compiled."""
        if threading.get_ident() == self._owner:
            self._variant_name = _variant_name(fn.jit_function, compile)
            self._entry = fn.jit_function.device_caches[compile["device"]][0], compile["key"]
        return False

    def _count_cache_hit(self, *, src: Any, cache_hit: bool, **_: Any) -> None:
        if cache_hit and threading.get_ident() in self._compilers:
            self._cache_hits.append(src.name)

    def wait(self, report: Callable[[Variants], None]) -> None:
        """Waits until all variants are compiled. Raises `CompilationFailed` for the first that cannot be."""
        pending, num_ready = set(self._names), 0
        while pending:
            ready, pending = wait(pending, timeout=POLL_S, return_when=FIRST_COMPLETED)
            for future in ready:
                error = future.exception()
                if error is not None:
                    raise self._failed(future, error) from error
                num_ready += 1
                report(Variants(len(self._names), num_ready, len(self._cache_hits)))
            self._fail_overdue(pending)

    def _fail_overdue(self, pending: set[Future[Any]]) -> None:
        """Fails all pending variants, and raises, if a compilation has run for longer than KERNEL_S_MAX."""
        started_s = {future: self._started_s[future] for future in pending if future in self._started_s}
        if not started_s or time.monotonic() - min(started_s.values()) <= KERNEL_S_MAX:
            return
        oldest = self._names[min(started_s, key=started_s.__getitem__)]
        error = CompilationFailed(f"{oldest}: its compiler has not ended after {KERNEL_S_MAX:.0f} s")
        self.cancel()
        for future in pending:
            with suppress(InvalidStateError):
                future.set_exception(error)
        raise error

    def cancel(self) -> None:
        """Cancels the variants that no thread has started to compile."""
        for future in self._names:
            future.cancel()

    def discard_unfinished(self) -> None:
        """Removes variants that were not compiled from the caches, so that they can be requested again."""
        for future, (variants, key) in self._entries.items():
            if variants.get(key) is future:
                del variants[key]

    def load(self) -> None:
        """Loads all variants onto the card of this thread; otherwise the first launch of each would wait for that."""
        for future in self._names:
            try:
                _ = future.result().run  # a property that loads
            except (TritonError, RuntimeError) as error:
                raise self._failed(future, error) from error

    def _failed(self, future: Future[Any], error: BaseException) -> CompilationFailed:
        return CompilationFailed(f"{self._names[future]}: {type(error).__name__}: {error}")


def _variant_name(kernel: Any, launch: dict[str, Any]) -> str:
    """`copy_kernel(source=*bf16, rows=i32, BLOCK=64, num_warps=4, num_stages=3)`"""
    passed = {name: kind for name, kind in launch["signature"].items() if kind != "constexpr"}
    constants = {kernel.arg_names[position]: value for (position, *_), value in launch["constants"].items()}
    options = {name: launch[name] for name in ("num_warps", "num_stages")}
    arguments = ", ".join(f"{name}={value}" for name, value in (passed | constants | options).items())
    return f"{kernel.__name__}({arguments})"
