"""Device functions of the sampling kernels on a row of logits: tiles, the request's rules, Gumbel-max, thresholds."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.sampling_columns import SUPPRESSED_IDS_MAX
from kernels.triton.sampling.gumbel import gumbel_noise, gumbel_noise_bound, noise_bits

GROUP = tl.constexpr(128)
GROUPS = tl.constexpr(8)
"""A tile is GROUPS groups of GROUP neighbouring logits, one group per warp. Twice as many need so many registers that one
program fewer fits on a multiprocessor, and fewer bytes are in flight."""

ID_SENTINEL = tl.constexpr(0x7FFFFFFF)  # larger than every id
INFINITE = tl.constexpr(0x7F800000)  # the bits of inf
_SUPPRESSED = tl.constexpr(SUPPRESSED_IDS_MAX)


@triton.jit
def adjust_logits(raw, ids, mask, request):
    """raw: logits at `ids` → float32 after penalties, bias, suppressed ids and the grammar's mask; -inf where masked.

    NaN and +inf become +inf whatever the rules are, so that they show in the largest logit.
    request: (row, slot, position, V, columns, masks, masks_stride), where columns are those of `SamplingColumns`.
    """
    row, slot, position, V, columns, masks, masks_stride = request
    repetition, frequency, presence, counts, min_tokens_until, suppressed_ids, rules, bias = columns
    raw = raw.to(tl.float32)
    value = raw
    repetition_penalty = tl.load(repetition + slot)
    frequency_penalty, presence_penalty = tl.load(frequency + slot), tl.load(presence + slot)
    if (repetition_penalty != 1.0) | (frequency_penalty != 0.0) | (presence_penalty != 0.0):
        count = tl.load(counts + slot.to(tl.int64) * V + ids, mask=mask, other=0)
        penalised = tl.where(
            value > 0.0, tl.div_rn(value, tl.zeros_like(value) + repetition_penalty), value * repetition_penalty
        )
        value = tl.where((count & 1) != 0, penalised, value)
        times = count >> 1
        value = value - frequency_penalty * times.to(tl.float32)
        value = value - tl.where(times > 0, presence_penalty, 0.0)
    rule = tl.load(rules + slot)
    if rule >= 0:
        value = value + tl.load(bias + rule.to(tl.int64) * V + ids, mask=mask, other=0.0)
    if position < tl.load(min_tokens_until + slot):
        for index in tl.static_range(_SUPPRESSED):
            value = tl.where(ids == tl.load(suppressed_ids + slot * _SUPPRESSED + index), float("-inf"), value)
    if masks is not None:
        word = tl.load(masks + row.to(tl.int64) * masks_stride + (ids >> 5), mask=mask, other=0)
        value = tl.where(((word >> (ids & 31)) & 1) != 0, value, float("-inf"))
    value = tl.where((raw != raw) | (raw == float("inf")), float("inf"), value)
    return tl.where(mask, value, float("-inf"))


@triton.jit
def load_adjusted_tile(logits_row, group, is_present, request):
    """group: [GROUPS] → ids and adjusted logits of these groups: [GROUPS, GROUP]; those not `is_present` are masked."""
    V = request[3]
    ids = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    mask = is_present[:, None] & (ids < V)
    raw = tl.load(logits_row + ids, mask=mask, other=float("-inf"))
    return ids, adjust_logits(raw, ids, mask, request)


@triton.jit
def load_tile(logits_row, tile, last, V):
    """Loads the raw logits of a tile, -inf from tile `last` on; callers prefetch two tiles ahead."""
    ids = (tl.arange(0, GROUPS) + tile * GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    end = tl.minimum(V, last * (GROUPS * GROUP))
    return tl.load(logits_row + ids, mask=ids < end, other=float("-inf"))


@triton.jit
def adjust_tile(raw, tile, request):
    """Ids and adjusted logits of a tile loaded by `load_tile`."""
    ids = (tl.arange(0, GROUPS) + tile * GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    return ids, adjust_logits(raw, ids, ids < request[3], request)


@triton.jit
def gumbel_max_tile(value, ids, scale, key, best, best_token):
    """Gumbel-max over one tile and the best so far. value: -inf for excluded tokens; ids ascend from tile to tile.

    Exact noise costs two logarithms of twenty operations each, a bound of it three operations: only the few tokens whose bound
    reaches the best so far are evaluated. The lowest id wins ties.
    """
    bound = value * scale + gumbel_noise_bound(noise_bits(key, ids))
    top = tl.max(bound)
    while (top > best) | ((top == best) & (top < float("inf")) & (top > float("-inf"))):
        token = tl.min(tl.where(bound == top, ids, ID_SENTINEL))
        logit = tl.max(tl.where(ids == token, value, float("-inf")))
        score = logit * scale + gumbel_noise(noise_bits(key, token))
        wins = (score > best) | ((score == best) & (token < best_token))
        best, best_token = tl.where(wins, score, best), tl.where(wins, token, best_token)
        bound = tl.where(ids == token, float("-inf"), bound)
        top = tl.max(bound)
    return best, best_token


@triton.jit
def distance_bits(distance):
    """distance ≥ 0, float32 → its bits, int32 of the same order"""
    return distance.to(tl.int32, bitcast=True)


@triton.jit
def smallest_threshold(patterns, weights, target):
    """The smallest t ≥ 0 with Σ weights[patterns ≤ t] ≥ target, 0x7FFFFFFF if there is none, by bisection of its bits.

    patterns: [C] int32 ≥ 0, weights: [C] int64
    """
    threshold = target.to(tl.int32) * 0
    bit = threshold + (1 << 30)
    for _ in range(31):
        reached = tl.sum(tl.where(patterns < threshold + bit, weights, 0), 0)
        threshold = tl.where(reached >= target, threshold, threshold + bit)
        bit = bit >> 1
    return threshold


@triton.jit
def weight_target(top_p, total):
    """The weight that a nucleus must reach: ⌈top_p · total⌉, at least 1. total: int64"""
    exact = top_p.to(tl.float64) * total.to(tl.float64)
    whole = exact.to(tl.int64)
    return tl.maximum(tl.where(whole.to(tl.float64) < exact, whole + 1, whole), 1)
