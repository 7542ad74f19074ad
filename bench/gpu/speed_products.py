"""Matrix products by the clock: the four of a layer of Llama-3.1-8B, weights' bytes over the calibrated bandwidth; and whole
layers, launched early or in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch.nn import functional

from bench.gpu.context import Context
from bench.gpu.inputs import Weight, coded, normal, stored_bytes
from bench.gpu.layer import measure_layers
from bench.gpu.rows import Row
from bench.gpu.timing import Call, median, seconds
from kernels.quantised_weights import pack_fp8, pack_int4, pack_int8
from kernels.triton.fp8_rows import quantize_rows_fp8
from kernels.triton.fused_linear import linear_add, normed_linear
from kernels.triton.linear import linear
from kernels.triton.linear_fp8 import linear_fp8
from kernels.triton.linear_int4 import linear_int4
from kernels.triton.linear_int8 import linear_int8

LAYER = {"qkv": (6144, 4096), "out": (4096, 4096), "gate_up": (28_672, 4096), "down": (4096, 14_336)}
TINY = {"qkv": (24, 32), "down": (16, 48)}
LAYERS = 4
"""So many layers' weights in turn: 1.7 GB in 16 bits and 0.45 in 4, of which the second-level cache holds 60 MB."""
Product = Callable[[torch.Tensor], torch.Tensor]


def measure(context: Context) -> None:
    for kind in ("bf16", "int8", "fp8", "int4"):
        names = [_name(kind, rows) for rows in (1, 16)]
        context.guard(names, partial(_layer, context, kind))
    for kind in ("bf16", "int8", "fp8", "int4"):
        fused = f"fused products of Llama-8B (norm, gate, residual), {kind}, 1 row"
        context.guard(fused, partial(_fused, context, fused, kind))
    context.guard("product fp8 rows, 4096 rows", lambda: _many_rows(context))
    measure_layers(context)  # the last: kernels that are launched in turn may have to be compiled


def _name(kind: str, rows: int) -> str:
    return f"products of Llama-8B, {kind}, {rows} row{'s' * (rows > 1)}"


def _shapes(context: Context) -> dict[str, tuple[int, int]]:
    return TINY if context.rehearsal else LAYER


def _weights(context: Context) -> Iterator[tuple[str, torch.Tensor]]:
    """Every matrix of so many layers, one at a time."""
    for _ in range(1 if context.rehearsal else LAYERS):
        for name, (n, k) in _shapes(context).items():
            yield name, normal(n, k, dtype=context.dtype, device=context.device, scale=k**-0.5)


def _packed(kind: str, weight: torch.Tensor) -> tuple[Product, int]:
    """The product and the bytes of its weights."""
    if kind == "bf16":
        return lambda x: linear(x, weight), weight.nbytes
    if kind == "int8":
        int8 = pack_int8(weight)
        return lambda x: linear_int8(x, int8), int8.values.nbytes + int8.scales.nbytes
    if kind == "fp8":
        fp8 = pack_fp8(weight)
        return lambda x: linear_fp8(x, fp8), fp8.values.nbytes + fp8.scales.nbytes
    int4 = pack_int4(weight, 128)
    return lambda x: linear_int4(x, int4), int4.words.nbytes + int4.scales_zeros.nbytes


def _layer(context: Context, kind: str) -> None:
    products = [(weight.shape[1], *_packed(kind, weight)) for _, weight in _weights(context)]
    plain = [weight for _, weight in _weights(context)] if kind == "bf16" else []
    num_bytes = sum(size for _, _, size in products)
    for rows in (1, 16):
        inputs = {columns: normal(rows, columns, dtype=context.dtype, device=context.device) for columns, _, _ in products}
        taken = _total(context, [partial(product, inputs[columns]) for columns, product, _ in products])
        rates = [num_bytes / taken_s / 1e9 for taken_s in taken]
        row = Row(name=_name(kind, rows), value=median(rates), limit=context.bandwidth / 1e9, samples=rates)
        row.facts = {"us_layer": median(taken) * 1e6 / max(1, len(products) / len(_shapes(context))), "bytes": num_bytes}
        if plain:
            theirs = _total(context, [partial(functional.linear, inputs[weight.shape[1]], weight) for weight in plain])
            row.peer, row.peer_name = num_bytes / median(theirs) / 1e9, "torch linear"
        context.emit(row)


def _total(context: Context, calls: list[Call]) -> list[float]:
    """Samples of the time of all calls together."""
    return [taken_s * len(calls) for taken_s in seconds(calls, context.device)]


def _fused(context: Context, name: str, kind: str) -> None:
    """Products with what stands around them: the bytes are those of the weights alone."""
    shapes = {"qkv": (24, 32), "out": (32, 32), "gate_up": (80, 32), "down": (32, 40)} if context.rehearsal else LAYER
    device, dtype = context.device, context.dtype
    hidden = shapes["qkv"][1]

    def made(rows: int, columns: int) -> Weight:
        return coded(kind, normal(rows, columns, dtype=dtype, device=device, scale=columns**-0.5))

    layers = [{part: made(*size) for part, size in shapes.items()} for _ in range(1 if context.rehearsal else LAYERS)]
    norm_weight = torch.ones(hidden, dtype=dtype, device=device)
    residual, attended = (normal(1, hidden, dtype=dtype, device=device) for _ in "ra")

    def call(layer: dict[str, Weight]) -> Call:
        def run() -> None:
            stream = linear_add(attended, layer["out"], residual, norm_weight)
            gated = normed_linear(stream, layer["gate_up"], 1e-6, gate="silu")
            normed_linear(linear_add(gated, layer["down"], stream.total, norm_weight), layer["qkv"], 1e-6)

        return run

    num_bytes = sum(stored_bytes(weight) for weight in layers[0].values())
    taken = seconds([call(layer) for layer in layers], device)
    rates = [num_bytes / taken_s / 1e9 for taken_s in taken]
    row = Row(name=name, value=median(rates), limit=context.bandwidth / 1e9, samples=rates)
    row.facts = {"us_layer": median(taken) * 1e6}
    context.emit(row)


def _many_rows(context: Context) -> None:
    """A prefill's product: e4m3 rows with a scale each, on the card's fp8 instructions."""
    m, n, k = (8, 16, 32) if context.rehearsal else (4096, 28_672, 4096)
    weight = pack_fp8(normal(n, k, dtype=context.dtype, device=context.device, scale=k**-0.5))
    values, scales = quantize_rows_fp8(normal(m, k, dtype=context.dtype, device=context.device))
    call = lambda: linear_fp8(values, weight, x_scales=scales, out_dtype=context.dtype)  # noqa: E731
    taken = seconds([call], context.device)
    rates = [2 * m * n * k / taken_s / 1e12 for taken_s in taken]
    row = Row(name="product fp8 rows, 4096 rows", value=median(rates), samples=rates)
    context.limit(row, lambda: context.flops_fp8 / 1e12)
    context.emit(row)
