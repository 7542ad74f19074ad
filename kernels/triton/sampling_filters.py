"""Gumbel-max among the tokens of a row that its filters leave, on the groups that can hold one: a part of `choose`.

Candidates are listed in the program's own memory and searched in registers; while there are too many, the range of the
threshold is narrowed in passes over the groups. Counts and weights are integers, so every way finds the same threshold.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gumbel import FARTHEST
from kernels.triton.gumbel import gumbel_noise, noise_bits, top_p_weight, typical_centre, typical_moment
from kernels.triton.sampling_rows import (
    GROUPS,
    INFINITE,
    NOBODY,
    adjusted_tile,
    distance_bits,
    gumbel_max_tile,
    smallest_threshold,
    weight_target,
)

_FARTHEST = tl.constexpr(FARTHEST)
_WAYS = tl.constexpr(8)  # parts into which a pass divides a range
_EVEN_STEPS = tl.constexpr(6)  # passes that divide by distance; later ones divide by bits, which always ends


@triton.jit
def group_bound(distance, scale, top_k, top_p, total, G):
    """A distance, as its bits, beyond which nothing passes top-k or, where that is off, top-p: from the group maxima alone.

    distance: [groups] ≥ 0, how far the group maxima lie below the largest logit
    """
    bound = INFINITE - 1 + G * 0
    if (top_k <= G) & ((top_k > 0) | (top_p < 1.0)):
        weights = tl.where(top_k > 0, 1, top_p_weight(distance * scale))
        target = tl.where(top_k > 0, top_k.to(tl.int64), weight_target(top_p, total))
        bound = tl.minimum(bound, smallest_threshold(distance_bits(distance), weights, target))
    return bound


@triton.jit
def _listed_tile(part, first):
    """Ids, logits and distances of the next GROUPS of the groups that are looked at."""
    logits_row, groups_row, num_active, largest, request, _ = part
    index = first + tl.arange(0, GROUPS)
    group = tl.load(groups_row + index, mask=index < num_active, other=0)
    ids, value = adjusted_tile(logits_row, group, index < num_active, request)
    return ids, value, largest - value


@triton.jit
def _apart(distance, centre):
    """How far distances lie from `centre`, as bits: the distances themselves where that is 0."""
    return distance_bits(tl.abs(distance - centre))


@triton.jit
def _is_in(distance, among):
    """What is searched: tokens up to a distance, as its bits, and within so many binary orders."""
    scale, _, reach, limit = among
    return (distance_bits(distance) <= reach) & (distance * scale <= limit)


@triton.jit
def _list(part, low, high, among, listed_logits, listed_ids, LISTED: tl.constexpr):
    """Write down what of those `among` lies above `low` up to `high` from their centre; how many. Stops behind LISTED."""
    num_active = part[2]
    count, first = num_active * 0, num_active * 0
    tl.debug_barrier()  # an earlier list was read
    while (first < num_active) & (count <= LISTED):
        ids, value, distance = _listed_tile(part, first)
        patterns = _apart(distance, among[1])
        taken = ((patterns > low) & (patterns <= high) & _is_in(distance, among)).to(tl.int32)
        of_group = tl.sum(taken, 1)
        place = count + (tl.cumsum(of_group, 0) - of_group)[:, None] + tl.cumsum(taken, 1) - 1
        fits = (taken > 0) & (place < LISTED)
        tl.store(listed_logits + place, value, mask=fits)
        tl.store(listed_ids + place, ids, mask=fits)
        count += tl.sum(of_group, 0)
        first += GROUPS
    tl.debug_barrier()
    return count


@triton.jit
def _read_list(listed_logits, listed_ids, count, LISTED: tl.constexpr):
    index = tl.arange(0, LISTED)
    value = tl.load(listed_logits + index, mask=index < count, other=float("-inf"))
    return value, tl.load(listed_ids + index, mask=index < count, other=0)


@triton.jit
def filtered_winner(part, scale, asked, limit, bound, total, key, listed_logits, listed_ids, LISTED: tl.constexpr):
    """The token. `bound` and `limit` exclude what certainly does not pass; `total`: the row's weight where top-k is off."""
    top_k, top_p, neg_log2_min_p, typical_p = asked
    num_active, largest = part[2], part[3]
    centre, everything = scale * 0.0, bound * 0 + INFINITE
    count = _list(part, -1, bound, (scale, centre, bound, limit), listed_logits, listed_ids, LISTED)
    is_complete = count <= LISTED
    threshold, nearest = bound, everything
    for stage in range(3):  # the number of top-k, the weight of top-p, and that of typical sampling about the mean distance
        is_typical = stage == 2
        if ((stage == 0) & (top_k > 0)) | ((stage == 1) & (top_p < 1.0)) | (is_typical & (typical_p < 1.0)):
            is_summed, share = is_typical | (top_k > 0), tl.where(is_typical, typical_p, top_p)
            high, below, target = tl.where(is_typical, everything, threshold), total * 0, top_k.to(tl.int64)
            reach, within = threshold, tl.where(is_typical, neg_log2_min_p, float("inf"))
            if not is_complete:
                if (stage > 0) & is_summed:
                    total, moments = _sums(part, (scale, centre, reach, within))
                    if is_typical:
                        centre = typical_centre(moments, total, scale)
                if stage > 0:
                    target = weight_target(share, total)
                among = (scale, centre, reach, within)
                high, below, count = _narrowed(part, stage > 0, target, high, among, listed_logits, listed_ids, LISTED)
            if count <= LISTED:
                value, _ids = _read_list(listed_logits, listed_ids, count, LISTED)
                distance = largest - value
                weights = tl.where(stage > 0, top_p_weight(distance * scale), 1)
                weights = tl.where(_is_in(distance, (scale, centre, reach, within)), weights, 0)
                if is_complete & (stage > 0):
                    total = tl.where(is_summed, tl.sum(weights, 0), total)
                    target = weight_target(share, total)
                    if is_typical:
                        centre = typical_centre(tl.sum(typical_moment(weights, distance * scale), 0), total, scale)
                found = tl.minimum(high, smallest_threshold(_apart(distance, centre), weights, target - below))
            else:
                found = high
            threshold = tl.where(is_typical, threshold, found)
            nearest = tl.where(is_typical, found, nearest)
    best, best_token = float("-inf"), 0x7FFFFFFF
    kept_among = (scale, centre, threshold, neg_log2_min_p)
    if is_complete:
        value, ids = _read_list(listed_logits, listed_ids, count, LISTED)
        distance = largest - value
        kept = _is_in(distance, kept_among) & (_apart(distance, centre) <= nearest)
        score = tl.where(kept, value * scale + gumbel_noise(noise_bits(key, ids)), float("-inf"))
        best_token = tl.min(tl.where(score == tl.max(score, 0), ids, NOBODY), 0)
    else:
        for first in range(0, num_active, GROUPS):
            ids, value, distance = _listed_tile(part, first)
            kept = _is_in(distance, kept_among) & (_apart(distance, centre) <= nearest)
            best, best_token = gumbel_max_tile(tl.where(kept, value, float("-inf")), ids, scale, key, best, best_token)
    return best_token


