"""Recorded sequences of operations: bit-identical to separate calls for any number of rows, and complete."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from kernels.attention_rows import AttentionShape
from kernels.recorded_operations import NotRecordable
from kernels.simd.launching import OperationSequence
from kernels.simd.table import OPERATIONS

pytestmark = pytest.mark.usefixtures("threads")

HIDDEN, INNER, BLOCKS, MAX_ROWS = 64, 96, 40, 19
SHAPE = AttentionShape(16, 4, 2, 16, softcap=30.0)


class Layers:
    """Three layers with every operation that a sequence may hold; each row's newest keys and values go to the cache."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.norms = torch.rand(3, HIDDEN) + 0.5
        sizes = ((128, HIDDEN), (HIDDEN, HIDDEN), (2 * INNER, HIDDEN), (HIDDEN, INNER))
        self.products = [[OPERATIONS.pack_linear(torch.randn(size) / 8, None) for size in sizes] for _ in range(3)]
        self.cache = torch.randn(3, BLOCKS, 16, 2, 2, 16)

    def __call__(self, x: torch.Tensor, inputs: list[torch.Tensor], sequence: OperationSequence | None = None) -> torch.Tensor:
        cos, sin, slots, tables, lens = inputs
        rows = OPERATIONS.rms_norm(x, self.norms[0], 1e-5)
        for norm, cache, (qkv, out, gate_up, down) in zip(self.norms, self.cache, self.products, strict=True):
            if sequence is not None:
                sequence.next_layer()
            heads = qkv(rows).view(-1, 8, 16)
            OPERATIONS.rope_and_cache(heads, cos, sin, cache, slots, num_kv_heads=2, rotary_dim=16)
            attended = OPERATIONS.paged_decode(heads[:, :4], cache, tables, lens, SHAPE)
            rows, x = OPERATIONS.add_rms_norm(out(attended.view(-1, HIDDEN)), x, norm, 1e-5, alpha=0.5)
            rows, x = OPERATIONS.add_rms_norm(down(OPERATIONS.silu_mul(gate_up(rows))), x, norm, 1e-5)
        return rows


