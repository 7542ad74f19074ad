"""Calibrates the card: copies, reads, matrix products and the gap between kernels. Every fraction relates to these figures.

copy       out ← x, bytes read and written (the base of all bandwidth fractions: the best of the sizes). The best of three
           ways counts, because a slow one would raise every fraction: the driver's copy captured in a graph, the same
           launched directly, and a kernel that negates. On H200s the driver's copy has been seen at two thirds of the
           memory's speed (NVIDIA/cccl, issue 1672)
read       the maximum of x, bytes read; may be slightly faster than the copy
matmul     8192³ on normally distributed numbers, two operations per multiply-add. The faster of two layouts of the second
           operand counts; a layer's products have the transposed one
graph gap  500 launches, in one graph, of a single-program kernel that does almost nothing
"""

from __future__ import annotations

import platform
import time
from functools import partial
from statistics import median
from typing import Any

import torch
import triton
import triton.language as tl

from bench.gpu import driver
from bench.gpu.context import Context
from bench.gpu.rows import Row
from bench.gpu.timing import Call, seconds

GB = 1_000_000_000
SIZES_GB = (1, 4, 8)
FP8 = torch.float8_e4m3fn
NUM_EMPTY = 500


@triton.jit
def nothing_kernel(place):  # type: ignore[no-untyped-def]
    tl.store(place, 1)


def calibrate(context: Context) -> None:
    """Measure first what other parts divide by, and report each figure at once; nvidia-smi, which may hang, runs last."""
    card = _card(context)
    context.add_facts(**card)
    copies: list[float] = []

    def copy_and_read(size: int) -> None:
        context.guard(f"copy {size} GB", partial(_copy, context, size, copies))
        context.guard(f"read {size} GB", partial(_read, context, size))

    copy_and_read(SIZES_GB[0])
    context.guard("matmul bf16 8192³", lambda: _matmul(context))
    for size in SIZES_GB[1:]:
        copy_and_read(size)
    context.guard("matmul fp8 8192³", lambda: _matmul_fp8(context))
    context.guard("graph gap per kernel", lambda: _gap(context))
    if context.device.type == "cuda":
        state = driver.state()
        context.add_facts(state_after_products=state, card={**card["card"], "driver": driver.version(state)})


def _card(context: Context) -> dict[str, Any]:
    found: dict[str, Any] = {"cpu": platform.processor() or platform.machine()}
    if context.device.type == "cuda":
        properties = torch.cuda.get_device_properties(context.device)
        free, total = torch.cuda.mem_get_info()
        card = {
            "name": properties.name,
            "memory_bytes": total,
            "multiprocessors": properties.multi_processor_count,
            "l2_bytes": properties.L2_cache_size,
            "capability": f"{properties.major}.{properties.minor}",
            "driver": None,
        }
        found |= {"card": card, "memory_free_bytes": free, "cuda": torch.version.cuda}
    return found


def _copy(context: Context, size_gb: int, rates_found: list[float]) -> None:
    count = context.size(size_gb * GB // 4, 4096 * size_gb)
    x = torch.empty(count, device=context.device).normal_()
    out = torch.empty_like(x)
    methods: dict[str, tuple[Call, bool]] = {
        "captured": (lambda: out.copy_(x), True),
        "plain": (lambda: out.copy_(x), False),
        "kernel": (lambda: torch.neg(x, out=out), True),
    }
    method_rates: dict[str, list[float]] = {}
    for method, (call, captured) in methods.items():
        times_s = seconds([call], context.device, captured=captured)
        method_rates[method] = [2 * x.nbytes / time_s for time_s in times_s]
    rates = max(method_rates.values(), key=median)
    row = Row(name=f"copy {size_gb} GB", value=median(rates) / 1e9, samples=[rate / 1e9 for rate in rates])
    row.facts = {method: median(found) / 1e9 for method, found in method_rates.items()}
    context.emit(row)
    rates_found.append(median(rates))
    context.add_facts(bandwidth=max(rates_found))


def _read(context: Context, size_gb: int) -> None:
    x = torch.empty(context.size(size_gb * GB // 4, 4096 * size_gb), device=context.device).normal_()
    out = torch.empty((), device=context.device)
    rates = [x.nbytes / time_s / 1e9 for time_s in seconds([lambda: torch.amax(x, dim=0, out=out)], context.device)]
    context.emit(Row(name=f"read {size_gb} GB", value=median(rates), samples=rates))


def _matmul(context: Context) -> None:
    size = context.size(8192, 64)
    a, b = (torch.randn(size, size, device=context.device).to(context.dtype) for _ in "ab")
    layouts = {"row by row": b, "transposed": b.T}
    layout_rates: dict[str, list[float]] = {}
    for layout, other in layouts.items():
        times_s = seconds([lambda other=other: torch.mm(a, other)], context.device)  # type: ignore[misc]
        layout_rates[layout] = [2 * size**3 / time_s / 1e12 for time_s in times_s]
    rates = max(layout_rates.values(), key=median)
    context.add_facts(flops=median(rates) * 1e12)
    facts = {layout: median(found) for layout, found in layout_rates.items()}
    context.emit(Row(name="matmul bf16 8192³", value=median(rates), samples=rates, facts=facts))


def _matmul_fp8(context: Context) -> None:
    size = context.size(8192, 64)
    a, b = (torch.randn(size, size, device=context.device).to(FP8) for _ in "ab")
    one = torch.ones((), device=context.device)
    out_dtype = torch.float32 if context.rehearsal else context.dtype

    def multiply() -> torch.Tensor:
        if context.rehearsal:
            return a.float() @ b.float().T
        return torch._scaled_mm(a, b.T, scale_a=one, scale_b=one, out_dtype=out_dtype, use_fast_accum=True)

    rates = [2 * size**3 / time_s / 1e12 for time_s in seconds([multiply], context.device)]
    context.add_facts(flops_fp8=median(rates) * 1e12)
    context.emit(Row(name="matmul fp8 8192³", value=median(rates), samples=rates))


def _gap(context: Context) -> None:
    place = torch.zeros(1, dtype=torch.int32, device=context.device)
    calls = [lambda: nothing_kernel[(1,)](place)] * context.size(NUM_EMPTY, 3)
    started_s = time.perf_counter()
    gaps = [1e6 * time_s for time_s in seconds(calls, context.device)]
    context.add_facts(gap_s=median(gaps) / 1e6)
    note = f"an empty kernel's own time included; took {time.perf_counter() - started_s:.1f} s"
    context.emit(Row(name="graph gap per kernel", value=median(gaps), samples=gaps, note=note))
