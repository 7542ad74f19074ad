"""Chunks of prompts whose attention by Triton is compared with the reference."""

from __future__ import annotations

from typing import Any

import torch

from kernels.attention_rows import AttentionShape
from kernels.reference import attention as reference
from kernels.triton.attention import prefill
from kernels.triton.attention.splits import DecodeWorkspace
from tests.support.kernel_cases import Guarded, PagedQueries
from tests.support.kernel_tolerances import assert_near

BLOCK = 16
SHAPE = AttentionShape(BLOCK, 4, 2, 64)
FP8 = torch.float8_e4m3fn
Rows = list[tuple[int, int]]  # (query_len, context_len)


class Chunks(PagedQueries):
    """Chunks of prompts, of which a kernel's attention is compared with the reference's."""

    def compare(self, kv_scales: torch.Tensor | None = None, *, workspace: DecodeWorkspace | None = None) -> None:
        """Compare attention of the kernel with the reference."""
        out = Guarded(tuple(self.q.shape), self.dtype, self.q.device)
        given = (self.q, self.cache, self.tables, self.query_starts, self.context_lens, self.shape)
        sizes: dict[str, Any] = {"max_query_len": self.max_query_len, "kv_scales": kv_scales}
        prefill.paged_prefill(*given, **sizes, out=out.tensor, workspace=workspace)
        expected = reference.paged_prefill(*given, **sizes)[self.unused_rows :]
        assert_near(out.check()[self.unused_rows :], expected, "attention")
        assert out.tensor[: self.unused_rows].isnan().all(), "unused rows were written"