def inputs(num_rows: int) -> list[torch.Tensor]:
    """Rows of one to three blocks each."""
    torch.manual_seed(num_rows)
    angles = torch.rand(num_rows, 1, 8) * 6
    lens = torch.randint(1, 40, (num_rows,), dtype=torch.int32)
    tables = torch.arange(2 * num_rows, dtype=torch.int32).view(num_rows, 2)
    tables = torch.cat((tables, tables[:, :1]), dim=1)
    last = (lens - 1).long()
    slots = tables.gather(1, (last // 16)[:, None])[:, 0].long() * 16 + last % 16
    return [torch.cat((angles.cos(),) * 2, -1), torch.cat((-angles.sin(), angles.sin()), -1), slots, tables, lens]


def test_a_sequence_is_bit_identical_to_separate_operations_for_any_number_of_rows() -> None:
    layers, x = Layers(), torch.zeros(MAX_ROWS, HIDDEN)
    buffers = [torch.zeros(MAX_ROWS, *each.shape[1:], dtype=each.dtype) for each in inputs(MAX_ROWS)]
    sequence, cache = OperationSequence(MAX_ROWS), layers.cache.clone()
    with sequence.recording():
        result = layers(x, buffers, sequence)
    assert torch.equal(layers.cache, cache), "recorded operations are not run"
    for num_rows in (MAX_ROWS, 1, 7, 16, 2, MAX_ROWS):
        x[:] = buffers[0][:] = math.nan  # for rows that are not requested
        x[:num_rows] = torch.randn(num_rows, HIDDEN)
        for buffer, value in zip(buffers, inputs(num_rows), strict=True):
            buffer[:num_rows] = value
        before = layers.cache.clone()
        expected = layers(x[:num_rows].clone(), inputs(num_rows))
        after = layers.cache.clone()
        layers.cache.copy_(before)
        sequence.run(num_rows)
        assert torch.equal(result[:num_rows], expected)
        assert torch.equal(layers.cache, after)


def test_a_sequence_uses_the_number_of_threads_of_torch() -> None:
    x, weight = torch.randn(8, 64), torch.ones(64)
    sequence = OperationSequence(8)
    with sequence.recording():
        result = OPERATIONS.rms_norm(x, weight, 1e-5)
    before = torch.get_num_threads()
    for threads in (2, 1, 2):
        torch.set_num_threads(threads)
        result.fill_(math.nan)
        sequence.run(8)
        assert torch.equal(result, OPERATIONS.rms_norm(x, weight, 1e-5))
    torch.set_num_threads(before)


def test_torch_operations_between_recorded_ones_are_refused() -> None:
    x, weight = torch.randn(2, 32), torch.ones(32)
    computations: list[Callable[[torch.Tensor], torch.Tensor]] = [
        torch.neg,
        torch.clone,
        lambda rows: rows.index_select(0, order),
    ]
    order = torch.tensor([1, 0])
    for compute in computations:
        with pytest.raises(NotRecordable), OperationSequence(2).recording():
            compute(OPERATIONS.rms_norm(x, weight, 1e-5))
    assert torch.isfinite(OPERATIONS.rms_norm(x, weight, 1e-5)).all()


def test_a_layer_reuses_the_memory_of_the_layer_before_the_last_one() -> None:
    x, weight = torch.randn(4, 32), torch.ones(32)
    sequence, addresses = OperationSequence(4), []
    with sequence.recording():
        for _ in range(4):
            sequence.next_layer()
            x = OPERATIONS.rms_norm(x, weight, 1e-5)
            addresses.append(x.data_ptr())
    assert addresses[0] == addresses[2] != addresses[1] == addresses[3]


def test_tensors_made_before_the_first_layer_are_kept_for_all_layers() -> None:
    """Rotations, for example, also if a record that shares the buffers had larger tensors there."""
    x, weight, wide, wide_weight = torch.randn(4, 32), torch.ones(32), torch.randn(4, 64), torch.ones(64)
    first = OperationSequence(4)
    sequences = first, first.sharing_buffers(4)
    for sequence in sequences:
        with sequence.recording():
            before = OPERATIONS.rms_norm(x, weight, 1e-5)
            for _ in range(4):
                sequence.next_layer()
                OPERATIONS.rms_norm(wide, wide_weight, 1e-5)
            again = OPERATIONS.rms_norm(before, weight, 1e-5)
        sequence.run(4)
        assert torch.equal(again, OPERATIONS.rms_norm(OPERATIONS.rms_norm(x, weight, 1e-5), weight, 1e-5))


def test_sequences_that_share_buffers_use_the_same_memory_and_give_their_own_results() -> None:
    x, weight = torch.randn(4, 32), torch.ones(32)
    first = OperationSequence(4)
    with first.recording():
        first_result = OPERATIONS.rms_norm(x, weight, 1e-5)
    wider, weights = torch.randn(4, 64), torch.ones(64)
    second = first.sharing_buffers(4)
    with second.recording():
        inner = OPERATIONS.rms_norm(wider, weights, 1e-5)  # larger than the tensor before in this buffer
        wider_result = OPERATIONS.rms_norm(inner, weights, 1e-5)
    third = second.sharing_buffers(4)
    with third.recording():
        again = OPERATIONS.rms_norm(x, weight, 1e-5)
    assert again.data_ptr() == inner.data_ptr()
    for _ in range(2):
        for sequence, result, rows, ones in ((first, first_result, x, weight), (third, again, x, weight)):
            sequence.run(4)
            assert torch.equal(result, OPERATIONS.rms_norm(rows, ones, 1e-5))
        second.run(4)
        assert torch.equal(wider_result, OPERATIONS.rms_norm(OPERATIONS.rms_norm(wider, weights, 1e-5), weights, 1e-5))
