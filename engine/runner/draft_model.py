"""A small model that drafts tokens for a large one of the same vocabulary.

Its cache has the block ids of the large one's, and whatever the large model computes is computed here too: every prompt
chunk, every decoded token, every draft. So at the end of a step both caches hold keys and values of the same positions, and
prefix hits, forks, swaps, copies and preemption need no bookkeeping of their own. A rejected draft token leaves slots behind
that the next step overwrites, in both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from engine.runner.paged_decoder import PagedDecoder
from engine.runner.token_spans import TokenSpan
from engine.sampling.logits_rules import SampledRow
from engine.sampling.randomness import key, signed
from engine.sampling.sampler import Sampler
from engine.scheduling.request import Request
from engine.scheduling.scheduled_batch import ScheduledRequest
from kernels.ops import DRAFT, NO_TOKEN, plain_sampling


class DraftModel:
    """Fills `draft_token_ids` of the items of a step; `by_rejection`: which requests are verified by that rule."""

    def __init__(self, decoder: PagedDecoder, sampler: Sampler, by_rejection: Callable[[Request], bool]) -> None:
        self.decoder = decoder
        self._sampler = sampler
        self._by_rejection = by_rejection

    def propose(self, items: Sequence[ScheduledRequest]) -> list[torch.Tensor | None]:
        """One pass over what the step computes, then one small pass per draft token. Repeating it gives the same drafts.

        Returns for each item that is verified by rejection the distributions its drafts were drawn from: [k, V] float32.
        """
        for item in items:
            if item.num_draft_tokens:
                item.draft_token_ids.clear()
        hidden = self.decoder.forward_spans([_known_tokens(item) for item in items])
        drawn_from: list[list[torch.Tensor]] = [[] for _ in items]
        drafting = [index for index, item in enumerate(items) if item.num_draft_tokens]
        depth = 0
        while drafting:
            proposed = self._propose_next(hidden, items, drafting, depth)
            for index, (token_id, distribution) in zip(drafting, proposed, strict=True):
                items[index].draft_token_ids.append(token_id)
                if distribution is not None:
                    drawn_from[index].append(distribution)
            depth += 1
            spans = [_draft_span(items[index], depth) for index in drafting]
            hidden = self.decoder.forward_spans(spans)
            drafting = [index for index in drafting if items[index].num_draft_tokens > depth]
        return [torch.stack(distributions) if distributions else None for distributions in drawn_from]

    def _propose_next(
        self, hidden: torch.Tensor, items: Sequence[ScheduledRequest], drafting: Sequence[int], depth: int
    ) -> list[tuple[int, torch.Tensor | None]]:
        """The next draft token of each request, with the noise of plain decoding, or with its own and the distribution."""
        rows = [SampledRow(items[index].request, items[index].request.num_tokens + depth) for index in drafting]
        logits = self.decoder.logits(hidden)
        equal = [i for i, row in enumerate(rows) if not self._by_rejection(row.request)]
        drawn = [i for i, row in enumerate(rows) if self._by_rejection(row.request)]
        proposed: list[tuple[int, torch.Tensor | None]] = [(0, None)] * len(rows)
        if equal:
            for i, token in zip(equal, self._sampler.sample(logits[equal], [rows[i] for i in equal]), strict=True):
                proposed[i] = (token.token_id or 0, None)
        if drawn:
            for i, token_and_distribution in zip(drawn, self._draw(logits[drawn], [rows[i] for i in drawn]), strict=True):
                proposed[i] = token_and_distribution
        return proposed

    def _draw(self, logits: torch.Tensor, rows: Sequence[SampledRow]) -> list[tuple[int, torch.Tensor]]:
        """logits: [R, V] → draft tokens and their distributions [V]; where nothing can be drawn, token 0 with all the mass."""
        distributions = self._sampler.distributions(logits, rows)
        keys = [signed(key(row.request.sampling.seed or 0, row.position, draw=DRAFT)) for row in rows]
        token_ids = plain_sampling.draw_weighted(distributions, torch.tensor(keys, dtype=torch.int64, device=logits.device))
        failed = token_ids == NO_TOKEN
        token_ids = token_ids.masked_fill(failed, 0)
        distributions[failed] = 0.0
        distributions[failed, 0] = 1.0
        return list(zip(token_ids.tolist(), distributions.unbind(0), strict=True))


def _known_tokens(item: ScheduledRequest) -> TokenSpan:
    """What the step computes of `item` before its drafts; its last token predicts the first draft token."""
    request, num_known = item.request, item.num_known_tokens
    outputs = (num_known - 1,) if item.num_draft_tokens else ()
    return TokenSpan(request.token_ids[item.start : item.start + num_known], item.start, request.block_table, outputs)


def _draft_span(item: ScheduledRequest, depth: int) -> TokenSpan:
    """Draft token number `depth`, counted from 1; the last one is computed for its keys and values only."""
    position = item.start + item.num_known_tokens + depth - 1
    outputs = (0,) if item.num_draft_tokens > depth else ()
    return TokenSpan(item.draft_token_ids[depth - 1 :], position, item.request.block_table, outputs)
