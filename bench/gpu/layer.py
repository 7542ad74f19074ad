"""One layer of plain weights: a decode step's kernels launched early, or each after the previous one has ended."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from statistics import median
from unittest import mock

import torch
from torch.nn.functional import linear

from bench.gpu.context import Context
from bench.gpu.inputs import LLAMA, TINY, make_pages, normal
from bench.gpu.rows import Row
from bench.gpu.targets import LAYER_ROWS, layer_row
from bench.gpu.timing import seconds
from engine.runner.warm_up import compiles_at_first_use, compiling
from kernels.attention_rows import AttentionShape
from kernels.operations import FUSED_ROWS_MAX
from kernels.triton.attention import decode as attention_decode
from kernels.triton.attention import splits as attention_splits
from kernels.triton.attention.rope_and_cache import rope_and_cache
from kernels.triton.attention.rotated_decode import rotated_decode
from kernels.triton.launching import early_launch
from kernels.triton.launching.early_launch import VARIABLE, supports_early_launch
from kernels.triton.products.fused_linear import linear_add, normed_linear
from kernels.triton.rows.activation import silu_mul
from kernels.triton.rows.norm import add_rms_norm

MODELS = {
    "Llama-8B": (LLAMA, 4096, 14_336, 4),
    "Qwen3-0.6B": (AttentionShape(16, 16, 8, 128), 1024, 3072, 28),
}
"""Heads, widths of the residual stream and of the feed-forward part, and the number of layers run in turn, each with its own
weights and keys: together more than the cache holds."""
CONTEXT_LEN = 1024
CHOSEN = "chosen"


def measure_layers(context: Context) -> None:
    """Check that kernels are launched early exactly where that is faster: a result for each model and number of rows."""
    cases = [(model, rows) for model, row_counts in LAYER_ROWS.items() for rows in row_counts]
    if compiles_at_first_use(context.device):
        context.guard("compilation of layers", lambda: _compile_layers(context, cases))
    for model, rows in cases:
        name = layer_row(model, rows)
        context.guard(name, partial(_measure_layer, context, name, model, rows))


def _compile_layers(context: Context, cases: list[tuple[str, int]]) -> None:
    """Compile the kernels of all layers together: half of them are launched in a way that no engine uses."""
    with compiling("layers"):
        for model, rows in cases:
            run, _ = make_layer(context, model, rows)
            for launched in _ways(rows).values():
                with launched():
                    run()


def _ways(rows: int) -> dict[str, Callable[[], AbstractContextManager[object]]]:
    """Blocks in which the kernels of a layer of so many rows are launched, by name."""
    return {"early": lambda: mock.patch.object(early_launch, "EARLY_ROWS_MAX", rows), "in turn": launched_serially}


def _measure_layer(context: Context, name: str, model: str, rows: int) -> None:
    run, layers = make_layer(context, model, rows)
    ways = _ways(rows)
    served = "early" if rows <= early_launch.EARLY_ROWS_MAX else "in turn"
    times_s: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(context.size(2, 1)):
        for way, launched in ways.items():
            with launched():
                times_s[way] += seconds([run], context.device, samples=3)
    emit_choice(context, name, {CHOSEN if way == served else way: median(found) / layers for way, found in times_s.items()})


def emit_choice(context: Context, name: str, times_s: dict[str, float]) -> None:
    """times_s: seconds by case, including `CHOSEN`. The row's value is the time of `CHOSEN` over that of the fastest case."""
    row = Row(name=name, value=times_s[CHOSEN] / min(times_s.values()))
    row.facts = {"us": {case: time_s * 1e6 for case, time_s in times_s.items()}}
    row.note = ", ".join(f"{case}: {time_s * 1e6:.3g} µs" for case, time_s in times_s.items())
    context.emit(row)


def launched_serially() -> AbstractContextManager[None]:
    """Inside the block no kernel starts before the previous one has ended."""
    return launches_patched(mock.patch.dict(os.environ, {VARIABLE: "0"}))


@contextmanager
def launches_patched(patch: AbstractContextManager[object]) -> Iterator[None]:
    """Apply a patch to the launches inside the block only, by clearing the cached decision on early launches around it."""
    try:
        with patch:
            supports_early_launch.cache_clear()
            yield
    finally:
        supports_early_launch.cache_clear()


def make_layer(context: Context, model: str, rows: int) -> tuple[Callable[[], None], int]:
    """Return the launches of layers of plain weights, as in a decode step of `rows` requests with 1k of context each, and the
    number of layers that they run in turn."""
    shape, hidden, inner, layers = (TINY, 64, 96, 1) if context.rehearsal else MODELS[model]
    device, dtype = context.device, context.dtype
    make = partial(normal, dtype=dtype, device=device)
    rows = context.size(rows, min(rows, 3) if rows <= FUSED_ROWS_MAX else FUSED_ROWS_MAX + 1)
    lengths = [context.size(CONTEXT_LEN, 20)] * rows
    caches = [make_pages(lengths, shape, dtype=dtype, device=device) for _ in range(layers)]
    width, num_attended = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim, shape.num_heads * shape.head_dim
    cos, sin = make(rows, 1, shape.head_dim), make(rows, 1, shape.head_dim)
    slots = torch.arange(rows, device=device) * shape.block_size
    norm_weight, first = torch.ones(hidden, dtype=dtype, device=device), make(rows, hidden)
    sizes = {"qkv": (width, hidden), "out": (hidden, num_attended), "gate_up": (2 * inner, hidden), "down": (hidden, inner)}
    weights = [{part: make(*size, scale=size[1] ** -0.5) for part, size in sizes.items()} for _ in range(layers)]
    workspace = attention_splits.decode_workspace(shape, rows, caches[0].tables.shape[1], dtype, device)

    def run_fused() -> None:
        stream = linear_add(attention_rows, weights[0]["out"], first, norm_weight)
        for layer, pages in zip(weights, caches, strict=True):
            qkv = normed_linear(stream, layer["qkv"], 1e-6).view(rows, -1, shape.head_dim)
            attended = rotated_decode(
                qkv, cos, sin, pages.cache, slots, pages.tables, pages.context_lens, shape,
                rotary_dim=shape.head_dim, workspace=workspace,
            )  # fmt: skip
            stream = linear_add(attended.view(rows, -1), layer["out"], stream.total, norm_weight)
            gated = normed_linear(stream, layer["gate_up"], 1e-6, gate="silu")
            stream = linear_add(gated, layer["down"], stream.total, norm_weight)

    def run_unfused() -> None:
        normed, total = add_rms_norm(first, first, norm_weight, 1e-6)
        for layer, pages in zip(weights, caches, strict=True):
            qkv = linear(normed, layer["qkv"]).view(rows, -1, shape.head_dim)
            rope_and_cache(qkv, cos, sin, pages.cache, slots, num_kv_heads=shape.num_kv_heads, rotary_dim=shape.head_dim)
            queries = qkv[:, : shape.num_heads]
            args = (queries, pages.cache, pages.tables, pages.context_lens, shape)
            attended = attention_decode.paged_decode(*args, workspace=workspace)
            normed, total = add_rms_norm(linear(attended.view(rows, -1), layer["out"]), total, norm_weight, 1e-6)
            gated = silu_mul(linear(normed, layer["gate_up"]))
            normed, total = add_rms_norm(linear(gated, layer["down"]), total, norm_weight, 1e-6)

    attention_rows = make(rows, num_attended)
    return (run_fused if rows <= FUSED_ROWS_MAX else run_unfused), layers
