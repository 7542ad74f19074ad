"""Batches for the PTX tests of paged attention, compared with the reference in float64."""

from __future__ import annotations

import torch

from kernels.attention_rows import AttentionShape
from kernels.reference import attention as reference
from kernels.reference import rotated_decode as exact
from kernels.triton.attention import decode as attention_decode
from kernels.triton.attention import rotated_decode
from tests.support.kernel_cases import RotatedDecodeBatch
from tests.support.kernel_tolerances import Kind, assert_near, assert_same
from tests.support.prefill_chunks import Chunks

CPU = torch.device("cpu")
BLOCK = 16
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
SCALES = torch.tensor([0.5, 2.0])


class AttentionBatch(Chunks):
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
        requests = [*zip(counts, lengths, strict=True)]
        super().__init__(requests, shape, CPU, dtype=dtype, kv_dtype=kv_dtype, unused_rows=unused_rows)
        self.scales = SCALES if kv_dtype == FP8 else None

    def check_decode(self) -> None:
        """Compare the decode kernel, for one query per request, with the reference."""
        out = self.out()
        arguments = (self.q, self.cache, self.tables, self.context_lens, self.shape)
        attention_decode.paged_decode(*arguments, kv_scales=self.scales, out=out.tensor)
        assert_near(out.check(), reference.paged_decode(*arguments, kv_scales=self.scales), "attention")

    def check_prefill(self) -> None:
        """Compare the prefill kernel with the reference."""
        self.compare(self.scales)


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
