"""Gumbel-max among the tokens that pass a row's filters, over the groups that can contain one: device functions of `select`.

Candidates are listed in the program's workspace and searched in registers; while there are too many, passes over the groups
narrow the range of the threshold. Counts and weights are integers, so either way finds the same threshold.

row_view: (logits of the row, its active groups, their number, the largest logit, request of `adjust_logits`, spread); spread is
twice the distance of the lowest finite group maximum from the largest logit.
region: (scale, centre, reach, order_limit): the tokens up to a distance `reach` (as its bits) below the largest logit and
within `order_limit` binary orders; thresholds in it are distances from `centre`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gumbel import FARTHEST
from kernels.triton.sampling.gumbel import gumbel_noise, noise_bits, top_p_weight, typical_centre, typical_moment
from kernels.triton.sampling.rows import (
    GROUPS,
    ID_SENTINEL,
    INFINITE,
    distance_bits,
    gumbel_max_tile,
    load_adjusted_tile,
    smallest_threshold,
    weight_target,
)

_FARTHEST = tl.constexpr(FARTHEST)
_NUM_BUCKETS = tl.constexpr(8)  # into which a pass divides a range
_LINEAR_PASSES = tl.constexpr(6)  # passes that divide by distance; later ones divide by bits, which always terminates


@triton.jit
def group_bound(distance, scale, top_k, top_p, total, G):
    """A distance, as its bits, beyond which nothing passes top-k or, if that is off, top-p: from the group maxima alone.

    distance: [groups] ≥ 0, of the group maxima below the largest logit
    """
    bound = INFINITE - 1 + G * 0
    if (top_k <= G) & ((top_k > 0) | (top_p < 1.0)):
        weights = tl.where(top_k > 0, 1, top_p_weight(distance * scale))
        target = tl.where(top_k > 0, top_k.to(tl.int64), weight_target(top_p, total))
        bound = tl.minimum(bound, smallest_threshold(distance_bits(distance), weights, target))
    return bound


@triton.jit
def _load_group_tile(row_view, first):
    """Ids, logits and distances of the next GROUPS active groups."""
    logits_row, groups_row, num_active, largest, request, _ = row_view
    index = first + tl.arange(0, GROUPS)
    group = tl.load(groups_row + index, mask=index < num_active, other=0)
    ids, value = load_adjusted_tile(logits_row, group, index < num_active, request)
    return ids, value, largest - value


@triton.jit
def _centre_distance_bits(distance, centre):
    """How far distances are from `centre`, as bits: the distances themselves if that is 0."""
    return distance_bits(tl.abs(distance - centre))


@triton.jit
def _is_inside(distance, region):
    """Whether tokens at these distances are in `region` (see the module)."""
    scale, _, reach, order_limit = region
    return (distance_bits(distance) <= reach) & (distance * scale <= order_limit)


@triton.jit
def _collect_candidates(row_view, low, high, region, candidate_logits, candidate_ids, LIST_SIZE: tl.constexpr):
    """Lists the tokens of `region` with low < distance from the centre ≤ high, as bits → their number. Stops once there are
    more than LIST_SIZE."""
    num_active = row_view[2]
    count, first = num_active * 0, num_active * 0
    tl.debug_barrier()  # an earlier list has been read
    while (first < num_active) & (count <= LIST_SIZE):
        ids, value, distance = _load_group_tile(row_view, first)
        patterns = _centre_distance_bits(distance, region[1])
        selected = ((patterns > low) & (patterns <= high) & _is_inside(distance, region)).to(tl.int32)
        group_counts = tl.sum(selected, 1)
        offset = count + (tl.cumsum(group_counts, 0) - group_counts)[:, None] + tl.cumsum(selected, 1) - 1
        fits = (selected > 0) & (offset < LIST_SIZE)
        tl.store(candidate_logits + offset, value, mask=fits)
        tl.store(candidate_ids + offset, ids, mask=fits)
        count += tl.sum(group_counts, 0)
        first += GROUPS
    tl.debug_barrier()
    return count


@triton.jit
def _load_candidates(candidate_logits, candidate_ids, count, LIST_SIZE: tl.constexpr):
    index = tl.arange(0, LIST_SIZE)
    value = tl.load(candidate_logits + index, mask=index < count, other=float("-inf"))
    return value, tl.load(candidate_ids + index, mask=index < count, other=0)


@triton.jit
def filtered_winner(
    row_view, scale, filters, order_limit, bound, total, key, candidate_logits, candidate_ids, LIST_SIZE: tl.constexpr
):
    """The token drawn. `bound` and `order_limit` exclude what certainly does not pass; `total`: the row's weight if top-k is
    off."""
    top_k, top_p, neg_log2_min_p, typical_p = filters
    num_active, largest = row_view[2], row_view[3]
    centre, no_limit = scale * 0.0, bound * 0 + INFINITE
    count = _collect_candidates(
        row_view, -1, bound, (scale, centre, bound, order_limit), candidate_logits, candidate_ids, LIST_SIZE
    )
    is_all_listed = count <= LIST_SIZE
    threshold, centre_threshold = bound, no_limit
    for stage in range(3):  # top-k by number, top-p by weight, typical sampling by weight about the mean distance
        is_typical = stage == 2
        if ((stage == 0) & (top_k > 0)) | ((stage == 1) & (top_p < 1.0)) | (is_typical & (typical_p < 1.0)):
            needs_sum, mass = is_typical | (top_k > 0), tl.where(is_typical, typical_p, top_p)
            high, weight_below, target = tl.where(is_typical, no_limit, threshold), total * 0, top_k.to(tl.int64)
            reach, stage_limit = threshold, tl.where(is_typical, neg_log2_min_p, float("inf"))
            if not is_all_listed:
                if (stage > 0) & needs_sum:
                    total, moments = _sum_weights_and_moments(row_view, (scale, centre, reach, stage_limit))
                    if is_typical:
                        centre = typical_centre(moments, total, scale)
                if stage > 0:
                    target = weight_target(mass, total)
                region = (scale, centre, reach, stage_limit)
                high, weight_below, count = _narrow_range(
                    row_view, stage > 0, target, high, region, candidate_logits, candidate_ids, LIST_SIZE
                )
            if count <= LIST_SIZE:
                value, _ids = _load_candidates(candidate_logits, candidate_ids, count, LIST_SIZE)
                distance = largest - value
                weights = tl.where(stage > 0, top_p_weight(distance * scale), 1)
                weights = tl.where(_is_inside(distance, (scale, centre, reach, stage_limit)), weights, 0)
                if is_all_listed & (stage > 0):
                    total = tl.where(needs_sum, tl.sum(weights, 0), total)
                    target = weight_target(mass, total)
                    if is_typical:
                        centre = typical_centre(tl.sum(typical_moment(weights, distance * scale), 0), total, scale)
                stage_threshold = tl.minimum(
                    high, smallest_threshold(_centre_distance_bits(distance, centre), weights, target - weight_below)
                )
            else:
                stage_threshold = high
            threshold = tl.where(is_typical, threshold, stage_threshold)
            centre_threshold = tl.where(is_typical, stage_threshold, centre_threshold)
    best, best_token = float("-inf"), 0x7FFFFFFF
    kept_region = (scale, centre, threshold, neg_log2_min_p)
    if is_all_listed:
        value, ids = _load_candidates(candidate_logits, candidate_ids, count, LIST_SIZE)
        distance = largest - value
        kept = _is_inside(distance, kept_region) & (_centre_distance_bits(distance, centre) <= centre_threshold)
        score = tl.where(kept, value * scale + gumbel_noise(noise_bits(key, ids)), float("-inf"))
        best_token = tl.min(tl.where(score == tl.max(score, 0), ids, ID_SENTINEL), 0)
    else:
        for first in range(0, num_active, GROUPS):
            ids, value, distance = _load_group_tile(row_view, first)
            kept = _is_inside(distance, kept_region) & (_centre_distance_bits(distance, centre) <= centre_threshold)
            best, best_token = gumbel_max_tile(tl.where(kept, value, float("-inf")), ids, scale, key, best, best_token)
    return best_token


@triton.jit
def _sum_weights_and_moments(row_view, region):
    """One pass: the sums of the weights and of the moments of the tokens in `region`."""
    scale = region[0]
    weight_sums, moment_sums = tl.zeros([GROUPS], tl.int64), tl.zeros([GROUPS], tl.int64)
    for first in range(0, row_view[2], GROUPS):
        _ids, _value, distance = _load_group_tile(row_view, first)
        orders = distance * scale
        weight = tl.where(_is_inside(distance, region), top_p_weight(orders), 0)
        weight_sums += tl.sum(weight, 1)
        moment_sums += tl.sum(typical_moment(weight, orders), 1)
    return tl.sum(weight_sums, 0), tl.sum(moment_sums, 0)


@triton.jit
def _cumulative_weights(row_view, is_weighted, ends, region):
    """One pass: the weight (or the number) of tokens in `region` up to each bucket end but the last: [_NUM_BUCKETS] int64"""
    num_active, scale = row_view[2], region[0]
    bucket = tl.arange(0, _NUM_BUCKETS)
    weights = tl.zeros([_NUM_BUCKETS], tl.int64)
    for first in range(0, num_active, GROUPS):
        _ids, _value, distance = _load_group_tile(row_view, first)
        patterns = _centre_distance_bits(distance, region[1])
        weight = tl.where(is_weighted, top_p_weight(distance * scale), 1)
        weight = tl.where(_is_inside(distance, region), weight, 0)
        for index in range(_NUM_BUCKETS - 1):
            up_to = patterns <= tl.sum(tl.where(bucket == index, ends, 0), 0)
            weights += tl.where(bucket == index, tl.sum(tl.sum(tl.where(up_to, weight, 0), 1), 0), 0)
    return weights


@triton.jit
def _bucket_ends(low, high, span, step):
    """Ends of _NUM_BUCKETS buckets of the patterns in (low, high]: equal in distance, or in bits once that no longer helps."""
    bucket = tl.arange(0, _NUM_BUCKETS)
    near = tl.maximum(low, 0).to(tl.float32, bitcast=True)
    far = tl.minimum(high.to(tl.float32, bitcast=True), near + span)
    linear_ends = distance_bits(near + (far - near) * ((bucket + 1).to(tl.float32) / _NUM_BUCKETS))
    bit_ends = low + ((high - low).to(tl.int64) * (bucket + 1) // _NUM_BUCKETS).to(tl.int32)
    ends = tl.where(step < _LINEAR_PASSES, linear_ends, bit_ends)
    return tl.where(bucket == _NUM_BUCKETS - 1, high, tl.minimum(tl.maximum(ends, low), high))


@triton.jit
def _narrow_range(row_view, is_weighted, target, high, region, candidate_logits, candidate_ids, LIST_SIZE: tl.constexpr):
    """Narrows low < threshold ≤ high until few tokens of `region` are in it, and lists them → (high, weight up to low, count).

    The threshold is the smallest at which the number (the weight) reaches `target`, or `high` if none does. More logits than
    LIST_SIZE remain only if they are equal: then the range has one pattern, which is the threshold.
    """
    bucket = tl.arange(0, _NUM_BUCKETS)
    low, weight_below = high * 0 - 1, target * 0
    span = tl.where(is_weighted, _FARTHEST / region[0], row_view[5])
    count, step = high * 0 + ID_SENTINEL, 0
    while (count > LIST_SIZE) & (high - low > 1):
        ends = _bucket_ends(low, high, span, step)
        weights = _cumulative_weights(row_view, is_weighted, ends, region)
        is_before = (weights < target) & (bucket < _NUM_BUCKETS - 1)  # bucket ends below the threshold
        num_before = tl.sum(is_before.to(tl.int32), 0)
        weight_below = tl.where(num_before > 0, tl.sum(tl.where(bucket == num_before - 1, weights, 0), 0), weight_below)
        low = tl.where(num_before > 0, tl.sum(tl.where(bucket == num_before - 1, ends, 0), 0), low)
        high = tl.sum(tl.where(bucket == num_before, ends, 0), 0)
        count = _collect_candidates(row_view, low, high, region, candidate_logits, candidate_ids, LIST_SIZE)
        step += 1
    return high, weight_below, count
