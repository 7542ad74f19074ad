"""Sampling compiled for this CPU: exactly the tokens of the definition, with any settings and number of threads."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from kernels import gumbel
from kernels.gumbel import NO_TOKEN
from kernels.reference import sampling as reference
from kernels.sampling_columns import SamplingColumns
from kernels.simd import sampling
from kernels.simd.vectors import LANES
from kernels.torch import sampling as torch_sampling
from tests.support.sampling_columns import columns_of

pytestmark = pytest.mark.usefixtures("threads")

SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 40, "temperature": 1.7},
    {"top_k": 300, "top_p": 0.9},
    {"top_p": 0.1},
    {"top_p": 1e-9},
    {"top_p": 0.95, "temperature": 0.6},
    {"top_p": 0.9999, "temperature": 2.0},
    {"min_p": 0.05},
    {"top_p": 0.9, "min_p": 0.1},
    {"top_k": 20, "top_p": 0.5, "min_p": 0.2},
    {"typical_p": 0.2},
    {"typical_p": 0.9, "temperature": 1.7},
    {"typical_p": 1e-9},
    {"typical_p": 0.99999994, "min_p": 0.01},
    {"top_k": 30, "top_p": 0.9, "min_p": 0.05, "typical_p": 0.6, "temperature": 0.7},
    {"top_k": 2, "typical_p": 0.5},
    {"temperature": 1e-4},
    {"temperature": 1e-4, "typical_p": 0.5},
    {"top_k": 10**6},
    {"repetition": 1.3, "temperature": 0.0},
    {"repetition": 0.7, "frequency": 0.4, "presence": -0.3, "top_p": 0.9},
    {"frequency": 1.5, "rule": 0},
    {"rule": 1, "temperature": 0.0},
    {"suppressed": [0, 3], "temperature": 0.0},
    {"suppressed": [1], "rule": 1, "presence": 2.0, "top_k": 7},
    {"suppressed": [1], "rule": 1, "repetition": 1.2, "typical_p": 0.7},
]
VOCABS = (1, LANES - 1, LANES, 129, 4093)


def ruled_columns(settings: list[dict[str, Any]], vocab_size: int) -> SamplingColumns:
    """Columns with the penalties, rules and suppressed tokens of `settings`, too, after random outputs."""
    columns = columns_of(settings, vocab_size, num_rules=2)
    generator = torch.Generator().manual_seed(vocab_size)
    columns.counts.copy_(torch.randint(0, 6, columns.counts.shape, generator=generator))
    columns.bias.copy_(torch.randn(columns.bias.shape, generator=generator) * 3)
    columns.bias[1, ::3] = -math.inf
    for slot, each in enumerate(settings):
        columns.repetition[slot] = each.get("repetition", 1.0)
        columns.frequency[slot], columns.presence[slot] = each.get("frequency", 0.0), each.get("presence", 0.0)
        columns.rules[slot] = each.get("rule", -1)
        columns.min_tokens_until[slot] = 9 if "suppressed" in each else 0
        for index, token_id in enumerate(token_id for token_id in each.get("suppressed", ()) if token_id < vocab_size):
            columns.suppressed_ids[slot, index] = token_id
    return columns


def compare(
    logits: torch.Tensor,
    columns: SamplingColumns,
    slots: torch.Tensor,
    positions: torch.Tensor,
    masks: torch.Tensor | None = None,
) -> list[int]:
    """The tokens; they must equal those of the definition and of torch."""
    before = logits.clone()
    tokens: list[int] = sampling.sample(logits, slots, positions, columns, masks=masks).tolist()
    assert torch.equal(logits.nan_to_num(7.0), before.nan_to_num(7.0)), "the logits were changed"
    assert tokens == torch_sampling.sample(logits, slots, positions, columns, masks=masks).tolist()
    assert tokens == reference.sample(logits, slots, positions, columns, masks=masks).tolist()
    return tokens


@pytest.mark.parametrize("vocab_size", VOCABS)
@pytest.mark.parametrize("spread", [0.01, 3.0])
def test_rows_with_any_settings_get_the_tokens_of_the_definition(vocab_size: int, spread: float) -> None:
    columns, count = ruled_columns(SETTINGS, vocab_size), len(SETTINGS)
    generator = torch.Generator().manual_seed(1)
    wide = torch.full((count, vocab_size + 5), math.nan)
    logits = wide[:, :vocab_size]  # strided rows with poison between them
    for step in range(3):
        logits.copy_(torch.randn(count, vocab_size, generator=generator) * spread)
        slots = torch.randperm(count, generator=generator).int()
        slots[step] = -1
        positions = torch.arange(count, dtype=torch.int64 if step % 2 else torch.int32) * 3 + step
        assert compare(logits, columns, slots, positions)[step] == NO_TOKEN


def test_equal_logits_are_kept_or_dropped_together() -> None:
    settings: list[dict[str, Any]] = [
        {"top_k": 3},
        {"top_p": 0.5},
        {"min_p": 0.5},
        {"temperature": 0.0},
        {},
        {"top_k": 5, "top_p": 0.5},
        {"typical_p": 0.3},
        {"top_p": 0.8, "typical_p": 0.5},
    ]
    columns = columns_of(settings, 700)
    logits = torch.randn(len(settings), 700, generator=torch.Generator().manual_seed(2)).round()
    slots = torch.arange(len(settings), dtype=torch.int32)
    for step in range(4):
        assert compare(logits, columns, slots, slots.long() + step)[3] == int(logits[3].argmax())
        compare(torch.zeros_like(logits), columns, slots, slots.long() + step)


def test_zeros_of_either_sign_are_equal() -> None:
    columns = columns_of([{"top_k": 3}, {"top_p": 0.5}, {"top_k": 3, "typical_p": 0.5}], 70)
    logits = torch.where(torch.rand(3, 70, generator=torch.Generator().manual_seed(6)) < 0.5, 0.0, -0.0)
    logits[:, 40:], logits[:, 0] = -1.0, -0.0
    for step in range(9):
        compare(logits, columns, torch.arange(3, dtype=torch.int32), torch.full((3,), step))


def test_a_mask_keeps_allowed_tokens_and_does_not_hide_failures() -> None:
    settings: list[dict[str, Any]] = [{}, {"temperature": 0.0}, {"top_k": 4}, {"top_p": 0.7}, {"suppressed": [3]}, {"rule": 1}]
    settings.append({"typical_p": 0.6})
    columns = ruled_columns(settings, 70)
    generator = torch.Generator().manual_seed(3)
    masks = torch.randint(-(2**31), 2**31, (len(settings), 5), generator=generator, dtype=torch.int64).int()[:, :3]
    logits = torch.randn(len(settings), 70, generator=generator)
    slots = torch.arange(len(settings), dtype=torch.int32)
    for row, token_id in enumerate(compare(logits, columns, slots, slots.long(), masks)):
        assert masks[row, token_id // 32] >> token_id % 32 & 1
    masks[0], masks[1:, 0] = 0, ~8
    logits[2:4, 3], logits[4, 3], logits[5, 3] = math.nan, math.inf, -math.inf
    tokens = compare(logits, columns, slots, slots.long(), masks)
    assert [token_id == NO_TOKEN for token_id in tokens] == [True, False, True, True, True, False, False]


def test_a_row_without_a_finite_largest_logit_has_no_token_and_leaves_the_others_alone() -> None:
    settings: list[dict[str, Any]] = [{"temperature": 0.0}, {}, {"top_k": 4}, {"top_p": 0.7}, {"typical_p": 0.7}]
    columns = columns_of(settings, 300)
    logits = torch.randn(20, 300, generator=torch.Generator().manual_seed(4))
    logits[0:5, 130], logits[5:10, 299], logits[10:15] = math.nan, math.inf, -math.inf
    tokens = compare(logits, columns, torch.arange(20, dtype=torch.int32) % 5, torch.full((20,), 5))
    assert [token_id == NO_TOKEN for token_id in tokens] == [True] * 15 + [False] * 5


def test_top_k_keeps_all_tokens_if_there_are_fewer_than_k() -> None:
    columns = columns_of([{"top_k": 9}, {"top_k": 9, "top_p": 0.9}, {"top_k": 9, "typical_p": 0.99}], 200)
    logits = torch.full((3, 200), -math.inf)
    logits[:, [3, 77, 150]] = torch.tensor([1.0, 2.0, 0.5])
    tokens = [compare(logits, columns, torch.tensor([0, 1, 2], dtype=torch.int32), torch.full((3,), at)) for at in range(20)]
    assert {row[0] for row in tokens} == {3, 77, 150}


def test_threads_without_workspace_leave_the_work_to_the_others() -> None:
    columns, slots = ruled_columns(SETTINGS, 40), torch.arange(len(SETTINGS), dtype=torch.int32)
    logits = torch.randn(len(SETTINGS), 40, generator=torch.Generator().manual_seed(5))
    workspace = torch.full((2, 3, 40), math.nan)
    expected = torch_sampling.sample(logits, slots, slots, columns).tolist()
    assert sampling.sample(logits, slots, slots, columns, workspace=workspace[:1]).tolist() == expected
    assert bool(workspace[1].isnan().all())


def test_tokens_are_drawn_with_their_probabilities() -> None:
    columns = columns_of([{}], 4)
    logits = torch.tensor([[0.5, 0.25, 0.2, 0.05]]).log().expand(4000, -1).contiguous()
    slots = torch.zeros(4000, dtype=torch.int32)
    chosen = sampling.sample(logits, slots, torch.arange(4000), columns)
    assert torch.equal(chosen, torch_sampling.draw(logits, columns.scale[:1].expand(4000), keys(columns, 4000)))
    frequencies = torch.bincount(chosen, minlength=4) / 4000
    assert frequencies.tolist() == pytest.approx([0.5, 0.25, 0.2, 0.05], abs=0.025)


def keys(columns: SamplingColumns, count: int) -> torch.Tensor:
    return gumbel.keys(columns.streams[:1].expand(count), torch.arange(count))
