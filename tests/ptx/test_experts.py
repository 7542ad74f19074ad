"""Mixtures of experts as machine-level code, whose weights are found by tables of addresses."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.reference import experts as reference
from kernels.reference.quantised import dequantise
from kernels.triton.expert_weights import bind_weights
from kernels.triton.experts import mix_gated_experts
from tests.ptx.test_products import PACKERS
from tests.support.kernel_cases import Guarded, normal
from tests.support.kernel_tolerances import assert_near
from tests.support.ptx.card import EmulatedCard

CPU = torch.device("cpu")
HIDDEN, INNER, EXPERTS, CHOSEN = 128, 128, 4, 2


@pytest.mark.parametrize(("kind", "count"), [("bf16", 5), ("bf16", 40), ("int8", 5), ("fp8", 40), ("int4", 5), ("int4", 40)])
def test_mixtures(card: EmulatedCard, kind: str, count: int) -> None:
    pack = PACKERS[kind]
    sizes = ((2 * INNER, HIDDEN), (HIDDEN, INNER))
    bfloat16 = [normal(EXPERTS, *size, dtype=torch.bfloat16, device=CPU, seed=1) / math.sqrt(size[1]) for size in sizes]
    packed = [[pack(weight) for weight in weights] for weights in bfloat16]
    gate_up, down = (torch.stack([dequantise(weight) for weight in weights]) for weights in packed)
    x = normal(count, HIDDEN, dtype=torch.bfloat16, device=CPU)
    weights, ids = reference.route(normal(count, EXPERTS, dtype=torch.float32, device=CPU, seed=4), CHOSEN, normalised=True)
    bound = [bind_weights(each) for each in packed]
    out = Guarded((count, HIDDEN), torch.bfloat16, CPU)
    with card.reaching(*bound[0].kept, *bound[1].kept):
        mix_gated_experts(x, weights.bfloat16(), ids, *bound, activation="silu", out=out.tensor)
    expected = reference.mix_gated_experts(x.float(), weights, ids, gate_up, down, activation="silu")
    assert_near(out.check(), expected, "matmul", scale=2)
