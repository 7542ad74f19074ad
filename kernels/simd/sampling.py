"""The sampler of each row's next token, with parameters in `SamplingColumns`: the same tokens as `kernels.cpu.sampling`.

    logits ─► the request's changes (in a copy of the row, if there are any) ─► the first of the largest
        ─► distances below it ─► the limits of top-k and top-p, each the smallest distance that leaves enough
        ─► of what min-p leaves too, the same by distances from their mean: typical sampling ─► Gumbel-max

Such a limit is found in three passes over the row. Distances are not negative, so their bits are in their order, and the sums
of the weights in each of 2048 ranges of bits tell which range contains the limit (a radix select). Reads a row once or, with
filters, up to fifteen times from the cache.
"""

from __future__ import annotations

import math
import os

import numba
import torch

from kernels.gumbel import FARTHEST, NO_TOKEN
from kernels.sampling_columns import SUPPRESSED_IDS_MAX, SamplingColumns
from kernels.simd.compiling import entry, part, task
from kernels.simd.gumbel import gumbel_noise, key_of, times, weights
from kernels.simd.launching import Launch
from kernels.simd.threads import argument, member, run
from kernels.simd.vectors import (
    BYTES,
    LANES,
    first_lanes,
    get,
    get_int32,
    get_int64,
    load_part,
    put,
    put_int64,
    splat,
    stack,
    store,
    store_part,
    total,
    where_less,
)

_SCALE, _TOP_P, _NEG_LOG2_MIN_P, _TYPICAL_P, _REPETITION, _FREQUENCY, _PRESENCE = range(7)
_TOP_K, _RULE = range(2)
_STREAM, _MIN_TOKENS_UNTIL = range(2)

_INFINITE = math.inf
_RANGES = 2048
_lanes = stack(2 * LANES)
_sums = stack(2 * _RANGES)
_one = stack(2)


@part
def _splat(number):
    return splat(numba.float32(number))


@part
def _end_of(x, i, size, other):
    """LANES numbers from element i on, with `other` beyond the end of the row."""
    value = load_part(x, i, size)
    return value if size - i >= LANES else first_lanes(value, size - i, other)


@part
def _winner(best, places):
    """The token with the largest score, the lowest on ties: `places` are those of the first lanes, -1 is none."""
    room, chosen, most = _lanes(), NO_TOKEN, numba.float32(-_INFINITE)
    store(room, 0, best)
    store(room, LANES, places)
    for lane in range(LANES):
        score, place = get(room, lane), get(room, LANES + lane)
        token = numba.int64(place) + lane
        if place >= 0 and (score > most or (score == most and token < chosen)):
            chosen, most = token, score
    return chosen


@part
def _first_largest(x, size):
    """The first of the largest numbers of a row; NO_TOKEN if one is NaN or infinite, or none is above -inf."""
    lowest, zero, highest = _splat(-_INFINITE), _splat(0.0), _splat(_INFINITE)
    best, places, poison = lowest, _splat(-1.0), zero
    for i in range(0, size, LANES):
        value = _end_of(x, i, size, lowest)
        poison = where_less(value, highest, poison, value)
        places = where_less(best, value, _splat(i), places)
        best = where_less(best, value, value, best)
    return _winner(best, places) if math.isfinite(total(poison)) else NO_TOKEN


@part
def _measure(x, out, weighed, size, most, scale):
    """out = most - x; and the weight of each into `weighed`, if that has memory."""
    for i in range(0, size, LANES):
        distance = _splat(most) - load_part(x, i, size)
        store_part(out, i, size, distance)
        if weighed:
            store_part(weighed, i, size, weights(times(distance, scale)))


@part
def _total_weight(distances, weighed, size, limit):
    """The weight of all tokens no farther than `limit`."""
    found = 0
    for i in range(size):
        if get(distances, i) <= limit:
            found += get_int32(weighed, i)
    return found


