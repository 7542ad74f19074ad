"""The next token of each row of logits: penalties, bias, grammar, temperature, filters and Gumbel-max, without sorting.

Formula. x' = logits after the slot's rules; a greedy row takes the largest x', the lowest id on ties. Others are drawn by
Gumbel-max (`kernels.gumbel`): argmax over kept tokens of x' · scale + noise(seed, position, token), scale = log2(e) /
temperature.
Kept: the top_k largest x'; of these the smallest set of largest x' whose weights reach top_p of theirs; of these those at most
−log2(min_p) binary orders below the largest; of these the most typical ones (`kernels.gumbel`) whose weights reach typical_p of
theirs. Ties are kept or dropped together.
Sources: Gumbel-max of arXiv 1611.00712, section 2. Thresholds instead of sorts as in FlashInfer (arXiv 2501.01005) and other
Triton samplers; here the exact threshold is searched, on the bits of the distance from the largest logit, which have the order
of the distances.

Memory. `scan` reads every row once (V · itemsize bytes), writes the largest logit of each group of 128, and finishes rows that
are greedy or without filters. Rows with top-p but without top-k are read again by `sum_weights` for the sum of their weights.
`select` reads only groups whose largest logit can pass the filters: with top-k, k groups have an element at or above the k-th
largest group maximum, so nothing below it is among the k; with top-p, a group counts only while the larger group maxima do not
reach p by themselves. A few thousand logits remain, which are listed and searched in registers. A nearly flat row with only
top-p leaves more: three or four passes over the groups narrow the range of its threshold; the same for a row with only typical
sampling, which needs one more pass for the mean that defines typicality. 256 rows of 128,256 float32: 131 MB per pass, 31 µs at
4.3 TB/s; one full pass and a partial one with top-k, two and a partial one with only top-p.
Operations. About 20 per logit of a row that draws without filters (a hash and a bound; exact noise only where the bound may
win), 15 for `sum_weights`, 2 otherwise. Logits are converted to float32 right after the load; counts and weights are summed as
integers, so results do not depend on splits, batch size or card.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.gumbel import NO_TOKEN
from kernels.sampling_columns import SamplingColumns
from kernels.triton.launching.card_properties import multiprocessors, power_of_two
from kernels.triton.sampling.filters import filtered_winner, group_bound
from kernels.triton.sampling.gumbel import noise_key, top_p_weight
from kernels.triton.sampling.rows import GROUP, GROUPS, ID_SENTINEL, adjust_tile, distance_bits, gumbel_max_tile, load_tile

LIST_SIZE = 1024
"""The most logits that one program lists and searches in registers."""

_NO_TOKEN = tl.constexpr(NO_TOKEN)
NUM_WARPS = 8


@triton.jit
def _load_filters(slot, V, scales, top_ks, top_ps, neg_log2_min_ps, typical_ps):
    """scale, (top_k (0: off), top_p, neg_log2_min_p, typical_p) of a slot, and whether its row is finished by `scan`."""
    scale, top_k, top_p = tl.load(scales + slot), tl.load(top_ks + slot), tl.load(top_ps + slot)
    neg_log2_min_p, typical_p = tl.load(neg_log2_min_ps + slot), tl.load(typical_ps + slot)
    top_k = tl.where(top_k < V, top_k, 0)
    is_unfiltered = (top_k == 0) & (top_p >= 1.0) & (neg_log2_min_p == float("inf")) & (typical_p >= 1.0)
    return scale, (top_k, top_p, neg_log2_min_p, typical_p), (scale == 0.0) | is_unfiltered


@triton.jit
def _load_group_maxima(group_maxima_row, G, GROUPS_PADDED: tl.constexpr):
    """Group maxima of a row, padded with -inf: [GROUPS_PADDED]; the largest of them; whether it is finite."""
    group = tl.arange(0, GROUPS_PADDED)
    maxima = tl.load(group_maxima_row + group, mask=group < G, other=float("-inf"))
    largest = tl.max(maxima, 0)
    return maxima, largest, (largest > float("-inf")) & (largest < float("inf"))


@triton.jit(do_not_specialize=["masks_stride", "G", "tiles"], do_not_specialize_on_alignment=["positions"])
def scan_kernel(
    logits, slots, positions, masks, group_maxima, best_scores, best_tokens,
    scales, streams, top_ks, top_ps, neg_log2_min_ps, typical_ps, repetition, frequency, presence, counts,
    min_tokens_until, suppressed_ids, rules, bias,
    logits_stride, masks_stride, V, G, tiles,
):  # fmt: skip
    """Program (row, split): the largest logit of each group, and the winner if the row is greedy or has no filters."""
    row, split = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row)
    if slot >= 0:
        position = tl.load(positions + row)
        scale, _filters, skips_filters = _load_filters(slot, V, scales, top_ks, top_ps, neg_log2_min_ps, typical_ps)
        key = noise_key(tl.load(streams + slot), position, 0)
        columns = (repetition, frequency, presence, counts, min_tokens_until, suppressed_ids, rules, bias)
        request = (row, slot, position, V, columns, masks, masks_stride)
        logits_row = logits + row.to(tl.int64) * logits_stride
        best, best_token = float("-inf"), 0x7FFFFFFF
        last = tl.minimum((split + 1) * tiles, tl.cdiv(G, GROUPS))
        raw = load_tile(logits_row, split * tiles, last, V)
        next_raw = load_tile(logits_row, split * tiles + 1, last, V)
        for tile in range(split * tiles, last):
            prefetched = load_tile(logits_row, tile + 2, last, V)
            ids, value = adjust_tile(raw, tile, request)
            raw, next_raw = next_raw, prefetched
            group = tile * GROUPS + tl.arange(0, GROUPS)
            maxima = tl.max(value, 1)
            tl.store(group_maxima + row.to(tl.int64) * G + group, maxima, mask=group < G)
            if scale == 0.0:
                top = tl.max(maxima, 0)
                if top > best:
                    best, best_token = top, tl.min(tl.where(value == top, ids, ID_SENTINEL))
            elif skips_filters:
                best, best_token = gumbel_max_tile(value, ids, scale, key, best, best_token)
        offset = row * tl.num_programs(1) + split
        tl.store(best_scores + offset, best)
        tl.store(best_tokens + offset, best_token)


@triton.jit(do_not_specialize=["masks_stride", "G", "tiles"], do_not_specialize_on_alignment=["positions"])
def sum_weights_kernel(
    logits, slots, positions, masks, group_maxima, weights,
    scales, top_ks, top_ps, neg_log2_min_ps, typical_ps, repetition, frequency, presence, counts,
    min_tokens_until, suppressed_ids, rules, bias,
    logits_stride, masks_stride, V, G, tiles,
    GROUPS_PADDED: tl.constexpr,
):  # fmt: skip
    """Program (row, split): the sum of the weights of its split, for rows with top-p but without top-k."""
    row, split = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row)
    if slot >= 0:
        scale, filters, skips_filters = _load_filters(slot, V, scales, top_ks, top_ps, neg_log2_min_ps, typical_ps)
        top_k, top_p, _neg_log2_min_p, _typical_p = filters
        if (not skips_filters) & (top_k == 0) & (top_p < 1.0):
            position = tl.load(positions + row)
            columns = (repetition, frequency, presence, counts, min_tokens_until, suppressed_ids, rules, bias)
            request = (row, slot, position, V, columns, masks, masks_stride)
            _maxima, largest, is_finite = _load_group_maxima(group_maxima + row.to(tl.int64) * G, G, GROUPS_PADDED)
            weight_sums = tl.zeros([GROUPS], tl.int64)
            last = tl.where(is_finite, tl.minimum((split + 1) * tiles, tl.cdiv(G, GROUPS)), 0)
            logits_row = logits + row.to(tl.int64) * logits_stride
            raw = load_tile(logits_row, split * tiles, last, V)
            next_raw = load_tile(logits_row, split * tiles + 1, last, V)
            for tile in range(split * tiles, last):
                prefetched = load_tile(logits_row, tile + 2, last, V)
                _ids, value = adjust_tile(raw, tile, request)
                raw, next_raw = next_raw, prefetched
                weight_sums += tl.sum(top_p_weight((largest - value) * scale), 1)
            tl.store(weights + row * tl.num_programs(1) + split, tl.sum(weight_sums, 0))


@triton.jit(do_not_specialize=["masks_stride", "G", "num_splits"], do_not_specialize_on_alignment=["positions"])
def select_kernel(
    logits, slots, positions, masks, group_maxima, best_scores, best_tokens, weights, groups, candidate_logits, candidate_ids,
    out, scales, streams, top_ks, top_ps, neg_log2_min_ps, typical_ps, repetition, frequency, presence, counts,
    min_tokens_until, suppressed_ids, rules, bias,
    logits_stride, masks_stride, V, G, num_splits,
    GROUPS_PADDED: tl.constexpr, SPLITS: tl.constexpr, LIST_SIZE: tl.constexpr,
):  # fmt: skip
    """Program (row): the token. If it is greedy or has no filters, only the winner among the splits remains to be found."""
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    token = slot * 0 + _NO_TOKEN
    if slot >= 0:
        maxima, largest, is_finite = _load_group_maxima(group_maxima + row.to(tl.int64) * G, G, GROUPS_PADDED)
        scale, filters, skips_filters = _load_filters(slot, V, scales, top_ks, top_ps, neg_log2_min_ps, typical_ps)
        top_k, top_p, neg_log2_min_p, _typical_p = filters
        split = tl.arange(0, SPLITS)
        offset = row * num_splits + split
        if is_finite & skips_filters:
            score = tl.load(best_scores + offset, mask=split < num_splits, other=float("-inf"))
            winner = tl.load(best_tokens + offset, mask=split < num_splits, other=ID_SENTINEL)
            token = tl.min(tl.where(score == tl.max(score, 0), winner, ID_SENTINEL), 0)
        elif is_finite:
            position = tl.load(positions + row)
            columns = (repetition, frequency, presence, counts, min_tokens_until, suppressed_ids, rules, bias)
            request = (row, slot, position, V, columns, masks, masks_stride)
            total = tl.sum(tl.load(weights + offset, mask=split < num_splits, other=0), 0)
            distance = largest - maxima
            bound = group_bound(distance, scale, top_k, top_p, total, G)
            # With top-k the weights of all k count towards top-p, including those that min-p excludes.
            order_limit = tl.where(top_k > 0, float("inf"), neg_log2_min_p)
            active = (distance_bits(distance) <= bound) & (distance * scale <= order_limit)
            groups_row = groups + row.to(tl.int64) * G
            rank = tl.cumsum(active.to(tl.int32), 0) - 1
            tl.store(groups_row + rank, tl.arange(0, GROUPS_PADDED), mask=active)
            tl.debug_barrier()
            spread = 2.0 * tl.max(tl.where(maxima > float("-inf"), distance, 0.0), 0)
            num_active = tl.max(rank, 0) + 1
            row_view = (logits + row.to(tl.int64) * logits_stride, groups_row, num_active, largest, request, spread)
            list_offset = row.to(tl.int64) * LIST_SIZE
            token = filtered_winner(
                row_view, scale, filters, order_limit, bound, total, noise_key(tl.load(streams + slot), position, 0),
                candidate_logits + list_offset, candidate_ids + list_offset, LIST_SIZE,
            )  # fmt: skip
    tl.store(out + row, token)


class SamplingWorkspace(NamedTuple):
    """Intermediate results of the three kernels: R rows, G groups, S splits. One serves all batch sizes up to its own."""

    group_maxima: torch.Tensor  # [R · G] float32
    best_scores: torch.Tensor  # [R · S] float32
    best_tokens: torch.Tensor  # [R · S] int32
    weights: torch.Tensor  # [R · S] int64
    groups: torch.Tensor  # [R · G] int32
    candidate_logits: torch.Tensor  # [R · LIST_SIZE] float32
    candidate_ids: torch.Tensor  # [R · LIST_SIZE] int32


def sampling_workspace(max_rows: int, vocab_size: int, device: torch.device) -> SamplingWorkspace:
    """For up to `max_rows` rows; 8 KiB per row, and the groups."""
    groups = max_rows * -(-vocab_size // GROUP.value)
    num_results = max(rows * _splits(rows, vocab_size, device)[0] for rows in range(1, max_rows + 1))

    def empty(size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    return SamplingWorkspace(
        empty(groups, torch.float32),
        empty(num_results, torch.float32),
        empty(num_results, torch.int32),
        empty(num_results, torch.int64),
        empty(groups, torch.int32),
        empty(max_rows * LIST_SIZE, torch.float32),
        empty(max_rows * LIST_SIZE, torch.int32),
    )


def _splits(rows: int, vocab_size: int, device: torch.device) -> tuple[int, int]:
    """Splits per row and tiles per split: about eight programs per multiprocessor, to keep many memory requests in flight."""
    tiles = _num_tiles(vocab_size)
    max_splits = max(1, min(tiles, -(-8 * multiprocessors(device) // rows)))
    tiles_per_split = -(-tiles // max_splits)
    return -(-tiles // tiles_per_split), tiles_per_split


def _num_tiles(vocab_size: int) -> int:
    """Tiles of a row, and the most splits that it can have: the same for any number of rows."""
    return -(-vocab_size // int(GROUP.value * GROUPS.value))


def padded_sizes(vocab_size: int) -> tuple[int, int]:
    """Groups and splits of a row, padded to the powers of two that the kernels are compiled for."""
    return power_of_two(-(-vocab_size // GROUP.value)), power_of_two(_num_tiles(vocab_size))


def sample(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    columns: SamplingColumns,
    *,
    masks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    workspace: SamplingWorkspace | None = None,
    weighs: bool = True,
) -> torch.Tensor:
    """Next token of each row, or NO_TOKEN: [R] int64, or of `out`'s dtype.

    logits: [R, V] float32, bf16 or fp16, each row contiguous, not changed; slots: [R] int32 or int64, -1 is padding; positions:
    [R] int64 or int32, index of the token in prompt plus output; masks: [R, ceil(V / 32)] int32, bit b of word w allows token
    32 w + b. `weighs` may be False if no row has top-p without top-k, which saves a launch. Rows of padding and tokens
    beyond V are masked. Does not synchronise with the device; allocates `out` and `workspace` if they are not given.
    """
    rows, vocab_size = logits.shape
    assert logits.stride(1) == 1, "the logits of a row are contiguous"
    device = logits.device
    out = torch.empty(rows, dtype=torch.int64, device=device) if out is None else out
    if rows == 0:
        return out
    space = sampling_workspace(rows, vocab_size, device) if workspace is None else workspace
    splits, tiles = _splits(rows, vocab_size, device)
    num_groups, (padded_groups, padded_splits) = -(-vocab_size // GROUP.value), padded_sizes(vocab_size)
    c = columns
    filters = (c.top_k, c.top_p, c.neg_log2_min_p, c.typical_p)
    rules = (c.repetition, c.frequency, c.presence, c.counts, c.min_tokens_until, c.suppressed_ids, c.rules, c.bias)
    masks_stride = 0 if masks is None else masks.stride(0)
    sizes = (logits.stride(0), masks_stride, vocab_size, num_groups)
    row_inputs = (logits, slots, positions, masks)
    best = (space.best_scores, space.best_tokens)
    grid = (rows, splits)
    scan_kernel[grid](
        *row_inputs, space.group_maxima, *best, c.scale, c.streams, *filters, *rules, *sizes, tiles,
        num_warps=NUM_WARPS, num_stages=2, enable_fp_fusion=False,
    )  # fmt: skip
    if weighs:
        sum_weights_kernel[grid](
            *row_inputs, space.group_maxima, space.weights, c.scale, *filters, *rules, *sizes, tiles,
            GROUPS_PADDED=padded_groups, num_warps=NUM_WARPS, num_stages=2, enable_fp_fusion=False,
        )  # fmt: skip
    select_kernel[(rows,)](
        *row_inputs, space.group_maxima, *best, space.weights, space.groups, space.candidate_logits, space.candidate_ids, out,
        c.scale, c.streams, *filters, *rules, *sizes, splits,
        GROUPS_PADDED=padded_groups, SPLITS=padded_splits, LIST_SIZE=LIST_SIZE,
        num_warps=NUM_WARPS, num_stages=2, enable_fp_fusion=False,
    )  # fmt: skip
    return out
