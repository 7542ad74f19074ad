"""A small model that writes guesses for a large one of the same vocabulary.

Its cache has the block ids of the large one's, and whatever the large model computes is computed here too: every prompt
chunk, every decoded token, every guess. So at the end of a step both caches hold keys and values of the same positions, and
prefix hits, forks, swaps, copies and preemption need no bookkeeping of their own. A wrong guess leaves slots behind that the
next step writes again, in both.
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
from kernels.ops import GUESS, NO_TOKEN, plain_sampling


class DraftModel:
    """Fills `draft_token_ids` of the items of a step; `by_rejection` tells which requests are verified by that rule."""

    def __init__(self, decoder: PagedDecoder, sampler: Sampler, by_rejection: Callable[[Request], bool]) -> None:
        self.decoder = decoder
        self._sampler = sampler
        self._by_rejection = by_rejection

    def propose(self, items: Sequence[ScheduledRequest]) -> list[torch.Tensor | None]:
        """One pass over what the step computes, then one small pass per guess. Repeating it gives the same guesses.

        Returns for each item that is verified by rejection the distributions its guesses were drawn from: [k, V] float32.
        """
        for item in items:
            if item.num_draft_tokens:
                item.draft_token_ids.clear()
        hidden = self.decoder.forward_spans([_known_tokens(item) for item in items])
        drawn_from: list[list[torch.Tensor]] = [[] for _ in items]
        guessing = [index for index, item in enumerate(items) if item.num_draft_tokens]
        depth = 0
        while guessing:
            for index, (token_id, distribution) in zip(guessing, self._guess(hidden, items, guessing, depth), strict=True):
                items[index].draft_token_ids.append(token_id)
                if distribution is not None:
                    drawn_from[index].append(distribution)
            depth += 1
            spans = [_guessed_token(items[index], depth) for index in guessing]
            hidden = self.decoder.forward_spans(spans)
            guessing = [index for index in guessing if items[index].num_draft_tokens > depth]
        return [torch.stack(each) if each else None for each in drawn_from]

    def _guess(
        self, hidden: torch.Tensor, items: Sequence[ScheduledRequest], guessing: Sequence[int], depth: int
    ) -> list[tuple[int, torch.Tensor | None]]:
        """The next guess of each request, by the noise of plain decoding or by its own; then with what it was drawn from."""
        rows = [SampledRow(items[index].request, items[index].request.num_tokens + depth) for index in guessing]
        logits = self.decoder.logits(hidden)
        equal = [i for i, row in enumerate(rows) if not self._by_rejection(row.request)]
        drawn = [i for i, row in enumerate(rows) if self._by_rejection(row.request)]
        guesses: list[tuple[int, torch.Tensor | None]] = [(0, None)] * len(rows)
        if equal:
            for i, token in zip(equal, self._sampler.sample(logits[equal], [rows[i] for i in equal]), strict=True):
                guesses[i] = (token.token_id or 0, None)
        if drawn:
            for i, guess in zip(drawn, self._draw(logits[drawn], [rows[i] for i in drawn]), strict=True):
                guesses[i] = guess
        return guesses

    def _draw(self, logits: torch.Tensor, rows: Sequence[SampledRow]) -> list[tuple[int, torch.Tensor]]:
        """logits: [R, V] → guesses with their distributions [V]; where nothing can be drawn, token 0 with all of the mass."""
        distributions = self._sampler.distributions(logits, rows)
        keys = [signed(key(row.request.sampling.seed or 0, row.position, draw=GUESS)) for row in rows]
        token_ids = plain_sampling.draw_weighted(distributions, torch.tensor(keys, dtype=torch.int64, device=logits.device))
        failed = token_ids == NO_TOKEN
        token_ids = token_ids.masked_fill(failed, 0)
        distributions[failed] = 0.0
        distributions[failed, 0] = 1.0
        return list(zip(token_ids.tolist(), distributions.unbind(0), strict=True))


def _known_tokens(item: ScheduledRequest) -> TokenSpan:
    """What the step computes of `item` before any guess; the last of it predicts the first guess."""
    request, num_known = item.request, item.num_known_tokens
    outputs = (num_known - 1,) if item.num_draft_tokens else ()
    return TokenSpan(request.token_ids[item.start : item.start + num_known], item.start, request.block_table, outputs)


def _guessed_token(item: ScheduledRequest, depth: int) -> TokenSpan:
    """Guess number `depth`, counted from 1; the last one is computed for its keys and values only."""
    position = item.start + item.num_known_tokens + depth - 1
    outputs = (0,) if item.num_draft_tokens > depth else ()
    return TokenSpan(item.draft_token_ids[depth - 1 :], position, item.request.block_table, outputs)
