"""The sampler by its definition, row by row and with sorts: rules, filters, Gumbel-max."""

from __future__ import annotations

import math

import torch

from kernels import gumbel
from kernels.gumbel import NO_TOKEN
from kernels.sampling_columns import SamplingColumns


def sample(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    columns: SamplingColumns,
    *,
    masks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Next token of each row, or NO_TOKEN: [R] int64

    logits: [R, V]; slots: [R] int, -1 is padding; positions: [R], index of the token in prompt plus output;
    masks: [R, ceil(V / 32)] int32, bit b of word w allows token 32 w + b
    """
    chosen = []
    for row, slot in enumerate(slots.tolist()):
        mask = None if masks is None else masks[row]
        chosen.append(NO_TOKEN if slot < 0 else _sample_row(logits[row].float(), slot, positions[row], columns, mask))
    return torch.tensor(chosen, dtype=torch.int64, device=logits.device)


def adjusted(
    logits: torch.Tensor, slot: int, position: int, columns: SamplingColumns, mask: torch.Tensor | None
) -> torch.Tensor:
    """One row after penalties, bias, suppressed ids and the grammar: [V]. NaN and +inf stay as they are."""
    values = logits.clone()
    occurs, output_count = columns.counts[slot] & 1, columns.counts[slot] >> 1
    repetition = columns.repetition[slot]
    values = torch.where(occurs > 0, torch.where(values > 0, values / repetition, values * repetition), values)
    values = values - columns.frequency[slot] * output_count.float()
    values = values - torch.where(output_count > 0, columns.presence[slot], 0.0)
    rule = int(columns.rules[slot])
    if rule >= 0:
        values = values + columns.bias[rule]
    if position < int(columns.min_tokens_until[slot]):
        suppressed_ids = columns.suppressed_ids[slot]
        values[suppressed_ids[suppressed_ids >= 0].long()] = -math.inf
    if mask is not None:
        ids = torch.arange(len(values), device=values.device)
        values = torch.where((mask[ids // 32] >> (ids % 32)) & 1 > 0, values, -math.inf)
    return torch.where(logits.isnan() | (logits == math.inf), math.inf, values)


def _sample_row(
    logits: torch.Tensor, slot: int, position: torch.Tensor, columns: SamplingColumns, mask: torch.Tensor | None
) -> int:
    values = adjusted(logits, slot, int(position), columns, mask)
    largest = values.max()
    if not math.isfinite(largest):
        return NO_TOKEN
    scale = columns.scale[slot]
    if scale == 0:
        return int((values == largest).nonzero()[0])
    filters = int(columns.top_k[slot]), columns.top_p[slot], columns.neg_log2_min_p[slot], columns.typical_p[slot]
    kept = filter_mask(largest - values, scale, *filters)
    key = gumbel.keys(columns.streams[slot][None], position[None])
    ids = torch.arange(len(values), device=values.device)
    score = values * scale + gumbel.noise(key, ids[None])[0]
    score = torch.where(kept & (values > -math.inf), score, -math.inf)
    return int((score == score.max()).nonzero()[0])


def filter_mask(
    distance: torch.Tensor,
    scale: torch.Tensor,
    top_k: int,
    top_p: torch.Tensor,
    neg_log2_min_p: torch.Tensor,
    typical_p: torch.Tensor,
) -> torch.Tensor:
    """The mask of tokens that the filters leave: [V] bool. Ties are kept or dropped together.

    distance: [V] ≥ 0, how far a logit is below the largest. top-k is applied first, then top-p: the smallest set whose
    weight reaches top_p of what top-k has kept; then min-p; then, of the rest, the most typical tokens whose weight reaches
    typical_p of its weight.
    """
    kept = torch.ones_like(distance, dtype=torch.bool)
    if 0 < top_k < len(distance):
        kept = distance <= distance.sort().values[top_k - 1]
    if top_p < 1:
        kept = kept & _reaching(distance, torch.where(kept, gumbel.weights(distance * scale), 0), top_p)
    kept = kept & (distance * scale <= neg_log2_min_p)
    if typical_p < 1:
        weight = torch.where(kept, gumbel.weights(distance * scale), 0)
        kept = kept & _reaching(gumbel.deviations(distance, weight, scale), weight, typical_p)
    return kept


def _reaching(distance: torch.Tensor, weight: torch.Tensor, fraction: torch.Tensor) -> torch.Tensor:
    """The mask of the nearest tokens whose total weight reaches `fraction` of the whole: [V] bool"""
    target = max(1, math.ceil(float(fraction.double() * weight.sum().double())))
    order = distance.sort(stable=True).indices
    reached = weight[order].cumsum(0) >= target
    return distance <= distance[order][reached.int().argmax()]
