"""Expert routing in one launch against its definition: awkward sizes, ties, NaN and infinities, padding."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.reference import experts as reference
from kernels.triton.experts.mixture import mix_gated_experts
from kernels.triton.experts.router import route_live
from kernels.triton.experts.tiles import sort_by_expert
from kernels.triton.experts.weights import bind_weights
from tests.support.kernel_cases import Guarded, normal, padded_rows
from tests.support.kernel_tolerances import assert_near, assert_same

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
SIZES = [(1, 1, 1), (1, 4, 2), (3, 5, 5), (17, 60, 4), (2, 128, 8), (2, 257, 3), (3, 512, 16)]
normalised_or_not = pytest.mark.parametrize("normalised", [True, False])


@normalised_or_not
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("num_tokens", "num_experts", "num_chosen"), SIZES)
def test_experts_and_their_weights_match_the_reference(
    num_tokens: int, num_experts: int, num_chosen: int, dtype: torch.dtype, normalised: bool, device: torch.device
) -> None:
    logits = padded_rows(normal(num_tokens, num_experts, dtype=dtype, device=device) * 3, num_experts + 7)
    weights = Guarded((num_tokens, num_chosen), dtype, device)
    expert_ids = Guarded((num_tokens, num_chosen), torch.int64, device)
    route_live(logits, num_chosen, normalised=normalised, out=(weights.tensor, expert_ids.tensor))
    expected_weights, expected_ids = reference.route(logits, num_chosen, normalised=normalised)
    assert_same(expert_ids.check(), expected_ids)
    assert_near(weights.check(), expected_weights, "normed")


def test_normalised_weights_are_the_softmax_over_the_chosen_experts(device: torch.device) -> None:
    """As Mixtral has them (arXiv 2401.04088, section 2.1)."""
    logits = normal(9, 8, dtype=torch.float32, device=device) * 30
    weights, expert_ids = route_live(logits, 2, normalised=True)
    assert_near(weights, logits.gather(1, expert_ids).softmax(-1), "normed")


@pytest.mark.parametrize("dtype", FLOATS)
def test_of_equal_logits_the_lower_expert_comes_first(dtype: torch.dtype, device: torch.device) -> None:
    logits = normal(33, 70, dtype=torch.float32, device=device).round().to(dtype)  # zeros of both signs among them
    assert (logits == 0).any(1).all()
    _, expert_ids = route_live(logits, 12, normalised=True)
    assert_same(expert_ids, reference.route(logits, 12, normalised=True)[1])
    assert route_live(torch.zeros_like(logits), 12, normalised=True)[1].tolist() == [list(range(12))] * 33


def test_logits_with_equal_rounded_probabilities_are_ordered_by_logit(device: torch.device) -> None:
    logits = torch.tensor([[-500.0, 0.0, -400.0, -300.0, -math.inf]], device=device)
    weights, expert_ids = route_live(logits, 5, normalised=False)
    assert expert_ids.tolist() == [[1, 3, 2, 0, 4]]
    assert weights.tolist() == [[1.0, 0.0, 0.0, 0.0, 0.0]]


@normalised_or_not
@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf])
def test_rows_without_a_softmax_have_nan_weights_and_valid_experts(
    value: float, normalised: bool, device: torch.device
) -> None:
    logits = normal(3, 6, dtype=torch.float32, device=device)
    logits[1] = value
    logits[2, 4] = value
    weights, expert_ids = route_live(logits, 3, normalised=normalised)
    expected, _ = reference.route(logits, 3, normalised=normalised)
    assert torch.equal(weights.isnan(), expected.isnan())
    assert_near(weights[0], expected[0], "normed")
    for row in expert_ids.tolist():
        assert len(set(row)) == 3
        assert set(row) <= set(range(6))


@pytest.mark.parametrize("kind", [torch.int64, torch.int32])
def test_rows_of_padding_have_no_expert_and_do_not_affect_others(kind: torch.dtype, device: torch.device) -> None:
    logits = normal(6, 9, dtype=torch.float16, device=device)
    logits[3] = math.nan
    slots = torch.tensor([97, 30, -1, 0, -1, 4, -1], dtype=kind, device=device)[1:]  # begins where no vector may
    weights, expert_ids = route_live(logits, 4, normalised=True, slots=slots)
    expected_weights, expected_ids = reference.route_live(logits, 4, normalised=True, slots=slots)
    assert_same(expert_ids, expected_ids)
    assert_near(weights, expected_weights, "normed")
    assert (expert_ids[[1, 3, 5]] == 9).all()
    alone = route_live(logits, 4, normalised=True)
    assert_same(weights[[0, 2, 4]], alone[0][[0, 2, 4]])


@normalised_or_not
def test_a_row_has_the_same_bits_in_any_batch(normalised: bool, device: torch.device) -> None:
    logits = normal(40, 128, dtype=torch.float32, device=device)
    whole = route_live(logits, 8, normalised=normalised)
    for part in (slice(0, 1), slice(3, 20), slice(39, 40)):
        for found, wanted in zip(route_live(logits[part], 8, normalised=normalised), whole, strict=True):
            assert_same(found, wanted[part])


def test_routing_no_rows_gives_empty_results(device: torch.device) -> None:
    weights, expert_ids = route_live(torch.empty(0, 8, device=device), 2, normalised=True)
    assert weights.shape == expert_ids.shape == (0, 2)


def test_positions_of_padding_belong_to_no_expert(device: torch.device) -> None:
    expert_ids = torch.tensor([[2, 0], [3, 3], [0, 1], [3, 3]], device=device)
    tokens = sort_by_expert(expert_ids, 3)
    assert tokens.offsets.tolist() == [0, 2, 3, 4]
    assert tokens.order[:4].tolist() == [1, 4, 5, 0]


@pytest.mark.parametrize("num_live", [0, 1, 2])
def test_padding_reads_no_expert_and_gives_zeros(num_live: int, device: torch.device) -> None:
    """The experts that live rows chose are the only ones whose weights are numbers."""
    logits = normal(8, 6, dtype=torch.float32, device=device, seed=3)
    slots = torch.arange(8, device=device).where(torch.arange(8, device=device) < num_live, -1)
    weights, expert_ids = route_live(logits, 2, normalised=True, slots=slots)
    x = normal(8, 40, dtype=torch.float32, device=device)
    x[num_live:] = math.nan
    gate_up = normal(6, 24, 40, dtype=torch.float32, device=device, seed=1)
    down = normal(6, 40, 12, dtype=torch.float32, device=device, seed=2)
    unread = [expert for expert in range(6) if not (expert_ids[:num_live] == expert).any()]
    assert unread
    gate_up[unread] = down[unread] = math.nan
    out = Guarded((8, 40), torch.float32, device)
    bound = bind_weights(gate_up.unbind()), bind_weights(down.unbind())
    mix_gated_experts(x, weights, expert_ids, *bound, out=out.tensor)
    expected = reference.mix_gated_experts(x, weights, expert_ids, gate_up, down)
    assert_near(out.check(), expected, "matmul", scale=float(expected.abs().max()) + 1)
    assert not out.check()[num_live:].any()
