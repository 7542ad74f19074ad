"""Around a step as machine-level code: inputs of a decode step from its slots, and blocks of the cache that are moved."""

from __future__ import annotations

from types import ModuleType

import torch

from kernels.reference import blocks as reference_blocks
from kernels.reference import decode_inputs as reference_inputs
from kernels.triton import blocks, decode_inputs
from tests.support.kernel_cases import Guarded, normal
from tests.support.kernel_tolerances import assert_same
from tests.support.ptx.card import EmulatedCard

CPU = torch.device("cpu")
BLOCK_SHAPE = (16, 2, 2, 24)


def test_inputs_of_a_decode_step() -> None:
    lengths = torch.tensor([1, 15, 16, 17, 33, 96, 2], dtype=torch.int32)
    tables = torch.randperm(42, generator=torch.Generator().manual_seed(1)).int().view(7, 6)
    slots = torch.tensor([6, -1, 3, 0, 5, -1, 2, 1, 4], dtype=torch.int32)
    kinds = {"token_ids": torch.int64, "positions": torch.int64, "slot_mapping": torch.int64, "context_lens": torch.int32}

    def made(kernels: ModuleType) -> dict[str, torch.Tensor]:
        outputs = {name: Guarded((9,), kind, CPU) for name, kind in kinds.items()}
        outputs["block_tables"] = Guarded((9, 6), torch.int32, CPU)
        arguments = {name: output.tensor for name, output in outputs.items()}
        kernels.prepare_decode(slots, torch.arange(100, 107), lengths, tables, block_size=16, **arguments)
        return {name: output.check() for name, output in outputs.items()}

    for ours, expected in zip(made(decode_inputs).values(), made(reference_inputs).values(), strict=True):
        assert_same(ours, expected)


def test_sampled_tokens_become_the_last_of_their_slots() -> None:
    slots, sampled = torch.tensor([6, -1, 2], dtype=torch.int32), torch.tensor([100, 101, -1])
    last, lengths = torch.arange(7), torch.arange(7, dtype=torch.int32)
    expected_last, expected_lengths = last.clone(), lengths.clone()
    out = Guarded((3,), torch.int64, CPU)
    decode_inputs.advance_slots(slots, sampled, last, lengths, out=out.tensor)
    reference_inputs.advance_slots(slots, sampled, expected_last, expected_lengths)
    assert_same(out.check(), sampled)
    assert_same(last, expected_last)
    assert_same(lengths, expected_lengths)


def test_blocks_are_copied_and_staged(card: EmulatedCard) -> None:
    made, expected = ([normal(9, *BLOCK_SHAPE, dtype=torch.bfloat16, device=CPU, seed=i) for i in range(3)] for _ in "ab")
    staging, expected_staging = (torch.zeros(4, 3, *BLOCK_SHAPE, dtype=torch.bfloat16) for _ in "ab")
    ids, others, rows = torch.tensor([8, 1]), torch.tensor([0, 5]), torch.tensor([3, 0])
    with card.reaching(*made):
        blocks.copy_blocks(made, ids, others)
        blocks.gather_blocks(made, ids, staging, rows)
        blocks.scatter_blocks(made, others, staging, rows)
    reference_blocks.copy_blocks(expected, ids, others)
    reference_blocks.gather_blocks(expected, ids, expected_staging, rows)
    reference_blocks.scatter_blocks(expected, others, expected_staging, rows)
    for ours, theirs in zip([*made, staging], [*expected, expected_staging], strict=True):
        assert_same(ours, theirs)
