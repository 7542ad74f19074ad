"""The sampler of each row's next token, with parameters in `SamplingColumns`: the same tokens as `kernels.torch.sampling`.

    logits ─► penalties, bias and masks (in a copy of the row, if there are any) ─► the first of the largest logits
        ─► distances below it ─► the limits of top-k and top-p: each is the smallest distance that keeps enough tokens
        ─► typical sampling: the same for distances from the mean, of the tokens that min-p keeps too ─► Gumbel-max

A limit is found by radix select, in three passes over the row: distances are not negative, so their bit patterns are in the
order of the distances, and the sum of the weights in each of up to 2048 bins of bit patterns shows which bin contains the
limit. Reads a row once or, with filters, up to fifteen times from the cache.
"""

from __future__ import annotations

import math
import os

import numba
import torch

from kernels.gumbel import FARTHEST, NO_TOKEN
from kernels.sampling_columns import SUPPRESSED_IDS_MAX, SamplingColumns
from kernels.simd.compiling import entry, subroutine, task
from kernels.simd.gumbel import gumbel_noise, multiply_unfused, noise_key, weights
from kernels.simd.launching import Launch
from kernels.simd.threads import argument, run, thread_and_count
from kernels.simd.vectors import (
    BYTES,
    LANES,
    load_float32,
    load_int32,
    load_int64,
    masked_load,
    masked_store,
    padded_load,
    reduce_sum,
    splat,
    stack_buffer,
    store,
    store_float32,
    store_int64,
    where_less,
)

_SCALE, _TOP_P, _NEG_LOG2_MIN_P, _TYPICAL_P, _REPETITION, _FREQUENCY, _PRESENCE = range(7)
_TOP_K, _RULE = range(2)
_STREAM, _MIN_TOKENS_UNTIL = range(2)

_INFINITE = math.inf
_BINS = 2048
_lane_buffer = stack_buffer(2 * LANES)
_bin_buffer = stack_buffer(2 * _BINS)
_scalar_buffer = stack_buffer(2)


@subroutine
def _best_token(best, first_ids):
    """The token with the largest score, the lowest on ties: `first_ids` are those of the first lanes, -1 is none."""
    buffer, best_token, best_score = _lane_buffer(), NO_TOKEN, numba.float32(-_INFINITE)
    store(buffer, 0, best)
    store(buffer, LANES, first_ids)
    for lane in range(LANES):
        score, first_id = load_float32(buffer, lane), load_float32(buffer, LANES + lane)
        token = numba.int64(first_id) + lane
        if first_id >= 0 and (score > best_score or (score == best_score and token < best_token)):
            best_token, best_score = token, score
    return best_token


@subroutine
def _argmax(x, size):
    """The index of the first of the largest elements of a row; NO_TOKEN if one is NaN or +inf, or none is above -inf."""
    lowest, zero, highest = splat(-_INFINITE), splat(0.0), splat(_INFINITE)
    best, first_ids, poison = lowest, splat(-1.0), zero
    for i in range(0, size, LANES):
        value = padded_load(x, i, size, lowest)
        poison = where_less(value, highest, poison, value)
        first_ids = where_less(best, value, splat(i), first_ids)
        best = where_less(best, value, value, best)
    return _best_token(best, first_ids) if math.isfinite(reduce_sum(poison)) else NO_TOKEN


@subroutine
def _store_distances(x, out, token_weights, size, row_max, scale):
    """out = row_max - x; and the weight of each token into `token_weights`, unless that is 0."""
    for i in range(0, size, LANES):
        distance = splat(row_max) - masked_load(x, i, size)
        masked_store(out, i, size, distance)
        if token_weights:
            masked_store(token_weights, i, size, weights(multiply_unfused(distance, scale)))


@subroutine
def _total_weight(distances, token_weights, size, limit):
    """The weight of all tokens no farther than `limit`."""
    total_weight = 0
    for i in range(size):
        if load_float32(distances, i) <= limit:
            total_weight += load_int32(token_weights, i)
    return total_weight


@subroutine
def _select_distance(distances, token_weights, size, target):
    """The smallest distance up to which the weights (all 1 without `token_weights`) sum up to `target`; the largest distance if
    they never do."""
    bins, prefix, remaining = _bin_buffer(), 0, target
    for level in range(3):
        shift, num_bins = 20 - 10 * level, _BINS if level == 0 else _BINS // 2
        width = 11 if level == 0 else 10
        for index in range(num_bins):
            store_int64(bins, index, 0)
        for i in range(size):
            bits = load_int32(distances, i)
            if bits >> (shift + width) == prefix:
                index = (bits >> shift) & (num_bins - 1)
                store_int64(bins, index, load_int64(bins, index) + (load_int32(token_weights, i) if token_weights else 1))
        index = 0
        while load_int64(bins, index) < remaining and index < num_bins - 1:
            remaining -= load_int64(bins, index)
            index += 1
        prefix = (prefix << width) | index
    buffer = _scalar_buffer()
    store_int64(buffer, 0, prefix)
    return load_float32(buffer, 0)


