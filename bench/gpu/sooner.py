"""Kernels of one row that trigger the next kernel before they end: candidates of `bench.gpu.choices`, not in service.

A kernel launched early starts when all programs of the previous kernel have ended or triggered it. On an H200, triggering at
once cost more than it gained: waiting programs then take up room beside products that need the whole bandwidth (ADR 56). Two
places remain. Attention of one request leaves memory and most of a multiprocessor idle, so that the first weights of the next
product can be loaded meanwhile. And a program of a product that has left its loop only stores a few numbers.

Nothing else changes: every kernel still waits until the previous one has ended, and triggers only after its own wait. So what a
kernel reads before its wait is as safe as in `kernels.triton.launching.early_launch`.
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

from kernels.triton.attention import lone_decode
from kernels.triton.launching.card_properties import interpreted
from kernels.triton.products import fused_row
from kernels.triton.products.epilogue import apply_epilogue

_INTERPRETED = tl.constexpr(interpreted())


@triton.jit
def _wait_then_trigger(EARLY: tl.constexpr):
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def _trigger_then_finish(
    product, up, weight_scales, bias, squares, row_squares, residual, norm_weight, out, weighted, squares_out,
    partials, arrivals, tile, split, rows, columns, M, N, K, eps, alpha,
    GATE: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Trigger the next kernel, then `apply_epilogue`. The trigger has no effect on a launch that is not early."""
    if not _INTERPRETED:
        gdc_launch_dependents()
    apply_epilogue(
        product, up, weight_scales, bias, squares, row_squares, residual, norm_weight, out, weighted, squares_out,
        partials, arrivals, tile, split, rows, columns, M, N, K, eps, alpha, GATE, SPLITS, BLOCK_M, BLOCK_N,
    )  # fmt: skip


def _with_global(kernel: Any, name: str, value: Any, **options: Any) -> Any:
    """The same kernel, in which the global `name` has another value."""
    source = kernel.fn
    changed = FunctionType(source.__code__, {**source.__globals__, name: value}, source.__name__)
    changed.__annotations__, changed.__module__ = source.__annotations__, source.__module__
    changed.__qualname__ = f"{source.__qualname__}_sooner"  # so that caches treat it as another kernel
    return triton.jit(changed, **options)


@contextmanager
def _trigger_in_attention() -> Iterator[None]:
    kernel = _with_global(lone_decode.lone_kernel, "wait_for_previous", _wait_then_trigger, do_not_specialize=["max_splits"])
    with mock.patch.object(lone_decode, "lone_kernel", kernel):
        yield


@contextmanager
def _trigger_in_attention_and_products() -> Iterator[None]:
    kernel = _with_global(fused_row.fused_row_kernel, "apply_epilogue", _trigger_then_finish)
    with ExitStack() as stack:
        stack.enter_context(_trigger_in_attention())
        stack.enter_context(mock.patch.object(fused_row, "fused_row_kernel", kernel))
        yield


SOONER: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "attention lets the next begin": _trigger_in_attention,
    "so do products behind their loop": _trigger_in_attention_and_products,
}
"""Ways to launch a layer of one row of 16-bit weights, by name."""
