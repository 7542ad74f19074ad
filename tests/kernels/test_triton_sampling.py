"""The sampling kernels against their definition: the same token for every request, and the right distribution."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from kernels import gumbel
from kernels.gumbel import FARTHEST, NO_TOKEN
from kernels.reference import sampling as reference
from kernels.sampling_columns import SamplingColumns
from kernels.torch import sampling as cpu
from kernels.triton.sampling import sampler as sampling
from tests.support.kernel_cases import Guarded, normal, padded_rows
from tests.support.sampling_columns import columns_of

VOCABS = (1, 129, 4093)
FILTERS: list[dict[str, float]] = [
    {},
    {"temperature": 0.0},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 40, "temperature": 1.7},
    {"top_k": 300, "top_p": 0.9},
    {"top_p": 0.1},
    {"top_p": 0.95, "temperature": 0.6},
    {"top_p": 0.9999, "temperature": 2.0},
    {"min_p": 0.05},
    {"top_p": 0.9, "min_p": 0.1},
    {"top_k": 20, "top_p": 0.5, "min_p": 0.2},
    {"typical_p": 0.2},
    {"typical_p": 0.9, "temperature": 1.7},
    {"typical_p": 1e-9},
    {"min_p": 0.05, "typical_p": 0.99999994},
    {"top_k": 300, "top_p": 0.9, "min_p": 0.02, "typical_p": 0.6},
    {"top_p": 0.9, "typical_p": 0.5, "temperature": 0.6},
    {"top_k": 2, "typical_p": 0.5},
    {"temperature": 1e-4},
    {"temperature": 1e-4, "typical_p": 0.5},
    {"top_k": 10**6},
]


def compare(
    logits: torch.Tensor,
    columns: SamplingColumns,
    slots: list[int],
    positions: list[int],
    masks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The kernels' tokens; checks that they are those of the definition."""
    device = logits.device
    slot_ids = torch.tensor(slots, dtype=torch.int32, device=device)
    places = torch.tensor(positions, dtype=torch.int64, device=device)
    out = Guarded((len(slots),), torch.int64, device)
    before = logits.clone()
    sampling.sample(logits, slot_ids, places, columns, masks=masks, out=out.tensor)
    assert cpu.sample(logits, slot_ids, places, columns, masks=masks).tolist() == out.tensor.tolist()
    assert torch.equal(logits.nan_to_num(7.0), before.nan_to_num(7.0)), "the logits were changed"
    assert out.check().tolist() == reference.sample(logits, slot_ids, places, columns, masks=masks).tolist()
    return out.tensor


@pytest.mark.parametrize("vocab_size", VOCABS)
def test_every_filter_draws_the_token_of_its_definition(vocab_size: int, device: torch.device) -> None:
    columns = columns_of(FILTERS, vocab_size, device)
    logits = padded_rows(normal(len(FILTERS), vocab_size, dtype=torch.float32, device=device) * 3, vocab_size + 5)
    compare(logits, columns, list(range(len(FILTERS))), [7 * i for i in range(len(FILTERS))])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_logits_of_16_bits_are_read_without_conversion(dtype: torch.dtype, device: torch.device) -> None:
    settings: list[dict[str, float]] = [{}, {"temperature": 0.0}, {"top_k": 5, "top_p": 0.9}, {"top_p": 0.8}]
    columns = columns_of(settings, 1031, device)
    logits = (normal(4, 1031, dtype=torch.float32, device=device) * 3).to(dtype)
    compare(logits, columns, [0, 1, 2, 3], [0, 1, 2, 3])


def test_equal_logits_are_kept_or_dropped_together(device: torch.device) -> None:
    settings: list[dict[str, float]] = [
        {"top_k": 3},
        {"top_p": 0.5},
        {"min_p": 0.5},
        {"temperature": 0.0},
        {},
        {"typical_p": 0.3},
        {"top_p": 0.8, "typical_p": 0.5},
    ]
    columns = columns_of(settings, 700, device)
    logits = normal(len(settings), 700, dtype=torch.float32, device=device).round()
    drawn = [compare(logits, columns, list(range(len(settings))), [step] * len(settings)) for step in range(2)]
    assert drawn[0][3] == logits[3].argmax()


