"""Kernels of one row that let the next one begin before they have ended: candidates of `bench.gpu.choices`, not in service.

A kernel launched early begins when the programs before it have ended, or have all said that it may. On an H200 it cost more
than it gained to say so at once: waiting programs then lie beside products that need the whole bandwidth (ADR 56). Two places
remain. Attention of one request leaves memory and most of a multiprocessor idle, so that the next product's first weights can
be loaded meanwhile. And a program of a product that has left its loop only stores a few numbers.

Nothing else changes: every kernel waits as before until the previous one has ended, and says so only after its own wait. So
what a kernel reads before its wait is as safe as in `kernels.triton.early_launch`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import FunctionType
from typing import Any
from unittest import mock

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.triton import fused_row, lone_decode
from kernels.triton.card_properties import interpreted
from kernels.triton.epilogue import apply_epilogue

_INTERPRETED = tl.constexpr(interpreted())


@triton.jit
def _wait_and_let_next_begin(EARLY: tl.constexpr):
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def _let_next_begin_and_finish(
    product, up, weight_scales, bias, squares, row_squares, residual, norm_weight, out, weighted, squares_out,
    partials, arrivals, tile, split, rows, columns, M, N, K, eps, alpha,
    GATE: tl.constexpr, COLUMN_SCALES: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """`apply_epilogue` of `kernels.triton.epilogue`; has no effect on a launch that is not early."""
    if not _INTERPRETED:
        gdc_launch_dependents()
    apply_epilogue(
        product, up, weight_scales, bias, squares, row_squares, residual, norm_weight, out, weighted, squares_out,
        partials, arrivals, tile, split, rows, columns, M, N, K, eps, alpha, GATE, COLUMN_SCALES, SPLITS, BLOCK_M, BLOCK_N,
    )  # fmt: skip


def _with_global(kernel: Any, name: str, value: Any, **options: Any) -> Any:
    """The kernel's source with another value of one of the names that it uses."""
    source = kernel.fn
    changed = FunctionType(source.__code__, {**source.__globals__, name: value}, source.__name__)
    changed.__annotations__, changed.__module__ = source.__annotations__, source.__module__
    changed.__qualname__ = f"{source.__qualname__}_sooner"  # another kernel, for caches
    return triton.jit(changed, **options)


@contextmanager
def _attention_lets_next_begin() -> Iterator[None]:
    kernel = _with_global(
        lone_decode.lone_kernel, "wait_for_previous", _wait_and_let_next_begin, do_not_specialize=["max_splits"]
    )
    with mock.patch.object(lone_decode, "lone_kernel", kernel):
        yield


@contextmanager
def _all_let_next_begin() -> Iterator[None]:
    kernel = _with_global(fused_row.fused_row_kernel, "apply_epilogue", _let_next_begin_and_finish)
    with ExitStack() as stack:
        stack.enter_context(_attention_lets_next_begin())
        stack.enter_context(mock.patch.object(fused_row, "fused_row_kernel", kernel))
        yield


SOONER: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "attention lets the next begin": _attention_lets_next_begin,
    "so do products behind their loop": _all_let_next_begin,
}
"""Ways to launch a layer of one row of 16-bit weights, by name."""
