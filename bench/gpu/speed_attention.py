"""Speed of paged attention: bytes of keys and values that a step must read, over the calibrated bandwidth.

Several KV caches are used in turn: together they are far larger than the L2 cache, and 8 GB where the row says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from statistics import median

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from bench.gpu.context import Context
from bench.gpu.inputs import FP8, LLAMA, TINY, Pages, gather_kv, make_pages, make_queries, normal, rope_angles
from bench.gpu.rows import Row
from bench.gpu.timing import seconds
from kernels.attention_rows import AttentionShape
from kernels.triton.attention.decode import paged_decode
from kernels.triton.attention.prefill import paged_prefill
from kernels.triton.attention.rotated_decode import rotated_decode
from kernels.triton.attention.splits import decode_workspace

SLIM, QWEN = AttentionShape(16, 32, 8, 64), AttentionShape(16, 16, 8, 128)
LIBRARIES = ("torch._dynamo", "torch._inductor.compile_fx")
"""What compiles flex_attention, imported before the part's time begins."""
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def measure(context: Context) -> None:
    name = "decode 32/8 heads of 128, 256 × 1k, 8 GB of KV"
    context.guard(name, lambda: _decode_row(context, name, LLAMA, [1024] * 256, copies=8, peer=True))
    other = "decode 32/8 heads of 128, 64 × 4k, 8 GB of KV"
    context.guard(other, lambda: _decode_row(context, other, LLAMA, [4096] * 64, copies=8))
    context.guard("decode 1 × 32k", lambda: _decode_row(context, "decode 1 × 32k", LLAMA, [32_768], copies=8))
    lone = "decode 1 × 32k with its rotation"
    context.guard(lone, lambda: _rotated_row(context, lone, LLAMA, [32_768], copies=8))
    for label, shape in (("32/8 heads of 64", SLIM), ("16/8 heads of 128", QWEN)):
        row = f"decode {label}, 256 × 1k"
        context.guard(row, partial(_decode_row, context, row, shape, [1024] * 256, copies=2))
    context.guard("decode 1 × 128k + 31 × 4k", lambda: _skewed(context))
    for label, lengths in (("256 × 1k", [1024] * 256), ("16 × 8k", [8192] * 16)):
        row = f"decode with fp8 KV, {label}"
        context.guard(row, partial(_fp8, context, row, lengths))
    for label, peer in (("the best SDPA", _sdpa), ("compiled flex_attention", _flex)):  # last: compilation takes long
        row = f"prefill 8k, head 128, against {label}"
        context.guard(row, partial(_prefill, context, row, peer))


