"""Mixtures of experts in four launches against single tokens and experts: empty, crowded and unequal experts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from kernels import ops
from kernels.quantised_weights import pack_int4
from kernels.reference import experts as reference
from kernels.reference import quantised
from kernels.triton.experts import int4 as experts_int4
from kernels.triton.experts import mixture as kernel
from kernels.triton.experts.mixture import bind_experts, grouped_linear, mix_gated_experts
from kernels.triton.experts.tiles import SortedTokens, group_tiles, sort_by_expert
from kernels.triton.experts.weights import bind_weights
from tests.support.engines import generation_request, run_to_end, small_engine, tokens
from tests.support.kernel_cases import Guarded, normal, padded_rows
from tests.support.kernel_tables import replace_table
from tests.support.kernel_tolerances import assert_near, assert_same
from tests.support.tiny_models import saved_model

FLOATS = (torch.float32, torch.float16)


def chosen(num_tokens: int, num_experts: int, num_chosen: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    logits = normal(num_tokens, num_experts, dtype=torch.float32, device=device, seed=4)
    return reference.route(logits, num_chosen, normalised=True)


def aligned(*shape: int, dtype: torch.dtype, device: torch.device, seed: int) -> torch.Tensor:
    """Matrices aligned to 16 bytes, whatever their width, with NaN after each row."""
    rows = (normal(*shape, dtype=dtype, device=device, seed=seed) * 0.3).flatten(0, 1)
    padded = padded_rows(rows, -(-shape[2] // 8) * 8 + 8)
    return padded.as_strided(shape, (shape[1] * padded.stride(0), padded.stride(0), 1))


@pytest.mark.parametrize(("num_tokens", "num_experts", "num_chosen"), [(1, 4, 2), (17, 5, 1), (40, 8, 3), (700, 3, 2)])
def test_positions_are_sorted_by_expert_and_stable(
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
def test_the_mixture_of_a_few_tokens_matches_the_reference(
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
    gate_up = aligned(num_experts, 2 * inner, hidden, dtype=dtype, device=device, seed=1)
    down = aligned(num_experts, hidden, inner, dtype=dtype, device=device, seed=2)
    out = Guarded((num_tokens, hidden), dtype, device)
    bound = bind_weights(gate_up.unbind()), bind_weights(down.unbind())
    mix_gated_experts(x, weights.to(dtype), expert_ids, *bound, activation=activation, out=out.tensor)
    expected = reference.mix_gated_experts(x, weights.to(dtype), expert_ids, gate_up, down, activation=activation)
    assert_near(out.check(), expected, "matmul", scale=float(expected.abs().max()) * 2)


@pytest.mark.parametrize("tokens_per_expert", [16, 32, 64, 128])
def test_every_tile_of_a_crowded_expert_matches_the_reference(
    tokens_per_expert: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles for `tokens_per_expert`; nearly all tokens choose one expert, and none chooses the first."""
    sized = group_tiles(tokens_per_expert, 90, gated=True)
    monkeypatch.setattr(kernel, "group_tiles", lambda *_, **__: sized)
    num_tokens = sized.block_m + 3
    expert_ids = torch.tensor([[1]] * (num_tokens - 2) + [[2]] * 2, device=device)
    weights = normal(num_tokens, 1, dtype=torch.float32, device=device, seed=5)
    x = normal(num_tokens, 40, dtype=torch.float32, device=device)
    gate_up = aligned(3, 18, 40, dtype=torch.float32, device=device, seed=1)
    down = aligned(3, 40, 9, dtype=torch.float32, device=device, seed=2)
    gate_up[0] = down[0] = float("nan")  # no token chose it, so no program may read it
    mix = bind_experts(gate_up.unbind(), down.unbind(), "silu")
    assert mix is not None
    mixed = mix(x, weights, expert_ids)
    expected = reference.mix_gated_experts(x, weights, expert_ids, gate_up, down)
    assert_near(mixed, expected, "matmul", scale=float(expected.abs().max()))


