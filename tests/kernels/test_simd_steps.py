"""Operations of a decode step between slots and layers, in compiled vectors, against their definitions; guarded outputs."""

from __future__ import annotations

import pytest
import torch

from kernels.reference import decode_inputs as reference_inputs
from kernels.reference import embedding as reference_embedding
from kernels.reference import token_counts as reference_counts
from kernels.simd.table import OPERATIONS
from tests.support.decode_inputs import COLUMNS, NUM_SLOTS, prepared, state
from tests.support.kernel_cases import Guarded

pytestmark = pytest.mark.usefixtures("threads")

CPU = torch.device("cpu")


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("rows", [[0], [6, 2, 0], [3, 1, 4, 5, 6, 0, 2], [-1, 2, -1, 4, -1], [-1]])
def test_rows_are_prepared_from_their_slots(rows: list[int], block_size: int) -> None:
    slots, slot_state = torch.tensor(rows, dtype=torch.int32), state([1, 15, 16, 17, 33, 96, 2], CPU)
    inputs = prepared(OPERATIONS, slots, slot_state, block_size)  # type: ignore[arg-type]
    for name, expected in prepared(reference_inputs, slots, slot_state, block_size).items():
        assert torch.equal(inputs[name], expected), name


def test_a_position_beyond_the_table_is_not_written_and_an_empty_slot_is_empty() -> None:
    inputs = prepared(OPERATIONS, torch.tensor([0, 1, 2], dtype=torch.int32), state([97, 0, 96], CPU))  # type: ignore[arg-type]
    assert inputs["slot_mapping"].tolist()[:2] == [-1, -1]
    assert inputs["slot_mapping"].tolist()[2] >= 0
    assert inputs["context_lens"].tolist() == [97, 0, 96]
    assert inputs["block_tables"][1].tolist() == [-5] * (COLUMNS + 2)


@pytest.mark.parametrize("rows", [[0], [6, 2, 0], [-1, 2, -1, 4, -1], [-1]])
def test_sampled_tokens_become_the_last_tokens_of_their_slots(rows: list[int]) -> None:
    slots, sampled = torch.tensor(rows, dtype=torch.int32), torch.arange(100, 100 + len(rows))
    sampled[-1] = -1  # no token could be drawn
    out = Guarded((len(rows),), torch.int64, CPU)
    actual, expected = (tuple(part.clone() for part in state([3] * NUM_SLOTS, CPU)[:2]) for _ in "ab")
    OPERATIONS.advance_slots(slots, sampled, *actual, out=out.tensor)
    reference_inputs.advance_slots(slots, sampled, *expected)
    assert torch.equal(out.check(), sampled)
    assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("hidden", [1, 16, 37])
def test_embeddings_and_rotations_are_looked_up(hidden: int, dtype: torch.dtype) -> None:
    table, ids = torch.randn(11, hidden), torch.tensor([10, 0, 3, 3], dtype=dtype)
    for multiplier in (1.0, 1.7):
        expected = reference_embedding.embed(ids, table, multiplier=multiplier)
        assert torch.equal(OPERATIONS.embed(ids, table, multiplier=multiplier), expected)
    angles = table[:, None]
    actual = OPERATIONS.rotation_rows(angles, -angles, ids)
    expected_rows = reference_embedding.rotation_rows(angles, -angles, ids)
    assert all(torch.equal(one, other) for one, other in zip(actual, expected_rows, strict=True))
    assert OPERATIONS.embed(ids[:0], table).shape == (0, hidden)


@pytest.mark.parametrize("rows", [1, 3, 130])
def test_generated_tokens_are_counted_in_their_slots(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    slots = torch.randperm(rows + 2, generator=generator)[:rows].int()
    tokens = torch.randint(-1, 37, (rows,), generator=generator)
    slots[rows // 2] = -1
    counts = Guarded((rows + 2, 37), torch.int32, CPU)
    counts.tensor.copy_(torch.randint(0, 9, counts.tensor.shape, generator=generator, dtype=torch.int32))
    expected = counts.tensor.clone()
    reference_counts.count_tokens(slots, tokens, expected)
    OPERATIONS.count_tokens(slots, tokens, counts.tensor)
    assert torch.equal(counts.check(), expected)
