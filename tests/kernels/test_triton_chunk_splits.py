"""Few queries after a long context: several programs share the keys of a tile, and their partial results are merged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from engine.memory import splits
from kernels.attention_rows import AttentionShape
from kernels.triton.attention import chunk_splits, prefill
from kernels.triton.attention.splits import SPLIT_QUERIES, DecodeWorkspace
from kernels.triton.launching.card_properties import CARDS, power_of_two
from tests.support.kernel_cases import Guarded
from tests.support.kernel_tolerances import assert_near, assert_same
from tests.support.prefill_chunks import BLOCK, FP8, SHAPE, Chunks, Rows

LLAMA = AttentionShape(BLOCK, 32, 8, 128)
SPLITS_MAX = 5
SHORT, TALL = (16, 32), (64, 16)
"""Tiles as (rows, keys). Where the tile does not matter to a test, each case has one of the two."""


class GuardedPartials:
    """Memory for partial results: NaN between sentinels."""

    def __init__(self) -> None:
        self.outputs: list[Guarded] = []

    def make(self, num_rows: int, splits: int, shape: AttentionShape, device: torch.device) -> DecodeWorkspace:
        sizes = (num_rows, splits, shape.num_heads, shape.head_dim), (num_rows, splits, shape.num_heads)
        self.outputs = [Guarded(size, torch.float32, device) for size in sizes]
        return DecodeWorkspace(*(guarded.tensor for guarded in self.outputs))

    @property
    def splits(self) -> int:
        return self.outputs[0].shape[1] if self.outputs else 1


@pytest.fixture(params=[SHORT, TALL], ids=["tiles of 16", "tiles of 64"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, keys = request.param
    monkeypatch.setattr(prefill, "prefill_tiling", lambda *_: prefill.PrefillTiling(rows, keys, num_warps=4, num_stages=2))


@pytest.fixture
def partials(monkeypatch: pytest.MonkeyPatch) -> Iterator[GuardedPartials]:
    """Splits of 32 keys, from 128 on, at most five of them."""
    guarded_partials = GuardedPartials()
    monkeypatch.setattr(chunk_splits, "SPLIT_KEYS", 32)
    monkeypatch.setattr(chunk_splits, "_fastest_splits", lambda *_: SPLITS_MAX)
    monkeypatch.setattr(DecodeWorkspace, "empty", guarded_partials.make)
    yield guarded_partials
    for guarded in guarded_partials.outputs:
        guarded.check()


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize(
    ("tiles", "rows"),
    [
        (SHORT, [(9, 127), (9, 128), (9, 129)]),
        (TALL, [(15, 159), (16, 160), (17, 161)]),
        (SHORT, [(1, 1), (33, 300), (2, 40), (15, 15)]),
        (TALL, [(40, 136)]),
        (TALL, [(67, 223), (16, 16)]),
    ],
    ids=["at the first split", "at the second", "long and short", "over the diagonal", "a long chunk"],
    indirect=["tiles"],
)
def test_awkward_lengths_match_the_reference(rows: Rows, partials: GuardedPartials, device: torch.device) -> None:
    chunks = Chunks(rows, SHAPE, device)
    chunks.compare()
    assert partials.splits == min(SPLITS_MAX, chunks.tables.shape[1] * BLOCK // 32) > 1


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize(("tiles", "unused_rows"), [(SHORT, 40), (TALL, 3)], indirect=["tiles"])
def test_unused_rows_before_the_first_chunk_are_not_written(
    unused_rows: int, partials: GuardedPartials, device: torch.device
) -> None:
    Chunks([(15, 159), (33, 300)], SHAPE, device, unused_rows=unused_rows).compare()
    assert partials.splits == SPLITS_MAX


def test_a_long_context_with_the_tiles_used_for_serving_matches_the_reference(
    partials: GuardedPartials, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_splits, "SPLIT_KEYS", 512)
    Chunks([(33, 2559)], SHAPE, device).compare()
    assert partials.splits == SPLITS_MAX


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_every_head_size_matches_the_reference(head_dim: int, partials: GuardedPartials, device: torch.device) -> None:
    Chunks([(9, 9), (12, 290)], AttentionShape(BLOCK, 4, 2, head_dim), device).compare()
    assert partials.splits == SPLITS_MAX


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize(
    ("tiles", "heads"), [(TALL, (8, 8)), (SHORT, (8, 1)), (SHORT, (6, 2)), (TALL, (7, 1))], indirect=["tiles"]
)
def test_every_number_of_query_heads_per_kv_head_matches_the_reference(
    heads: tuple[int, int], partials: GuardedPartials, device: torch.device
) -> None:
    Chunks([(18, 230), (5, 5)], AttentionShape(BLOCK, *heads, 16), device).compare()
    assert partials.splits == SPLITS_MAX


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize(("tiles", "block_size"), [(SHORT, 16), (TALL, 32), (SHORT, 64)], indirect=["tiles"])
def test_every_block_size_matches_the_reference(block_size: int, partials: GuardedPartials, device: torch.device) -> None:
    Chunks([(20, 167), (30, 330)], AttentionShape(block_size, 2, 1, 32), device).compare()
    assert partials.splits == SPLITS_MAX


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize(("tiles", "window"), [(SHORT, 100), (TALL, 128), (SHORT, 200)], indirect=["tiles"])
def test_a_window_masks_earlier_tokens(window: int, partials: GuardedPartials, device: torch.device) -> None:
    rows = [(33, 33), (9, 390), (40, 240)]
    chunks = Chunks(rows, AttentionShape(BLOCK, 2, 1, 32, sliding_window=window), device)
    for row, (query_len, context_len) in enumerate(rows):
        for position in range(max(0, context_len - query_len + 1 - window)):
            chunks.cache[chunks.tables[row, position // BLOCK], position % BLOCK] = float("nan")
    chunks.compare()
    assert partials.splits > 1


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize(("tiles", "window"), [(SHORT, 150), (TALL, None)], indirect=["tiles"])
def test_soft_capped_scores_with_a_custom_scale_match_the_reference(
    window: int | None, partials: GuardedPartials, device: torch.device
) -> None:
    shape = AttentionShape(BLOCK, 2, 1, 32, sliding_window=window, scale=0.4, softcap=1.5)
    Chunks([(33, 233), (9, 170)], shape, device).compare()
    assert partials.splits > 1


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("tiles", [TALL], indirect=True)
def test_half_precision_matches_the_reference(partials: GuardedPartials, device: torch.device) -> None:
    Chunks([(33, 280), (9, 9)], SHAPE, device, dtype=torch.float16).compare()
    assert partials.splits == SPLITS_MAX


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize(("tiles", "scales"), [(SHORT, None), (TALL, (0.5, 3.0))], indirect=["tiles"])
def test_an_fp8_cache_matches_the_reference_with_and_without_scales(
    scales: tuple[float, float] | None, partials: GuardedPartials, device: torch.device
) -> None:
    kv_scales = None if scales is None else torch.tensor(scales, dtype=torch.float32, device=device)
    Chunks([(33, 280), (9, 9)], SHAPE, device, dtype=torch.float16, kv_dtype=FP8).compare(kv_scales)
    assert partials.splits == SPLITS_MAX


def computed(chunks: Chunks) -> torch.Tensor:
    given = (chunks.q, chunks.cache, chunks.tables, chunks.query_starts, chunks.context_lens, chunks.shape)
    return prefill.paged_prefill(*given, max_query_len=chunks.max_query_len)


@pytest.mark.usefixtures("tiles")
def test_splits_change_only_the_order_of_sums(
    partials: GuardedPartials, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = Chunks([(21, 300), (9, 130)], SHAPE, device)
    split = computed(chunks)
    assert partials.splits == SPLITS_MAX
    monkeypatch.setattr(chunk_splits, "_fastest_splits", lambda *_: 1)
    assert_near(split, computed(chunks), "attention")


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize(("tiles", "columns"), [(SHORT, 40), (TALL, 0)], indirect=["tiles"])
def test_the_length_of_other_requests_changes_no_bit(columns: int, partials: GuardedPartials, device: torch.device) -> None:
    """Nor does the width of the block tables, on which the grid depends."""
    chunks = Chunks([(21, 150), (12, 700)], SHAPE, device)
    together = computed(chunks)
    assert partials.splits == SPLITS_MAX
    chunks.context_lens[1] = 12
    chunks.tables = chunks.tables[:, : 11 + columns].contiguous()
    assert_same(computed(chunks)[:21], together[:21])


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("tiles", [SHORT], indirect=True)
def test_the_number_of_programs_per_query_changes_no_bit(
    partials: GuardedPartials, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = Chunks([(9, 150), (12, 300), (3, 3)], AttentionShape(BLOCK, 7, 1, 16), device)
    results = []
    for programs in (1, 2, 7):
        monkeypatch.setattr(chunk_splits, "_merging_programs", lambda *_, programs=programs: programs)
        results.append(computed(chunks))
        assert partials.splits == SPLITS_MAX
    for result in results[1:]:
        assert_same(result, results[0])


@pytest.mark.parametrize(("num_rows", "programs"), [(16, 32), (132, 32), (200, 21), (960, 4), (2112, 2), (10_000, 1)])
def test_the_number_of_merging_programs_at_a_time_is_limited(num_rows: int, programs: int) -> None:
    assert chunk_splits._merging_programs(num_rows, LLAMA.num_heads, 132) == programs


@triton.jit  # type: ignore[untyped-decorator]
def plan_kernel(plans, max_splits, KEYS: tl.constexpr, SPLIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Program i: tiles per split and number of splits of a tile with i + 1 visible keys, from 3 · KEYS on."""
    begin = tl.program_id(0) * 0 + 3 * KEYS
    tiles, num_splits = chunk_splits.plan_tile_splits(begin, begin + tl.program_id(0), max_splits, KEYS, SPLIT)
    tl.store(plans + tl.program_id(0) * 2, tiles)
    tl.store(plans + tl.program_id(0) * 2 + 1, num_splits)


