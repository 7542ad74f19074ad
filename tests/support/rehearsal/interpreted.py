"""Triton kernels on an emulated card: the interpreter runs them when the stream reaches them, and compiles nothing."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from kernels.variants import Variants
from tests.support.rehearsal.card import current_card
from tests.support.rehearsal.leaves import map_leaves
from tests.support.rehearsal.tensors import refuse_host, to_host


@contextmanager
def launch_interpreted_kernels(*, runs: bool = True) -> Iterator[None]:
    """Launch kernels on the stream, which run when it reaches them or, unless `runs`, never, so that outputs stay garbage. Like
    Triton, reject host pointers except to page-locked memory, and launch nothing while kernels are only to be compiled."""
    executor = importlib.import_module("triton.runtime.interpreter").GridExecutor
    execute = executor.__call__

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        refuse_host((args, kwargs))
        card = current_card()
        if card.only_compiles:
            return
        host_args, host_kwargs = map_leaves(to_host, (args, kwargs))
        card.stream.add(lambda: execute(self, *host_args, **host_kwargs) if runs else None)

    compiling = importlib.import_module("kernels.triton.launching.compiled_together")
    with mock.patch.object(executor, "__call__", launch), mock.patch.object(compiling, "compiled_together", _only_compile):
        yield


@contextmanager
def _only_compile(_report: Callable[[Variants], None]) -> Iterator[None]:
    card = current_card()
    card.only_compiles = True
    try:
        yield
    finally:
        card.only_compiles = False