@part
def _limit(distances, weighed, size, target):
    """The smallest distance up to which the weights (all 1 without `weighed`) sum up to `target`; the largest if none does."""
    sums, found, left = _sums(), 0, target
    for level in range(3):
        shift, ranges = 20 - 10 * level, _RANGES if level == 0 else _RANGES // 2
        width = 11 if level == 0 else 10
        for index in range(ranges):
            put_int64(sums, index, 0)
        for i in range(size):
            bits = get_int32(distances, i)
            if bits >> (shift + width) == found:
                index = (bits >> shift) & (ranges - 1)
                put_int64(sums, index, get_int64(sums, index) + (get_int32(weighed, i) if weighed else 1))
        index = 0
        while get_int64(sums, index) < left and index < ranges - 1:
            left -= get_int64(sums, index)
            index += 1
        found = (found << width) | index
    room = _one()
    put_int64(room, 0, found)
    return get(room, 0)


@part
def _gumbel_max(x, size, scale, key, most, limit, neg_log2_min_p):
    """The token drawn among those whose distance below the largest logit is within the limits."""
    lowest = _splat(-_INFINITE)
    best, places = lowest, _splat(-1.0)
    for i in range(0, size, LANES):
        value = _end_of(x, i, size, lowest)
        score = times(value, scale) + gumbel_noise(i, key)
        distance = _splat(most) - value
        score = where_less(_splat(limit), distance, lowest, score)
        score = where_less(_splat(neg_log2_min_p), times(distance, scale), lowest, score)
        places = where_less(best, score, _splat(i), places)
        best = where_less(best, score, score, best)
    return _winner(best, places)


@part
def _share(part_of_it, whole):
    """The least weight that counts as this part of the whole."""
    return max(1, numba.int64(math.ceil(numba.float64(part_of_it) * numba.float64(whole))))


@part
def _leave_typical(x, distances, weighed, size, scale, typical_p, limit, neg_log2_min_p):
    """Of the tokens within the limits keep those nearest to their mean: `weighed` gets the row's logits without the others."""
    whole, moments = 0, 0
    for i in range(size):
        distance = get(distances, i)
        if distance <= limit and distance * scale <= neg_log2_min_p:
            weight = get_int32(weighed, i)
            whole += weight
            moments += numba.int64(numba.float32(weight) * min(distance * scale, numba.float32(FARTHEST)))
        else:
            put(weighed, i, numba.float32(0.0))
    centre = numba.float32(numba.float64(moments) / numba.float64(whole) / numba.float64(scale))
    for i in range(size):
        put(distances, i, abs(get(distances, i) - centre))
    nearest = _limit(distances, weighed, size, _share(typical_p, whole))
    for i in range(size):
        put(weighed, i, get(x, i) if get(distances, i) <= nearest else numba.float32(-_INFINITE))


@part
def _drawn(x, size, most, scale, top_k, top_p, neg_log2_min_p, typical_p, key, room):
    """Draw a row's token. `room` has space for two rows."""
    limit = numba.float32(_INFINITE)
    if (0 < top_k < size) or top_p < 1 or typical_p < 1:
        weighed = room + size * BYTES if top_p < 1 or typical_p < 1 else 0
        _measure(x, room, weighed, size, most, scale)
        if 0 < top_k < size:
            limit = _limit(room, 0, size, top_k)
        if top_p < 1:
            target = _share(top_p, _total_weight(room, weighed, size, limit))
            limit = min(limit, _limit(room, weighed, size, target))
        if typical_p < 1:
            _leave_typical(x, room, weighed, size, scale, typical_p, limit, neg_log2_min_p)
            x = weighed
    return _gumbel_max(x, size, scale, key, most, limit, neg_log2_min_p)


@part
def _change(x, out, size, repetition, frequency, presence, counts, bias):
    """Apply penalties and bias of a request; 0 stands for no counts, or no bias."""
    for i in range(size):
        value = get(x, i)
        if counts:
            count = get_int32(counts, i)
            times_out = numba.float32(count >> 1)
            if count & 1:
                value = value / repetition if value > 0 else value * repetition
            value = value - frequency * times_out
            value = value - (presence if count >> 1 > 0 else numba.float32(0.0))
        if bias:
            value = value + get(bias, i)
        put(out, i, value if get(x, i) < _INFINITE else numba.float32(_INFINITE))


@part
def _forbid(out, token):
    """Forbid a token. NaN and infinities stay: forbidding a token must not hide that the model failed."""
    if get(out, token) < _INFINITE:
        put(out, token, numba.float32(-_INFINITE))


