"""The prefill candidate of the GPU bench compiles under every supported Triton. It is not executed: it uses mbarriers."""

from __future__ import annotations

import pytest

from bench.gpu.prefill_by_groups import prefill_by_groups
from kernels.attention_rows import AttentionShape
from tests.support.ptx.attention_batch import AttentionBatch
from tests.support.ptx.card import EmulatedCard


class Compiled(Exception):
    """Raised instead of executing the compiled kernel."""


def test_the_candidate_compiles(card: EmulatedCard) -> None:
    def stop(ptx: str) -> str:
        raise Compiled(ptx)

    card.transform_ptx = stop
    batch = AttentionBatch(AttentionShape(16, 4, 1, 128), [100], [64])
    inputs = (batch.cache, batch.tables, batch.query_starts, batch.context_lens)
    with pytest.raises(Compiled, match="groups_kernel"):
        prefill_by_groups(batch.q, *inputs, batch.shape, 3, batch.out().tensor, None)
