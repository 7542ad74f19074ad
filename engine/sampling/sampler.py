"""Chooses the next token of each row of logits. A row's choice depends on its own logits, parameters, seed and position only.

rules (`sampling.logits_rules`) ─► grammar mask ─► largest logit, or temperature ─► filters (`sampling.logits_filters`) ─► draw

Greedy rows take the largest logit, the lowest id among equals. Others are drawn by Gumbel-max (`kernels.gumbel`): every token
that may be drawn gets noise of its own from (seed, position, token), and the largest logit with noise wins. Candidates come
from a partial top-k; only rows whose filter reaches beyond it are sorted in full. A row without a finite maximum, or without
a token to draw, fails alone. Log-probabilities are the model's own, before all of this.

This is the plain twin of the kernels that choose on a GPU: both draw the very same tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from engine.protocol import SamplingParams, TokenLogprob
from engine.sampling.logits_filters import (
    FilterColumns,
    column,
    filtered_candidates,
    is_filtered,
    needs_all_tokens,
    neg_log2_min_p_of,
    scale_of,
    typical_tokens,
)
from engine.sampling.logits_filters import is_greedy as is_greedy
from engine.sampling.logits_rules import LogitsRules, SampledRow, has_rules
from engine.sampling.logprobs import token_logprobs
from engine.sampling.randomness import key, signed
from kernels.ops import NO_TOKEN, plain_sampling

NOT_FINITE = "the model computed logits that are not finite for this request"
NOTHING_ALLOWED = "every token is forbidden here by what the request asks for (guided decoding, bad_words, min_tokens)"


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The choice for one row of logits, or why there is none. `error_param` names the field that forbade every token."""

    token_id: int | None = None
    logprob: TokenLogprob | None = None
    error: str | None = None
    error_param: str | None = None


