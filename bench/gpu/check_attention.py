"""Paged attention's error against float64, relative to torch's in the same dtype; and whether bits depend on the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from bench.gpu.context import Context
from bench.gpu.errors import ResultPair, ResultTriple, check_errors, check_invariant
from bench.gpu.inputs import FP8, Pages, gather_kv, make_pages, make_queries, normal, rope_angles
from kernels.attention_rows import AttentionShape
from kernels.reference.attention import paged_decode as exact_decode
from kernels.reference.attention import paged_prefill as exact_prefill
from kernels.reference.rope_and_cache import rope_and_cache as exact_rope
from kernels.torch.rope_and_cache import rope_and_cache as torch_rope
from kernels.triton.attention.decode import paged_decode
from kernels.triton.attention.prefill import paged_prefill
from kernels.triton.attention.rotated_decode import rotated_decode

Case = tuple[str, Callable[[], ResultTriple]]


def check(context: Context) -> None:
    """Check decodes over keys and values in 16 bits."""
    small, lengths = context.rehearsal, _lengths(context)
    llama, slim, gemma, groups = _shapes(context)
    shapes = [llama, *groups, *(() if small else (replace(llama, block_size=32), replace(llama, block_size=64)))]
    check_errors(context, "paged decode", [_decode(context, shape, lengths) for shape in shapes] + _long(context, llama))
    check_errors(context, "paged decode, head size 64", [_decode(context, slim, lengths)])
    check_errors(context, "paged decode, window and soft-cap", [_decode(context, gemma, lengths)])
    together, alone = list(filter(None, lengths)), [9] if small else [1, 65, 1023, 4095]
    cases = [_rotated(context, shape, together) for shape in (llama, slim, gemma)]
    check_errors(context, "paged decode with rotation", cases)
    cases = [_rotated(context, shape, [length]) for shape in (llama, slim, gemma) for length in alone]
    check_errors(context, "paged decode with rotation, one request", cases)
    cases = [_rotated(context, llama, each, fp8=True) for each in (together, *([length] for length in alone))]
    check_errors(context, "paged decode with rotation, fp8 KV", cases)
    shapes = [llama] if small else [llama, slim, gemma]
    check_invariant(
        context, "paged decode", [(_name(shape), partial(_alone_and_batched, context, shape, lengths)) for shape in shapes]
    )


def check_prefill(context: Context) -> None:
    """Check prefills, and decodes over an fp8 cache: the other half of the attention variants."""
    small = context.rehearsal
    llama, slim, gemma, groups = _shapes(context)
    fp8_shapes = [llama] if small else [llama, slim, gemma, groups[0], groups[-1]]
    check_errors(
        context, "paged decode, fp8 KV", [_decode(context, shape, _lengths(context), fp8=True) for shape in fp8_shapes]
    )
    chunks = [(9, 9), (5, 20)] if small else [(100, 100), (37, 300), (1, 16)]

    def long(*, fp8: bool) -> list[Case]:
        return [] if small else [_prefill(context, llama, [(129, 8192)], fp8=fp8, label="129 tokens of 8k")]

    cases = [_prefill(context, shape, chunks) for shape in (llama, slim, *groups[-1:])]
    check_errors(context, "paged prefill", cases + long(fp8=False))
    check_errors(context, "paged prefill, window and soft-cap", [_prefill(context, gemma, chunks)])
    cases = [_prefill(context, shape, chunks, fp8=True) for shape in ([llama] if small else [llama, gemma])]
    check_errors(context, "paged prefill, fp8 KV", cases + long(fp8=True))
    check_errors(context, "paged prefill, small chunks", [_prefill(context, llama, [(3, 17), (2, 2), (1, 33)])])


def _lengths(context: Context) -> list[int]:
    return [1, 15, 0, 17, 40] if context.rehearsal else [1, 15, 16, 0, 17, 257, 1023, 4095]


def _shapes(context: Context) -> tuple[AttentionShape, AttentionShape, AttentionShape, list[AttentionShape]]:
    """Llama's shape, one with head size 64, one with a window and a soft-cap, and shapes with other group sizes."""
    small = context.rehearsal
    llama = AttentionShape(16, 4, 2, 32) if small else AttentionShape(16, 32, 8, 128)
    slim = AttentionShape(16, 4, 2, 16) if small else AttentionShape(16, 32, 8, 64)
    gemma = replace(llama, sliding_window=20, softcap=5.0) if small else AttentionShape(16, 8, 4, 256, 1000, None, 50.0)
    return llama, slim, gemma, [] if small else [AttentionShape(16, 8 * group, 8, 128) for group in (1, 2, 8, 16)]