def test_a_token_has_the_same_bits_in_any_batch(device: torch.device) -> None:
    weights, expert_ids = chosen(9, 4, 2, device)
    x = normal(9, 64, dtype=torch.float16, device=device)
    gate_up = normal(4, 32, 64, dtype=torch.float16, device=device, seed=1)
    down = normal(4, 64, 16, dtype=torch.float16, device=device, seed=2)
    mix = bind_experts(gate_up.unbind(), down.unbind(), "silu")
    assert mix is not None
    together = mix(x, weights, expert_ids)
    for token in (0, 4, 8):
        part = slice(token, token + 1)
        assert_same(mix(x[part], weights[part], expert_ids[part]), together[part])


PACKERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "int8": ops.pack_int8,
    "fp8": ops.pack_fp8,
    "int4": partial(pack_int4, group_size=32),
    "int4 with bfloat16 scales": partial(pack_int4, group_size=64, scale_dtype=torch.bfloat16),
}


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("packer", PACKERS)
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "num_chosen", "hidden", "inner"),
    [(1, 4, 2, 136, 32), (9, 3, 2, 64, 160), (120, 3, 1, 32, 96)],
)
def test_quantised_experts_match_their_dequantised_weights(
    num_tokens: int,
    num_experts: int,
    num_chosen: int,
    hidden: int,
    inner: int,
    packer: str,
    activation: str,
    device: torch.device,
) -> None:
    pack = PACKERS[packer]
    weights, expert_ids = chosen(num_tokens, num_experts, num_chosen, device)
    x = padded_rows(normal(num_tokens, hidden, dtype=torch.float16, device=device), -(-hidden // 8) * 8 + 8)
    shapes = (1, (num_experts, 2 * inner, hidden)), (2, (num_experts, hidden, inner))
    gate_ups, downs = (
        [pack(each) for each in (normal(*shape, dtype=torch.float32, device=device, seed=seed) * 0.3).unbind()]
        for seed, shape in shapes
    )
    mix = bind_experts(gate_ups, downs, activation)
    assert mix is not None
    wide = (torch.stack([quantised.dequantise(each) for each in packed]) for packed in (gate_ups, downs))
    expected = reference.mix_gated_experts(x, weights.half(), expert_ids, *wide, activation=activation)
    assert_near(mix(x, weights.half(), expert_ids), expected, "matmul", scale=float(expected.abs().max()) * 2)


@pytest.mark.parametrize("packer", ["int8", "int4"])
@pytest.mark.parametrize("tokens_per_expert", [16, 32, 64, 128])
def test_every_tile_of_a_crowded_quantised_expert_matches_the_reference(
    tokens_per_expert: int, packer: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above, and the scales of the expert that no token chose are poisoned."""
    pack = PACKERS[packer]
    for module, name in ((kernel, "group_tiles"), (experts_int4, "group_int4_tiles")):
        sized = {gated: getattr(module, name)(tokens_per_expert, 90, gated=gated) for gated in (False, True)}
        monkeypatch.setattr(module, name, lambda *_, gated, sized=sized: sized[gated])
    num_tokens = tokens_per_expert + 3
    expert_ids = torch.tensor([[1]] * (num_tokens - 2) + [[2]] * 2, device=device)
    weights = normal(num_tokens, 1, dtype=torch.float16, device=device, seed=5)
    x = normal(num_tokens, 64, dtype=torch.float16, device=device)
    gate_ups = [pack(each) for each in normal(3, 64, 64, dtype=torch.float32, device=device, seed=1) * 0.3]
    downs = [pack(each) for each in normal(3, 64, 32, dtype=torch.float32, device=device, seed=2) * 0.3]
    wide = [torch.stack([quantised.dequantise(each) for each in packed]) for packed in (gate_ups, downs)]
    for packed in (gate_ups[0], downs[0]):
        if packer == "int8":
            packed.scales.fill_(float("nan"))
        else:
            packed.scales_zeros.fill_(0x7E00)
    mix = bind_experts(gate_ups, downs, "silu")
    assert mix is not None
    expected = reference.mix_gated_experts(x, weights, expert_ids, *wide)
    assert_near(mix(x, weights, expert_ids), expected, "matmul", scale=float(expected.abs().max()))


def test_experts_of_different_formats_or_permutations_are_refused(device: torch.device) -> None:
    plain = [torch.zeros(64, 64, device=device)] * 2
    int4 = pack_int4(plain[0], 32)
    ordered = replace(int4, permutation=torch.arange(64, device=device))
    assert bind_experts([ops.pack_int8(plain[0]), plain[0]], plain, "silu") is None
    assert bind_experts([int4, pack_int4(plain[0], 64)], plain, "silu") is None
    assert bind_experts([ordered, ordered], plain, "silu") is None
    assert bind_experts(plain, [int4, plain[0]], "silu") is None
    with pytest.raises(ValueError, match="differ in their format"):
        bind_weights([int4, ordered])


def test_experts_of_4_bits_need_rows_of_16_bits(device: torch.device) -> None:
    tokens = sort_by_expert(torch.zeros(1, 1, dtype=torch.int64, device=device), 1)
    weights = bind_weights([pack_int4(torch.zeros(64, 64, device=device), 32)])
    with pytest.raises(ValueError, match="rows of 16 bits"):
        grouped_linear(torch.zeros(1, 64, device=device), weights, tokens, activation="silu")


def test_no_tokens_give_no_rows(device: torch.device) -> None:
    x = normal(1, 8, dtype=torch.float32, device=device)[:0]
    none = torch.empty(0, 2, device=device)
    mix = bind_experts(torch.zeros(2, 8, 8, device=device).unbind(), torch.zeros(2, 8, 4, device=device).unbind(), "silu")
    assert mix is not None
    assert mix(x, none, none.long()).shape == (0, 8)


@pytest.mark.parametrize(("activation", "with_factors"), [("relu", False), ("silu", True), ("", False)])
def test_a_product_needs_either_an_activation_or_factors(activation: str, with_factors: bool, device: torch.device) -> None:
    tokens = sort_by_expert(torch.zeros(1, 1, dtype=torch.int64, device=device), 1)
    x, weight = normal(1, 8, dtype=torch.float32, device=device), bind_weights([torch.zeros(8, 8, device=device)])
    factors = torch.ones(1, 1, device=device) if with_factors else None
    with pytest.raises(ValueError, match="either an activation"):
        grouped_linear(x, weight, tokens, activation=activation, factors=factors)


def test_matrices_of_different_shapes_or_without_alignment_are_refused(device: torch.device) -> None:
    memory = torch.zeros(100, device=device)
    with pytest.raises(ValueError, match="differ in shape"):
        bind_weights([memory[:64].view(8, 8), memory[:32].view(4, 8)])
    with pytest.raises(ValueError, match="begin on 16 bytes"):
        bind_weights([memory[1:65].view(8, 8)])
    with pytest.raises(ValueError, match="contiguous rows"):
        bind_weights([memory[:64].view(8, 8).T])


def test_a_model_with_experts_gives_the_same_tokens_with_kernels_and_torch(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device.type != "cpu":
        pytest.skip("on a GPU the kernels serve, and bench/gpu.sh compares what they say")
    model = saved_model("qwen3_moe", num_hidden_layers=1, head_dim=16).directory
    mixed = []
    sort = sort_by_expert

    def counted(expert_ids: torch.Tensor, num_experts: int) -> SortedTokens:
        mixed.append(expert_ids.shape[0])
        return sort(expert_ids, num_experts)

    monkeypatch.setattr(kernel, "sort_by_expert", counted)
    answers = []
    for table in ("cpu", "cuda"):
        with replace_table("cpu", "cuda") if table == "cuda" else contextlib.nullcontext():
            engine = small_engine(model, max_num_seqs=4, max_model_len=32, num_kv_blocks=8)
            events = run_to_end(
                engine, [generation_request("a", [5, 6, 7], max_tokens=2), generation_request("b", [3, 9], max_tokens=2)]
            )
        answers.append({name: tokens(each) for name, each in events.items()})
        assert bool(mixed) == (table == "cuda")
    assert answers[0] == answers[1]
