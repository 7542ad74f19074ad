"""Chunks of prompts whose attention by Triton is compared with the reference."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch

from kernels.attention_rows import AttentionShape
from kernels.reference import attention as reference
from kernels.triton.attention import prefill
from kernels.triton.attention.splits import DecodeWorkspace
from tests.support.kernel_cases import Guarded, fill_cache, normal, padded_rows, scatter_block_tables, table_tensor
from tests.support.kernel_tolerances import assert_near

BLOCK = 16
SHAPE = AttentionShape(BLOCK, 4, 2, 64)
FP8 = torch.float8_e4m3fn
Rows = list[tuple[int, int]]  # (query_len, context_len)


class Chunks:
    """Chunks of prompts in a poisoned cache, their queries in a poisoned projection, after `unused_rows` rows of no request."""

    def __init__(
        self,
        rows: Rows,
        shape: AttentionShape,
        device: torch.device,
        *,
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
        unused_rows: int = 0,
    ) -> None:
        self.shape, self.dtype, self.unused_rows = shape, dtype, unused_rows
        lengths = [context_len for _, context_len in rows]
        tables, num_blocks = scatter_block_tables(lengths, shape.block_size)
        size = (num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
        self.cache = fill_cache(tables, lengths, size, dtype=kv_dtype or dtype, device=device)
        self.tables = table_tensor(tables, device)
        self.context_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
        starts = [*accumulate((query_len for query_len, _ in rows), initial=unused_rows)]
        self.query_starts = torch.tensor(starts, dtype=torch.int32, device=device)
        self.max_query_len = max(query_len for query_len, _ in rows)
        queries = normal(starts[-1], shape.num_heads * shape.head_dim, dtype=dtype, device=device)
        wide = padded_rows(queries, (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim)
        self.q = wide.view(-1, shape.num_heads, shape.head_dim)

    def compare(self, kv_scales: torch.Tensor | None = None, *, workspace: DecodeWorkspace | None = None) -> None:
        """Compare attention of the kernel with the reference."""
        out = Guarded(tuple(self.q.shape), self.dtype, self.q.device)
        given = (self.q, self.cache, self.tables, self.query_starts, self.context_lens, self.shape)
        sizes: dict[str, Any] = {"max_query_len": self.max_query_len, "kv_scales": kv_scales}
        prefill.paged_prefill(*given, **sizes, out=out.tensor, workspace=workspace)
        expected = reference.paged_prefill(*given, **sizes)[self.unused_rows :]
        assert_near(out.check()[self.unused_rows :], expected, "attention")
        assert out.tensor[: self.unused_rows].isnan().all(), "unused rows were written"