def _name(shape: AttentionShape) -> str:
    window = "" if shape.sliding_window is None else f", window of {shape.sliding_window}"
    return f"{shape.num_heads}/{shape.num_kv_heads} heads of {shape.head_dim}, blocks of {shape.block_size}{window}"


def _long(context: Context, shape: AttentionShape) -> list[Case]:
    return [] if context.rehearsal else [_decode(context, shape, [131_072, 3], label="128k tokens")]


def _decode(context: Context, shape: AttentionShape, lengths: list[int], *, fp8: bool = False, label: str = "") -> Case:
    def make() -> ResultTriple:
        pages = make_pages(lengths, shape, dtype=FP8 if fp8 else context.dtype, device=context.device)
        scales = torch.tensor([0.5, 2.0], device=context.device) if fp8 else None
        q = make_queries(pages, len(lengths), context.dtype)
        args = (pages.cache, pages.tables, pages.context_lens, shape)
        ours = paged_decode(q, *args, kv_scales=scales)
        exact = exact_decode(q.double(), *args, kv_scales=scales)
        theirs = torch.stack([_torch_attention(q[row : row + 1], pages, row, scales)[0] for row in range(len(lengths))])
        return ours, exact, theirs

    return label or _name(shape), make


def _rotated(context: Context, shape: AttentionShape, lengths: list[int], *, fp8: bool = False) -> Case:
    """Decode with QK-norm and rotation, compared with torch's separate operations, which round queries and keys in between."""

    def make() -> ResultTriple:
        device, dtype, size = context.device, context.dtype, shape.head_dim
        pages = make_pages(lengths, shape, dtype=FP8 if fp8 else dtype, device=device)
        scales = torch.tensor([0.5, 2.0], device=device) if fp8 else None
        qkv = normal(len(lengths), shape.num_heads + 2 * shape.num_kv_heads, size, dtype=dtype, device=device)
        cos, sin = rope_angles(len(lengths), size, dtype, device)
        slots = pages.newest_slots
        norms: dict[str, Any] = {
            "q_weight": normal(size, dtype=dtype, device=device),
            "k_weight": normal(size, dtype=dtype, device=device),
        }

        def separate(rotate: Callable[..., None], kind: torch.dtype) -> tuple[torch.Tensor, Pages]:
            rotated, cache = qkv.to(kind, copy=True), pages.cache.to(FP8 if fp8 else kind, copy=True)
            weights = {name: weight.to(kind) for name, weight in norms.items()}
            heads: dict[str, Any] = {"num_kv_heads": shape.num_kv_heads, "rotary_dim": size}
            rotate(rotated, cos.to(kind), sin.to(kind), None if fp8 else cache, slots, eps=1e-6, **heads, **weights)
            if fp8:  # rounded to 16 bits first, as served: one step between e4m3 numbers exceeds every other error judged here
                no_rotation = torch.ones_like(cos), torch.zeros_like(sin)
                torch_rope(rotated.to(dtype), *no_rotation, cache, slots, kv_scales=scales, **heads)
            return rotated[:, : shape.num_heads], replace(pages, cache=cache)

        q, rotated_pages = separate(exact_rope, torch.float64)
        context_lens = pages.context_lens
        exact = exact_decode(q, rotated_pages.cache, pages.tables, context_lens, shape, kv_scales=scales)
        q, rotated_pages = separate(torch_rope, dtype)
        theirs = torch.stack([_torch_attention(q[row : row + 1], rotated_pages, row, scales)[0] for row in range(len(lengths))])
        args = (qkv, cos, sin, pages.cache, slots, pages.tables, context_lens, shape)
        return rotated_decode(*args, rotary_dim=size, eps=1e-6, kv_scales=scales, **norms), exact, theirs

    return f"{_name(shape)}, {len(lengths)} of up to {max(lengths)} tokens", make


