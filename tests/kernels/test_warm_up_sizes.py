"""Warm-up steps compile the kernels of every step, whatever its number of requests."""

from __future__ import annotations

import itertools

import pytest

from engine.options import SEATS_MAX
from engine.runner.warm_up import (
    CHUNK_LENGTHS,
    DECODE_BATCH_SIZES,
    FEW_REQUESTS,
    MANY_REQUESTS,
    SEARCH_BATCH_SIZES,
    SOME_REQUESTS,
    STEP_SIZES,
    _steps_of_each_kind,
)
from engine.scheduling.limits import STEP_DRAFT_TOKENS_MAX, SchedulerLimits
from kernels.operations import FUSED_ROWS_MAX
from kernels.triton.attention.splits import SPLIT_QUERIES, scheduled_requests
from kernels.triton.launching.early_launch import EARLY_ROWS_MAX
from kernels.triton.products.hopper_tiles import tile_sizes

ROWS_MAX = SEATS_MAX + STEP_DRAFT_TOKENS_MAX


def test_every_number_of_decodes_and_chunks_has_a_compiled_size() -> None:
    for compiled in (DECODE_BATCH_SIZES, (FEW_REQUESTS, SOME_REQUESTS, MANY_REQUESTS, *SEARCH_BATCH_SIZES)):
        for most in (1, 33, 256, 257, 600, 1024, ROWS_MAX):
            asked = {scheduled_requests(min(number, most)) for number in compiled}
            assert {scheduled_requests(number) for number in range(1, most + 1)} <= asked, f"{compiled} up to {most}"


def test_products_of_any_few_rows_have_tiles_that_were_compiled() -> None:
    for compiled in (STEP_SIZES, DECODE_BATCH_SIZES, CHUNK_LENGTHS):
        asked = {tile_sizes(number, 4096, 132, gated=False, bits=8) for number in (1, *compiled)}
        tiles = {tile_sizes(number, 4096, 132, gated=False, bits=8) for number in range(1, FUSED_ROWS_MAX + 1)}
        assert tiles <= asked, f"{compiled}"


@pytest.mark.parametrize("seats", [1, 2, 3, 4, 5, 9, 20, 33, 300, 1024])
def test_short_chunks_of_any_number_of_requests_use_compiled_variants(seats: int) -> None:
    """A variant depends on the chunk length, the number of requests searched, and early launch."""
    limits = SchedulerLimits(max_num_seqs=seats, max_num_batched_tokens=2048, max_model_len=4096, block_size=16)

    def variant(longest: int, number: int, num_rows: int) -> tuple[int, int, bool]:
        most = next(queries for queries in SPLIT_QUERIES if longest <= queries)
        return most, scheduled_requests(number), num_rows <= EARLY_ROWS_MAX

    steps = [[len(row.token_ids) for row in rows] for rows in _steps_of_each_kind(limits, 0)]
    short = [lengths for lengths in steps if 1 < max(lengths) <= SPLIT_QUERIES[-1]]
    compiled = {variant(max(lengths), len(lengths), sum(lengths)) for lengths in short}
    for longest, number in itertools.product(range(2, SPLIT_QUERIES[-1] + 1), range(1, seats + 1)):
        for num_rows in {longest + 2 * (number - 1), longest * number}:  # of one token it is a decode
            if num_rows <= limits.max_num_batched_tokens:
                assert variant(longest, number, num_rows) in compiled


def test_no_size_beyond_the_requests_of_an_engine_is_compiled() -> None:
    assert max(DECODE_BATCH_SIZES) <= ROWS_MAX
