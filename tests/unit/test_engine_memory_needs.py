"""Predicted memory of a model (`MemoryNeeds`), the context that fits a device (`MemoryFit`), and proposed remedies."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.config.model import parse_model_config
from engine.errors import EngineConfigError
from engine.formats import EIGHT_BITS, EIGHT_BITS_STORED, FOUR_BITS, Formats, WeightFormat, unquantised
from engine.memory.fit import GAIN_MIN, REMEDIES_MAX, MemoryFit, changes_in_order, gib, head_8_bit, shrink_batch, weights_4_bit
from engine.memory.kv_plan import check_context, check_fit, plan_memory
from engine.memory.needs import GIB, MemoryNeeds
from engine.memory.shape import SAMPLED_GRAPH_BYTES, Load, MemoryShape
from engine.memory.splits import invariant_bytes
from engine.options import EngineOptions
from engine.simulator.models import CONFIGS, MODELS
from engine.step_sizes import draft_graphs_kept, graphs_kept, sampled_shapes
from kernels.quantised_weights import pack_int4

KV_8, WEIGHTS_8, WEIGHTS_4 = "keys and values in 8 bits", "weights in 8 bits", "weights in 4 bits"
H200 = int(139 * GIB * 0.90)
RESERVED = 3_000_000_000  # activations, graphs and context in the published figures
BF16 = Formats(weights=unquantised(2), element_bytes=2, kv_element_bytes=2)
LOAD = Load(num_tokens=8192, num_seqs=256, block_size=16)
WORKSPACE_BYTES = 32 << 20  # of cuBLAS, for the stream of captures


def shape_of(name: str) -> MemoryShape:
    return MemoryShape.of(parse_model_config(CONFIGS[name], {}))


LLAMA_8B = shape_of("llama-3.1-8b")


def fit(usable_gib: float, wanted_len: int = 131_072, formats: Formats = BF16, model: MemoryShape = LLAMA_8B) -> MemoryFit:
    return MemoryFit(
        model=model,
        formats=formats,
        load=LOAD,
        usable_bytes=int(usable_gib * GIB),
        context_bytes=GIB // 2,
        wanted_len=wanted_len,
    )


@pytest.mark.parametrize(
    ("name", "blocks"), [("llama-3.1-8b", 54_962), ("qwen3-8b", 48_719), ("qwen3-0.6b", 70_916), ("llama-3.2-1b", 245_768)]
)
def test_blocks_on_an_h200_equal_the_published_figures(name: str, blocks: int) -> None:
    model = shape_of(name)
    needs = MemoryNeeds.of(model, BF16, LOAD, context_bytes=0)
    needs = replace(needs, activations_bytes=0, graphs_bytes=0, slots_bytes=0, context_bytes=RESERVED)
    assert needs.num_blocks(H200) == pytest.approx(blocks, rel=0.005)
    halved = replace(needs, block_bytes=needs.block_bytes // 2)
    assert halved.num_blocks(H200) == pytest.approx(2 * blocks, rel=0.005)


@pytest.mark.parametrize(
    ("name", "billions", "kv_bytes", "four_bit_gb"),
    [
        ("llama-3.1-8b", 8.030, 131_072, 4.12),
        ("qwen3-8b", 8.190, 147_456, 4.20),
        ("qwen3-4b", 4.022, 147_456, 2.26),
        ("qwen3-0.6b", 0.596, 114_688, 0.38),
        ("llama-3.2-1b", 1.236, 32_768, 0.76),
    ],
)
def test_parameters_and_kv_bytes_equal_those_of_the_published_models(
    name: str, billions: float, kv_bytes: int, four_bit_gb: float
) -> None:
    model = shape_of(name)
    assert (model.matrices + model.embedding + model.head) / 1e9 == pytest.approx(billions, rel=1e-3)
    assert model.kv_token * 2 == kv_bytes
    head = MODELS[name].shape.head_params
    assert (FOUR_BITS.num_bytes(model.matrices) + head) / 1e9 == pytest.approx(four_bit_gb, rel=0.03), (
        "whose zero points are not counted"
    )


def test_a_tied_head_in_8_bits_is_kept_beside_the_embedding() -> None:
    tied = shape_of("llama-3.2-1b")
    for model, more in ((tied, tied.embedding), (LLAMA_8B, -LLAMA_8B.head)):
        assert model.weights_bytes(EIGHT_BITS, 2) - model.weights_bytes(EIGHT_BITS_STORED, 2) == more


@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_int4_weights_are_counted_as_they_are_packed(group_size: int) -> None:
    packed = pack_int4(torch.ones(96, 512), group_size)
    packed_bytes = packed.words.nbytes + packed.scales_zeros.nbytes
    assert FOUR_BITS._replace(group=group_size).num_bytes(96 * 512) == packed_bytes


def test_activations_are_the_larger_of_a_layer_and_the_logits() -> None:
    assert LLAMA_8B.activations_bytes(8192, 256, 2) == 8192 * (3 * 14336 + 6 * 4096) * 2
    assert LLAMA_8B.activations_bytes(16, 16, 2) == 16 * 128_256 * 4 * 2
    assert LLAMA_8B.activations_bytes(16, 10_000, 2) == (1 << 25) * 8, "logits are computed in slices"


def test_split_workspace_is_counted_for_few_tokens_with_a_long_context() -> None:
    def activations(load: Load, context_len: int = 2048) -> int:
        return MemoryNeeds.of(LLAMA_8B, BF16, load, context_bytes=0, context_len=context_len).activations_bytes

    small = replace(LOAD, num_tokens=512, num_seqs=8, on_gpu=True)
    plain_bytes = LLAMA_8B.activations_bytes(512, 8, 2)
    assert activations(small) == plain_bytes + (1 << 16) * 129 * 4
    assert activations(small, 2047) == plain_bytes, "no context is so long that its keys are cut"
    assert activations(replace(small, batch_invariant=True)) == plain_bytes
    large = replace(small, num_tokens=8192)
    assert activations(large) == LLAMA_8B.activations_bytes(8192, 8, 2), "a step of many tokens holds more"


def test_split_workspace_is_counted_for_many_chunks_of_few_tokens() -> None:
    def activations(load: Load, context_len: int) -> int:
        return MemoryNeeds.of(LLAMA_8B, BF16, load, context_bytes=0, context_len=context_len).activations_bytes

    small = replace(LOAD, num_tokens=512, num_seqs=64, on_gpu=True, has_slots=True)
    plain_bytes = LLAMA_8B.activations_bytes(512, 64, 2)
    place_bytes = 32 * 129 * 4
    assert activations(small, 1024) == plain_bytes + 512 * 4 * place_bytes, "four splits"
    assert activations(small, 32_768) == plain_bytes + (256 << 20), "more are not made: such chunks are tiled"
    fewer = replace(small, num_seqs=40)
    few_bytes = LLAMA_8B.activations_bytes(8 * 40, 40, 2)
    assert activations(fewer, 32_768) == few_bytes + 8 * 40 * 32 * place_bytes
    assert activations(fewer, 65_536) == few_bytes + (256 << 20)
    decodes_bytes = LLAMA_8B.activations_bytes(512, 512, 2)
    assert activations(replace(small, num_seqs=512), 32_768) == decodes_bytes, "as many decodes have a workspace"
    assert activations(replace(small, num_draft_tokens=448), 32_768) == decodes_bytes, "and so have draft tokens"
    assert activations(replace(small, batch_invariant=True), 1024) == plain_bytes
    assert activations(replace(small, on_gpu=False), 1024) == plain_bytes
    assert activations(replace(small, num_tokens=8192), 32_768) == LLAMA_8B.activations_bytes(8192, 64, 2)


def beyond_unquantised(load: Load, formats: Formats, model: MemoryShape = LLAMA_8B) -> tuple[int, int]:
    """By how many bytes activations and graphs exceed those of a model whose weights are not quantised."""
    found, plain = (
        MemoryNeeds.of(model, each, load, context_bytes=0, context_len=4096)
        for each in (formats, replace(formats, weights=unquantised(formats.element_bytes)))
    )
    return found.activations_bytes - plain.activations_bytes, found.graphs_bytes - plain.graphs_bytes


IN_8_BITS, IN_4_BITS = replace(BF16, weights=EIGHT_BITS), replace(BF16, weights=FOUR_BITS)
HEAD_IN_8_BITS = replace(BF16, weights=BF16.weights._replace(head_bits=8))
SLAB_LOAD, SLAB_BYTES = replace(LOAD, num_tokens=2048, on_gpu=True, has_slots=True), 2 << 23


def test_dequantised_slabs_are_counted_for_many_rows_on_a_gpu() -> None:
    """16 MiB outside of graphs, and 16 MiB in captured steps of so many rows; the largest with chunks has 960 for Llama-8B."""

    def activations(load: Load, formats: Formats = IN_8_BITS) -> int:
        return beyond_unquantised(load, formats)[0]

    assert [activations(SLAB_LOAD, each) for each in (IN_8_BITS, IN_4_BITS, HEAD_IN_8_BITS)] == [SLAB_BYTES] * 3
    assert activations(replace(SLAB_LOAD, num_tokens=512)) == 0, "tiles decode them in registers"
    assert activations(replace(SLAB_LOAD, num_tokens=513)) == SLAB_BYTES
    assert activations(replace(SLAB_LOAD, on_gpu=False, has_slots=False)) == 0
    assert beyond_unquantised(replace(SLAB_LOAD, has_slots=False), IN_8_BITS) == (SLAB_BYTES, 0)
    assert beyond_unquantised(replace(SLAB_LOAD, batch_invariant=True), IN_8_BITS) == (0, 0), "which has kernels of its own"
    in_32_bits = replace(IN_8_BITS, element_bytes=4)
    assert beyond_unquantised(SLAB_LOAD, in_32_bits) == (0, 0), "no matrix instruction multiplies 32 bits"
    tiny = replace(LLAMA_8B, matrices=1000)
    assert tiny.slab_bytes(513, IN_8_BITS) == 2000


def test_captured_steps_of_many_rows_hold_a_slab_and_its_launches() -> None:
    def graphs(load: Load, formats: Formats = IN_8_BITS, model: MemoryShape = LLAMA_8B) -> int:
        return beyond_unquantised(load, formats, model)[1]

    launches_bytes = 2 * 832 * (24 << 10)
    assert LLAMA_8B.slab_launches_bytes(IN_8_BITS) == launches_bytes, "two for each 2^23 weights: 39 MiB"
    of_all = SLAB_BYTES + 4 * launches_bytes
    assert [graphs(SLAB_LOAD, each) for each in (IN_8_BITS, IN_4_BITS)] == [of_all] * 2, "640, 768, 896 and 960 rows"
    assert graphs(SLAB_LOAD, HEAD_IN_8_BITS) == SLAB_BYTES, "no layer has slabs"
    assert graphs(replace(SLAB_LOAD, num_tokens=513)) == SLAB_BYTES + launches_bytes
    assert graphs(replace(SLAB_LOAD, num_tokens=512)) == 0
    many = replace(SLAB_LOAD, num_seqs=1024, num_tokens=512)
    assert graphs(many) == SLAB_BYTES + (2 * 16 + 4 + 8) * launches_bytes, "decode steps of more than 512 requests"
    experts = replace(LLAMA_8B, expert_matrices=LLAMA_8B.matrices - (1 << 23))
    assert graphs(SLAB_LOAD, model=experts) == SLAB_BYTES + 4 * 2 * (24 << 10), "experts have kernels of their own"


def test_captures_have_a_workspace_of_the_matrix_library_on_their_stream() -> None:
    load = replace(LOAD, on_gpu=True, has_slots=True)
    logits_bytes = LLAMA_8B.activations_bytes(256, 256, 2)
    for batch_invariant, workspace_bytes in ((False, WORKSPACE_BYTES), (True, 0)):
        each = replace(load, batch_invariant=batch_invariant)
        needs = MemoryNeeds.of(LLAMA_8B, BF16, each, context_bytes=0, context_len=15)
        assert needs.graphs_bytes - needs.num_graphs * LLAMA_8B.graph_bytes == logits_bytes + workspace_bytes


def test_steps_over_slots_hold_the_logits_of_all_rows() -> None:
    qwen, load = shape_of("qwen3-0.6b"), replace(LOAD, num_seqs=1024, num_tokens=1024, on_gpu=True, has_slots=True)
    kept_bytes = graphs_kept(1024, 0, chunk_rows=1024) * qwen.graph_bytes + len(sampled_shapes(1024)) * SAMPLED_GRAPH_BYTES
    invariant = MemoryNeeds.of(qwen, BF16, replace(load, batch_invariant=True), context_bytes=0, context_len=1024)
    assert invariant.graphs_bytes - kept_bytes == invariant.activations_bytes == 1024 * 151_936 * 4, "593.5 MiB"
    usual = MemoryNeeds.of(qwen, BF16, load, context_bytes=0, context_len=1024)
    logits_bytes = 1024 * 151_936 * 2
    assert (usual.graphs_bytes - kept_bytes, usual.activations_bytes) == (logits_bytes + WORKSPACE_BYTES, logits_bytes)
    sliced = MemoryNeeds.of(qwen, BF16, replace(load, has_slots=False, batch_invariant=True), context_bytes=0)
    assert sliced.activations_bytes == 256 << 20, "without slots they are computed in slices"


def test_graph_memory_is_predicted_per_kept_graph() -> None:
    def graphs_of(load: Load, draft: MemoryShape | None = None) -> int:
        load = replace(load, has_slots=True)
        needs = MemoryNeeds.of(LLAMA_8B, BF16, load, context_bytes=0, context_len=8192, draft=draft)
        rows = load.num_seqs + load.num_draft_tokens
        chunks_bytes = LLAMA_8B.captured_chunks_bytes(960, 2, load.chunk_tables_bytes(8192))
        sampled_bytes = len(sampled_shapes(load.num_seqs)) * 20 * 24 * 1024
        activations_bytes = max(chunks_bytes, LLAMA_8B.activations_bytes(rows, rows, 2))
        return needs.graphs_bytes - activations_bytes - sampled_bytes - WORKSPACE_BYTES

    assert LLAMA_8B.graph_bytes == (10 * 32 + 20) * 24 * 1024
    assert replace(LLAMA_8B, num_sparse_layers=30).graph_bytes == (10 * 2 + 13 * 30 + 20) * 24 * 1024
    assert graphs_of(LOAD) == graphs_kept(256, 0, chunk_rows=960) * LLAMA_8B.graph_bytes
    assert graphs_of(replace(LOAD, num_seqs=32)) == graphs_kept(32, 0, chunk_rows=960) * LLAMA_8B.graph_bytes, (
        "fewer seats have fewer sizes"
    )
    with_drafts, small = replace(LOAD, num_draft_tokens=64), shape_of("llama-3.2-1b")
    assert graphs_of(with_drafts) == graphs_kept(256, 64, chunk_rows=960) * LLAMA_8B.graph_bytes
    of_draft = graphs_of(with_drafts, small) - graphs_of(with_drafts)
    assert of_draft == (graphs_kept(256, 64, chunk_rows=960) + draft_graphs_kept(256)) * small.graph_bytes, (
        "the draft is in those with chunks"
    )
    assert MemoryNeeds.of(LLAMA_8B, BF16, LOAD, context_bytes=0).graphs_bytes == 0, "where no step is captured"


def test_captured_steps_with_chunks_are_as_large_as_their_largest_shape() -> None:
    def rows(num_tokens: int, context_len: int = 131_072, *, batch_invariant: bool = False) -> int:
        return LLAMA_8B.chunk_rows(replace(LOAD, num_tokens=num_tokens, batch_invariant=batch_invariant), context_len, 2)

    assert rows(8192) == 960, "of 128 MiB of activations"
    assert rows(500) == 500, "no step has more tokens"
    assert rows(8192, 500) == 500, "no request has"
    assert rows(15) == rows(8192, 15) == 0
    assert rows(8192, batch_invariant=True) == 256, "the rows that its workspace has room for"
    assert LLAMA_8B.captured_chunks_bytes(960, 2, 7) == 960 * 67_584 * 2 + 2**16 * 129 * 4 + 7
    assert LLAMA_8B.captured_chunks_bytes(0, 2, 7) == 0
    assert LOAD.chunk_tables_bytes(131_072) == (256 + 32) * 8192 * 4, "9 MiB"


def test_slots_hold_split_workspaces_sampling_columns_and_block_tables() -> None:
    assert LLAMA_8B.splits_bytes(256, 32_768, 2) == 256 * 32 * 32 * 129 * 4
    assert LLAMA_8B.columns_bytes(256, 2) == 128_256 * (256 * 6 + 256 * 4)
    assert LLAMA_8B.columns_bytes(512, 2) == 128_256 * (512 * 6 + 261 * 4), "128 MiB of biases"
    eager = MemoryNeeds.of(LLAMA_8B, BF16, replace(LOAD, on_gpu=True), context_bytes=0, context_len=32_768)
    assert eager.slots_bytes == LLAMA_8B.splits_bytes(256, 32_768, 2)
    ahead = replace(LOAD, on_gpu=True, has_slots=True)
    slots = MemoryNeeds.of(LLAMA_8B, BF16, ahead, context_bytes=0, context_len=32_768)
    assert slots.slots_bytes - eager.slots_bytes == LLAMA_8B.columns_bytes(256, 2) + ahead.slot_tables_bytes(32_768)
    with_drafts = MemoryNeeds.of(LLAMA_8B, BF16, replace(ahead, num_draft_tokens=64), context_bytes=0, context_len=32_768)
    tables_bytes = 64 * 2048 * 4
    assert with_drafts.slots_bytes - slots.slots_bytes == LLAMA_8B.splits_bytes(64, 32_768, 2) + 64 * 128_256 * 2 + tables_bytes
    assert with_drafts.graphs_bytes > slots.graphs_bytes
    assert MemoryNeeds.of(LLAMA_8B, BF16, LOAD, context_bytes=0, context_len=32_768).slots_bytes == 0, "a CPU has neither"


def test_rotary_tables_grow_with_the_context_and_with_a_draft_model() -> None:
    needs = MemoryNeeds.of(LLAMA_8B, BF16, LOAD, context_bytes=0, context_len=131_072)
    assert needs.rotary_bytes == 131_072 * 2 * 128 * 2 == 64 << 20
    assert MemoryNeeds.of(LLAMA_8B, BF16, LOAD, context_bytes=0, context_len=1_010_000).rotary_bytes == 1_010_000 * 512
    draft = shape_of("llama-3.2-1b")
    paired = MemoryNeeds.of(LLAMA_8B, BF16, LOAD, context_bytes=0, context_len=131_072, draft=draft)
    assert paired.rotary_bytes == needs.rotary_bytes + 131_072 * 2 * 64 * 2
    assert f"rotary tables {gib(64 << 20)}" in fit(24).explain()
    assert needs.fixed_bytes - replace(needs, rotary_bytes=0).fixed_bytes == 64 << 20


def test_batch_invariant_workspace_grows_with_rows_and_context_up_to_a_limit() -> None:
    assert invariant_bytes(256, 8192, 32, 128, None) == 256 * 32 * 32 * 130 * 4
    assert invariant_bytes(4, 8192, 32, 128, None) == 64 * 32 * 32 * 130 * 4, "there is room for the queries of a chunk"
    assert 0.99 < invariant_bytes(256, 131_072, 32, 128, None) / (256 << 20) <= 1
    assert invariant_bytes(1, 1 << 23, 32, 128, None) == 32 * (1 << 15) * 130 * 4, "a long request has room, whatever the limit"
    assert invariant_bytes(256, 256, 32, 128, None) == 0, "keys of one part are not put together"
    assert invariant_bytes(256, 257, 32, 128, None) == 256 * 32 * 2 * 130 * 4
    assert invariant_bytes(256, 131_072, 32, 128, 1024) == invariant_bytes(256, 6 * 256, 32, 128, None)
    load = replace(LOAD, on_gpu=True, has_slots=True, batch_invariant=True)
    needs = MemoryNeeds.of(LLAMA_8B, BF16, load, context_bytes=0, context_len=8192)
    kept_bytes = LLAMA_8B.columns_bytes(256, 4) + load.slot_tables_bytes(8192)
    assert needs.slots_bytes == invariant_bytes(256, 8192, 32, 128, None) + kept_bytes


def test_a_batch_invariant_fit_that_is_too_large_names_its_workspace_and_finds_the_longest_context() -> None:
    invariant = replace(fit(24), load=replace(LOAD, on_gpu=True, has_slots=True, batch_invariant=True))
    assert f"slots and batch-invariant attention {gib(invariant._needs(131_072).slots_bytes)}" in invariant.explain()
    assert 0 < invariant.context_len < 131_072
    assert replace(invariant, wanted_len=invariant.context_len).fits
    assert not replace(invariant, wanted_len=invariant.context_len + 16).fits


def test_a_shorter_context_needs_a_smaller_split_workspace() -> None:
    short = replace(fit(24), load=replace(LOAD, on_gpu=True, has_slots=True))
    assert 0 < short.context_len < fit(24).context_len
    assert short.needs.slots_bytes < replace(short, usable_bytes=H200).needs.slots_bytes
    assert replace(short, wanted_len=short.context_len).fits
    assert not replace(short, wanted_len=short.context_len + 16).fits


def test_a_draft_model_adds_its_weights_and_enlarges_each_block() -> None:
    draft = shape_of("llama-3.2-1b")
    alone = MemoryNeeds.of(LLAMA_8B, BF16, LOAD, context_bytes=0)
    paired = MemoryNeeds.of(LLAMA_8B, BF16, LOAD, context_bytes=0, draft=draft)
    assert paired.block_bytes == alone.block_bytes + 16 * 32_768
    assert paired.weights_bytes - alone.weights_bytes == pytest.approx(2 * 1.236e9, rel=1e-3)


def test_a_draft_model_is_not_quantised_with_its_target() -> None:
    formats, draft = replace(BF16, weights=EIGHT_BITS), shape_of("llama-3.2-1b")
    alone = MemoryNeeds.of(LLAMA_8B, formats, LOAD, context_bytes=0)
    paired = MemoryNeeds.of(LLAMA_8B, formats, LOAD, context_bytes=0, draft=draft)
    assert paired.weights_bytes - alone.weights_bytes == draft.weights_bytes(unquantised(2), 2)


def test_without_slots_target_and_draft_model_share_the_split_workspace() -> None:
    eager = replace(LOAD, on_gpu=True)
    alone = MemoryNeeds.of(LLAMA_8B, BF16, eager, context_bytes=0, context_len=32_768)
    paired = MemoryNeeds.of(LLAMA_8B, BF16, eager, context_bytes=0, context_len=32_768, draft=shape_of("llama-3.2-1b"))
    assert paired.slots_bytes == alone.slots_bytes > 0


def test_a_model_that_fits_gets_the_requested_context_and_no_remedies() -> None:
    assert fit(40).fits
    assert fit(40).context_len == 131_072
    assert fit(40, wanted_len=1001).context_len == 1001, "it may end within a block"
    assert fit(40).remedies() == []
    assert fit(40).explain().endswith("40.0 GiB may be used")


def test_what_needs_all_that_there_is_fits_and_a_byte_more_does_not() -> None:
    whole = replace(fit(40), usable_bytes=fit(40).needed_bytes)
    assert whole.fits
    assert not replace(whole, usable_bytes=whole.usable_bytes - 1).fits


def test_a_context_that_is_too_long_is_shortened_to_whole_blocks() -> None:
    short = fit(24)
    assert not short.fits
    assert 0 < short.context_len < 131_072
    assert short.context_len % 16 == 0
    assert replace(short, wanted_len=short.context_len).fits
    assert not replace(short, wanted_len=short.context_len + 16).fits


def test_a_context_that_ends_within_a_block_is_shortened_to_the_block_before() -> None:
    partial, whole = fit(40, wanted_len=1001), fit(40, wanted_len=992)
    assert replace(partial, usable_bytes=whole.needed_bytes).context_len == 992


def remedy_names(fit: MemoryFit) -> list[str]:
    """The names of the proposed changes, without the options in brackets."""
    return [re.sub(r" \([^)]*\)", "", remedy.words) for remedy in fit.remedies()]


def test_all_single_changes_that_keep_the_context_are_offered_in_order_of_their_cost() -> None:
    captured = replace(fit(28), load=replace(LOAD, has_slots=True))
    assert remedy_names(captured) == ["a shorter context", "fewer at a time", KV_8, WEIGHTS_8, WEIGHTS_4]
    lengths = [remedy.context_len for remedy in captured.remedies()]
    assert lengths[2:] == [131_072] * 3, "two changes are not offered where one of them is enough"
    assert 0 < lengths[0] < lengths[1] < 131_072


def test_if_no_single_change_keeps_the_context_pairs_are_offered_too() -> None:
    found = fit(21.6)
    assert remedy_names(found) == ["a shorter context", "fewer at a time", KV_8, WEIGHTS_8, f"{WEIGHTS_8} with {KV_8}"]
    assert found.remedies()[2].context_len == pytest.approx(2 * found.context_len, rel=0.01)
    assert found.remedies()[-1].context_len == 131_072


def test_if_no_change_keeps_the_context_each_remedy_names_the_context_it_leaves() -> None:
    remedies = fit(12).remedies()
    assert remedies
    assert all(0 < remedy.context_len < 131_072 for remedy in remedies)
    assert f"{WEIGHTS_8} (quantization=int8 or fp8): max_model_len={remedies[0].context_len}" in fit(12).explain()


@pytest.mark.parametrize("weights", [BF16.weights, FOUR_BITS], ids=["bf16", "int4"])
def test_an_int8_output_head_is_offered_last(weights: WeightFormat) -> None:
    on_gpu = replace(fit(5.9, formats=replace(BF16, weights=weights)), load=replace(LOAD, on_gpu=True, has_slots=True))
    (only,) = replace(on_gpu, memory_bytes=int(6.3 * GIB), usable_bytes=int(5.67 * GIB), context_bytes=600 << 20).remedies()
    assert "the output head in 8 bits (head_quantization=int8)" in only.words
    assert 0 < only.context_len < 10_000


def test_fp8_is_not_offered_on_a_gpu_without_it() -> None:
    older = replace(fit(24), has_fp8=False)
    assert remedy_names(older)[-2:] == [WEIGHTS_8, WEIGHTS_4]
    assert "fp8" not in older.explain()
    assert "(quantization=int8)" in older.explain()


def test_a_larger_memory_share_is_offered_first_unless_it_is_full_already() -> None:
    half = replace(fit(12), memory_bytes=24 * GIB)
    assert half.remedies()[0].words == "a larger share of the card (gpu_memory_utilization=0.95)"
    assert half.remedies()[0].context_len == replace(half, usable_bytes=int(24 * GIB * 0.95)).context_len
    assert "and 12.0 GiB may be used (gpu_memory_utilization=0.5 of 24.0 GiB);" in half.explain()
    longer = replace(half, wanted_len=half.remedies()[0].context_len)
    assert remedy_names(longer)[0] == "a larger share of the card"
    assert longer.remedies()[0].context_len == longer.wanted_len
    full = replace(fit(24), usable_bytes=int(24 * GIB * 0.95), memory_bytes=24 * GIB)
    assert "share" not in "".join(remedy_names(full))
    assert "gpu_memory_utilization" not in fit(12).explain(), "a CPU has no such share"


def test_fewer_sequences_or_eager_steps_are_offered_if_their_memory_is_what_does_not_fit() -> None:
    small = shape_of("qwen3-0.6b")
    load = replace(LOAD, has_slots=True, on_gpu=True)
    crowded = replace(fit(2.2, model=small, wanted_len=4096), load=load)
    assert crowded.context_len == 0
    assert remedy_names(crowded)[0] == "fewer at a time"
    assert "fewer at a time (max_num_seqs=32, max_num_batched_tokens=2048): max_model_len=" in crowded.explain()
    assert "no captured steps (enforce_eager)" in replace(crowded, usable_bytes=int(1.7 * GIB)).explain()
    few = replace(load, num_seqs=8, num_tokens=512, has_slots=False)
    assert not any("fewer" in words or "captured" in words for words in remedy_names(replace(crowded, load=few)))


def test_only_what_is_above_few_at_a_time_is_named() -> None:
    crowded = fit(24)
    for load, words in (
        (replace(LOAD, num_tokens=2048), "fewer at a time (max_num_seqs=32)"),
        (replace(LOAD, num_seqs=32), "fewer at a time (max_num_batched_tokens=2048)"),
    ):
        changed = shrink_batch(replace(crowded, load=load))
        assert changed is not None
        assert changed.words == words
    assert shrink_batch(replace(crowded, load=replace(LOAD, num_seqs=32, num_tokens=2048))) is None


def test_an_output_head_in_8_bits_is_offered_beside_quantised_weights_without_one() -> None:
    for stored in (EIGHT_BITS_STORED, FOUR_BITS):
        changed = head_8_bit(fit(24, formats=replace(BF16, weights=stored)))
        assert changed is not None
        assert changed.fit.formats.weights == stored._replace(head_bits=8)
    for weights in (unquantised(2), EIGHT_BITS):
        assert head_8_bit(fit(24, formats=replace(BF16, weights=weights))) is None


def test_weights_in_4_bits_are_computed_with_in_16_on_a_gpu_alone() -> None:
    on_cpu = fit(24, formats=Formats(weights=unquantised(4), element_bytes=4, kv_element_bytes=4))
    on_gpu = replace(on_cpu, load=replace(LOAD, on_gpu=True))
    for asked, size in ((on_cpu, 4), (on_gpu, 2)):
        changed = weights_4_bit(asked)
        assert changed is not None
        assert changed.fit.formats == replace(asked.formats, weights=FOUR_BITS, element_bytes=size, kv_element_bytes=size)
    assert weights_4_bit(fit(24, formats=replace(BF16, weights=FOUR_BITS))) is None


def test_sixteen_bit_types_are_offered_before_quantisation_on_a_gpu() -> None:
    wide = Formats(weights=unquantised(4), element_bytes=4, kv_element_bytes=4)
    on_gpu = replace(fit(40, formats=wide), load=replace(LOAD, on_gpu=True))
    assert remedy_names(on_gpu)[2] == "numbers in 16 bits"
    assert on_gpu.remedies()[2].context_len == 131_072
    assert "numbers in 16 bits" not in remedy_names(fit(40, formats=wide)), "16 bits are slow on a CPU"


def test_formats_in_use_are_not_offered() -> None:
    small = Formats(weights=FOUR_BITS, element_bytes=2, kv_element_bytes=1)
    assert remedy_names(fit(8, formats=small))[0] == "a shorter context"
    assert not {KV_8, WEIGHTS_8, WEIGHTS_4} & set(remedy_names(fit(8, formats=small)))
    eight = Formats(weights=EIGHT_BITS, element_bytes=2, kv_element_bytes=2)
    assert not any(WEIGHTS_8 in words for words in remedy_names(fit(12, formats=eight)))


@pytest.mark.parametrize("usable_eighths", range(16, 280, 18))
@pytest.mark.parametrize(
    "formats", [BF16, Formats(weights=FOUR_BITS, element_bytes=2, kv_element_bytes=2)], ids=["bf16", "int4"]
)
@pytest.mark.parametrize("memory_share", [None, 0.6, 0.9])
def test_remedies_are_few_and_ordered_by_rising_context(
    usable_eighths: int, formats: Formats, memory_share: float | None
) -> None:
    memory_bytes = None if memory_share is None else int(usable_eighths * GIB / 8 / memory_share)
    loaded = replace(fit(usable_eighths / 8, formats=formats), load=replace(LOAD, on_gpu=True, has_slots=True))
    candidate = replace(loaded, memory_bytes=memory_bytes)
    remedies = candidate.remedies()
    assert len(remedies) <= REMEDIES_MAX
    lengths = [remedy.context_len for remedy in remedies]
    assert lengths == sorted(lengths)
    assert all(length > candidate.context_len for length in lengths[1:])
    assert not candidate.fits or not remedies
    best = max((changed.context_len for _, changed in changes_in_order(candidate)), default=0)
    assert candidate.fits or max(lengths, default=0) * GAIN_MIN >= best, "the longest context is among them"


def test_beyond_the_maximum_the_remedy_with_the_smallest_gain_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = (100, 200, 400, 500, 1000, 2000, 4000)
    changes = [([str(length)], SimpleNamespace(context_len=length)) for length in lengths]
    monkeypatch.setattr("engine.memory.fit.changes_in_order", lambda _: changes)
    assert [remedy.context_len for remedy in fit(12).remedies()] == [100, 200, 400, 1000, 2000, 4000]


def test_on_a_cpu_all_changes_together_are_offered_if_none_suffices_alone() -> None:
    assert fit(6).context_len == 0
    assert remedy_names(fit(6)) == [f"fewer at a time, {WEIGHTS_4}, the output head in 8 bits, {KV_8}"]


def test_remedies_beside_a_quantised_other_model_are_those_of_the_model_itself() -> None:
    small = fit(40, formats=Formats(weights=FOUR_BITS, element_bytes=2, kv_element_bytes=2))
    beside = replace(fit(20), others=(small,), others_bytes=6 * GIB)
    assert remedy_names(beside)[:2] == [WEIGHTS_8, f"{WEIGHTS_8} with {KV_8}"]


def test_if_no_change_suffices_the_explanation_names_the_least_memory_needed() -> None:
    found = replace(fit(2), load=replace(LOAD, block_size=1024))
    assert found.remedies() == []
    smallest = replace(found, formats=Formats(weights=FOUR_BITS._replace(head_bits=8), element_bytes=2, kv_element_bytes=1))
    few = replace(smallest, load=replace(found.load, num_seqs=32, num_tokens=2048)).needs
    least = gib(few.fixed_bytes + few.block_bytes)
    assert f"no possible change makes it fit: after all of them it needs {least} with" in found.explain()


def test_the_explanation_has_the_parts_their_sum_and_the_remedies() -> None:
    explanation = fit(24).explain()
    assert explanation.startswith("needs 32.")
    for part in (
        "weights 15.0 GiB",
        "activations 1.0 GiB",
        "keys and values of 131072 tokens 16.0 GiB",
        "24.0 GiB may be used",
    ):
        assert part in explanation
    assert KV_8 in explanation


@pytest.mark.parametrize(
    ("lacking", "words"),
    [
        (GIB, "needs 34.0 GiB (.*), and 33.0 GiB may"),
        (GIB // 50, "needs 34.00 GiB .* and 33.98 GiB may"),
        (1, "needs 3650[0-9]* bytes .* and 3650[0-9]* bytes may"),
    ],
)
def test_needed_and_available_memory_are_printed_with_enough_digits_to_differ(lacking: int, words: str) -> None:
    whole = replace(fit(1), context_bytes=34 * GIB - fit(1).needed_bytes + GIB // 2)
    assert re.search(words, replace(whole, usable_bytes=34 * GIB - lacking).explain())


@pytest.mark.parametrize(
    ("num_bytes", "words"), [(0, "0.0 MiB"), (3 << 20, "3.0 MiB"), (GIB, "1.0 GiB"), (GIB // 2, "0.5 GiB")]
)
def test_bytes_are_formatted_in_mib_and_gib(num_bytes: int, words: str) -> None:
    assert gib(num_bytes) == words


def engine_options(**options: Any) -> EngineOptions:
    return EngineOptions(model=Path("m"), **options)


@pytest.mark.parametrize("length", [2, 131_072])
def test_the_shortest_and_the_longest_context_of_the_model_are_accepted(length: int) -> None:
    check_context(parse_model_config(CONFIGS["llama-3.1-8b"], {}), engine_options(max_model_len=length))


@pytest.mark.parametrize(
    ("options", "num_blocks", "context_len"),
    [({"max_model_len": 32}, 2, 32), ({"block_size": 2}, 1, 2)],
    ids=["to its last block", "of the shortest request"],
)
def test_a_context_may_fill_the_whole_cache(options: dict[str, int], num_blocks: int, context_len: int) -> None:
    config = parse_model_config(CONFIGS["llama-3.1-8b"], {})
    plan = plan_memory(config, engine_options(**options), block_bytes=100, available_bytes=num_blocks * 100)
    assert plan.max_model_len == context_len


@pytest.mark.parametrize("length", [None, 32])
def test_host_blocks_are_planned_with_and_without_a_requested_context(length: int | None) -> None:
    config = parse_model_config(CONFIGS["llama-3.1-8b"], {})
    plan = plan_memory(config, engine_options(max_model_len=length, swap_space=1.0), block_bytes=1 << 20, available_bytes=GIB)
    assert plan.num_host_blocks == 1024


def test_a_fixed_cache_may_take_all_remaining_memory() -> None:
    needs = fit(40, wanted_len=160).needs
    given_bytes = 10 * needs.block_bytes
    usable_bytes = needs.fixed_bytes + given_bytes
    full = replace(fit(40, wanted_len=160), fixed_kv_bytes=given_bytes, usable_bytes=usable_bytes)
    assert (full.needs.num_blocks(usable_bytes), full.needs.fixed_bytes) == (10, needs.fixed_bytes)
    check_fit("m", full, engine_options(num_kv_blocks=10))


def test_if_the_model_alone_does_not_fit_the_error_does_not_blame_its_fixed_cache() -> None:
    small = replace(fit(10), fixed_kv_bytes=10 * fit(10).needs.block_bytes)
    with pytest.raises(EngineConfigError, match=r"^model m does not fit with"):
        check_fit("m", small, engine_options(num_kv_blocks=10))
