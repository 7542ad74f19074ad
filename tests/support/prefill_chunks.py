"""Chunks of prompts whose attention by Triton is compared with the reference."""

from __future__ import annotations

from typing import Any

import torch

from kernels.attention_rows import AttentionShape
from kernels.reference import attention as reference
from kernels.triton.attention import prefill
from kernels.triton.attention.splits import DecodeWorkspace
from tests.support.kernel_cases import PagedQueries
from tests.support.kernel_tolerances import assert_near

BLOCK = 16
SHAPE = AttentionShape(BLOCK, 4, 2, 64)
FP8 = torch.float8_e4m3fn
Rows = list[tuple[int, int]]  # (query_len, context_len)


class Chunks(PagedQueries):
    """Chunks of prompts, of which a kernel's attention is compared with the reference's."""

    def compare(self, kv_scales: torch.Tensor | None = None, *, workspace: DecodeWorkspace | None = None) -> None:
        """Compare attention of the kernel with the reference, and check that it leaves unused rows alone."""
        out = self.out()
        prefill.paged_prefill(**self._arguments(kv_scales), out=out.tensor, workspace=workspace)
        assert_near(out.check()[self.unused_rows :], self.expected(kv_scales)[self.unused_rows :], "attention")
        assert out.tensor[: self.unused_rows].isnan().all(), "unused rows were written"

    def expected(self, kv_scales: torch.Tensor | None = None) -> torch.Tensor:
        """The outputs of the reference for all queries."""
        return reference.paged_prefill(**self._arguments(kv_scales))

    def _arguments(self, kv_scales: torch.Tensor | None) -> dict[str, Any]:
        return {
            "q": self.q, "kv_cache": self.cache, "block_tables": self.tables, "query_starts": self.query_starts,
            "context_lens": self.context_lens, "shape": self.shape, "max_query_len": self.max_query_len, "kv_scales": kv_scales,
        }  # fmt: skip