def _batch(context: Context, lengths: Sequence[int]) -> list[int]:
    """The lengths or, in a rehearsal, the first three of them divided by 1024."""
    return [max(1, length // 1024) for length in lengths[:3]] if context.rehearsal else list(lengths)


def _shape(context: Context, shape: AttentionShape) -> AttentionShape:
    return TINY if context.rehearsal else shape


def decode_seconds(
    context: Context, shape: AttentionShape, lengths: Sequence[int], *, copies: int, fp8: bool = False
) -> tuple[list[float], Pages]:
    """Sampled seconds of one decode, and the last of the caches."""
    caches = [
        make_pages(lengths, shape, dtype=FP8 if fp8 else context.dtype, device=context.device)
        for _ in range(1 if context.rehearsal else copies)
    ]
    scales = torch.ones(2, device=context.device) if fp8 else None
    q = make_queries(caches[0], len(lengths), context.dtype)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    width = caches[0].tables.shape[1]
    workspace = decode_workspace(shape, len(lengths), width, caches[0].cache.dtype, context.device)

    def call(pages: Pages) -> Callable[[], object]:
        return lambda: paged_decode(
            q, pages.cache, pages.tables, pages.context_lens, shape, kv_scales=scales, out=out, workspace=workspace
        )

    return seconds([call(pages) for pages in caches], context.device), caches[-1]


def _decode_row(
    context: Context, name: str, shape: AttentionShape, lengths: Sequence[int], *, copies: int, peer: bool = False
) -> None:
    lengths = _batch(context, lengths)
    times_s, pages = decode_seconds(context, _shape(context, shape), lengths, copies=copies)
    row = context.bandwidth_row(name, pages.kv_bytes, times_s)
    row.facts = {"us": median(times_s) * 1e6, "kv_bytes": pages.kv_bytes, "caches": copies}
    if peer:
        with suppress(RuntimeError):
            row.peer, row.peer_name = pages.kv_bytes / _torch_decode(context, pages) / 1e9, "torch SDPA, unpaged, one cache"
    context.emit(row)


def _rotated_row(context: Context, name: str, shape: AttentionShape, lengths: Sequence[int], *, copies: int) -> None:
    """A decode as a layer launches it, rotation and cache write included: a single request has a kernel of its own."""
    shape, lengths, device, dtype = _shape(context, shape), _batch(context, lengths), context.device, context.dtype
    caches = [make_pages(lengths, shape, dtype=dtype, device=device) for _ in range(1 if context.rehearsal else copies)]
    qkv = normal(len(lengths), shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim, dtype=dtype, device=device)
    cos, sin = rope_angles(len(lengths), shape.head_dim, dtype, device)
    workspace = decode_workspace(shape, len(lengths), caches[0].tables.shape[1], dtype, device)

    def call(pages: Pages) -> Callable[[], object]:
        args = (qkv, cos, sin, pages.cache, pages.newest_slots, pages.tables, pages.context_lens, shape)
        return partial(rotated_decode, *args, rotary_dim=shape.head_dim, workspace=workspace)

    times_s = seconds([call(pages) for pages in caches], device)
    row = context.bandwidth_row(name, caches[0].kv_bytes, times_s)
    row.facts = {"us": median(times_s) * 1e6, "kv_bytes": caches[0].kv_bytes, "caches": copies}
    context.emit(row)


def _torch_decode(context: Context, pages: Pages) -> float:
    """Seconds of torch's attention over contiguous keys and values. Raises RuntimeError if the requests differ in length."""
    if len(set(pages.lengths)) > 1:
        raise RuntimeError("torch's attention needs requests of one length")
    pairs = [gather_kv(pages, request) for request in range(len(pages.lengths))]
    keys, values = torch.cat([pair[0] for pair in pairs]).contiguous(), torch.cat([pair[1] for pair in pairs]).contiguous()
    q = make_queries(pages, len(pages.lengths), context.dtype).unsqueeze(2)
    attention = functional.scaled_dot_product_attention
    return median(seconds([lambda: attention(q, keys, values, enable_gqa=True)], context.device))


def _skewed(context: Context) -> None:
    """One long request among short ones, compared with requests of equal length and as many tokens in total."""
    skewed = [131_072] + [4096] * 31
    uniform = [sum(skewed) // 32] * 32
    shape, times = _shape(context, LLAMA), {"skewed": [0.0], "uniform": [0.0]}
    for name, lengths in (("skewed", skewed), ("uniform", uniform)):
        times[name], pages = decode_seconds(context, shape, _batch(context, lengths), copies=2)
        context.facts[f"bytes {name}"] = pages.kv_bytes
        del pages
    ratios = [one / other for one, other in zip(times["skewed"], times["uniform"], strict=True)]
    row = Row(name="decode 1 × 128k + 31 × 4k", value=median(times["skewed"]) / median(times["uniform"]), samples=ratios)
    row.facts = {"us_skewed": median(times["skewed"]) * 1e6, "us_uniform": median(times["uniform"]) * 1e6}
    context.emit(row)


def _fp8(context: Context, name: str, lengths: Sequence[int]) -> None:
    """Decode over an fp8 cache, compared with a bf16 one. Up to 32 requests have their own kernel variant."""
    shape, lengths = _shape(context, LLAMA), _batch(context, lengths)
    bf16_times_s, pages = decode_seconds(context, shape, lengths, copies=8)
    del pages
    fp8_times_s, pages = decode_seconds(context, shape, lengths, copies=8, fp8=True)
    row = Row(name=name, value=median(bf16_times_s) / median(fp8_times_s))
    row.samples = [one / other for one, other in zip(bf16_times_s, fp8_times_s, strict=True)]
    rate = pages.kv_bytes / median(fp8_times_s) / 1e9
    row.facts = {"us_bf16": median(bf16_times_s) * 1e6, "us_fp8": median(fp8_times_s) * 1e6, "gb_per_s": rate}
    row.note = f"{rate:.0f} GB/s, {rate * 1e9 / context.bandwidth:.2f} of bandwidth"
    context.emit(row)


Peers = dict[str, float]
"""Seconds of each peer that was tried, by name."""


def _prefill(context: Context, name: str, peer: Callable[[Context, AttentionShape, int], Peers]) -> None:
    """One prompt of 8k. Counts causal operations only: two products over half of the square, for each query head."""
    shape, length = _shape(context, LLAMA), context.size(8192, 20)
    pages = make_pages([length], shape, dtype=context.dtype, device=context.device)
    q = make_queries(pages, length, context.dtype)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    starts = torch.tensor([0, length], dtype=torch.int32, device=context.device)
    args = (pages.cache, pages.tables, starts, pages.context_lens, shape)
    times_s = seconds([lambda: paged_prefill(q, *args, max_query_len=length, out=out)], context.device)
    flops = 2 * shape.num_heads * shape.head_dim * length**2
    rates = [flops / time_s / 1e12 for time_s in times_s]
    row = Row(name=name, value=median(rates), samples=rates)
    peers = peer(context, shape, length)
    best = min(peers, key=lambda each: peers[each])
    row.peer, row.peer_name = flops / peers[best] / 1e12, f"torch {best}, unpaged"
    row.facts = {"us": median(times_s) * 1e6, "us_peers": {each: time_s * 1e6 for each, time_s in peers.items()}}
    row.note = f"peer: {row.peer_name}"
    context.limit(row, lambda: context.flops / 1e12)
    context.emit(row)


def _heads(context: Context, shape: AttentionShape, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values of one request: [1, heads, length, head size]"""
    counts = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    q, k, v = (normal(1, count, length, shape.head_dim, dtype=context.dtype, device=context.device) for count in counts)
    return q, k, v


def _sdpa(context: Context, shape: AttentionShape, length: int) -> Peers:
    """Seconds of every backend of torch's attention that accepts the shape."""
    q, k, v = _heads(context, shape, length)
    group = shape.group
    wide = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)  # for backends that need them per query head
    attention = functional.scaled_dot_product_attention
    found = {}
    for name, backend in BACKENDS.items():
        if name == "math" and not context.rehearsal:
            continue  # a matrix of 8k · 8k for each head: never the best
        for label, keys, values in (("", k, v), (" with repeated heads", *wide)):
            with suppress(RuntimeError), sdpa_kernel(backend):
                call = partial(attention, q, keys, values, is_causal=True, enable_gqa=keys is k)
                found[f"SDPA {name}{label}"] = median(seconds([call], context.device))
    if not found:
        raise RuntimeError("no backend of torch's attention takes this shape")
    return found


def _flex(context: Context, shape: AttentionShape, length: int) -> Peers:
    """Seconds of torch's flex_attention, compiled for a mask. A rehearsal does not compile it."""
    q, k, v = _heads(context, shape, length)

    def causal(_batch: torch.Tensor, _head: torch.Tensor, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        return row >= column

    mask = create_block_mask(causal, None, None, length, length, device=str(context.device))
    attention = flex_attention if context.rehearsal else torch.compile(flex_attention)
    with torch.inference_mode():
        return {
            "flex_attention": median(seconds([partial(attention, q, k, v, block_mask=mask, enable_gqa=True)], context.device))
        }
