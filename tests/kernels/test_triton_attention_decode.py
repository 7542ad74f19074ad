"""Paged decode attention of Triton against its float64 reference: awkward lengths, poisoned caches, and scheduling."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from engine.memory.splits import num_splits
from kernels.attention_rows import AttentionShape
from kernels.reference import attention as reference
from kernels.triton.attention import decode, splits
from kernels.triton.launching.card_properties import CARDS, card
from tests.support.kernel_cases import Guarded, PagedQueries
from tests.support.kernel_tolerances import assert_near, assert_same

BLOCK = 16
SHAPE = AttentionShape(BLOCK, 4, 2, 64)
FP8 = torch.float8_e4m3fn


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 32 tokens and splits of 32, 64 or 128, so that short requests have many of them."""
    tiling = splits.DecodeTiling(tile=32, split=32, num_warps=4, num_stages=2, programs=2)
    monkeypatch.setattr(splits, "decode_tiling", lambda *_: tiling)


class Batch(PagedQueries):
    """Requests of given lengths, each with one query unless there are `query_lens`."""

    def __init__(
        self,
        lengths: list[int],
        shape: AttentionShape,
        device: torch.device,
        *,
        query_lens: list[int] | None = None,
        **dtypes: Any,
    ) -> None:
        super().__init__([*zip(query_lens or [1] * len(lengths), lengths, strict=True)], shape, device, **dtypes)
        self.queries: dict[str, Any] = {}
        if query_lens:
            self.queries = {"query_starts": self.query_starts, "max_query_len": self.max_query_len}

    def expected(self, kv_scales: torch.Tensor | None = None) -> torch.Tensor:
        return reference.paged_decode(
            self.q, self.cache, self.tables, self.context_lens, self.shape,
            **self.queries, kv_scales=kv_scales,
        )  # fmt: skip

    def actual(self, kv_scales: torch.Tensor | None = None) -> torch.Tensor:
        out = self.out()
        decode.paged_decode(
            self.q, self.cache, self.tables, self.context_lens, self.shape,
            **self.queries, kv_scales=kv_scales, out=out.tensor,
        )  # fmt: skip
        return out.check()

    def compare(self, kv_scales: torch.Tensor | None = None) -> None:
        assert_near(self.actual(kv_scales), self.expected(kv_scales), "attention")


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("lengths", [[1, 15, 16, 17], [33, 31, 0, 1], [257, 129, 67, 128]])
def test_awkward_lengths_match_the_reference(lengths: list[int], device: torch.device) -> None:
    Batch(lengths, SHAPE, device).compare()


@pytest.mark.usefixtures("small_tiles")
def test_a_request_of_many_splits_among_short_ones_matches_the_reference(device: torch.device) -> None:
    Batch([3, 701, 1], SHAPE, device).compare()


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_every_head_size_matches_the_reference(head_dim: int, device: torch.device) -> None:
    Batch([67, 5], AttentionShape(BLOCK, 4, 2, head_dim), device).compare()


