"""Chooses the next token of each row of logits. The choice depends only on the row's logits, parameters, seed and position.

rules (`sampling.logits_rules`) ─► grammar mask ─► largest logit, or temperature ─► filters (`sampling.logits_filters`) ─► draw

Greedy rows take the largest logit, the lowest id on ties. Others are drawn by Gumbel-max (`kernels.gumbel`): every token that
may be drawn gets its own noise from (seed, position, token), and the largest sum of logit and noise wins. Candidates come from
a partial top-k; only rows whose filter reaches beyond it are sorted in full. A row without a finite maximum, or without a token
to draw, fails alone. Log-probabilities are the model's own, before all of this.

This is the plain twin of the kernels that choose on a GPU: both draw exactly the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.protocol import SamplingParams, TokenLogprob
from engine.sampling.logits_filters import is_filtered, is_greedy, neg_log2_min_p_of, scale_of
from engine.sampling.logits_rules import LogitsRules, SampledRow, has_rules
from engine.sampling.logprobs import token_logprobs
from engine.sampling.randomness import key, signed
from kernels.ops import NO_TOKEN, plain_sampling

NOT_FINITE = "the model computed logits that are not finite for this request"
NOTHING_ALLOWED = "every token is forbidden here by parameters of the request (guided decoding, bad_words, min_tokens)"


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The choice for one row of logits, or why there is none. `error_param` names the field that forbade every token."""

    token_id: int | None = None
    logprob: TokenLogprob | None = None
    error: str | None = None
    error_param: str | None = None


