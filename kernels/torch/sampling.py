"""The sampler in torch operations, for CPUs and as the plain twin on a GPU: the same tokens as `kernels.triton.sampling`.

Filters search among a row's most likely tokens, of which a few are enough for trained models; only rows whose filter reaches
beyond them get more. Rows without filters take part in Gumbel-max with all tokens: an upper bound of every score shows which
few scores have to be computed exactly.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels import gumbel
from kernels.gumbel import NO_TOKEN
from kernels.sampling_columns import SamplingColumns

CANDIDATE_STAGES = (64, 1024)
"""Sizes of the partial top-k, increased only for rows whose own filter reaches beyond it; then the whole vocabulary. A partial
top-k of 64 costs a third of one of 256, and trained models rarely keep more."""

SORT_ELEMENTS = 1 << 17
"""Logits that are sorted at a time, in whole rows; sorting takes some twenty times their memory."""

SLICE_ELEMENTS = 1 << 16
"""Noise that a CPU generates at a time: it is read a dozen times, so it should stay in the second-level cache."""

_INFINITE = float("inf")
_NO_ID = 2**31 - 1  # above all ids: a minimum over ids ignores it
_SUM_ERROR = 4e-6  # largest relative error of the sum of float32 weights


class Filters(NamedTuple):
    """Filters of B rows, [B] each: top_k int64 (0 is off), top_p, neg_log2_min_p and typical_p float32 (1, inf, 1 are off)."""

    top_k: torch.Tensor
    top_p: torch.Tensor
    neg_log2_min_p: torch.Tensor
    typical_p: torch.Tensor

    def rows(self, index: torch.Tensor) -> Filters:
        return Filters(*(each[index] for each in self))


class Candidates(NamedTuple):
    """Tokens of some rows: `rows` [b] int64, the indices of these among all; ids and logits [b, C]; `kept` [b, C] bool, by the
    filters."""

    rows: torch.Tensor
    ids: torch.Tensor
    logits: torch.Tensor
    kept: torch.Tensor


def draw(logits: torch.Tensor, scale: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The token with the largest noisy score (Gumbel-max) of each row, of all its tokens: [B] int64

    logits: [B, V] float32 with finite largest; scale: [B] float32, log2(e) / temperature; keys: [B] int64
    """
    size = max(1, SLICE_ELEMENTS // logits.shape[1]) if logits.device.type == "cpu" else len(logits)
    chunks = [slice(begin, begin + size) for begin in range(0, len(logits), size)]
    return torch.cat([_draw(logits[chunk], scale[chunk], keys[chunk]) for chunk in chunks])


def _draw(logits: torch.Tensor, scale: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    bounds = _gumbel_bounds(keys, logits.shape[1]).addcmul_(logits, scale[:, None])
    first = largest(bounds)[1][:, None]
    values = logits.gather(1, first)
    _, score = winner(first, values, values > -_INFINITE, scale, keys)
    slack = (values[:, 0].abs() * scale + 64.0) * 2.0**-22  # bounds may be rounded once where scores are rounded twice
    rows, ids = _indices_reaching(bounds, (score - slack)[:, None])
    values = logits[rows, ids]
    scores = values * scale[rows] + gumbel.noise(keys[rows], ids[:, None])[:, 0]
    best = score.scatter_reduce(0, rows, scores, "amax")
    is_best = scores == best[rows]
    no_ids = torch.full_like(keys, _NO_ID)
    return no_ids.scatter_reduce(0, rows[is_best], ids[is_best], "amin")


def _gumbel_bounds(key: torch.Tensor, num_ids: int) -> torch.Tensor:
    """Upper bounds of `gumbel.noise` for the ids below `num_ids`, close to it where noise is large: [R, num_ids] float32

    In 32 bits and in place, for whole vocabularies: E ≥ bits / 2^32 · log2(e).
    """
    low = (key << 32 >> 32).int()[:, None]
    high = (key >> 32).int()[:, None]
    x = torch.arange(num_ids, dtype=torch.int32, device=key.device)[None].mul_(_int32(gumbel.TOKEN_STEP)) + low
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    x *= _int32(gumbel.HASH_1)
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    x += high
    x *= _int32(gumbel.HASH_2)
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    # One bit less, to make it a positive number. Between powers of two the bit pattern of a float is linear, and its logarithm
    # is above that line; 31.4725 is 32 − log2(log2(e)), and 0.001 allows for rounding.
    pattern = (x >> 1).bitwise_and_(0x7FFFFFFF).float().view(torch.int32)
    return pattern.float().mul_(-(2.0**-23)).add_(31.4725 - 1 + 127)


def _int32(number: int) -> int:
    return number - 2**32 if number >= 2**31 else number


def draw_weighted(weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """As `draw`, but by weights instead of logits, the largest weight / E: [B] int64, NO_TOKEN if they have no usable sum.

    weights: [B, V] float32 ≥ 0, in proportion to the probabilities
    """
    ids = torch.arange(weights.shape[1], device=weights.device)
    score = weights / gumbel.exponential(gumbel.bits(keys, ids[None]))
    total = weights.sum(dim=-1)
    best = score.amax(dim=-1, keepdim=True)
    chosen = ids.expand_as(score).masked_fill(score != best, _NO_ID).amin(dim=-1)
    return torch.where(total.isfinite() & (best[:, 0] > 0), chosen, NO_TOKEN)


def largest(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest of each row of values, [B, V], NaN if one of them is, and its index, the first on ties: [B] each

    On a CPU numpy takes a fifth of torch's time."""
    if values.device.type != "cpu":
        return values.max(dim=-1)
    indices = torch.from_numpy(values.numpy().argmax(axis=-1))
    return values.gather(1, indices[:, None])[:, 0], indices


def _indices_reaching(values: torch.Tensor, limits: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Rows and columns of the values that reach the limit of their row; limits: [B, 1]"""
    if values.device.type == "cpu":
        return tuple(torch.from_numpy(indices) for indices in (values.numpy() >= limits.numpy()).nonzero())
    return (values >= limits).nonzero(as_tuple=True)


def winner(
    ids: torch.Tensor, logits: torch.Tensor, kept: torch.Tensor, scale: torch.Tensor, keys: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The id with the largest score among the kept ones, the lowest on ties: [B] int64, and its score [B]

    ids: [B or 1, C], logits: [B, C] float32, kept: [B, C] bool, at least one in each row
    """
    score = (logits * scale[:, None] + gumbel.noise(keys, ids)).masked_fill_(~kept, -_INFINITE)
    best = score.amax(dim=-1)
    return ids.expand_as(score).masked_fill(score != best[:, None], _NO_ID).amin(dim=-1), best


def candidates(logits: torch.Tensor, scale: torch.Tensor, filters: Filters) -> list[Candidates]:
    """The tokens of every row that the filters keep, grouped by how many most likely tokens a row needed.

    logits: [B, V] float32 with finite largest
    """
    vocab_size = logits.shape[1]
    pending = torch.arange(len(logits), device=logits.device)
    groups: list[Candidates] = []
    for count in (stage for stage in CANDIDATE_STAGES if stage < vocab_size):
        pending_logits = logits if len(pending) == len(logits) else logits[pending]
        group, is_open = _candidates(pending_logits, scale[pending], filters.rows(pending), count)
        still_open = is_open.nonzero()[:, 0]
        if not len(still_open):
            return [*groups, group._replace(rows=pending)]
        done = (~is_open).nonzero()[:, 0]
        if len(done):
            groups.append(Candidates(pending[done], group.ids[done], group.logits[done], group.kept[done]))
        pending = pending[still_open]
    for rows in torch.split(pending, max(1, SORT_ELEMENTS // vocab_size)):
        group, _ = _candidates(logits[rows], scale[rows], filters.rows(rows), vocab_size)
        groups.append(group._replace(rows=rows))
    return groups


def _candidates(logits: torch.Tensor, scale: torch.Tensor, filters: Filters, count: int) -> tuple[Candidates, torch.Tensor]:
    """Candidates among the `count` most likely tokens; and [B] bool: whether a token beyond these might be kept too."""
    values, ids = logits.topk(count, dim=-1)
    distance = values[:, :1] - values
    orders = distance * scale[:, None]
    kept = values > -_INFINITE
    has_top_k = (filters.top_k > 0) & (filters.top_k < logits.shape[1])
    is_open = has_top_k & (filters.top_k > count)
    last = (filters.top_k - 1).clamp(min=0, max=count - 1)[:, None]
    kept &= (distance <= distance.gather(1, last)) | ~has_top_k[:, None]
    has_top_p = filters.top_p < 1
    if bool(has_top_p.any()):
        weights = gumbel.weights(orders) * kept
        cumulative = weights.cumsum(dim=-1)
        total = torch.where(has_top_k, cumulative[:, -1], 0)
        needs_total = has_top_p & ~has_top_k
        if bool(needs_total.any()):
            total = torch.where(needs_total, _totals(logits, values[:, :1], scale, filters.top_p, cumulative), total)
        target = _targets(filters.top_p, total)
        is_below = cumulative < target[:, None]
        is_open |= has_top_p & is_below[:, -1]
        cut = is_below.sum(dim=-1, keepdim=True).clamp_(max=count - 1)
        kept &= (distance <= distance.gather(1, cut)) | ~has_top_p[:, None]
    kept &= orders <= filters.neg_log2_min_p[:, None]
    is_open |= kept[:, -1]  # ties with the last one, or any token after it
    is_typical = filters.typical_p < 1
    if bool(is_typical.any()):
        weights = gumbel.weights(orders) * kept
        deviation, order = gumbel.deviations(distance, weights, scale[:, None]).sort(dim=-1)
        is_below = weights.gather(1, order).cumsum(dim=-1) < _targets(filters.typical_p, weights.sum(dim=-1))[:, None]
        last = deviation.gather(1, is_below.sum(dim=-1, keepdim=True).clamp_(max=count - 1))
        kept &= torch.empty_like(kept).scatter_(1, order, deviation <= last) | ~is_typical[:, None]
    rows = torch.arange(len(logits), device=logits.device)
    return Candidates(rows, ids, values, kept), is_open


def _targets(top_p: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """⌈top_p · total⌉, at least 1: [B] int64"""
    return (top_p.double() * total.double()).ceil().long().clamp_(min=1)


def _totals(
    logits: torch.Tensor, largest: torch.Tensor, scale: torch.Tensor, top_p: torch.Tensor, cumulative: torch.Tensor
) -> torch.Tensor:
    """The weight of each row, or a number that cuts `cumulative` at the same index: [B] int64

    The sum of float32 weights costs a third of the sum of integers, each of which loses up to one. It is enough unless a cut is
    within its error.
    """
    approximate = ((logits - largest) * (scale[:, None] * 0.6931471805599453)).exp_().sum(dim=-1).double() * 2.0**30
    low = _targets(top_p, (approximate * (1 - _SUM_ERROR) - logits.shape[1]).long())
    high = _targets(top_p, (approximate * (1 + _SUM_ERROR)).long())
    uncertain = ((cumulative < low[:, None]).sum(dim=-1) != (cumulative < high[:, None]).sum(dim=-1)).nonzero()[:, 0]
    totals = approximate.long()
    if len(uncertain):
        totals[uncertain] = gumbel.weights((largest[uncertain] - logits[uncertain]) * scale[uncertain, None]).sum(dim=-1)
    return totals


def sample(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    columns: SamplingColumns,
    *,
    masks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    workspace: None = None,  # noqa: ARG001 - kernels have one
    weighs: bool = True,  # noqa: ARG001 - this implementation computes only what is needed
) -> torch.Tensor:
    """As `kernels.triton.sampling.sampler.sample`. Reads slots on the host, so it cannot be part of a graph."""
    tokens = torch.full((len(slots),), NO_TOKEN, dtype=torch.int64, device=logits.device)
    active_rows = [row for row, slot in enumerate(slots.tolist()) if slot >= 0]
    if active_rows:
        rows = torch.tensor(active_rows, device=logits.device)
        active_logits = logits.float().clone() if len(active_rows) == len(slots) else logits[rows].float()
        _adjust(active_logits, slots[rows].tolist(), positions[rows].tolist(), columns, None if masks is None else masks[rows])
        tokens[rows] = _sample(active_logits, slots[rows].long(), positions[rows].long(), columns)
    return tokens if out is None else out.copy_(tokens)


def _adjust(
    values: torch.Tensor, slots: list[int], positions: list[int], columns: SamplingColumns, masks: torch.Tensor | None
) -> None:
    """Penalties, bias, suppressed ids and the grammar, in place; NaN and +inf become +inf. values: [B, V]"""
    is_invalid = values.isnan() | (values == _INFINITE)
    for row, (slot, position) in enumerate(zip(slots, positions, strict=True)):
        repetition, frequency, presence = columns.repetition[slot], columns.frequency[slot], columns.presence[slot]
        if repetition != 1 or frequency != 0 or presence != 0:
            value, count = values[row], columns.counts[slot]
            output_count = (count >> 1).float()
            value = torch.where((count & 1) > 0, torch.where(value > 0, value / repetition, value * repetition), value)
            values[row] = value - frequency * output_count - torch.where(output_count > 0, presence, 0.0)
        rule = int(columns.rules[slot])
        if rule >= 0:
            values[row] += columns.bias[rule]
        if position < int(columns.min_tokens_until[slot]):
            suppressed_ids = columns.suppressed_ids[slot]
            values[row].index_fill_(0, suppressed_ids[suppressed_ids >= 0].long(), -_INFINITE)
    if masks is not None:
        ids = torch.arange(values.shape[1], device=values.device)
        allowed = (masks[:, ids // 32] >> (ids % 32)) & 1
        values.masked_fill_(allowed == 0, -_INFINITE)
    values.masked_fill_(is_invalid, _INFINITE)


def _sample(values: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, columns: SamplingColumns) -> torch.Tensor:
    maxima, tokens = largest(values)
    usable = maxima.isfinite()
    scale = columns.scale[slots]
    thresholds = (columns.top_p, columns.neg_log2_min_p, columns.typical_p)
    filters = Filters(columns.top_k[slots].long(), *(column[slots] for column in thresholds))
    is_plain = ((filters.top_k == 0) | (filters.top_k >= values.shape[1])) & (filters.top_p >= 1)
    is_plain &= (filters.neg_log2_min_p == _INFINITE) & (filters.typical_p >= 1)
    is_sampled = usable & (scale > 0)
    keys = gumbel.keys(columns.streams[slots], positions)
    unfiltered = (is_sampled & is_plain).nonzero()[:, 0]
    if len(unfiltered):
        tokens[unfiltered] = draw(values[unfiltered], scale[unfiltered], keys[unfiltered])
    filtered = (is_sampled & ~is_plain).nonzero()[:, 0]
    if len(filtered):
        for group in candidates(values[filtered], scale[filtered], filters.rows(filtered)):
            rows = filtered[group.rows]
            tokens[rows] = winner(group.ids, group.logits, group.kept, scale[rows], keys[rows])[0]
    return torch.where(usable, tokens, NO_TOKEN)