@subroutine
def _gumbel_max(x, size, scale, key, row_max, limit, neg_log2_min_p):
    """The token drawn among those whose distance below the largest logit is within the limits."""
    lowest = splat(-_INFINITE)
    best, first_ids = lowest, splat(-1.0)
    for i in range(0, size, LANES):
        value = padded_load(x, i, size, lowest)
        score = multiply_unfused(value, scale) + gumbel_noise(i, key)
        distance = splat(row_max) - value
        score = where_less(splat(limit), distance, lowest, score)
        score = where_less(splat(neg_log2_min_p), multiply_unfused(distance, scale), lowest, score)
        first_ids = where_less(best, score, splat(i), first_ids)
        best = where_less(best, score, score, best)
    return _best_token(best, first_ids)


@subroutine
def _target_weight(fraction, total_weight):
    """The least weight that is at least this fraction of the total."""
    return max(1, numba.int64(math.ceil(numba.float64(fraction) * numba.float64(total_weight))))


@subroutine
def _filter_typical(x, distances, token_weights, size, scale, typical_p, limit, neg_log2_min_p):
    """Of the tokens within the limits, keep those nearest to their mean: `token_weights` becomes the row's logits, -inf for
    those farther from the mean; `_gumbel_max` applies the other limits."""
    total_weight, moments = 0, 0
    for i in range(size):
        distance = load_float32(distances, i)
        if distance <= limit and distance * scale <= neg_log2_min_p:
            weight = load_int32(token_weights, i)
            total_weight += weight
            moments += numba.int64(numba.float32(weight) * min(distance * scale, numba.float32(FARTHEST)))
        else:
            store_float32(token_weights, i, 0.0)
    centre = numba.float32(numba.float64(moments) / numba.float64(total_weight) / numba.float64(scale))
    for i in range(size):
        store_float32(distances, i, abs(load_float32(distances, i) - centre))
    typical_limit = _select_distance(distances, token_weights, size, _target_weight(typical_p, total_weight))
    for i in range(size):
        store_float32(
            token_weights, i, load_float32(x, i) if load_float32(distances, i) <= typical_limit else numba.float32(-_INFINITE)
        )


@subroutine
def _draw(x, size, row_max, scale, top_k, top_p, neg_log2_min_p, typical_p, key, scratch):
    """Draw a row's token. `scratch` has space for two rows."""
    limit = numba.float32(_INFINITE)
    if (0 < top_k < size) or top_p < 1 or typical_p < 1:
        token_weights = scratch + size * BYTES if top_p < 1 or typical_p < 1 else 0
        _store_distances(x, scratch, token_weights, size, row_max, scale)
        if 0 < top_k < size:
            limit = _select_distance(scratch, 0, size, top_k)
        if top_p < 1:
            target = _target_weight(top_p, _total_weight(scratch, token_weights, size, limit))
            limit = min(limit, _select_distance(scratch, token_weights, size, target))
        if typical_p < 1:
            _filter_typical(x, scratch, token_weights, size, scale, typical_p, limit, neg_log2_min_p)
            x = token_weights
    return _gumbel_max(x, size, scale, key, row_max, limit, neg_log2_min_p)


@subroutine
def _apply_penalties_and_bias(x, out, size, repetition, frequency, presence, counts, bias):
    """Apply the penalties and the bias of a request; `counts` and `bias` are 0 if it has none."""
    for i in range(size):
        value = load_float32(x, i)
        if counts:
            count = load_int32(counts, i)
            output_count = numba.float32(count >> 1)
            if count & 1:
                value = value / repetition if value > 0 else value * repetition
            value = value - frequency * output_count
            value = value - (presence if count >> 1 > 0 else numba.float32(0.0))
        if bias:
            value = value + load_float32(bias, i)
        store_float32(out, i, value if load_float32(x, i) < _INFINITE else numba.float32(_INFINITE))


@subroutine
def _mask_token(out, token):
    """Set a token's logit to -inf. NaN and infinities stay: forbidding a token must not hide that the model failed."""
    if load_float32(out, token) < _INFINITE:
        store_float32(out, token, -_INFINITE)


@subroutine
def _apply_bitmask(out, size, mask):
    for i in range(size):
        if not (load_int32(mask, i >> 5) >> (i & 31)) & 1:
            _mask_token(out, i)


