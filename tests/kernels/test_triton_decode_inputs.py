"""Inputs of a decode step from its slots: the Triton kernels and the torch operations against loops."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from kernels.host_tokens import HostTokens
from kernels.reference import decode_inputs as reference
from kernels.torch import decode_inputs as cpu_inputs
from kernels.triton.step import inputs as triton_inputs
from tests.support.decode_inputs import COLUMNS, NUM_SLOTS, prepared, state
from tests.support.kernel_cases import Guarded
from tests.support.kernel_tolerances import assert_same

BOTH = pytest.mark.parametrize("kernels", [triton_inputs, cpu_inputs], ids=["triton", "torch"])


@BOTH
@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("rows", [[0], [6, 2, 0], [3, 1, 4, 5, 6, 0, 2], [-1, 2, -1, 4, -1], [-1]])
def test_rows_are_prepared_from_their_slots(
    kernels: ModuleType, rows: list[int], block_size: int, device: torch.device
) -> None:
    slots = torch.tensor(rows, dtype=torch.int32, device=device)
    held = state([1, 15, 16, 17, 33, 96, 2], device)
    made, expected = prepared(kernels, slots, held, block_size), prepared(reference, slots, held, block_size)
    for name, tensor in expected.items():
        assert_same(made[name], tensor)


@BOTH
def test_a_position_beyond_the_table_is_not_written_and_an_empty_slot_is_empty(
    kernels: ModuleType, device: torch.device
) -> None:
    slots = torch.tensor([0, 1, 2], dtype=torch.int32, device=device)
    made = prepared(kernels, slots, state([97, 0, 96], device))
    assert made["slot_mapping"].tolist()[:2] == [-1, -1]
    assert made["slot_mapping"].tolist()[2] >= 0
    assert made["context_lens"].tolist() == [97, 0, 96]
    assert made["block_tables"][1].tolist() == [-5] * (COLUMNS + 2)


def test_long_tables_are_shared_by_several_programs(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    monkeypatch.setattr(triton_inputs, "COLUMNS", 16)
    slots = torch.tensor([1, -1, 0], dtype=torch.int32, device=device)
    held = state([600, 250], device, columns=40)
    made, expected = prepared(triton_inputs, slots, held), prepared(reference, slots, held)
    for name, tensor in expected.items():
        assert_same(made[name], tensor)


@BOTH
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("rows", [[0], [6, 2, 0], [-1, 2, -1, 4, -1], [-1]])
def test_sampled_tokens_become_the_last_tokens_of_their_slots(
    kernels: ModuleType, rows: list[int], dtype: torch.dtype, device: torch.device
) -> None:
    slots = torch.tensor(rows, dtype=torch.int32, device=device)
    sampled = torch.arange(100, 100 + len(rows), device=device)
    sampled[-1] = -1  # no token could be drawn
    out = Guarded((len(rows),), torch.int64, device)
    made, expected = (tuple(part.clone() for part in state([3] * NUM_SLOTS, device)[:2]) for _ in "ab")
    made = made[0].to(dtype), made[1]
    kernels.advance_slots(slots, sampled, *made, out=out.tensor)
    reference.advance_slots(slots, sampled, *expected)
    assert_same(out.check(), sampled)
    assert_same(made[0].long(), expected[0])
    assert_same(made[1], expected[1])


@BOTH
def test_more_rows_than_one_program_holds_match_the_reference(kernels: ModuleType, device: torch.device) -> None:
    slots = torch.randperm(300, generator=torch.Generator().manual_seed(2)).to(torch.int32)[:257].to(device)
    last, counts = torch.zeros(300, dtype=torch.int64, device=device), torch.ones(300, dtype=torch.int32, device=device)
    kernels.advance_slots(slots, torch.arange(1, 258, device=device), last, counts)
    assert int(counts.sum()) == 300 + 257
    assert_same(last[slots.long()], torch.arange(1, 258, device=device))


@BOTH
def test_steps_return_their_tokens_to_the_host_in_order(kernels: ModuleType, device: torch.device) -> None:
    """Steps of several sizes, one of padding alone, and one with more rows than the kernel advances per iteration."""
    steps = [[3], [0, 5, -1, 4], [-1, -1], [*range(299)], [2, -1], [6, 1, 3], [5]]
    found, expected = (state([3] * 300, device)[:2] for _ in "ab")
    guards = [Guarded((3, 301), torch.int64, device) for _ in "ab"]
    left, expected_left = (
        HostTokens(guard.tensor.zero_(), torch.zeros(1, dtype=torch.int64, device=device)) for guard in guards
    )
    for number, rows in enumerate(steps):
        slots = torch.tensor(rows, dtype=torch.int32, device=device)
        sampled = 1000 * number + slots.long()
        kernels.advance_slots(slots, sampled, *found, host=left)
        reference.advance_slots(slots, sampled, *expected, host=expected_left)
        for ours, theirs in zip([*found, *left], [*expected, *expected_left], strict=True):
            assert_same(ours, theirs)
    assert left.num_steps.tolist() == [6]
    assert guards[0].check()[:, :4].tolist() == [[6, 6005, 3001, 3002], [4, 4002, 3999, 0], [5, 5006, 5001, 5003]]
