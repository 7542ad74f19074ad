"""Inputs that expose out-of-bounds accesses of a kernel: poison outside valid inputs, sentinels around outputs."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch

from kernels.attention_rows import AttentionShape
from kernels.reference.rotated_decode import rotated_decode
from tests.support.kernel_tolerances import Kind, assert_near, assert_same

# Lengths on both sides of block and tile boundaries.
GROUPS = (1, 2, 4, 8)
FLOATS = (torch.float32, torch.float16)  # bfloat16 arithmetic is wrong in the interpreter: load → float32 → store is right
GUARD = 64  # elements on each side
SENTINEL = 97  # every dtype represents this value exactly: bytes of 0x61


def poisoned(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of NaN, or of the smallest integer, which is never a valid index."""
    if dtype.is_floating_point:
        return torch.full(shape, math.nan, dtype=torch.float32, device=device).to(dtype)
    return torch.full(shape, torch.iinfo(dtype).min, dtype=dtype, device=device)


def normal(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> torch.Tensor:
    """Normal random numbers, the same on every device, rounded to `dtype`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(device)


def padded_rows(rows: torch.Tensor, width: int) -> torch.Tensor:
    """rows: [R, C] → the same values as a view [R, C] of a poisoned tensor [R, width]: rows lie `width` elements apart."""
    wide = poisoned(rows.shape[0], width, dtype=rows.dtype, device=rows.device)
    wide[:, : rows.shape[1]] = rows
    return wide[:, : rows.shape[1]]


@dataclass
class Guarded:
    """An output with sentinels before and after it. Pass `tensor` to the kernel, then call `check()`.

    The output itself starts as poison, so that the comparison detects elements that were not written.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    tensor: torch.Tensor = field(init=False)
    _memory: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        size = self.dtype.itemsize
        count = math.prod(self.shape)
        self._memory = torch.full(((count + 2 * GUARD) * size,), SENTINEL, dtype=torch.uint8, device=self.device)
        self.tensor = self._memory.view(self.dtype)[GUARD : GUARD + count].view(self.shape)
        self.tensor.copy_(poisoned(*self.shape, dtype=self.dtype, device=self.device))

    def check(self) -> torch.Tensor:
        """Raise if anything outside was written; return the output."""
        edge = GUARD * self.dtype.itemsize
        outside = torch.cat([self._memory[:edge], self._memory[-edge:]])
        assert bool((outside == SENTINEL).all()), "the kernel wrote outside its output"
        return self.tensor


def scatter_block_tables(lengths: list[int], block_size: int) -> tuple[list[list[int]], int]:
    """Disjoint block tables in random order, and the size of their pool; every second table is longer than necessary."""
    counts = [-(-length // block_size) + index % 2 for index, length in enumerate(lengths)]
    ids = list(range(sum(counts) + 3))
    random.Random(5).shuffle(ids)
    return [[ids.pop() for _ in range(count)] for count in counts], sum(counts) + 3


def table_tensor(tables: list[list[int]], device: torch.device) -> torch.Tensor:
    """[B, M] int32; columns beyond a request's own blocks, at least one, hold an id outside any pool."""
    width = max((len(table) for table in tables), default=0) + 1
    rows = [table + [2**30] * (width - len(table)) for table in tables]
    return torch.tensor(rows, dtype=torch.int32, device=device)


def fill_cache(
    tables: list[list[int]],
    lengths: list[int],
    shape: tuple[int, int, int, int],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """shape: (N, P, K, D) → [N, P, 2, K, D]: each request's first `length` tokens are random, everything else is NaN."""
    num_blocks, block_size, kv_heads, head_dim = shape
    cache = poisoned(num_blocks, block_size, 2, kv_heads, head_dim, dtype=torch.float32, device=device)
    generator = torch.Generator().manual_seed(3)
    for table, length in zip(tables, lengths, strict=True):
        for position in range(length):
            values = torch.randn(2, kv_heads, head_dim, generator=generator).to(device)
            cache[table[position // block_size], position % block_size] = values
    return cache.to(dtype)


class PagedQueries:
    """Queries of requests in a poisoned projection, after `unused_rows` rows of no request, and a cache with NaN in all slots
    that no context uses. requests: (query_len, context_len) of each."""

    def __init__(
        self,
        requests: Sequence[tuple[int, int]],
        shape: AttentionShape,
        device: torch.device,
        *,
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
        unused_rows: int = 0,
    ) -> None:
        self.shape, self.dtype, self.unused_rows = shape, dtype, unused_rows
        lengths = [context_len for _, context_len in requests]
        tables, num_blocks = scatter_block_tables(lengths, shape.block_size)
        size = (num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
        self.cache = fill_cache(tables, lengths, size, dtype=kv_dtype or dtype, device=device)
        self.tables = table_tensor(tables, device)
        self.context_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
        starts = [*accumulate((query_len for query_len, _ in requests), initial=unused_rows)]
        self.query_starts = torch.tensor(starts, dtype=torch.int32, device=device)
        self.max_query_len = max(query_len for query_len, _ in requests)
        queries = normal(starts[-1], shape.num_heads * shape.head_dim, dtype=dtype, device=device)
        wide = padded_rows(queries, (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim)
        self.q = wide.view(-1, shape.num_heads, shape.head_dim)

    def out(self) -> Guarded:
        """An output for all queries whose surroundings are checked."""
        return Guarded(tuple(self.q.shape), self.dtype, self.q.device)


class RotatedDecodeBatch:
    """The projected newest tokens of requests of given lengths, and a cache with NaN in their slots and in all unused ones."""

    def __init__(
        self,
        lengths: list[int],
        shape: AttentionShape,
        device: torch.device,
        *,
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
        rotary_dim: int | None = None,
        is_normed: bool = False,
    ) -> None:
        size, rotary_dim = shape.head_dim, rotary_dim or shape.head_dim
        self.shape = shape
        tables, num_blocks = scatter_block_tables(lengths, shape.block_size)
        cached_lens = [max(length - 1, 0) for length in lengths]
        cached = (num_blocks, shape.block_size, shape.num_kv_heads, size)
        self.cache = fill_cache(tables, cached_lens, cached, dtype=kv_dtype or dtype, device=device)
        self.tables = table_tensor(tables, device)
        self.lens = torch.tensor(lengths, dtype=torch.int32, device=device)
        positions = [divmod(length, shape.block_size) for length in cached_lens]
        slots = [
            table[block] * shape.block_size + offset if table else -1
            for table, (block, offset) in zip(tables, positions, strict=True)
        ]
        self.slots = torch.tensor(slots, device=device)
        wide = (shape.num_heads + 2 * shape.num_kv_heads) * size
        self.qkv = padded_rows(normal(len(lengths), wide, dtype=dtype, device=device), wide + 16).view(len(lengths), -1, size)
        angles = normal(len(lengths), 1, rotary_dim // 2, dtype=torch.float32, device=device, seed=1) * 3
        self.cos = torch.cat((angles.cos(), angles.cos()), -1).to(dtype)
        self.sin = torch.cat((-angles.sin(), angles.sin()), -1).to(dtype)
        self.options: dict[str, Any] = {"rotary_dim": rotary_dim, "eps": 1e-6}
        if is_normed:
            weights = normal(2, size, dtype=dtype, device=device, seed=2)
            self.options |= {"q_weight": weights[0], "k_weight": weights[1]}
        if kv_dtype is not None and kv_dtype.itemsize == 1:
            self.options["kv_scales"] = torch.tensor([0.5, 2.0], device=device)

    def arguments(self, cache: torch.Tensor, rows: slice = slice(None)) -> tuple[Any, ...]:
        """The positional arguments of `rotated_decode`, for some of the rows."""
        angles = self.cos[rows], self.sin[rows]
        return self.qkv[rows], *angles, cache, self.slots[rows], self.tables[rows], self.lens[rows], self.shape

    def compare(self, decode: Callable[..., torch.Tensor]) -> torch.Tensor:
        """Raise unless outputs and cache equal the reference's and nothing else was written. → outputs"""
        cache, qkv = self.cache.clone(), self.qkv.clone()
        expected = rotated_decode(*self.arguments(cache), **self.options)
        found = decode(*self.arguments(self.cache), **self.options)
        kind: Kind = "fp8" if self.cache.dtype.itemsize == 1 else "attention"
        assert_near(found, expected, "attention", scale=2.0**8 if kind == "fp8" else 1.0)
        untouched = cache.float().isnan()
        assert_same(self.cache.float().isnan(), untouched)
        assert_near(self.cache.float()[~untouched], cache.float()[~untouched], kind)
        assert_same(self.qkv, qkv)
        return found


def tied_tokens(vocab_size: int, hidden_size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An output head in which pairs of tokens have equal rows, repeated half a vocabulary later: the likeliest token always has
    a tie in its tile and in another. Rows are integers, so sums are exact in any order."""
    different = normal(vocab_size, hidden_size, dtype=dtype, device=device, seed=1).round()
    ids = torch.arange(vocab_size, device=device) % max(1, vocab_size // 2)
    return different[ids // 2 * 2]