@task
def _sample_rows(a):
    logits, stride, size, slots = argument(a, 0), argument(a, 1), argument(a, 2), argument(a, 3)
    positions, position_bytes = argument(a, 4), argument(a, 5)
    floats, ints, longs, columns = argument(a, 6), argument(a, 7), argument(a, 8), argument(a, 9)
    suppressed_ids, counts, bias = argument(a, 10), argument(a, 11), argument(a, 12)
    masks, mask_stride, workspaces, num_workspaces = argument(a, 13), argument(a, 14), argument(a, 15), argument(a, 16)
    out, num_rows = argument(a, 17), argument(a, 18)
    thread, threads = thread_and_count(a)
    threads = min(threads, num_workspaces)  # more threads would have no memory to work in
    workspace = workspaces + thread * 3 * size * BYTES
    for row in range(num_rows * min(thread, threads) // threads, num_rows * min(thread + 1, threads) // threads):
        slot = load_int32(slots, row)
        if slot < 0:
            store_int64(out, row, NO_TOKEN)
            continue
        x = logits + row * stride * BYTES
        position = load_int64(positions, row) if position_bytes == 8 else load_int32(positions, row)
        repetition, frequency = (
            load_float32(floats, _REPETITION * columns + slot),
            load_float32(floats, _FREQUENCY * columns + slot),
        )
        presence, rule = load_float32(floats, _PRESENCE * columns + slot), load_int32(ints, _RULE * columns + slot)
        is_penalised = repetition != 1 or frequency != 0 or presence != 0
        is_suppressed = position < load_int64(longs, _MIN_TOKENS_UNTIL * columns + slot)
        if is_penalised or rule >= 0 or is_suppressed or masks:
            _apply_penalties_and_bias(
                x, workspace, size, repetition, frequency, presence,
                counts + slot * size * BYTES if is_penalised else 0, bias + rule * size * BYTES if rule >= 0 else 0,
            )  # fmt: skip
            x = workspace
            if is_suppressed:
                for index in range(slot * SUPPRESSED_IDS_MAX, (slot + 1) * SUPPRESSED_IDS_MAX):
                    if load_int32(suppressed_ids, index) >= 0:
                        _mask_token(x, load_int32(suppressed_ids, index))
            if masks:
                _apply_bitmask(x, size, masks + row * mask_stride * BYTES)
        token = _argmax(x, size)
        scale = load_float32(floats, _SCALE * columns + slot)
        if token != NO_TOKEN and scale > 0:
            key = noise_key(load_int64(longs, _STREAM * columns + slot), position)
            # not -0.0: 0.0 would be -0.0 below it, whose bits are out of order
            row_max = load_float32(x, token) + numba.float32(0.0)
            token = _draw(
                x, size, row_max, scale, load_int32(ints, _TOP_K * columns + slot),
                load_float32(floats, _TOP_P * columns + slot), load_float32(floats, _NEG_LOG2_MIN_P * columns + slot),
                load_float32(floats, _TYPICAL_P * columns + slot), key, workspace + size * BYTES,
            )  # fmt: skip
        store_int64(out, row, token)


@entry(22)
def _run(
    pool, threads, task, logits, stride, size, slots, positions, position_bytes, floats, ints, longs, columns,
    suppressed_ids, counts, bias, masks, mask_stride, workspaces, num_workspaces, out, num_rows,
):  # fmt: skip
    run(
        pool, threads, task,
        (logits, stride, size, slots, positions, position_bytes, floats, ints, longs, columns,
         suppressed_ids, counts, bias, masks, mask_stride, workspaces, num_workspaces, out, num_rows),
    )  # fmt: skip


_sample = Launch(_run, _sample_rows, num_rows_at=18)

_OPERATIONS_PER_LOGIT = 16
"""Approximate work of a row, in operations per logit."""


def sampling_workspace(max_rows: int, vocab_size: int, device: torch.device) -> torch.Tensor:
    """Scratch memory per thread for an adjusted row, distances and weights; unused parts take no memory."""
    return torch.empty(max(os.cpu_count() or 1, torch.get_num_threads()), 3, vocab_size)


def sample(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    columns: SamplingColumns,
    *,
    masks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    weighs: bool = True,
) -> torch.Tensor:
    """Next token of each row, or NO_TOKEN: [R] int64

    logits: [R, V] float32, not changed; slots: [R] int32, below 0 is padding; positions: [R] int32 or int64, index of the
    token in prompt plus output; masks: [R, ceil(V / 32)] int32, bit b of word w allows token 32 w + b
    """
    num_rows, vocab_size = logits.shape
    scratch = sampling_workspace(num_rows, vocab_size, logits.device) if workspace is None else workspace
    tokens = torch.empty(num_rows, dtype=torch.int64) if out is None else out
    assert logits.dtype is torch.float32
    assert slots.dtype is torch.int32
    _sample(
        logits.numel() * _OPERATIONS_PER_LOGIT if num_rows > 1 else 0,
        logits.data_ptr(),
        logits.stride(0),
        vocab_size,
        slots.data_ptr(),
        positions.data_ptr(),
        positions.element_size(),
        columns.floats.data_ptr(),
        columns.ints.data_ptr(),
        columns.longs.data_ptr(),
        columns.floats.stride(0),
        columns.suppressed_ids.data_ptr(),
        columns.counts.data_ptr(),
        columns.bias.data_ptr(),
        0 if masks is None else masks.data_ptr(),
        0 if masks is None else masks.stride(0),
        scratch.data_ptr(),
        scratch.shape[0],
        tokens.data_ptr(),
        num_rows,
    )
    return tokens
