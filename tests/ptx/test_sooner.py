"""PTX of kernels that trigger the next one before they end: candidates of the GPU bench."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch

from bench.gpu.sooner import SOONER
from kernels.attention_rows import AttentionShape
from kernels.reference import fused_linear as reference
from kernels.triton.products import fused_linear
from kernels.triton.products.split_k import arrival_counters
from tests.support.kernel_cases import RotatedDecodeBatch, normal
from tests.support.kernel_tolerances import assert_near
from tests.support.ptx.attention_batch import BF16, BLOCK, CPU, check_rotated_decode
from tests.support.ptx.block import REVERSE
from tests.support.ptx.card import EmulatedCard

WAIT, TRIGGER = "griddepcontrol.wait", "griddepcontrol.launch_dependents"


@pytest.mark.parametrize(
    ("early_triggers", "num_kernels"), [(early_triggers, count) for count, early_triggers in enumerate(SOONER.values(), 1)]
)
def test_kernels_trigger_the_next_one_only_after_their_own_wait(
    early_triggers: Callable[[], AbstractContextManager[object]], num_kernels: int, card: EmulatedCard
) -> None:
    programs: list[str] = []

    def record(ptx: str) -> str:
        programs.append(ptx)
        return ptx

    card.transform_ptx, card.order = record, REVERSE
    x, residual = (normal(1, 256, dtype=BF16, device=CPU, seed=seed) for seed in (1, 2))
    weight, norm_weight = normal(256, 256, dtype=BF16, device=CPU, seed=3) / 16, torch.ones(256, dtype=BF16)
    with early_triggers():
        check_rotated_decode(RotatedDecodeBatch([257], AttentionShape(BLOCK, 8, 2, 128), CPU, dtype=BF16))
        found = fused_linear.linear_add(x, weight, residual, norm_weight)
    expected = reference.linear_add(x, weight, residual, norm_weight)
    assert_near(found.total, expected.total, "matmul")
    assert not arrival_counters(CPU).any()
    triggering = [ptx for ptx in programs if TRIGGER in ptx]
    assert len(triggering) == num_kernels
    assert all(ptx.index(WAIT) < ptx.index(TRIGGER) for ptx in triggering)
