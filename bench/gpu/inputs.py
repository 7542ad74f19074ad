"""Inputs of checks and timings: scattered pages, projections, rows. Values are normally distributed (seeded), never zeros."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kernels.attention_rows import AttentionShape
from kernels.quantised_weights import Fp8Weight, Int4Weight, Int8Weight, Weight, pack_fp8, pack_int4, pack_int8
from kernels.triton.products.fp8 import linear_fp8
from kernels.triton.products.int4 import linear_int4
from kernels.triton.products.int8 import linear_int8
from kernels.triton.products.linear import linear

FP8 = torch.float8_e4m3fn
LLAMA, TINY = AttentionShape(16, 32, 8, 128), AttentionShape(16, 4, 2, 32)
"""Attention of Llama-3.1-8B, and of the model that a rehearsal uses instead."""
PRODUCTS: dict[str, Callable[..., torch.Tensor]] = {
    "bf16": linear, "int8": linear_int8, "fp8": linear_fp8, "int4": linear_int4,
}  # fmt: skip
"""x: [T, K], a weight as `pack_weight` of this kind → x Wᵀ"""


def normal(*shape: int, dtype: torch.dtype, device: torch.device, scale: float = 1.0) -> torch.Tensor:
    """Normally distributed numbers, rounded to `dtype`; made in slices to avoid a second full copy in float32."""
    if dtype.itemsize > 1:
        return torch.empty(shape, dtype=dtype, device=device).normal_(std=scale)
    out = torch.empty(shape, dtype=dtype, device=device)
    for piece in torch.split(out.view(-1), 1 << 26):
        piece.copy_(torch.empty(piece.shape, dtype=torch.float16, device=device).normal_(std=scale))
    return out


@dataclass(frozen=True, slots=True)
class Pages:
    """A KV cache with requests of given lengths, their blocks in random order."""

    shape: AttentionShape
    cache: torch.Tensor  # [N, P, 2, K, D]
    tables: torch.Tensor  # [B, M] int32
    context_lens: torch.Tensor  # [B] int32
    lengths: tuple[int, ...]

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values that a decode step reads."""
        tokens = sum(self.lengths)
        if self.shape.sliding_window is not None:
            tokens = sum(min(length, self.shape.sliding_window) for length in self.lengths)
        return 2 * tokens * self.shape.num_kv_heads * self.shape.head_dim * self.cache.element_size()

    @property
    def newest_slots(self) -> torch.Tensor:
        """The slot in the cache of each request's newest token: [B] int64. Every request has one."""
        newest, block_size = self.context_lens.long() - 1, self.shape.block_size
        blocks = self.tables.gather(1, (newest // block_size)[:, None])[:, 0].long()
        return blocks * block_size + newest % block_size


def make_pages(lengths: Sequence[int], shape: AttentionShape, *, dtype: torch.dtype, device: torch.device) -> Pages:
    """Scattered blocks for requests of these lengths, and one block that belongs to no request. The rest of each request's last
    block is filled with NaN."""
    counts = [-(-length // shape.block_size) for length in lengths]
    num_blocks = sum(counts) + 1
    size = (num_blocks, shape.block_size, 2, shape.num_kv_heads, shape.head_dim)
    cache = normal(*size, dtype=dtype, device=device)
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(7)).tolist()
    tables = torch.zeros(len(lengths), max(1, *counts), dtype=torch.int32)
    starts = itertools.accumulate(counts, initial=0)
    for row, (start, count, length) in enumerate(zip(starts, counts, lengths, strict=False)):
        tables[row, :count] = torch.tensor(order[start : start + count], dtype=torch.int32)
        used = length - (count - 1) * shape.block_size
        if count and used < shape.block_size:
            cache[order[start + count - 1], used:].view(torch.uint8).fill_(0xFF)  # NaN in e4m3, fp16 and bf16
    lens = torch.tensor(list(lengths), dtype=torch.int32)
    return Pages(shape, cache, tables.to(device), lens.to(device), tuple(lengths))


def pack_weight(kind: str, weight: torch.Tensor) -> Weight:
    """The weight as a layer stores it: plain, "int8", "fp8" by rows, or "int4" in groups of 128."""
    match kind:
        case "int8":
            return pack_int8(weight)
        case "fp8":
            return pack_fp8(weight)
        case "int4":
            return pack_int4(weight, 128)
    return weight


def stored_bytes(weight: Weight) -> int:
    """Bytes of a stored weight: codes, scales and zero points."""
    if isinstance(weight, Int8Weight | Fp8Weight):
        return weight.values.nbytes + weight.scales.nbytes
    return weight.words.nbytes + weight.scales_zeros.nbytes if isinstance(weight, Int4Weight) else weight.nbytes


def make_queries(pages: Pages, num_rows: int, dtype: torch.dtype) -> torch.Tensor:
    """[T, H, D], a view of a QKV projection: in each row, keys and values follow the queries."""
    shape = pages.shape
    wide = normal(num_rows, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim, dtype=dtype, device=pages.cache.device)
    return wide[:, : shape.num_heads]


def rope_angles(num_rows: int, rotary_dim: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of arbitrary angles, as `rope_and_cache` takes them: [T, 1, rotary_dim] each."""
    radians = torch.rand(num_rows, 1, rotary_dim // 2, device=device) * 6
    return torch.cat((radians.cos(), radians.cos()), -1).to(dtype), torch.cat((-radians.sin(), radians.sin()), -1).to(dtype)


def gather_kv(pages: Pages, request: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of one request, [1, K, T, D] each, for a library without paging."""
    length = pages.lengths[request]
    blocks = pages.tables[request, : -(-length // pages.shape.block_size)].long()
    kv = pages.cache[blocks].flatten(0, 1)[:length]
    return kv[:, 0].transpose(0, 1).unsqueeze(0), kv[:, 1].transpose(0, 1).unsqueeze(0)
