"""Mixtures of experts in four launches against one token and one expert at a time: empty, crowded and unequal experts."""

from __future__ import annotations

import pytest
import torch

from kernels.reference import experts as reference
from kernels.triton import experts as kernel
from kernels.triton.experts import group_tiles, grouped_linear, mix_gated_experts, sort_by_expert
from tests.support.kernel_cases import Guarded, normal, padded_rows
from tests.support.kernel_tolerances import assert_near, assert_same

# Triton 3.6's interpreter reads the bound of a loop from an array of one element.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")

FLOATS = (torch.float32, torch.float16)


def chosen(num_tokens: int, num_experts: int, num_chosen: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    logits = normal(num_tokens, num_experts, dtype=torch.float32, device=device, seed=4)
    return reference.route(logits, num_chosen, normalised=True)


@pytest.mark.parametrize(("num_tokens", "num_experts", "num_chosen"), [(1, 4, 2), (17, 5, 1), (40, 8, 3), (700, 3, 2)])
def test_places_are_sorted_by_expert_and_stay_in_their_order(
    num_tokens: int, num_experts: int, num_chosen: int, device: torch.device
) -> None:
    _, expert_ids = chosen(num_tokens, num_experts, num_chosen, device)
    tokens = sort_by_expert(expert_ids, num_experts)
    flat = expert_ids.flatten()
    assert torch.equal(tokens.order.long(), flat.argsort(stable=True))
    counts = torch.bincount(flat, minlength=num_experts)
    assert tokens.offsets.tolist() == [0, *counts.cumsum(0).tolist()]


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "num_chosen", "hidden", "inner"),
    [(1, 4, 2, 17, 5), (3, 8, 3, 64, 33), (40, 2, 1, 130, 16)],
)
def test_the_mixture_of_a_few_tokens(
    num_tokens: int,
    num_experts: int,
    num_chosen: int,
    hidden: int,
    inner: int,
    dtype: torch.dtype,
    activation: str,
    device: torch.device,
) -> None:
    weights, expert_ids = chosen(num_tokens, num_experts, num_chosen, device)
    x = padded_rows(normal(num_tokens, hidden, dtype=dtype, device=device), -(-hidden // 8) * 8 + 8)
    gate_up = normal(num_experts, 2 * inner, hidden, dtype=dtype, device=device, seed=1) * 0.3
    down = normal(num_experts, hidden, inner, dtype=dtype, device=device, seed=2) * 0.3
    out = Guarded((num_tokens, hidden), dtype, device)
    mix_gated_experts(x, weights.to(dtype), expert_ids, gate_up, down, activation=activation, out=out.tensor)
    expected = reference.mix_gated_experts(x, weights.to(dtype), expert_ids, gate_up, down, activation=activation)
    assert_near(out.check(), expected, "matmul", scale=float(expected.abs().max()) * 2)


@pytest.mark.parametrize("rows_each", [16, 32, 64, 128])
def test_every_tile_of_a_crowded_expert(rows_each: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles for `rows_each` tokens an expert, with all tokens at one expert and then none at another."""
    sized = group_tiles(rows_each * 3, 3, 90, gated=True)
    monkeypatch.setattr(kernel, "group_tiles", lambda *_, **__: sized)
    num_tokens = sized.block_m + 3
    expert_ids = torch.tensor([[1]] * (num_tokens - 2) + [[2]] * 2, device=device)
    weights = normal(num_tokens, 1, dtype=torch.float32, device=device, seed=5)
    x = normal(num_tokens, 40, dtype=torch.float32, device=device)
    gate_up = normal(3, 18, 40, dtype=torch.float32, device=device, seed=1)
    down = normal(3, 40, 9, dtype=torch.float32, device=device, seed=2)
    gate_up[0] = down[0] = float("nan")  # nobody chose it, so nobody may read it
    mixed = mix_gated_experts(x, weights, expert_ids, gate_up, down)
    expected = reference.mix_gated_experts(x, weights, expert_ids, gate_up, down)
    assert_near(mixed, expected, "matmul", scale=float(expected.abs().max()))


def test_a_token_has_the_same_bits_whoever_else_is_in_the_batch(device: torch.device) -> None:
    weights, expert_ids = chosen(9, 4, 2, device)
    x = normal(9, 64, dtype=torch.float16, device=device)
    gate_up = normal(4, 32, 64, dtype=torch.float16, device=device, seed=1) * 0.3
    down = normal(4, 64, 16, dtype=torch.float16, device=device, seed=2) * 0.3
    together = mix_gated_experts(x, weights, expert_ids, gate_up, down)
    for token in (0, 4, 8):
        part = slice(token, token + 1)
        assert_same(mix_gated_experts(x[part], weights[part], expert_ids[part], gate_up, down), together[part])


def test_no_tokens_give_no_rows(device: torch.device) -> None:
    x = normal(1, 8, dtype=torch.float32, device=device)[:0]
    none = torch.empty(0, 2, device=device)
    assert mix_gated_experts(x, none, none.long(), torch.zeros(2, 8, 8), torch.zeros(2, 8, 4)).shape == (0, 8)


@pytest.mark.parametrize(("activation", "with_factors"), [("relu", False), ("silu", True), ("", False)])
def test_a_product_has_an_activation_or_factors(activation: str, with_factors: bool, device: torch.device) -> None:
    tokens = sort_by_expert(torch.zeros(1, 1, dtype=torch.int64, device=device), 1)
    x, weight = normal(1, 8, dtype=torch.float32, device=device), torch.zeros(1, 8, 8, device=device)
    factors = torch.ones(1, 1, device=device) if with_factors else None
    with pytest.raises(ValueError, match="either an activation"):
        grouped_linear(x, weight, tokens, activation=activation, factors=factors)
