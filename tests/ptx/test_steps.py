"""PTX of the kernels around a step: inputs of a decode step from its slots, and copies of cache blocks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

from kernels.attention_rows import AttentionShape
from kernels.host_tokens import HostTokens
from kernels.reference import blocks as reference_blocks
from kernels.reference import decode_inputs as reference_inputs
from kernels.reference import fused_linear as reference_products
from kernels.reference import rotated_decode as reference_decode
from kernels.triton.attention import rotated_decode
from kernels.triton.products import fused_linear
from kernels.triton.step import blocks
from kernels.triton.step import inputs as decode_inputs
from tests.support.kernel_cases import Guarded, RotatedDecodeBatch, normal
from tests.support.kernel_tolerances import assert_same
from tests.support.ptx.card import EmulatedCard

CPU = torch.device("cpu")
BLOCK_SHAPE = (16, 2, 2, 24)


class Layers(NamedTuple):
    """The operations of a decode step with few rows and plain weights, up to the output projection of attention."""

    prepare_decode: Callable[..., None]
    linear_add: Callable[..., Any]
    normed_linear: Callable[..., torch.Tensor]
    rotated_decode: Callable[..., torch.Tensor]

    @classmethod
    def of(cls, inputs: ModuleType, products: ModuleType, decode: ModuleType) -> Layers:
        return cls(inputs.prepare_decode, products.linear_add, products.normed_linear, decode.rotated_decode)


OURS = Layers.of(decode_inputs, fused_linear, rotated_decode)
EXACT = Layers.of(reference_inputs, reference_products, reference_decode)


def test_inputs_of_a_decode_step_match_the_reference() -> None:
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


@pytest.mark.parametrize("lengths", [[70], [35, 18]])
def test_layers_launched_early_read_only_what_the_preceding_kernel_does_not_write(
    lengths: list[int], card: EmulatedCard
) -> None:
    """Two layers of a decode step, starting from the slots, as consecutive launches."""
    shape = AttentionShape(16, 4, 2, 32)
    rows, width, hidden = len(lengths), 8 * 32, 4 * 32
    batches = [RotatedDecodeBatch(lengths, shape, CPU, dtype=torch.bfloat16) for _ in "ab"]
    given, slots = batches[0], torch.arange(rows, dtype=torch.int32)
    caches, expected_caches = ([batch.cache.clone() for batch in batches] for _ in "ab")
    made = partial(normal, dtype=torch.bfloat16, device=CPU)
    weights = {"qkv": made(width, hidden, seed=3) / 16, "out": made(hidden, hidden, seed=4) / 16}
    norm, first = made(hidden, seed=5) + 1, made(rows, hidden, seed=6)
    start = torch.zeros(rows, hidden, dtype=torch.bfloat16)

    def layers(ops: Layers, kept: list[torch.Tensor]) -> torch.Tensor:
        step = {"positions": torch.empty(rows, dtype=torch.int64), "token_ids": torch.empty(rows, dtype=torch.int64)}
        step["slot_mapping"] = torch.empty(rows, dtype=torch.int64)
        lens, tables = torch.empty(rows, dtype=torch.int32), torch.empty_like(given.tables)
        ops.prepare_decode(
            slots, torch.arange(rows), given.lens, given.tables, block_size=16, context_lens=lens, block_tables=tables, **step
        )
        stream = ops.linear_add(first, weights["out"], start, norm)
        for cache in kept:
            qkv = ops.normed_linear(stream, weights["qkv"], 1e-6).view(rows, -1, 32)
            attended = ops.rotated_decode(
                qkv, given.cos, given.sin, cache, step["slot_mapping"], tables, lens, shape, **given.options
            )
            stream = ops.linear_add(attended.view(rows, -1), weights["out"], stream.total, norm)
        total: torch.Tensor = stream.total
        return total

    expected = layers(EXACT, expected_caches)
    card.launches_back_to_back = True
    found = layers(OURS, caches)
    torch.testing.assert_close([found, *caches], [expected, *expected_caches], rtol=0.02, atol=0.02, equal_nan=True)


@pytest.mark.parametrize("rows", [[6, -1, 2], [-1, -1], [*range(7), *range(300, 640)]])
def test_advanced_slots_and_host_tokens_match_the_reference(rows: list[int]) -> None:
    slots, sampled = torch.tensor(rows, dtype=torch.int32), torch.arange(100, 100 + len(rows))
    sampled[-1] = -1
    last, lengths = torch.arange(640), torch.arange(640, dtype=torch.int32)
    expected_last, expected_lengths = last.clone(), lengths.clone()
    places = [Guarded((4, 1 + len(rows)), torch.int64, CPU) for _ in "ab"]
    host, expected_host = (HostTokens(each.tensor.zero_(), torch.tensor([6])) for each in places)
    for _ in range(2):
        out = Guarded((len(rows),), torch.int64, CPU)
        decode_inputs.advance_slots(slots, sampled, last, lengths, out=out.tensor, host=host)
        reference_inputs.advance_slots(slots, sampled, expected_last, expected_lengths, host=expected_host)
        assert_same(out.check(), sampled)
        for ours, theirs in ((last, expected_last), (lengths, expected_lengths), *zip(host, expected_host, strict=True)):
            assert_same(ours, theirs)
    places[0].check()
    assert host.num_steps.item() == (8 if rows[0] >= 0 else 6)


def test_copied_and_staged_blocks_match_the_reference(card: EmulatedCard) -> None:
    made, expected = ([normal(9, *BLOCK_SHAPE, dtype=torch.bfloat16, device=CPU, seed=i) for i in range(3)] for _ in "ab")
    staging, expected_staging = (torch.zeros(4, 3, *BLOCK_SHAPE, dtype=torch.bfloat16) for _ in "ab")
    ids, others, rows = torch.tensor([8, 1]), torch.tensor([0, 5]), torch.tensor([3, 0])
    with card.with_reachable(*made):
        blocks.copy_blocks(made, ids, others)
        blocks.gather_blocks(made, ids, staging, rows)
        blocks.scatter_blocks(made, others, staging, rows)
    reference_blocks.copy_blocks(expected, ids, others)
    reference_blocks.gather_blocks(expected, ids, expected_staging, rows)
    reference_blocks.scatter_blocks(expected, others, expected_staging, rows)
    for ours, theirs in zip([*made, staging], [*expected, expected_staging], strict=True):
        assert_same(ours, theirs)