def test_a_token_at_the_limit_of_min_p_is_kept(device: torch.device) -> None:
    columns = columns_of([{"min_p": 0.5}] * 4, 300, device)
    columns.scale[:] = 1.0  # distances are in binary orders
    logits = torch.zeros(4, 300, device=device)
    logits[:, 0] = 1.0
    assert compare(logits, columns, [0, 1, 2, 3], [0, 1, 2, 3]).any(), "299 others are half as likely"


@pytest.mark.parametrize("rows", [1, 16])
def test_the_lowest_of_equal_tokens_is_taken_whichever_tile_or_program_finds_it(rows: int, device: torch.device) -> None:
    """Three tiles: each in a program of its own, or, with 16 rows, two in one."""
    columns = columns_of([{"temperature": 0.0}] * rows, 2500, device)
    logits = normal(rows, 2500, dtype=torch.float32, device=device).round().clamp(max=2.0)
    for first in (0, 1100, 2100):
        logits[:, :first] = 0.0
        drawn = compare(logits, columns, list(range(rows)), [0] * rows)
        assert drawn.tolist() == [row.index(2.0) for row in logits.tolist()]


def test_equal_logits_across_a_long_row_are_searched_in_several_passes(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    monkeypatch.setattr(sampling, "LIST_SIZE", 64)
    settings: list[dict[str, float]] = [
        {"top_k": 3},
        {"top_p": 0.5},
        {"top_k": 600, "top_p": 0.3},
        {"top_p": 0.9, "min_p": 0.4},
        {"typical_p": 0.5},
        {"top_k": 600, "typical_p": 0.5},
    ]
    columns = columns_of(settings, 700, device)
    count = len(settings)
    compare(torch.zeros(count, 700, device=device), columns, list(range(count)), list(range(1, count + 1)))


@pytest.mark.parametrize("spread", [1e-3, 0.3, 4.0])
def test_more_candidates_than_registers_hold_give_the_same_token(
    monkeypatch: pytest.MonkeyPatch, spread: float, device: torch.device
) -> None:
    monkeypatch.setattr(sampling, "LIST_SIZE", 64)
    settings: list[dict[str, float]] = [
        {"top_p": 0.9},
        {"top_p": 0.99, "temperature": 0.5},
        {"top_k": 400, "top_p": 0.8, "min_p": 0.01},
        {"min_p": 0.3},
        {"typical_p": 0.4},
        {"typical_p": 0.95, "temperature": 0.5},
        {"top_k": 400, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.7},
        {"top_p": 0.9, "typical_p": 0.3},
    ]
    columns = columns_of(settings, 1500, device)
    logits = normal(len(settings), 1500, dtype=torch.float32, device=device, seed=3) * spread
    compare(logits, columns, list(range(len(settings))), [3] * len(settings))


def test_a_row_without_a_finite_largest_logit_has_no_token_and_leaves_the_others_alone(device: torch.device) -> None:
    settings: list[dict[str, float]] = [{"temperature": 0.0}, {}, {"top_k": 4}, {"top_p": 0.7}, {"typical_p": 0.7}]
    columns = columns_of(settings, 300, device)
    logits = normal(20, 300, dtype=torch.float32, device=device)
    logits[0:5, 130] = math.nan
    logits[5:10, 299] = math.inf
    logits[10:15] = -math.inf
    tokens = compare(logits, columns, list(range(5)) * 4, [5] * 20)
    assert tokens[:15].tolist() == [NO_TOKEN] * 15
    assert (tokens[15:] >= 0).all()


def test_forbidding_a_logit_does_not_hide_that_it_is_not_finite(device: torch.device) -> None:
    columns = columns_of([{}, {"top_k": 2}], 70, device)
    logits = normal(2, 70, dtype=torch.float32, device=device)
    logits[0, 3], logits[1, 66] = math.nan, math.inf
    masks = torch.full((2, 3), -1, dtype=torch.int32, device=device)
    masks[0, 0] = ~8
    masks[1, 2] = ~4
    assert compare(logits, columns, [0, 1], [1, 1], masks).tolist() == [NO_TOKEN, NO_TOKEN]


def test_only_tokens_allowed_by_a_mask_are_drawn(device: torch.device) -> None:
    settings: list[dict[str, float]] = [{}, {"temperature": 0.0}, {"top_k": 5, "top_p": 0.9}, {"top_p": 0.8}, {"min_p": 0.1}]
    settings.append({"typical_p": 0.5})
    columns = columns_of(settings, 515, device)
    logits = normal(6, 515, dtype=torch.float32, device=device)
    generator = torch.Generator().manual_seed(2)
    masks = torch.randint(-(2**31), 2**31, (6, 17), generator=generator, dtype=torch.int64).int().to(device)
    masks[1] = 0
    masks[2] = 0
    masks[2, 16] = 4
    tokens = compare(logits, columns, [0, 1, 2, 3, 4, 5], [9] * 6, masks)
    assert tokens[1] == NO_TOKEN
    assert tokens[2] == 514


def test_an_empty_slot_has_no_token_and_slots_may_stand_in_any_order(device: torch.device) -> None:
    columns = columns_of(FILTERS, 200, device)
    logits = normal(5, 200, dtype=torch.float32, device=device)
    tokens = compare(logits, columns, [3, -1, 0, 8, -1], [4, 0, 4, 9, 0])
    assert tokens[1] == NO_TOKEN == tokens[4]


def test_penalties_biases_and_suppressed_tokens_are_applied_before_filters(device: torch.device) -> None:
    settings: list[dict[str, float]] = [{"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.6}]
    columns = columns_of(settings, 260, device, num_rules=3)
    generator = torch.Generator().manual_seed(4)
    columns.counts.copy_(torch.randint(0, 8, (4, 260), generator=generator, dtype=torch.int32) | 1)
    columns.counts[:, ::2] = 0
    columns.bias.copy_(torch.randn(3, 260, generator=generator))
    columns.bias[:, 7] = -math.inf
    columns.repetition.copy_(torch.tensor([1.3, 0.7, 1.0, 2.0]))
    columns.frequency.copy_(torch.tensor([0.3, -0.7, 0.0, 2.0]))
    columns.presence.copy_(torch.tensor([-1.3, 0.7, 0.1, 0.0]))
    columns.rules.copy_(torch.tensor([2, 0, -1, 1]))
    columns.min_tokens_until.copy_(torch.tensor([0, 11, 10, 12]))
    columns.suppressed_ids[:, :2] = torch.tensor([[1, 2], [3, 200], [5, 6], [8, 9]])
    logits = normal(4, 260, dtype=torch.float32, device=device) * 2
    for position in (10, 11):
        compare(logits, columns, [0, 1, 2, 3], [position] * 4)


def test_a_request_draws_the_same_token_alone_and_in_a_batch(device: torch.device) -> None:
    settings: list[dict[str, float]] = [{"temperature": 0.0}, {}, {"top_k": 9, "top_p": 0.9}, {"top_p": 0.6}, {"min_p": 0.1}]
    columns = columns_of(settings, 9000, device)
    logits = normal(40, 9000, dtype=torch.float32, device=device) * 2
    slots = torch.arange(len(settings), dtype=torch.int32, device=device)
    positions = torch.full_like(slots, 3)
    assert sampling._splits(1, 9000, device)[0] > sampling._splits(40, 9000, device)[0], "rows are divided otherwise"
    crowd = torch.full((40,), -1, dtype=torch.int32, device=device)
    crowd[:5] = slots
    together = sampling.sample(logits, crowd, torch.full_like(crowd, 3), columns)[:5]
    alone = [sampling.sample(logits[i : i + 1], slots[i : i + 1], positions[i : i + 1], columns) for i in range(5)]
    assert torch.equal(together, torch.cat(alone))


def test_a_workspace_serves_up_to_its_number_of_rows(device: torch.device) -> None:
    settings: list[dict[str, float]] = [{"top_p": 0.6}, {}, {"top_k": 9}]
    columns = columns_of(settings, 4500, device)
    workspace = sampling.sampling_workspace(3, 4500, device)
    logits = normal(3, 4500, dtype=torch.float32, device=device) * 2
    slots = torch.arange(3, dtype=torch.int32, device=device)
    for rows in (3, 1, 2):
        chosen = sampling.sample(logits[:rows], slots[:rows], slots[:rows].long(), columns, workspace=workspace)
        assert torch.equal(chosen, reference.sample(logits[:rows], slots[:rows], slots[:rows].long(), columns))


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """χ² per degree of freedom; categories expected fewer than five times are merged into one."""
    often = expected >= 5
    counts = torch.cat([counts[often], counts[~often].sum()[None]])
    expected = torch.cat([expected[often], expected[~often].sum()[None]])
    used = expected > 0
    assert not counts[~used].any(), "what cannot be drawn was drawn"
    return float(((counts - expected)[used] ** 2 / expected[used]).sum()) / max(1, int(used.sum()) - 1)


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.5}, {"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.2}], ids=str)
def test_draws_over_seeds_and_positions_follow_the_softmax(settings: dict[str, Any], device: torch.device) -> None:
    """40,000 draws from 40 tokens by the definition, whose tokens the kernels draw."""
    logits = normal(1, 40, dtype=torch.float32, device=device)[0] * 1.5
    columns = columns_of([settings], 40, device)
    scale = columns.scale[0]
    filters = int(columns.top_k[0]), columns.top_p[0], columns.neg_log2_min_p[0], columns.typical_p[0]
    kept = reference.filter_mask(logits.max() - logits, scale, *filters)
    streams = torch.tensor([random.Random(i).getrandbits(63) for i in range(400)], device=device)
    keys = gumbel.keys(streams.repeat_interleave(100), torch.arange(100, device=device).repeat(400))
    score = logits * scale + gumbel.noise(keys, torch.arange(40, device=device)[None])
    drawn = score.masked_fill(~kept, -math.inf).argmax(-1)
    counts = torch.bincount(drawn, minlength=40).double()
    weight = torch.where(kept, (logits.double() * float(scale) * math.log(2)).exp(), 0.0)
    assert chi_square(counts, weight / weight.sum() * len(drawn)) < 1.7


def test_noise_of_neighbouring_tokens_positions_and_seeds_is_independent(device: torch.device) -> None:
    streams = torch.arange(64, device=device).repeat_interleave(64)
    keys = gumbel.keys(streams, torch.arange(64, device=device).repeat(64))
    bits = gumbel.bits(keys, torch.arange(128, device=device)[None])
    uniform = bits.double() / 2**32
    assert abs(float(uniform.mean()) - 0.5) < 2e-3
    for other in (uniform.roll(1, 1), uniform.roll(1, 0), uniform.roll(64, 0), uniform.roll(32, 1)):
        together = torch.stack([uniform.flatten(), other.flatten()])
        assert abs(float(torch.corrcoef(together)[0, 1])) < 6e-3
        cells = (together * 16).long()
        counts = torch.bincount(cells[0] * 16 + cells[1], minlength=256).double()
        assert chi_square(counts, counts.mean().expand(256)) < 1.4


def test_an_exponential_variate_is_precise_where_it_is_small(device: torch.device) -> None:
    small = torch.tensor([1, 3, 101, 2**16 + 1, 2**28 + 1, 2**30 + 1, 2**31 + 1, 2**32 - 1], device=device)
    exact = -torch.log2(1 - small.double() / 2**32)
    torch.testing.assert_close(gumbel.exponential(small).double(), exact, rtol=1e-6, atol=0)


def test_weights_halve_with_every_power_of_two_and_end(device: torch.device) -> None:
    orders = torch.tensor([0.0, 1.0, 2.0, 30.0, FARTHEST, 1e30, math.inf], device=device)
    assert gumbel.weights(orders).tolist() == [2**30, 2**29, 2**28, 1, 0, 0, 0]
