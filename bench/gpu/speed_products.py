"""Speed of matrix products: the four of a Llama-3.1-8B layer, as bytes of the weights over the calibrated bandwidth; and whole
layers, launched early or in turn."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from statistics import median

import torch
from torch.nn import functional

from bench.gpu.context import Context
from bench.gpu.inputs import PRODUCTS, normal, pack_weight, stored_bytes
from bench.gpu.layer import measure_layers
from bench.gpu.rows import Row
from bench.gpu.targets import PRODUCT_GOALS, PRODUCT_ROWS, fused_products_row, products_row
from bench.gpu.timing import Call, seconds
from kernels.quantised_weights import Weight, pack_fp8
from kernels.triton.products.fp8 import linear_fp8
from kernels.triton.products.fused_linear import linear_add, normed_linear
from kernels.triton.rows.fp8 import quantize_rows_fp8

LAYER = {"qkv": (6144, 4096), "out": (4096, 4096), "gate_up": (28_672, 4096), "down": (4096, 14_336)}
TINY = {"qkv": (24, 32), "down": (16, 48)}
LAYERS = 4
"""Layers whose weights are read in turn: 1.7 GB in 16 bits and 0.45 in 4, of which the L2 cache holds 60 MB."""


def measure(context: Context) -> None:
    for kind in PRODUCT_GOALS:
        names = [products_row(kind, rows) for rows in PRODUCT_ROWS]
        context.guard(names, partial(_layer, context, kind))
    for kind in PRODUCT_GOALS:
        fused = fused_products_row(kind)
        context.guard(fused, partial(_fused, context, fused, kind))
    context.guard("product fp8 rows, 4096 rows", lambda: _many_rows(context))
    measure_layers(context)  # last: kernels that are launched in turn may have to be compiled


def _shapes(context: Context) -> dict[str, tuple[int, int]]:
    return TINY if context.rehearsal else LAYER


def _weights(context: Context) -> Iterator[torch.Tensor]:
    """Yield every matrix of the layers, one at a time."""
    for _ in range(1 if context.rehearsal else LAYERS):
        for n, k in _shapes(context).values():
            yield normal(n, k, dtype=context.dtype, device=context.device, scale=k**-0.5)


def _layer(context: Context, kind: str) -> None:
    weights = [(weight.shape[1], pack_weight(kind, weight)) for weight in _weights(context)]
    plain = list(_weights(context)) if kind == "bf16" else []
    num_bytes = sum(stored_bytes(weight) for _, weight in weights)
    for rows in PRODUCT_ROWS:
        inputs = {columns: normal(rows, columns, dtype=context.dtype, device=context.device) for columns, _ in weights}
        times_s = _total(context, [partial(PRODUCTS[kind], inputs[columns], weight) for columns, weight in weights])
        row = context.bandwidth_row(products_row(kind, rows), num_bytes, times_s)
        row.facts = {"us_layer": median(times_s) * 1e6 / max(1, len(weights) / len(_shapes(context))), "bytes": num_bytes}
        if plain:
            theirs = _total(context, [partial(functional.linear, inputs[weight.shape[1]], weight) for weight in plain])
            row.peer, row.peer_name = num_bytes / median(theirs) / 1e9, "torch linear"
        context.emit(row)


def _total(context: Context, calls: list[Call]) -> list[float]:
    """Samples of the total time of all calls, in seconds."""
    return [time_s * len(calls) for time_s in seconds(calls, context.device)]


def _fused(context: Context, name: str, kind: str) -> None:
    """Products fused with the operations around them: only the bytes of the weights count."""
    shapes = {"qkv": (24, 32), "out": (32, 32), "gate_up": (80, 32), "down": (32, 40)} if context.rehearsal else LAYER
    device, dtype = context.device, context.dtype
    hidden = shapes["qkv"][1]

    def make_weight(rows: int, columns: int) -> Weight:
        return pack_weight(kind, normal(rows, columns, dtype=dtype, device=device, scale=columns**-0.5))

    layers = [{part: make_weight(*size) for part, size in shapes.items()} for _ in range(1 if context.rehearsal else LAYERS)]
    norm_weight = torch.ones(hidden, dtype=dtype, device=device)
    residual, attended = (normal(1, hidden, dtype=dtype, device=device) for _ in "ra")

    def call(layer: dict[str, Weight]) -> Call:
        def run() -> None:
            stream = linear_add(attended, layer["out"], residual, norm_weight)
            gated = normed_linear(stream, layer["gate_up"], 1e-6, gate="silu")
            normed_linear(linear_add(gated, layer["down"], stream.total, norm_weight), layer["qkv"], 1e-6)

        return run

    num_bytes = sum(stored_bytes(weight) for weight in layers[0].values())
    times_s = seconds([call(layer) for layer in layers], device)
    row = context.bandwidth_row(name, num_bytes, times_s)
    row.facts = {"us_layer": median(times_s) * 1e6}
    context.emit(row)


def _many_rows(context: Context) -> None:
    """A prefill's product: e4m3 rows with one scale each, using the card's fp8 instructions."""
    m, n, k = (8, 16, 32) if context.rehearsal else (4096, 28_672, 4096)
    weight = pack_fp8(normal(n, k, dtype=context.dtype, device=context.device, scale=k**-0.5))
    values, scales = quantize_rows_fp8(normal(m, k, dtype=context.dtype, device=context.device))
    call = partial(linear_fp8, values, weight, x_scales=scales, out_dtype=context.dtype)
    times_s = seconds([call], context.device)
    rates = [2 * m * n * k / time_s / 1e12 for time_s in times_s]
    row = Row(name="product fp8 rows, 4096 rows", value=median(rates), samples=rates)
    context.limit(row, lambda: context.flops_fp8 / 1e12)
    context.emit(row)
