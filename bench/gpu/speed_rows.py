"""Speed of row operations: bytes that must be read and written, over the calibrated bandwidth; the sampler; and the host's cost
of driver calls. Those are measured here because only one process imports meanwhile: during the calibration a dozen do, on all
cores."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch

from bench.gpu.calibration import nothing_kernel
from bench.gpu.check_sampling import sampling_columns, triton_and_reference
from bench.gpu.context import Context
from bench.gpu.host_calls import measure_calls
from bench.gpu.inputs import normal, pack_weight, rope_angles, stored_bytes
from bench.gpu.rows import Row
from bench.gpu.targets import HOST_CALLS
from bench.gpu.timing import Call, seconds
from kernels.triton.attention.rope_and_cache import rope_and_cache
from kernels.triton.experts.mixture import bind_experts
from kernels.triton.rows.activation import silu_mul
from kernels.triton.rows.norm import add_rms_norm
from kernels.triton.sampling.sampler import sample, sampling_workspace
from kernels.triton.step.blocks import copy_blocks

COPIES = 4
"""Copies of the inputs, used in turn: a single one might fit into the L2 cache."""


def measure(context: Context) -> None:
    for name, make in (
        ("add + rms norm, 8k rows", _add_norm),
        ("rope and KV write, 8k rows", _rope),
        ("silu·mul, 8k rows", _silu),
        ("fused head + argmax, 128k words, 1 row", partial(_head, kind="bf16")),
        ("fused head in 8 bits + argmax, 128k words, 1 row", partial(_head, kind="int8")),
        ("experts of Qwen3-30B-A3B, 64 tokens", _experts),
        ("block copy, 4096 blocks", _copy),
    ):
        context.guard(name, partial(_bytes_row, context, name, make))
    names = ["sample top-k top-p, 256 × 128k", "sample top-k top-p against torch's sort"]
    context.guard(names, lambda: _sampler(context, *names))
    place = torch.zeros(1, dtype=torch.int32, device=context.device)
    context.guard(HOST_CALLS, lambda: measure_calls(context, lambda: nothing_kernel[(1,)](place)))


def _bytes_row(context: Context, name: str, make: Callable[[Context], tuple[Call, int]]) -> None:
    calls = [make(context) for _ in range(1 if context.rehearsal else COPIES)]
    times_s = seconds([call for call, _ in calls], context.device)
    num_bytes = calls[0][1]
    row = context.bandwidth_row(name, num_bytes, times_s)
    row.facts = {"us": median(times_s) * 1e6, "bytes": num_bytes}
    context.emit(row)


def _add_norm(context: Context) -> tuple[Call, int]:
    rows, width = context.size(8192, 4), context.size(4096, 64)
    x, residual, normed, total = (normal(rows, width, dtype=context.dtype, device=context.device) for _ in range(4))
    weight = normal(width, dtype=context.dtype, device=context.device)
    return lambda: add_rms_norm(x, residual, weight, 1e-6, out=(normed, total)), 4 * x.nbytes


def _silu(context: Context) -> tuple[Call, int]:
    rows, inner = context.size(8192, 4), context.size(14_336, 48)
    x = normal(rows, 2 * inner, dtype=context.dtype, device=context.device)
    out = torch.empty(rows, inner, dtype=context.dtype, device=context.device)
    return lambda: silu_mul(x, out=out), x.nbytes + out.nbytes


def _rope(context: Context) -> tuple[Call, int]:
    rows, heads, kv_heads, size = (6, 4, 2, 32) if context.rehearsal else (8192, 32, 8, 128)
    device, dtype = context.device, context.dtype
    qkv = normal(rows, heads + 2 * kv_heads, size, dtype=dtype, device=device, scale=0.1)
    cos, sin = rope_angles(rows, size, dtype, device)
    cache = torch.zeros(rows // 16 + 1, 16, 2, kv_heads, size, dtype=dtype, device=device)
    slots = torch.randperm(rows, device=device)
    token = size * qkv.element_size()
    tables = token  # half of each cosine and sine table: the other half has the same numbers
    moved = rows * (token * (heads + 2 * kv_heads) + token * (heads + kv_heads) + token * 2 * kv_heads + tables)
    return partial(rope_and_cache, qkv, cos, sin, cache, slots, num_kv_heads=kv_heads, rotary_dim=size), moved


def _copy(context: Context) -> tuple[Call, int]:
    count = context.size(4096, 3)
    cache = normal(2 * count, 16, 2, *((2, 16) if context.rehearsal else (8, 128)), dtype=context.dtype, device=context.device)
    order = torch.randperm(2 * count, device=context.device)
    return lambda: copy_blocks([cache], order[:count], order[count:]), 2 * count * cache[0].nbytes


def _head(context: Context, kind: str) -> tuple[Call, int]:
    head, _ = triton_and_reference("greedy_head", "greedy_head")
    vocab, width = context.size(128_256, 300), context.size(4096, 64)
    hidden = normal(1, width, dtype=context.dtype, device=context.device)
    weight = pack_weight(kind, normal(vocab, width, dtype=context.dtype, device=context.device, scale=width**-0.5))
    out = torch.empty(1, dtype=torch.int64, device=context.device)
    return lambda: head(hidden, weight, out=out), stored_bytes(weight)


def _experts(context: Context) -> tuple[Call, int]:
    """64 tokens choose 8 of 128 experts each, so nearly all are read. Counts the bytes of every expert chosen by any token."""
    tokens, hidden, inner, count, top_k = (3, 32, 24, 4, 2) if context.rehearsal else (64, 2048, 768, 128, 8)
    dtype, device = context.dtype, context.device
    gate_up = normal(count, 2 * inner, hidden, dtype=dtype, device=device, scale=hidden**-0.5)
    down = normal(count, hidden, inner, dtype=dtype, device=device, scale=inner**-0.5)
    x = normal(tokens, hidden, dtype=dtype, device=device)
    top_probs, ids = torch.topk(torch.rand(tokens, count, device=device).softmax(-1), top_k)
    weights = (top_probs / top_probs.sum(-1, keepdim=True)).to(dtype)
    mix = bind_experts(list(gate_up), list(down), "silu")
    assert mix is not None, "matrices of one kind"
    return lambda: mix(x, weights, ids), len(set(ids.flatten().tolist())) * (gate_up[0].nbytes + down[0].nbytes)


def _sampler(context: Context, name: str, against: str) -> None:
    rows, vocab = context.size(256, 3), context.size(128_256, 700)
    device = context.device
    logits = normal(rows, vocab, dtype=torch.float32, device=device, scale=2.0)
    columns = sampling_columns([{"top_k": 50, "top_p": 0.9, "temperature": 0.8}] * rows, vocab, device)
    slots, positions = torch.arange(rows, dtype=torch.int32, device=device), torch.arange(rows, device=device)
    workspace, out = sampling_workspace(rows, vocab, device), torch.empty(rows, dtype=torch.int64, device=device)
    call = partial(sample, logits, slots, positions, columns, out=out, workspace=workspace)
    times_us = [1e6 * time_s for time_s in seconds([call], device)]
    limit = logits.nbytes / context.bandwidth * 1e6
    row = Row(name=name, value=median(times_us), limit=limit, samples=times_us)
    row.note = "logits of a deviation of 2, top-k 50, top-p 0.9; the limit is one pass over the logits"
    variants: dict[str, dict[str, Any]] = {
        "greedy": {"temperature": 0.0},
        "plain": {},
        "top_p_0.95": {"top_p": 0.95},
        "min_p": {"min_p": 0.05},
    }
    for label, settings in variants.items():
        variant_columns = sampling_columns([settings] * rows, vocab, device)
        sample_variant = partial(sample, logits, slots, positions, variant_columns, out=out, workspace=workspace)
        row.facts[f"us_{label}"] = median(seconds([sample_variant], device, samples=3)) * 1e6
    context.emit(row)
    theirs = median(seconds([lambda: _sorted_sample(logits)], device, samples=3, captured=False)) * 1e6
    faster = Row(name=against, value=theirs / median(times_us), peer_name="sort, cumsum, multinomial")
    faster.facts = {"us": median(times_us), "us_sort": theirs}
    context.emit(faster)


def _sorted_sample(logits: torch.Tensor) -> torch.Tensor:
    """Top-k, top-p sampling as usually written in plain torch."""
    ordered, ids = (logits / 0.8).sort(dim=-1, descending=True)
    ordered[:, 50:] = float("-inf")
    probs = ordered.softmax(dim=-1)
    probs[probs.cumsum(dim=-1) - probs > 0.9] = 0.0
    return ids.gather(1, torch.multinomial(probs, 1))