@part
def _forbid_by_mask(out, size, mask):
    for i in range(size):
        if not (get_int32(mask, i >> 5) >> (i & 31)) & 1:
            _forbid(out, i)


@task
def _rows(a):
    logits, stride, size, slots = argument(a, 0), argument(a, 1), argument(a, 2), argument(a, 3)
    positions, position_bytes = argument(a, 4), argument(a, 5)
    floats, ints, longs, columns = argument(a, 6), argument(a, 7), argument(a, 8), argument(a, 9)
    suppressed_ids, counts, bias = argument(a, 10), argument(a, 11), argument(a, 12)
    masks, mask_stride, rooms, num_rooms = argument(a, 13), argument(a, 14), argument(a, 15), argument(a, 16)
    out, num_rows = argument(a, 17), argument(a, 18)
    thread, threads = member(a)
    threads = min(threads, num_rooms)  # more threads would have no memory to work in
    room = rooms + thread * 3 * size * BYTES
    for row in range(num_rows * min(thread, threads) // threads, num_rows * min(thread + 1, threads) // threads):
        slot = get_int32(slots, row)
        if slot < 0:
            put_int64(out, row, NO_TOKEN)
            continue
        x = logits + row * stride * BYTES
        position = get_int64(positions, row) if position_bytes == 8 else get_int32(positions, row)
        repetition, frequency = get(floats, _REPETITION * columns + slot), get(floats, _FREQUENCY * columns + slot)
        presence, rule = get(floats, _PRESENCE * columns + slot), get_int32(ints, _RULE * columns + slot)
        is_penalised = repetition != 1 or frequency != 0 or presence != 0
        is_suppressed = position < get_int64(longs, _MIN_TOKENS_UNTIL * columns + slot)
        if is_penalised or rule >= 0 or is_suppressed or masks:
            _change(
                x, room, size, repetition, frequency, presence,
                counts + slot * size * BYTES if is_penalised else 0, bias + rule * size * BYTES if rule >= 0 else 0,
            )  # fmt: skip
            x = room
            if is_suppressed:
                for index in range(slot * SUPPRESSED_IDS_MAX, (slot + 1) * SUPPRESSED_IDS_MAX):
                    if get_int32(suppressed_ids, index) >= 0:
                        _forbid(x, get_int32(suppressed_ids, index))
            if masks:
                _forbid_by_mask(x, size, masks + row * mask_stride * BYTES)
        token = _first_largest(x, size)
        scale = get(floats, _SCALE * columns + slot)
        if token != NO_TOKEN and scale > 0:
            key = key_of(get_int64(longs, _STREAM * columns + slot), position)
            most = get(x, token) + numba.float32(0.0)  # not -0.0: 0.0 would be -0.0 below it, whose bits are out of order
            token = _drawn(
                x, size, most, scale, get_int32(ints, _TOP_K * columns + slot), get(floats, _TOP_P * columns + slot),
                get(floats, _NEG_LOG2_MIN_P * columns + slot), get(floats, _TYPICAL_P * columns + slot), key,
                room + size * BYTES,
            )  # fmt: skip
        put_int64(out, row, token)


@entry(22)
def _run(
    pool, threads, task, logits, stride, size, slots, positions, position_bytes, floats, ints, longs, columns,
    suppressed_ids, counts, bias, masks, mask_stride, rooms, num_rooms, out, num_rows,
):  # fmt: skip
    run(
        pool, threads, task,
        (logits, stride, size, slots, positions, position_bytes, floats, ints, longs, columns,
         suppressed_ids, counts, bias, masks, mask_stride, rooms, num_rooms, out, num_rows),
    )  # fmt: skip


_choose = Launch(_run, _rows, rows_at=18)

_PASSES = 16
"""Approximate work of a row, in operations per number."""


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
    room = sampling_workspace(num_rows, vocab_size, logits.device) if workspace is None else workspace
    chosen = torch.empty(num_rows, dtype=torch.int64) if out is None else out
    assert logits.dtype is torch.float32
    assert slots.dtype is torch.int32
    _choose(
        logits.numel() * _PASSES if num_rows > 1 else 0,
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
        room.data_ptr(),
        room.shape[0],
        chosen.data_ptr(),
        num_rows,
    )
    return chosen