@pytest.mark.parametrize("heads", [(8, 8), (8, 4), (8, 2), (8, 1), (6, 2), (20, 1)])
def test_every_number_of_query_heads_per_kv_head_matches_the_reference(heads: tuple[int, int], device: torch.device) -> None:
    Batch([37, 5], AttentionShape(BLOCK, *heads, 16), device).compare()


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_every_block_size_matches_the_reference(block_size: int, device: torch.device) -> None:
    Batch([67, 130], AttentionShape(block_size, 2, 1, 32), device).compare()


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("window", [1, 16, 21, 64])
def test_a_window_masks_earlier_tokens(window: int, device: torch.device) -> None:
    shape = AttentionShape(BLOCK, 2, 1, 32, sliding_window=window)
    batch = Batch([1, 50, 22, 90], shape, device)
    for row, length in enumerate(batch.context_lens.tolist()):
        for position in range(max(0, length - window)):
            batch.cache[batch.tables[row, position // BLOCK], position % BLOCK] = float("nan")
    batch.compare()


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("window", [None, 21])
def test_soft_capped_scores_with_a_custom_scale_match_the_reference(window: int | None, device: torch.device) -> None:
    Batch([1, 40, 130], AttentionShape(BLOCK, 2, 1, 32, sliding_window=window, scale=0.4, softcap=1.5), device).compare()


@pytest.mark.usefixtures("small_tiles")
def test_half_precision_matches_the_reference(device: torch.device) -> None:
    Batch([1, 45, 130], SHAPE, device, dtype=torch.float16).compare()


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("scales", [None, (0.5, 3.0)])
def test_an_fp8_cache_matches_the_reference_with_and_without_scales(
    scales: tuple[float, float] | None, device: torch.device
) -> None:
    kv_scales = None if scales is None else torch.tensor(scales, dtype=torch.float32, device=device)
    Batch([1, 45, 130], SHAPE, device, dtype=torch.float16, kv_dtype=FP8).compare(kv_scales)


@pytest.mark.parametrize("number", [80, 89, 90])
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float16, FP8])
def test_the_tiles_of_every_card_match_the_reference(
    number: int, kv_dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(splits, "capability", lambda _: number)
    dtype = torch.float16 if kv_dtype is FP8 else kv_dtype
    Batch([700, 65], AttentionShape(BLOCK, 4, 1, 128), device, dtype=dtype, kv_dtype=kv_dtype).compare()


@pytest.mark.parametrize("number", CARDS)
@pytest.mark.parametrize("rows", [4, 16, 32, 48, 128])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_registers_are_left_for_all_programs_over_an_fp8_cache(number: int, rows: int, head_dim: int) -> None:
    tiling = splits.decode_tiling(head_dim, 1, rows, number)
    for each in (tiling, tiling.rotated):
        assert each.registers_max is not None
        assert card(number).programs(each.registers_max, 0, each.num_warps) >= each.programs >= 1


@pytest.mark.parametrize(
    ("rows", "head_dim", "number", "expected"),
    [
        (28, 64, 90, (64, 4, 2)), (28, 64, 89, (64, 4, 2)), (32, 64, 100, (64, 4, 2)), (48, 64, 89, (64, 8, 1)),
        (128, 128, 90, (64, 8, 1)), (48, 128, 90, (64, 8, 1)), (40, 96, 90, (64, 8, 1)),
        (16, 64, 90, (128, 4, 3)), (64, 64, 90, (128, 8, 1)), (28, 128, 90, (128, 8, 1)), (64, 128, 90, (128, 8, 1)),
        (128, 128, 89, (64, 8, 1)), (48, 256, 90, (64, 8, 1)),
        (8, 128, 90, (64, 4, 4)), (8, 64, 90, (128, 4, 4)), (8, 256, 100, (32, 4, 4)), (8, 128, 89, (64, 4, 2)),
    ],
)  # fmt: skip
def test_tiles_over_an_fp8_cache_are_short_for_few_queries_and_where_registers_would_not_suffice(
    rows: int, head_dim: int, number: int, expected: tuple[int, int, int]
) -> None:
    """expected: tokens per tile, warps, programs per multiprocessor. The split, which sizes the workspace, does not change."""
    tiling = splits.decode_tiling(head_dim, 1, rows, number, 4)
    assert (tiling.tile, tiling.num_warps, tiling.programs) == expected
    assert tiling.split == splits.decode_tiling(head_dim, 1, 1, number).split
    assert (tiling.rotated.tile, tiling.rotated.split) == (tiling.tile, tiling.split)
    assert tiling.rotated.programs == min(3, tiling.programs)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("window", [None, 21])
@pytest.mark.parametrize(
    ("heads", "query_len"),
    [((1, 1, 64), 1), ((4, 1, 96), 1), ((8, 1, 64), 1), ((7, 1, 128), 1), ((2, 1, 64), 4), ((9, 1, 64), 1)],
)
def test_few_queries_over_an_fp8_cache_are_columns_of_its_products(
    heads: tuple[int, int, int], query_len: int, window: int | None, device: torch.device
) -> None:
    """Up to eight queries per KV head, from heads or drafts; the queries of nine heads are rows."""
    shape = AttentionShape(BLOCK, *heads, sliding_window=window)
    is_columns = splits.padded_rows(shape, query_len, 1) == splits.COLUMNS_MAX
    assert is_columns == (splits.query_rows(shape, query_len) <= splits.COLUMNS_MAX)
    lengths, counts = [5, 130, 67], [query_len, 1, query_len]
    batch = Batch(lengths, shape, device, dtype=torch.float16, kv_dtype=FP8, query_lens=counts if query_len > 1 else None)
    batch.compare(torch.tensor((0.5, 3.0), dtype=torch.float32, device=device))


@pytest.mark.parametrize(
    ("heads", "window"), [((14, 2, 64), None), ((7, 1, 64), 600), ((12, 1, 128), None), ((32, 1, 128), None)]
)
def test_drafts_of_large_groups_of_heads_over_an_fp8_cache_match_the_reference(
    heads: tuple[int, int, int], window: int | None, device: torch.device
) -> None:
    shape = AttentionShape(BLOCK, *heads, sliding_window=window)
    batch = Batch([4, 700, 67], shape, device, dtype=torch.float16, kv_dtype=FP8, query_lens=[4, 3, 1])
    batch.compare(torch.tensor((0.5, 3.0), dtype=torch.float32, device=device))


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("window", [None, 21])
def test_drafts_attend_only_to_earlier_tokens(window: int | None, device: torch.device) -> None:
    shape = replace(SHAPE, sliding_window=window)
    Batch([4, 70, 17, 130], shape, device, query_lens=[4, 1, 3, 4]).compare()


def grouped(rows: list[tuple[int, int]], group_size: int) -> list[tuple[int, int, int]]:
    """rows: (rows, length of the context of the last one) of each request → (request, rows, length) of its groups"""
    groups = []
    for request, (count, length) in enumerate(rows):
        for first in range(0, count, group_size):
            last = min(first + group_size, count)
            groups.append((request, last - first, length and length - (count - last)))
    return groups


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("group_size", [4, 8])
@pytest.mark.parametrize("window", [None, 21])
@pytest.mark.parametrize(
    "rows",
    [
        [(9, 300), (1, 70), (4, 4), (5, 33), (1, 1)],
        [(17, 130), (3, 0)],
        [(1, 40), (8, 513), (11, 0)],
    ],
    ids=["with and without drafts", "padding", "more padding"],
)
def test_rows_in_groups_match_rows_computed_alone(
    rows: list[tuple[int, int]], window: int | None, group_size: int, device: torch.device
) -> None:
    """Groups of one request share its blocks; padding has no visible keys; two groups of the launch have no rows."""
    shape, num_rows = replace(SHAPE, sliding_window=window), sum(count for count, _ in rows)
    batch = Batch([length for _, length in rows], shape, device, query_lens=[count for count, _ in rows])
    groups = grouped(rows, group_size)
    tables = batch.tables[[request for request, _, _ in groups] + [0, 0]]
    lens = torch.tensor([length for _, _, length in groups] + [0, 0], dtype=torch.int32, device=device)
    ends = [*accumulate(count for _, count, _ in groups), num_rows, num_rows]
    starts = torch.tensor([0, *ends], dtype=torch.int32, device=device)
    workspace = splits.decode_workspace(shape, num_rows, tables.shape[1], torch.float32, device)
    for tensor in workspace:
        tensor.fill_(float("nan"))
    out = Guarded(tuple(batch.q.shape), torch.float32, device)
    decode.paged_decode(
        batch.q, batch.cache, tables, lens, shape,
        query_starts=starts, max_query_len=group_size, out=out.tensor, workspace=workspace,
    )  # fmt: skip
    owners = [request for request, (count, _) in enumerate(rows) for _ in range(count)]
    visible_lens = [max(0, length - num_later) for count, length in rows for num_later in reversed(range(count))]
    own_lens = torch.tensor(visible_lens, dtype=torch.int32, device=device)
    assert_near(out.check(), reference.paged_decode(batch.q, batch.cache, batch.tables[owners], own_lens, shape), "attention")


@pytest.mark.parametrize(
    ("heads", "kv_dtype", "number", "group_size"),
    [
        ((32, 8, 128), torch.bfloat16, 90, 8), ((16, 8, 128), FP8, 90, 8), ((8, 8, 128), FP8, 90, 8),
        ((64, 8, 128), torch.bfloat16, 90, 4), ((28, 4, 128), torch.bfloat16, 90, 4), ((32, 8, 128), FP8, 90, 4),
        ((32, 8, 128), torch.bfloat16, 80, 4), ((64, 4, 128), FP8, 90, 4), ((32, 8, 64), FP8, 90, 8), ((14, 2, 64), FP8, 90, 4),
    ],
)  # fmt: skip
def test_groups_are_as_large_as_two_programs_per_multiprocessor_allow(
    heads: tuple[int, int, int], kv_dtype: torch.dtype, number: int, group_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(splits, "capability", lambda _: number)
    assert splits.max_verify_group(AttentionShape(BLOCK, *heads), kv_dtype, torch.device("cpu")) == group_size


@pytest.mark.usefixtures("small_tiles")
def test_a_row_has_the_same_bits_in_any_batch(device: torch.device) -> None:
    lengths = [130, 1, 70, 257, 33]
    batch = Batch(lengths, SHAPE, device)
    together = batch.actual()
    wide = torch.cat([batch.tables, batch.tables], dim=1)
    for row in range(len(lengths)):
        one = slice(row, row + 1)
        alone = decode.paged_decode(batch.q[one], batch.cache, wide[one], batch.context_lens[one], SHAPE)
        assert_same(alone, together[one])


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("window", [None, 21])
@pytest.mark.parametrize("query_lens", [None, [4, 1, 3, 4, 1]])
def test_which_program_computes_a_split_changes_no_bit(
    query_lens: list[int] | None, window: int | None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one program per KV head, which computes all splits in turn, and with one per split."""
    batch = Batch([130, 1, 70, 257, 33], replace(SHAPE, sliding_window=window), device, query_lens=query_lens)
    outputs = []
    for number in (1, 64):
        monkeypatch.setattr(decode, "multiprocessors", lambda _, number=number: number)
        outputs.append(batch.actual())
    assert_same(*outputs)


@pytest.mark.usefixtures("small_tiles")
def test_a_workspace_can_be_reused_by_shorter_batches(device: torch.device) -> None:
    longest = Batch([257, 129, 300], SHAPE, device)
    workspace = splits.decode_workspace(SHAPE, 4, 40, torch.float32, device)
    for tensor in workspace:
        tensor.fill_(float("nan"))
    for batch in (longest, Batch([0, 65], SHAPE, device), longest):
        given = (batch.q, batch.cache, batch.tables, batch.context_lens, SHAPE)
        assert_near(decode.paged_decode(*given, workspace=workspace), batch.expected(), "attention")


@triton.jit  # type: ignore[untyped-decorator]
def schedule_kernel(context_lens, query_starts, schedules, num_requests, resident_groups, REQUESTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Stores the part of each group of programs: first request, first split, number of splits."""
    group, num_groups = tl.program_id(0), tl.num_programs(0)
    request, split, count = splits.schedule(
        context_lens, query_starts, num_requests, group, num_groups, resident_groups, 0, 1, 64, 128, REQUESTS
    )
    tl.store(schedules + group * 3, request)
    tl.store(schedules + group * 3 + 1, split)
    tl.store(schedules + group * 3 + 2, count)


def split_length(length: int, split: int) -> int:
    """Tokens per split of a request of this length, at least `split`, before splits are equalised."""
    return split * next((factor for factor, splits_max in ((1, 4), (2, 16), (4, 128)) if length <= splits_max * split), 8)


def split_tiles(length: int, resident_groups: int) -> list[int]:
    """Tiles of 64 tokens in each split of a request of this length, with splits of at least 128 tokens."""
    count = max(1, -(-length // split_length(length, 128)))
    if length > 2048 and count >= resident_groups:
        count -= count % resident_groups
    tiles = max(1, -(-length // (64 * count)))
    return [tiles] * max(1, -(-length // (64 * tiles)))


@pytest.mark.parametrize("resident_groups", [1, 49])
@pytest.mark.parametrize("num_absent", [0, 20])
@pytest.mark.parametrize(
    "lengths",
    [[131072, *[4096] * 31], [4096] * 64, [1025] * 50, [1] * 40, [0, 0, 700, 0], list(range(1, 3000, 97)), [1000]],
    ids=["one long", "uniform", "odd", "ones", "padding", "all sorts", "alone"],
)
def test_every_split_is_scheduled_once_and_the_load_is_balanced(
    lengths: list[int], num_absent: int, resident_groups: int, device: torch.device
) -> None:
    """Requests without queries have no splits."""
    num_groups = 49
    lens = torch.tensor(lengths + [0] * num_absent, dtype=torch.int32, device=device)
    ends = [*range(1, len(lengths) + 1), *[len(lengths)] * num_absent]
    starts = torch.tensor([0, *ends], dtype=torch.int32, device=device) if num_absent else None
    schedules = torch.full((num_groups, 3), -1, dtype=torch.int32, device=device)
    schedule_kernel[(num_groups,)](lens, starts, schedules, len(lens), resident_groups, REQUESTS=128)
    tiles_by_request = [split_tiles(length, resident_groups) for length in lengths]
    all_splits = [
        (request, split, tiles + 1)
        for request, request_tiles in enumerate(tiles_by_request)
        for split, tiles in enumerate(request_tiles)
    ]
    position, costs = 0, []
    for request, split, count in schedules.tolist():
        if count:
            assert (request, split) == all_splits[position][:2]
        costs.append(sum(cost for _, _, cost in all_splits[position : position + count]))
        position += count
    assert position == len(all_splits)
    assert max(costs) < sum(costs) / num_groups + max(cost for _, _, cost in all_splits)


@pytest.mark.parametrize("length", [50_176, 65_536, 100_352, 131_072])
def test_a_single_long_request_is_balanced_over_the_card(length: int) -> None:
    """The busiest group has at most 1.15 times the mean load; with splits of sixteen tiles throughout, 1.5 times at 64k."""
    groups = 49
    tiles = split_tiles(length, groups)
    assert -(-len(tiles) // groups) * tiles[0] <= 1.15 * length / 64 / groups


def test_workspace_bytes_are_those_allocated(device: torch.device) -> None:
    workspace = splits.decode_workspace(SHAPE, 3, 70, torch.float16, device)
    allocated = sum(tensor.numel() * tensor.element_size() for tensor in workspace)
    assert allocated == splits.workspace_bytes(SHAPE, 3, 70, torch.float16, device)


def test_no_request_has_more_splits_than_the_workspace_holds() -> None:
    split = 128
    edges = [factor * split + extra for factor in (4, 16, 64, 128) for extra in (0, 1)]
    for length in [*range(1, 140 * split, 61), *edges, 131_072]:
        assert -(-length // split_length(length, split)) <= splits.max_splits(length, split)
        assert splits.max_splits(length, split) <= splits.max_splits(length + 1, split)


@pytest.mark.parametrize("number", CARDS)
@pytest.mark.parametrize("kv_bytes", [1, 2, 4])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_with_a_window_a_split_has_room_for_a_group_of_queries(head_dim: int, kv_bytes: int, number: int) -> None:
    """The first visible token of the group may be in the middle of a tile."""
    tiling = splits.decode_tiling(head_dim, kv_bytes, 16, number)
    assert (tiling.tile - 1) + (splits.SPLIT_QUERIES[-1] - 1) <= tiling.split


def test_an_empty_batch_gives_an_empty_result(device: torch.device) -> None:
    empty = torch.empty(0, 4, 64, device=device)
    cache = torch.empty(1, BLOCK, 2, 2, 64, device=device)
    tables, lens = torch.empty(0, 3, dtype=torch.int32, device=device), torch.empty(0, dtype=torch.int32, device=device)
    assert decode.paged_decode(empty, cache, tables, lens, SHAPE).shape == (0, 4, 64)


@pytest.mark.parametrize("window", [None, 512])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_the_memory_plan_matches_the_workspace(
    head_dim: int, dtype: torch.dtype, window: int | None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (80, 89, 90, 100):
        monkeypatch.setattr(splits, "capability", lambda _, found=number: found)
        for blocks in (1, 40, 129, 2048, 8192):
            shape = AttentionShape(16, 32, 8, head_dim, sliding_window=window)
            planned = num_splits(16 * blocks, head_dim, dtype.itemsize, window) * 5 * 32 * (head_dim + 1) * 4
            assert splits.workspace_bytes(shape, 5, blocks, dtype, device) == planned