class Sampler:
    """Sampling for one engine; holds token counts of live requests and nothing else."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rules = LogitsRules(device)

    def sample(self, logits: torch.Tensor, rows: Sequence[SampledRow], masks: torch.Tensor | None = None) -> list[SampledToken]:
        """One output per row.

        logits: [R, V] float32 (may be changed), row i of `rows[i]`; masks: [R, ceil(V / 32)] int32, which tokens the grammar
        of a guided request allows (bit b of word w: token 32 w + b); rows of other requests are not looked at
        """
        model_logits = self._constrain(logits, rows, masks)
        maxima, chosen = plain_sampling.largest(logits)
        for group in _sampled_groups(rows):
            chosen[group] = self._draw(logits, maxima, rows, group)
        usable = (torch.isfinite(maxima) & (chosen != NO_TOKEN)).tolist()
        return self._outputs(logits, model_logits, usable, chosen, maxima, rows)

    def distributions(
        self, logits: torch.Tensor, rows: Sequence[SampledRow], masks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Probabilities that `sample` draws from, after rules, temperature and filters: [R, V] float32.

        A greedy row has 1 at its largest logit. A row that cannot be drawn from is all zeros. Arguments as of `sample`.
        """
        self._constrain(logits, rows, masks)
        maxima, chosen = logits.max(dim=-1)
        result = torch.zeros_like(logits).scatter_(1, chosen[:, None], 1.0)
        for group in _sampled_groups(rows):
            scaled = self._scaled(logits, maxima, rows, group)
            if not is_filtered(rows[group[0]].sampling):
                result[group] = torch.softmax(scaled, dim=-1)
                continue
            result[group] = 0.0
            for part, ids, weights in self._candidates(scaled, [rows[row].sampling for row in group]):
                places = column([group[i] for i in part], torch.int64, self._device)
                result[places, ids] = weights / weights.sum(dim=-1, keepdim=True)
        drawable = torch.isfinite(maxima)[:, None] & torch.isfinite(result.sum(dim=-1, keepdim=True))
        return torch.where(drawable, result, 0.0)

    def _constrain(
        self, logits: torch.Tensor, rows: Sequence[SampledRow], masks: torch.Tensor | None
    ) -> dict[int, torch.Tensor]:
        """Apply rules and masks in place; return the model's own logits of the rows that change and want log-probabilities."""
        guided = [] if masks is None else [i for i, row in enumerate(rows) if row.sampling.is_guided]
        changed = {*guided, *(i for i, row in enumerate(rows) if has_rules(row))}
        kept = {i: logits[i].clone() for i in changed if rows[i].sampling.logprobs is not None}
        if changed:
            self._rules.apply(logits, rows)
        if guided and masks is not None:
            self._rules.apply_masks(logits, masks, guided)
        return kept

    def _scaled(self, logits: torch.Tensor, maxima: torch.Tensor, rows: Sequence[SampledRow], group: list[int]) -> torch.Tensor:
        """Logits over temperature, the largest moved to zero: [len(group), V]"""
        temperatures = column([rows[i].sampling.temperature for i in group], torch.float32, self._device)
        if len(group) == len(rows):
            return (logits - maxima[:, None]).div_(temperatures)
        return (logits[group] - maxima[group, None]).div_(temperatures)

    def _draw(self, logits: torch.Tensor, maxima: torch.Tensor, rows: Sequence[SampledRow], group: list[int]) -> torch.Tensor:
        """Token ids of the rows of `group`, which either all filter or all do not, or NO_TOKEN: [len(group)] int64"""
        params = [rows[i].sampling for i in group]
        keys = torch.tensor([_key(rows[i]) for i in group], dtype=torch.int64).to(self._device)
        scale = column([scale_of(p) for p in params], torch.float32, self._device)[:, 0]
        part = logits if len(group) == len(rows) else logits[group]
        if not is_filtered(params[0]):
            return plain_sampling.draw(part, scale, keys)
        chosen = torch.full((len(group),), NO_TOKEN, dtype=torch.int64, device=self._device)
        typical = [i for i, p in enumerate(params) if p.typical_p < 1.0]
        others = [i for i, p in enumerate(params) if p.typical_p >= 1.0]
        if others:
            self._draw_filtered(part, params, others, scale, keys, chosen)
        if typical:
            scaled = self._scaled(logits, maxima, rows, [group[i] for i in typical])
            for found, ids, weights in self._candidates(scaled, [params[i] for i in typical]):
                places = [typical[i] for i in found]
                kept = weights > 0
                winners, _ = plain_sampling.winner(ids, part[places].gather(1, ids), kept, scale[places], keys[places])
                chosen[places] = torch.where(kept.any(dim=-1), winners, NO_TOKEN)
        return chosen

    def _draw_filtered(
        self,
        logits: torch.Tensor,
        params: Sequence[SamplingParams],
        places: list[int],
        scale: torch.Tensor,
        keys: torch.Tensor,
        chosen: torch.Tensor,
    ) -> None:
        """Write the tokens of the rows `places`, which have filters but typical sampling, to `chosen`."""
        asked = [params[i] for i in places]
        filters = plain_sampling.Filters(
            column([max(0, p.top_k) for p in asked], torch.int64, self._device)[:, 0],
            column([p.top_p for p in asked], torch.float32, self._device)[:, 0],
            column([neg_log2_min_p_of(p) for p in asked], torch.float32, self._device)[:, 0],
        )
        index = torch.tensor(places, device=self._device)
        everyone = len(places) == len(params)
        for part in plain_sampling.candidates(logits if everyone else logits[index], scale[index], filters):
            rows = index[part.rows]
            chosen[rows] = plain_sampling.winner(part.ids, part.logits, part.kept, scale[rows], keys[rows])[0]

    def _candidates(
        self, scaled: torch.Tensor, params: Sequence[SamplingParams]
    ) -> Iterator[tuple[list[int], torch.Tensor, torch.Tensor]]:
        """Parts of the rows with ids and weights of their candidates, as far as each row's own filter reaches.

        The candidates are widened stage by stage for the rows that need it: which stage serves a row is its own affair.
        """
        vocab_size = scaled.shape[-1]
        everything = {i: None for i, sampling in enumerate(params) if needs_all_tokens(sampling)}
        for i in everything:  # one at a time: its sort is what it costs, and takes five times the memory of its logits
            ids = torch.arange(vocab_size, device=self._device)[None]
            yield [i], ids, typical_tokens(scaled[i : i + 1], [params[i]])
        waiting = [i for i in range(len(params)) if i not in everything]
        for count in (*(stage for stage in plain_sampling.CANDIDATE_STAGES if stage < vocab_size), vocab_size):
            reached = [i for i in waiting if count == vocab_size or params[i].top_k <= count]
            if not reached:
                continue
            part = scaled if len(reached) == len(params) else scaled[reached]
            filters = FilterColumns.of([params[i] for i in reached], self._device)
            ids, weights, reaches_end = filtered_candidates(part, count, filters)
            done = [k for k, open_end in enumerate(reaches_end.tolist()) if count == vocab_size or not open_end]
            if len(done) == len(reached):
                yield reached, ids, weights
            elif done:
                yield [reached[k] for k in done], ids[done], weights[done]
            served = {reached[k] for k in done}
            waiting = [i for i in waiting if i not in served]

    def _outputs(
        self,
        logits: torch.Tensor,
        model_logits: dict[int, torch.Tensor],
        usable: list[bool],
        chosen: torch.Tensor,
        maxima: torch.Tensor,
        rows: Sequence[SampledRow],
    ) -> list[SampledToken]:
        token_ids = chosen.tolist()
        asked = [i for i, row in enumerate(rows) if row.request.sampling.logprobs is not None and usable[i]]
        logprobs = self._logprobs(logits, model_logits, asked, chosen, rows) if asked else {}
        outputs = [SampledToken(token_id, logprobs.get(i)) for i, token_id in enumerate(token_ids)]
        if not all(usable):
            for i, maximum in enumerate(maxima.tolist()):
                outputs[i] = outputs[i] if usable[i] else _failure(rows[i], maximum)
        return outputs

    def _logprobs(
        self,
        logits: torch.Tensor,
        model_logits: dict[int, torch.Tensor],
        asked: list[int],
        chosen: torch.Tensor,
        rows: Sequence[SampledRow],
    ) -> dict[int, TokenLogprob]:
        unchanged = [i for i in asked if i not in model_logits]
        counts = {i: rows[i].sampling.logprobs or 0 for i in asked}
        found = {}
        if unchanged:
            entries = token_logprobs(logits, unchanged, chosen[unchanged], [counts[i] for i in unchanged])
            found = dict(zip(unchanged, entries, strict=True))
        for i in asked:
            if i in model_logits:
                (found[i],) = token_logprobs(model_logits[i][None], [0], chosen[i : i + 1], [counts[i]])
        return found


def _sampled_groups(rows: Sequence[SampledRow]) -> list[list[int]]:
    """Indices of the rows that draw, those with filters apart from those without; no empty group."""
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
    """Why a row has no token: what its request forbids, or what the model computed."""
    sampling = row.sampling
    if maximum != float("-inf") or not (sampling.is_guided or has_rules(row)):
        return SampledToken(error=NOT_FINITE)
    param = sampling.guided_param or ("bad_words" if sampling.bad_words_token_ids else "min_tokens")
    return SampledToken(error=NOTHING_ALLOWED, error_param=param)
