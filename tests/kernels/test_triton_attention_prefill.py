"""Paged prefill attention of Triton against its float64 reference: chunks of awkward lengths, long and short ones mixed."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

from kernels.attention_rows import AttentionShape
from kernels.triton.attention import prefill
from kernels.triton.attention.decode import paged_decode
from kernels.triton.attention.splits import decode_workspace
from kernels.triton.launching.card_properties import CARDS
from tests.support.kernel_tolerances import assert_same
from tests.support.prefill_chunks import BLOCK, FP8, SHAPE, Chunks, Rows


@pytest.fixture(params=[(16, 32), (64, 32)], ids=["tiles of 16", "tiles of 64"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both tile sizes for all chunks, without splitting short ones."""
    rows, keys = request.param
    monkeypatch.setattr(prefill, "prefill_tiling", lambda *_: prefill.PrefillTiling(rows, keys, num_warps=4, num_stages=2))
    monkeypatch.setattr(prefill, "SPLIT_QUERIES", ())


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("rows", [[(17, 17), (2, 16), (16, 33), (15, 15)], [(1, 1), (67, 67), (3, 20)], [(33, 129), (5, 97)]])
def test_first_and_later_chunks_match_the_reference(rows: Rows, device: torch.device) -> None:
    Chunks(rows, SHAPE, device).compare()


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("unused_rows", [1, 8, 33, 70])
def test_unused_rows_before_the_first_chunk_are_not_written(unused_rows: int, device: torch.device) -> None:
    Chunks([(17, 17), (2, 16), (40, 90)], SHAPE, device, unused_rows=unused_rows).compare()


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_every_head_size_matches_the_reference(head_dim: int, device: torch.device) -> None:
    Chunks([(9, 9), (12, 41)], AttentionShape(BLOCK, 4, 2, head_dim), device).compare()


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("heads", [(8, 8), (8, 4), (8, 2), (8, 1), (6, 2), (7, 1)])
def test_every_number_of_query_heads_per_kv_head_matches_the_reference(heads: tuple[int, int], device: torch.device) -> None:
    Chunks([(18, 37), (5, 5)], AttentionShape(BLOCK, *heads, 16), device).compare()


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_every_block_size_matches_the_reference(block_size: int, device: torch.device) -> None:
    Chunks([(20, 67), (30, 130)], AttentionShape(block_size, 2, 1, 32), device).compare()


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("window", [1, 16, 21, 64])
def test_a_window_masks_earlier_tokens(window: int, device: torch.device) -> None:
    shape = AttentionShape(BLOCK, 2, 1, 32, sliding_window=window)
    rows = [(33, 33), (9, 90), (40, 140)]
    chunks = Chunks(rows, shape, device)
    for row, (query_len, context_len) in enumerate(rows):
        for position in range(max(0, context_len - query_len + 1 - window)):
            chunks.cache[chunks.tables[row, position // BLOCK], position % BLOCK] = float("nan")
    chunks.compare()


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("window", [None, 21])
def test_soft_capped_scores_with_a_custom_scale_match_the_reference(window: int | None, device: torch.device) -> None:
    shape = AttentionShape(BLOCK, 2, 1, 32, sliding_window=window, scale=0.4, softcap=1.5)
    Chunks([(33, 33), (9, 70)], shape, device).compare()


@pytest.mark.usefixtures("tiles")
def test_half_precision_matches_the_reference(device: torch.device) -> None:
    Chunks([(33, 80), (9, 9)], SHAPE, device, dtype=torch.float16).compare()


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("scales", [None, (0.5, 3.0)])
def test_an_fp8_cache_matches_the_reference_with_and_without_scales(
    scales: tuple[float, float] | None, device: torch.device
) -> None:
    kv_scales = None if scales is None else torch.tensor(scales, dtype=torch.float32, device=device)
    Chunks([(33, 80), (9, 9)], SHAPE, device, dtype=torch.float16, kv_dtype=FP8).compare(kv_scales)


@pytest.mark.parametrize("bytes_max", [0, prefill.SPLIT_BYTES_MAX])
@pytest.mark.parametrize("room", [None, 12, 13])
def test_short_chunks_over_long_contexts_are_split_like_decodes_where_there_is_room(
    room: int | None, bytes_max: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """room: rows of the workspace, of which 13 are needed"""
    monkeypatch.setattr(prefill, "SPLIT_BYTES_MAX", bytes_max)
    split = mock.Mock(wraps=paged_decode)
    monkeypatch.setattr(prefill, "paged_decode", split)
    shape = replace(SHAPE, sliding_window=100)
    workspace = None if room is None else decode_workspace(shape, room, 20, torch.float32, device)
    Chunks([(4, 300), (1, 45), (8, 8)], shape, device).compare(workspace=workspace)
    is_held = room == 13
    assert split.called is (is_held or bytes_max > 0)
    if split.called:
        assert split.call_args.kwargs["workspace"] is (workspace if is_held else None)


def test_the_tiles_of_an_h200_and_of_an_l40_match_the_reference(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (90, 89):
        monkeypatch.setattr(prefill, "capability", lambda _, number=number: number)
        Chunks([(70, 200)], SHAPE, device, dtype=torch.float16).compare()


@pytest.mark.parametrize("rows", [1, 16, 20, 4096])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_tiles_of_float32_fit_the_smallest_card(head_dim: int, rows: int) -> None:
    """Queries, weights, and two tiles each of keys and of values in flight."""
    for number in CARDS:
        tiling = prefill.prefill_tiling(head_dim, 4, rows, windowed=False, capability=number)
        shared_bytes = 4 * (tiling.rows * (head_dim + tiling.keys) + 2 * tiling.num_stages * tiling.keys * head_dim)
        assert shared_bytes <= CARDS[number].shared_bytes_max


@pytest.mark.usefixtures("tiles")
def test_the_result_is_bit_identical_for_any_chunking_of_a_prompt(device: torch.device) -> None:
    """Chunks where a query keeps its row of a tile: the interpreter's matrix product, unlike a GPU's, depends on the row."""
    whole = Chunks([(75, 115)], SHAPE, device)
    given = (whole.cache, whole.tables)
    together = prefill.paged_prefill(whole.q, *given, whole.query_starts, whole.context_lens, SHAPE, max_query_len=75)
    for first, last in ((0, 32), (32, 64), (64, 75)):
        starts = torch.tensor([0, last - first], dtype=torch.int32, device=device)
        context = torch.tensor([40 + last], dtype=torch.int32, device=device)
        part = prefill.paged_prefill(whole.q[first:last], *given, starts, context, SHAPE, max_query_len=last - first)
        assert_same(part, together[first:last])


def test_an_empty_batch_gives_an_empty_result(device: torch.device) -> None:
    empty = torch.empty(0, 4, 64, device=device)
    cache = torch.empty(1, BLOCK, 2, 2, 64, device=device)
    tables, lens = torch.empty(0, 3, dtype=torch.int32, device=device), torch.empty(0, dtype=torch.int32, device=device)
    starts = torch.zeros(1, dtype=torch.int32, device=device)
    assert prefill.paged_prefill(empty, cache, tables, starts, lens, SHAPE, max_query_len=9).shape == (0, 4, 64)