@triton.jit
def _sums(part, among):
    """One pass: the weight of those `among`, and their moments."""
    scale = among[0]
    weight, moments = tl.zeros([GROUPS], tl.int64), tl.zeros([GROUPS], tl.int64)
    for first in range(0, part[2], GROUPS):
        _ids, _value, distance = _listed_tile(part, first)
        orders = distance * scale
        each = tl.where(_is_in(distance, among), top_p_weight(orders), 0)
        weight += tl.sum(each, 1)
        moments += tl.sum(typical_moment(each, orders), 1)
    return tl.sum(weight, 0), tl.sum(moments, 0)


@triton.jit
def _divided(part, is_weighted, ends, among):
    """One pass: the weight (or the number) of those `among` up to each of the ends but the last: [WAYS] int64"""
    num_active, scale = part[2], among[0]
    way = tl.arange(0, _WAYS)
    weights = tl.zeros([_WAYS], tl.int64)
    for first in range(0, num_active, GROUPS):
        _ids, _value, distance = _listed_tile(part, first)
        patterns = _apart(distance, among[1])
        weight = tl.where(is_weighted, top_p_weight(distance * scale), 1)
        weight = tl.where(_is_in(distance, among), weight, 0)
        for index in range(_WAYS - 1):
            up_to = patterns <= tl.sum(tl.where(way == index, ends, 0), 0)
            weights += tl.where(way == index, tl.sum(tl.sum(tl.where(up_to, weight, 0), 1), 0), 0)
    return weights


@triton.jit
def _ends(low, high, span, step):
    """Ends of _WAYS parts of the patterns above `low` up to `high`: by distance, or by bits once that leads no further."""
    way = tl.arange(0, _WAYS)
    near = tl.maximum(low, 0).to(tl.float32, bitcast=True)
    far = tl.minimum(high.to(tl.float32, bitcast=True), near + span)
    by_distance = distance_bits(near + (far - near) * ((way + 1).to(tl.float32) / _WAYS))
    by_bits = low + ((high - low).to(tl.int64) * (way + 1) // _WAYS).to(tl.int32)
    ends = tl.where(step < _EVEN_STEPS, by_distance, by_bits)
    return tl.where(way == _WAYS - 1, high, tl.minimum(tl.maximum(ends, low), high))


@triton.jit
def _narrowed(part, is_weighted, target, high, among, listed_logits, listed_ids, LISTED: tl.constexpr):
    """A range `low` < threshold ≤ `high` with few of those `among`, which are listed: (high, what lies up to low, how many).

    The threshold is the smallest at which the number (the weight) reaches `target`, or `high` if none does. More logits than
    LISTED remain only where they are equal: then the range has one pattern, which is the threshold.
    """
    way = tl.arange(0, _WAYS)
    low, below = high * 0 - 1, target * 0
    span = tl.where(is_weighted, _FARTHEST / among[0], part[5])
    count, step = high * 0 + NOBODY, 0
    while (count > LISTED) & (high - low > 1):
        ends = _ends(low, high, span, step)
        weights = _divided(part, is_weighted, ends, among)
        passed = tl.sum(((weights < target) & (way < _WAYS - 1)).to(tl.int32), 0)  # ends that lie before the threshold
        below = tl.where(passed > 0, tl.sum(tl.where(way == passed - 1, weights, 0), 0), below)
        low = tl.where(passed > 0, tl.sum(tl.where(way == passed - 1, ends, 0), 0), low)
        high = tl.sum(tl.where(way == passed, ends, 0), 0)
        count = _list(part, low, high, among, listed_logits, listed_ids, LISTED)
        step += 1
    return high, below, count