class Sampler:
    """Sampling for one engine; its only state is the token counts of live requests."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rules = LogitsRules(device)

    def sample(self, logits: torch.Tensor, rows: Sequence[SampledRow], masks: torch.Tensor | None = None) -> list[SampledToken]:
        """One output per row.

        logits: [R, V] float32 (may be changed), row i of `rows[i]`; masks: [R, ceil(V / 32)] int32, the tokens that the grammar
        of a guided request allows (bit b of word w: token 32 w + b); rows of other requests are ignored
        """
        model_logits = self._apply_rules(logits, rows, masks)
        maxima, chosen = plain_sampling.largest(logits)
        for group in _sampled_groups(rows):
            chosen[group] = self._draw(logits, rows, group)
        usable = (torch.isfinite(maxima) & (chosen != NO_TOKEN)).tolist()
        scored = [i for i, row in enumerate(rows) if row.request.sampling.logprobs is not None and usable[i]]
        logprobs = _logprobs(logits, model_logits, scored, chosen, rows) if scored else {}
        outputs = [SampledToken(token_id, logprobs.get(i)) for i, token_id in enumerate(chosen.tolist())]
        if not all(usable):
            for i, maximum in enumerate(maxima.tolist()):
                if not usable[i]:
                    outputs[i] = _failure(rows[i], maximum)
        return outputs

    def distributions(
        self, logits: torch.Tensor, rows: Sequence[SampledRow], masks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Probabilities that `sample` draws from, after rules, temperature and filters: [R, V] float32.

        A greedy row has 1 at its largest logit. A row that cannot be drawn from is all zeros. Arguments as for `sample`.
        """
        self._apply_rules(logits, rows, masks)
        maxima, chosen = logits.max(dim=-1)
        result = torch.zeros_like(logits).scatter_(1, chosen[:, None], 1.0)
        for group in _sampled_groups(rows):
            temperatures = self._column([rows[i].sampling.temperature for i in group])[:, None]
            index = self._column(group, torch.int64)
            if not is_filtered(rows[group[0]].sampling):
                result[index] = torch.softmax((logits[index] - maxima[index, None]).div_(temperatures), dim=-1)
                continue
            result[index] = 0.0
            for candidates in self._candidates(logits[index], [rows[i].sampling for i in group]):
                scaled = (candidates.logits - maxima[index[candidates.rows], None]).div_(temperatures[candidates.rows])
                probabilities = torch.softmax(scaled.masked_fill_(~candidates.kept, float("-inf")), dim=-1)
                result[index[candidates.rows, None], candidates.ids] = probabilities
        drawable = torch.isfinite(maxima)[:, None] & torch.isfinite(result.sum(dim=-1, keepdim=True))
        return torch.where(drawable, result, 0.0)

    def _apply_rules(
        self, logits: torch.Tensor, rows: Sequence[SampledRow], masks: torch.Tensor | None
    ) -> dict[int, torch.Tensor]:
        """Apply rules and masks in place; return the model's own logits of changed rows that need log-probabilities."""
        guided = [] if masks is None else [i for i, row in enumerate(rows) if row.sampling.is_guided]
        changed = {*guided, *(i for i, row in enumerate(rows) if has_rules(row))}
        model_logits = {i: logits[i].clone() for i in changed if rows[i].sampling.logprobs is not None}
        if changed:
            self._rules.apply(logits, rows)
        if guided and masks is not None:
            self._rules.apply_masks(logits, masks, guided)
        return model_logits

    def _draw(self, logits: torch.Tensor, rows: Sequence[SampledRow], group: list[int]) -> torch.Tensor:
        """Token ids of the rows of `group`, or NO_TOKEN: [len(group)] int64. Either all rows have filters or none has."""
        params = [rows[i].sampling for i in group]
        keys = self._column([_key(rows[i]) for i in group], torch.int64)
        scale = self._column([scale_of(p) for p in params])
        group_logits = logits if len(group) == len(rows) else logits[group]
        if not is_filtered(params[0]):
            return plain_sampling.draw(group_logits, scale, keys)
        chosen = torch.empty(len(group), dtype=torch.int64, device=self._device)
        for candidates in self._candidates(group_logits, params):
            candidate_rows = candidates.rows
            chosen[candidate_rows] = plain_sampling.winner(
                candidates.ids, candidates.logits, candidates.kept, scale[candidate_rows], keys[candidate_rows]
            )[0]
        return chosen

    def _candidates(self, logits: torch.Tensor, params: Sequence[SamplingParams]) -> list[plain_sampling.Candidates]:
        """The tokens that the filters leave of every row; logits: [len(params), V]"""
        filters = plain_sampling.Filters(
            self._column([max(0, p.top_k) for p in params], torch.int64),
            self._column([p.top_p for p in params]),
            self._column([neg_log2_min_p_of(p) for p in params]),
            self._column([p.typical_p for p in params]),
        )
        return plain_sampling.candidates(logits, self._column([scale_of(p) for p in params]), filters)

    def _column(self, values: Sequence[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype).to(self._device)


def _logprobs(
    logits: torch.Tensor,
    model_logits: dict[int, torch.Tensor],
    scored: list[int],
    chosen: torch.Tensor,
    rows: Sequence[SampledRow],
) -> dict[int, TokenLogprob]:
    """Of the rows `scored`, by row. `model_logits`: the model's own logits of rows that rules or masks have changed."""
    unchanged = [i for i in scored if i not in model_logits]
    counts = {i: rows[i].sampling.logprobs or 0 for i in scored}
    logprobs = {}
    if unchanged:
        entries = token_logprobs(logits, unchanged, chosen[unchanged], [counts[i] for i in unchanged])
        logprobs = dict(zip(unchanged, entries, strict=True))
    for i in scored:
        if i in model_logits:
            (logprobs[i],) = token_logprobs(model_logits[i][None], [0], chosen[i : i + 1], [counts[i]])
    return logprobs


def _sampled_groups(rows: Sequence[SampledRow]) -> list[list[int]]:
    """Indices of the rows that draw, in two groups: with filters and without; no empty group."""
    filtered: list[int] = []
    plain: list[int] = []
    for index, row in enumerate(rows):
        if not is_greedy(row.request.sampling):
            (filtered if is_filtered(row.request.sampling) else plain).append(index)
    return [group for group in (filtered, plain) if group]


def _key(row: SampledRow) -> int:
    seed = row.request.sampling.seed
    assert seed is not None, f"request {row.request.request_id} has no seed"
    return signed(key(seed, row.position))


def _failure(row: SampledRow, maximum: float) -> SampledToken:
    """Why a row has no token: the request forbids every one, or the model's logits are not finite."""
    sampling = row.sampling
    if maximum != float("-inf") or not (sampling.is_guided or has_rules(row)):
        return SampledToken(error=NOT_FINITE)
    param = sampling.guided_param or ("bad_words" if sampling.bad_words_token_ids else "min_tokens")
    return SampledToken(error=NOTHING_ALLOWED, error_param=param)
