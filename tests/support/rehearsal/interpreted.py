"""Launches of Triton kernels on a rehearsed card: the interpreter runs them when the stream comes to them."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from tests.support.rehearsal.card import current_card
from tests.support.rehearsal.leaves import map_leaves
from tests.support.rehearsal.tensors import refuse_host, to_host


@contextmanager
def launch_interpreted_kernels(*, runs: bool = True) -> Iterator[None]:
    """Kernels are launched, and run when the stream comes to them, or, unless `runs`, never: their outputs stay garbage.
    Addresses of the host are refused as Triton does, but for page-locked memory."""
    executor = importlib.import_module("triton.runtime.interpreter").GridExecutor
    execute = executor.__call__

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        refuse_host((args, kwargs))
        host_args, host_kwargs = map_leaves(to_host, (args, kwargs))
        card = current_card()
        card.num_launches += 1
        card.stream.add(lambda: execute(self, *host_args, **host_kwargs) if runs else None)

    with mock.patch.object(executor, "__call__", launch):
        yield
