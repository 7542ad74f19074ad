"""PTX of mixtures of experts, whose weights are read through tables of addresses."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.reference import experts as reference
from kernels.reference.quantised import dequantise
from kernels.triton.experts.mixture import mix_gated_experts
from kernels.triton.experts.router import route_live
from kernels.triton.experts.weights import bind_weights
from tests.support.kernel_cases import Guarded, normal, padded_rows
from tests.support.kernel_tolerances import assert_near, assert_same
from tests.support.ptx.card import EmulatedCard
from tests.support.ptx.weight_packers import PACKERS

CPU = torch.device("cpu")
HIDDEN, INNER, EXPERTS, CHOSEN = 128, 128, 4, 2


@pytest.mark.parametrize(("kind", "count"), [("bf16", 5), ("int8", 5), ("fp8", 40), ("int4", 40)])
def test_mixtures_of_experts_match_the_reference(card: EmulatedCard, kind: str, count: int) -> None:
    pack = PACKERS[kind]
    sizes = ((2 * INNER, HIDDEN), (HIDDEN, INNER))
    bfloat16 = [normal(EXPERTS, *size, dtype=torch.bfloat16, device=CPU, seed=1) / math.sqrt(size[1]) for size in sizes]
    packed = [[pack(weight) for weight in weights] for weights in bfloat16]
    gate_up, down = (torch.stack([dequantise(weight) for weight in weights]) for weights in packed)
    x = normal(count, HIDDEN, dtype=torch.bfloat16, device=CPU)
    weights, ids = reference.route(normal(count, EXPERTS, dtype=torch.float32, device=CPU, seed=4), CHOSEN, normalised=True)
    bound = [bind_weights(each) for each in packed]
    out = Guarded((count, HIDDEN), torch.bfloat16, CPU)
    with card.with_reachable(*bound[0].tensors, *bound[1].tensors):
        mix_gated_experts(x, weights.bfloat16(), ids, *bound, activation="silu", out=out.tensor)
    expected = reference.mix_gated_experts(x.float(), weights, ids, gate_up, down, activation="silu")
    assert_near(out.check(), expected, "matmul", scale=2)


@pytest.mark.parametrize(
    ("dtype", "num_experts", "num_chosen", "normalised"),
    [(torch.bfloat16, 128, 8, True), (torch.float16, 60, 4, False), (torch.float32, 512, 16, True)],
)
def test_routers_match_the_reference(
    card: EmulatedCard, dtype: torch.dtype, num_experts: int, num_chosen: int, normalised: bool
) -> None:
    logits = padded_rows(normal(4, num_experts, dtype=dtype, device=CPU) * 3, num_experts + 9)
    logits[2] = logits[2].round()
    slots = torch.tensor([0, -1, 7, 3, -1])[1:]  # not aligned for vector loads
    weights, ids = Guarded((4, num_chosen), dtype, CPU), Guarded((4, num_chosen), torch.int64, CPU)
    route_live(logits, num_chosen, normalised=normalised, slots=slots, out=(weights.tensor, ids.tensor))
    expected, expected_ids = reference.route_live(logits, num_chosen, normalised=normalised, slots=slots)
    assert_same(ids.check(), expected_ids)
    assert_near(weights.check(), expected, "normed")


def test_padding_rows_and_unselected_experts_are_not_read(card: EmulatedCard) -> None:
    """The padding rows and the weights of experts that no token selects are NaN."""
    slots = torch.tensor([3, -1, -1])
    weights, ids = route_live(torch.tensor([[0.0, 1.0, 2.0, -1.0]] * 3), CHOSEN, normalised=True, slots=slots)
    assert ids.tolist() == [[2, 1], [4, 4], [4, 4]]
    x = normal(3, HIDDEN, dtype=torch.bfloat16, device=CPU)
    x[1:] = math.nan
    gate_up, down = (
        normal(EXPERTS, *size, dtype=torch.bfloat16, device=CPU, seed=1) / math.sqrt(size[1])
        for size in ((2 * INNER, HIDDEN), (HIDDEN, INNER))
    )
    gate_up[[0, 3]] = down[[0, 3]] = math.nan
    bound = bind_weights(gate_up.unbind()), bind_weights(down.unbind())
    out = Guarded((3, HIDDEN), torch.bfloat16, CPU)
    with card.with_reachable(*bound[0].tensors, *bound[1].tensors):
        mix_gated_experts(x, weights.bfloat16(), ids, *bound, activation="silu", out=out.tensor)
    expected = reference.mix_gated_experts(x.float(), weights, ids, gate_up, down, activation="silu")
    assert_near(out.check(), expected, "matmul", scale=2)