@pytest.mark.parametrize("splits_max", [2, 3, 7])
def test_splits_cover_every_key_once_with_equal_lengths_except_the_last(splits_max: int, device: torch.device) -> None:
    keys, split, num_tokens_max = 16, 32, 600
    plans = torch.zeros(num_tokens_max, 2, dtype=torch.int32, device=device)
    plan_kernel[(num_tokens_max,)](plans, splits_max, KEYS=keys, SPLIT=split)
    for num_tokens, (tiles, number) in enumerate(plans.tolist(), 1):
        assert (number - 1) * tiles * keys < num_tokens <= number * tiles * keys
        assert number <= min(splits_max, num_tokens // split) or number == 1
        assert number > 1 or num_tokens < chunk_splits.SPLIT_FROM * split
        assert tiles * keys >= split or number == 1


@pytest.mark.parametrize(
    ("num_rows", "num_requests", "num_tokens", "splits"),
    [
        (100, 1, 8192, 4),  # 4 tiles of 8 heads
        (100, 1, 131_072, 4),
        (20, 1, 131_072, 16),  # 1 tile
        (20, 1, 4096, 8),  # of 512 keys
        (250, 1, 32_768, 2),  # 8 tiles
        (400, 1, 32_768, 1),  # 104 programs nearly fill the card
        (2048, 1, 32_768, 1),
        (100, 1, 2047, 1),
        (60, 4, 32_768, 3),  # 5 tiles
        (100, 33, 32_768, 1),
    ],
)
def test_the_number_of_splits_fills_an_h200_once_or_twice(
    num_rows: int, num_requests: int, num_tokens: int, splits: int
) -> None:
    shape = replace(LLAMA, block_size=1)
    assert chunk_splits.max_tile_splits(shape, num_rows, num_requests, num_tokens, (128, 128), 132) == splits


@pytest.mark.parametrize(("window", "splits"), [(1024, 1), (1700, 1), (2048, 4), (4096, 8)])
def test_a_long_window_is_split(window: int, splits: int) -> None:
    shape = replace(LLAMA, sliding_window=window)
    assert chunk_splits.max_tile_splits(shape, 20, 1, 8192, (128, 128), 132) == splits


@pytest.mark.parametrize("programs", [72, 132, 264, 320])
def test_memory_for_partial_results_is_bounded_in_every_step(programs: int) -> None:
    for shape in (LLAMA, AttentionShape(BLOCK, 8, 4, 256), AttentionShape(BLOCK, 64, 1, 64), AttentionShape(BLOCK, 4, 4, 128)):
        for rows, num_requests in ((64, 1), (128, 1), (128, 7)):
            for num_rows in (9, 17, 100, 500, 1000, 4000, 30_000, 200_000):
                splits = chunk_splits.max_tile_splits(shape, num_rows, num_requests, 8192, (rows, 128), programs)
                assert splits == 1 or splits * num_rows * shape.num_heads <= chunk_splits.PARTIAL_RESULTS_MAX


def test_the_memory_plan_matches_the_limits_of_partial_results() -> None:
    assert chunk_splits.PARTIAL_RESULTS_MAX == splits.CHUNK_PARTS_MAX
    assert chunk_splits.SPLIT_FROM * chunk_splits.SPLIT_KEYS == splits.CHUNK_CONTEXT_MIN
    assert (SPLIT_QUERIES[-1], prefill.SPLIT_BYTES_MAX) == (splits.FEW_QUERIES_MAX, splits.FEW_QUERIES_BYTES_MAX)


GROUPS = [(8 * group, 8, 128) for group in (1, 2, 3, 4, 5, 7, 8, 16)] + [(8, 4, 256), (32, 1, 64), (64, 64, 64), (14, 2, 64)]


@pytest.mark.parametrize("capability", [80, 89, 90, 100])
def test_every_tile_split_while_serving_was_split_in_a_warm_up_step(capability: int) -> None:
    """In the steps that compile kernels before the first request."""
    from engine.runner.warm_up import CHUNK_LENGTHS, LONG_CONTEXT

    programs = {80: 108, 89: 142, 90: 132, 100: 148}[capability]

    def tile_of(shape: AttentionShape, kv_bytes: int, longest: int, num_rows: int, num_requests: int) -> object:
        rows = longest * (shape.num_heads // shape.num_kv_heads)
        tiling = prefill.prefill_tiling(shape.head_dim, kv_bytes, rows, False, capability)
        blocks, size = LONG_CONTEXT // BLOCK, (tiling.rows, tiling.keys)
        resident_programs = programs * tiling.programs
        return (
            tiling if chunk_splits.max_tile_splits(shape, num_rows, num_requests, blocks, size, resident_programs) > 1 else None
        )

    for sizes in GROUPS:
        shape = AttentionShape(BLOCK, *sizes)
        for kv_bytes in (1, 2, 4):
            warmed_up = {tile_of(shape, kv_bytes, length, length, 1) for length in CHUNK_LENGTHS if length > 8}
            for longest in (*range(9, 140), 200, 300, 500, 1000):
                for others in (0, 1, 5, 31):
                    assert tile_of(shape, kv_bytes, longest, longest + 2 * others, 1 + others) in {*warmed_up, None}


@pytest.mark.parametrize("number", CARDS)
def test_shared_memory_suffices_for_the_programs_that_splits_are_planned_for(number: int) -> None:
    for head_dim in (64, 128, 256):
        for kv_bytes in (1, 2, 4):
            for rows in (16, 64, 128):
                tiling = prefill.prefill_tiling(head_dim, kv_bytes, rows, windowed=False, capability=number)
                shared_bytes = power_of_two(head_dim) * kv_bytes * 2 * (tiling.num_stages - 1) * tiling.keys
                assert CARDS[number].programs(64, shared_bytes, tiling.num_warps) >= tiling.programs


@pytest.mark.parametrize(
    ("num_rows", "num_requests", "at_least"), [(16, 4, 32), (64, 4, 32), (256, 4, 8), (320, 32, 4), (960, 32, 2)]
)
def test_a_captured_launch_splits_the_keys_of_one_chunk(num_rows: int, num_requests: int, at_least: int) -> None:
    """Most of the rows and requests that it is captured for may be unused."""
    arguments = LLAMA, num_rows, num_requests, 2048, (128, 128), 132
    splits = chunk_splits.max_tile_splits(*arguments, any_lengths=True)
    assert splits >= max(at_least, chunk_splits.max_tile_splits(*arguments))
    assert splits * num_rows * LLAMA.num_heads <= chunk_splits.PARTIAL_RESULTS_MAX, "as memory is planned"
    assert splits * (num_rows // 32 + num_requests) * LLAMA.num_kv_heads <= chunk_splits.WAVES_MAX * 132
    assert chunk_splits.max_tile_splits(LLAMA, num_rows, num_requests, 100, (128, 128), 132, any_lengths=True) == 1, (
        "no context is long"
    )
    windowed = replace(LLAMA, sliding_window=1024)
    assert chunk_splits.max_tile_splits(windowed, num_rows, num_requests, 2048, (128, 128), 132, any_lengths=True) == 1
