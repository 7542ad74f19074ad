"""Batches for the PTX tests of paged attention, compared with the reference in float64."""

from __future__ import annotations

from itertools import accumulate

import torch

from kernels.attention_rows import AttentionShape
from kernels.reference import attention as reference
from kernels.reference import rotated_decode as exact
from kernels.triton.attention import decode as attention_decode
from kernels.triton.attention import prefill as attention_prefill
from kernels.triton.attention import rotated_decode
from tests.support.kernel_cases import (
    Guarded,
    RotatedDecodeBatch,
    fill_cache,
    normal,
    padded_rows,
    scatter_block_tables,
    table_tensor,
)
from tests.support.kernel_tolerances import Kind, assert_near, assert_same

CPU = torch.device("cpu")
BLOCK = 16
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
SCALES = torch.tensor([0.5, 2.0])


class AttentionBatch:
    """Requests of `lengths` tokens in a cache that is NaN elsewhere, and queries for the last `counts` tokens of each."""

    def __init__(
        self,
        shape: AttentionShape,
        lengths: list[int],
        counts: list[int],
        kv_dtype: torch.dtype = BF16,
        dtype: torch.dtype = BF16,
        *,
        unused_rows: int = 0,
    ) -> None:
        """`unused_rows`: rows of no request, before those of the first."""
        self.shape, self.dtype, self.unused_rows = shape, dtype, unused_rows
        tables, num_blocks = scatter_block_tables(lengths, shape.block_size)
        size = (num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
        self.cache = fill_cache(tables, lengths, size, dtype=kv_dtype, device=CPU)
        self.tables = table_tensor(tables, CPU)
        self.lens = torch.tensor(lengths, dtype=torch.int32)
        self.starts = torch.tensor([*accumulate(counts, initial=unused_rows)], dtype=torch.int32)
        self.max_query_len = max(counts)
        queries = normal(unused_rows + sum(counts), shape.num_heads * shape.head_dim, dtype=dtype, device=CPU)
        wide = padded_rows(queries, (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim)
        self.q = wide.view(-1, shape.num_heads, shape.head_dim)
        self.scales = SCALES if kv_dtype == FP8 else None

    def out(self) -> Guarded:
        """An output tensor whose surroundings are checked."""
        return Guarded(tuple(self.q.shape), self.dtype, CPU)

    def check_decode(self) -> None:
        """Compare the decode kernel, for one query per request, with the reference."""
        out = self.out()
        arguments = (self.q, self.cache, self.tables, self.lens, self.shape)
        attention_decode.paged_decode(*arguments, kv_scales=self.scales, out=out.tensor)
        assert_near(out.check(), reference.paged_decode(*arguments, kv_scales=self.scales), "attention")

    def expected(self) -> torch.Tensor:
        """The outputs of the reference for all queries."""
        return reference.paged_prefill(
            self.q, self.cache, self.tables, self.starts, self.lens, self.shape,
            max_query_len=self.max_query_len, kv_scales=self.scales,
        )  # fmt: skip

    def check_prefill(self) -> None:
        """Compare the prefill kernel with the reference, and check that it leaves unused rows alone."""
        out = self.out()
        attention_prefill.paged_prefill(
            self.q, self.cache, self.tables, self.starts, self.lens, self.shape,
            max_query_len=self.max_query_len, kv_scales=self.scales, out=out.tensor,
        )  # fmt: skip
        assert_near(out.check()[self.unused_rows :], self.expected()[self.unused_rows :], "attention")
        assert out.tensor[: self.unused_rows].isnan().all(), "unused rows were written"


def check_rotated_decode(batch: RotatedDecodeBatch) -> None:
    """Compare outputs and cache of the rotated decode kernel with the reference."""
    cache = batch.cache.clone()
    expected = exact.rotated_decode(*batch.arguments(cache), **batch.options)
    found = rotated_decode.rotated_decode(*batch.arguments(batch.cache), **batch.options)
    is_fp8 = batch.cache.dtype == FP8
    kind: Kind = "fp8" if is_fp8 else "normed"
    assert_near(found, expected, "attention", scale=2**6 if is_fp8 else 4)
    untouched = cache.float().isnan()
    assert_same(batch.cache.float().isnan(), untouched)
    assert_near(batch.cache[~untouched], cache[~untouched], kind, scale=2**6)
