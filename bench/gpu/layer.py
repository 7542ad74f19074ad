"""One layer of plain weights for one row: the launches of a decode step, early or one after the other has ended."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from unittest import mock

import torch

from bench.gpu.context import Context
from bench.gpu.inputs import make_pages, normal
from bench.gpu.rows import Row
from bench.gpu.timing import median, seconds
from kernels.attention_rows import AttentionShape
from kernels.triton import attention_decode
from kernels.triton.early_launch import VARIABLE, may_be_early
from kernels.triton.fused_linear import linear_add, normed_linear
from kernels.triton.rotated_decode import rotated_decode

LLAMA, TINY = AttentionShape(16, 32, 8, 128), AttentionShape(16, 4, 2, 32)
MODELS = {
    "Llama-8B": (LLAMA, 4096, 14_336, 4),
    "Qwen3-0.6B": (AttentionShape(16, 16, 8, 128), 1024, 3072, 28),
}
"""Heads, width of the residual stream and of the feed-forward part, and layers in turn, more than a cache holds."""
CONTEXT_LEN = 1024
CHOSEN = "chosen"


def measure_layers(context: Context) -> None:
    """Whether early launches are the faster ones: a row for each model."""
    for model in MODELS:
        name = f"layer of {model}, 1 row: early launches over others"
        context.guard(name, partial(_early, context, name, model))


def _early(context: Context, name: str, model: str) -> None:
    run, layers = make_layer(context, model)
    taken = {CHOSEN: median(seconds([run], context.device)) / layers}
    with launched_in_turn():
        taken["in turn"] = median(seconds([run], context.device)) / layers
    emit_choice(context, name, taken)


def emit_choice(context: Context, name: str, taken: dict[str, float]) -> None:
    """taken: seconds by case, of which one is `CHOSEN`. The row's value is how many times as long that takes as the fastest."""
    row = Row(name=name, value=taken[CHOSEN] / min(taken.values()))
    row.facts = {"us": {case: taken_s * 1e6 for case, taken_s in taken.items()}}
    row.note = ", ".join(f"{case}: {taken_s * 1e6:.3g} µs" for case, taken_s in taken.items())
    context.emit(row)


def launched_in_turn() -> AbstractContextManager[None]:
    """No kernel starts before the one in front of it has ended."""
    return launched_with(mock.patch.dict(os.environ, {VARIABLE: "0"}))


@contextmanager
def launched_with(patch: AbstractContextManager[object]) -> Iterator[None]:
    """Launches see what is patched, and do not see it afterwards."""
    try:
        with patch:
            may_be_early.cache_clear()
            yield
    finally:
        may_be_early.cache_clear()


def make_layer(context: Context, model: str) -> tuple[Callable[[], None], int]:
    """The five launches of a layer of plain weights, between one token and a context of 1k, and of how many layers in turn."""
    shape, hidden, inner, layers = (TINY, 64, 96, 1) if context.rehearsal else MODELS[model]
    device, dtype = context.device, context.dtype
    made = partial(normal, dtype=dtype, device=device)
    pages = make_pages([context.size(CONTEXT_LEN, 20)], shape, dtype=dtype, device=device)
    width, attended = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim, shape.num_heads * shape.head_dim
    cos, sin = made(1, 1, shape.head_dim), made(1, 1, shape.head_dim)
    slot = torch.zeros(1, dtype=torch.int64, device=device)
    norm_weight, first = torch.ones(hidden, dtype=dtype, device=device), made(1, hidden)
    sizes = {"qkv": (width, hidden), "out": (hidden, attended), "gate_up": (2 * inner, hidden), "down": (hidden, inner)}
    weights = [{part: made(*size, scale=size[1] ** -0.5) for part, size in sizes.items()} for _ in range(layers)]

    def run() -> None:
        stream = linear_add(made_rows, weights[0]["out"], first, norm_weight)
        for layer in weights:
            qkv = normed_linear(stream, layer["qkv"], 1e-6).view(1, -1, shape.head_dim)
            rows = rotated_decode(
                qkv, cos, sin, pages.cache, slot, pages.tables, pages.context_lens, shape,
                rotary_dim=shape.head_dim, workspace=workspace,
            )  # fmt: skip
            stream = linear_add(rows.view(1, -1), layer["out"], stream.total, norm_weight)
            gated = normed_linear(stream, layer["gate_up"], 1e-6, gate="silu")
            stream = linear_add(gated, layer["down"], stream.total, norm_weight)

    made_rows = made(1, attended)
    workspace = attention_decode.decode_workspace(shape, 1, pages.tables.shape[1], dtype, device)
    return run, layers