def _torch_attention(q: torch.Tensor, pages: Pages, request: int, scales: torch.Tensor | None) -> torch.Tensor:
    """q: [T, H, D], a request's newest queries → [T, H, D] in q's dtype: torch's attention, or products and a softmax."""
    shape = pages.shape
    if not pages.lengths[request]:
        return torch.zeros_like(q)
    keys, values = (each.to(q.dtype) for each in gather_kv(pages, request))
    if scales is not None:
        keys, values = keys * scales[0].to(q.dtype), values * scales[1].to(q.dtype)
    length, count = pages.lengths[request], q.shape[0]
    group = shape.group
    wide = q.transpose(0, 1).unsqueeze(0)
    if shape.sliding_window is None and shape.softcap is None and count in (1, length):
        attend = functional.scaled_dot_product_attention
        return attend(wide, keys, values, is_causal=count > 1, enable_gqa=True)[0].transpose(0, 1)
    position = torch.arange(length - count, length, device=q.device)[:, None]
    token = torch.arange(length, device=q.device)[None, :]
    visible = token <= position
    if shape.sliding_window is not None:
        visible &= token > position - shape.sliding_window
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = (wide @ keys.transpose(-1, -2)) * shape.head_dim**-0.5
    if shape.softcap is not None:
        scores = shape.softcap * torch.tanh(scores / shape.softcap)
    return (torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1) @ values)[0].transpose(0, 1)


def _prefill(
    context: Context, shape: AttentionShape, chunks: list[tuple[int, int]], *, fp8: bool = False, label: str = ""
) -> Case:
    """chunks: (number of queries, context length) of each request"""

    def make() -> ResultTriple:
        lengths = [length for _, length in chunks]
        pages = make_pages(lengths, shape, dtype=FP8 if fp8 else context.dtype, device=context.device)
        scales = torch.tensor([0.5, 2.0], device=context.device) if fp8 else None
        counts = [count for count, _ in chunks]
        starts = [sum(counts[:row]) for row in range(len(counts) + 1)]
        q = make_queries(pages, starts[-1], context.dtype)
        query_starts = torch.tensor(starts, dtype=torch.int32, device=context.device)
        args = (pages.cache, pages.tables, query_starts, pages.context_lens, shape)
        ours = paged_prefill(q, *args, max_query_len=max(counts), kv_scales=scales)
        exact = exact_prefill(q.double(), *args, max_query_len=max(counts), kv_scales=scales)
        theirs = [_torch_attention(q[starts[row] : starts[row + 1]], pages, row, scales) for row in range(len(chunks))]
        return ours, exact, torch.cat(theirs)

    return label or _name(shape), make


def _alone_and_batched(context: Context, shape: AttentionShape, lengths: list[int]) -> ResultPair:
    pages = make_pages(lengths, shape, dtype=context.dtype, device=context.device)
    q = make_queries(pages, len(lengths), context.dtype)
    together = paged_decode(q, pages.cache, pages.tables, pages.context_lens, shape)
    rows = [slice(row, row + 1) for row in range(len(lengths))]
    alone = [paged_decode(q[row], pages.cache, pages.tables[row], pages.context_lens[row], shape) for row in rows]
    return torch.cat(alone), together
