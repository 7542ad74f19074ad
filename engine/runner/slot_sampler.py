"""How a step that the host does not watch chooses its tokens: by columns of parameters that lie in the slots.

`HostSlotSampler` is the twin for devices that the host does watch: it hands the rows to the plain sampler, which gives the
very tokens of the plain runner.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol

import torch

from engine.sampling.logits_rules import SampledRow, has_penalties
from engine.sampling.sampler import NO_TOKEN, Sampler
from engine.scheduling.request import Request


class SlotSampler(Protocol):
    """Sampling of one engine by slots."""

    def accepts(self, request: Request) -> bool:
        """Whether everything this request asks of its tokens can be done without the host."""
        ...

    def place(self, slots: Sequence[int], requests: Sequence[Request]) -> None:
        """The slots have these owners from now on."""
        ...

    def kind(self, slots: Sequence[int]) -> Hashable:
        """Which variant of `choose` a step with these slots needs; a graph is captured for each."""
        ...

    def choose(self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, kind: Hashable) -> torch.Tensor:
        """logits: [R, V], float32 or narrower (may be changed); slots: [R] int32, below 0 is padding; positions: [R], index of
        the chosen token in prompt plus output → token ids, NO_TOKEN where none can be drawn: [R] int64"""
        ...


def needs_no_host(request: Request) -> bool:
    """Whether no step of the request needs the host between logits and token, or its log-probabilities on the way."""
    sampling = request.sampling
    return sampling.logprobs is None and sampling.prompt_logprobs is None and not sampling.is_guided


class HostSlotSampler:
    """The plain sampler, by slots."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._owners: dict[int, Request] = {}

    def accepts(self, request: Request) -> bool:
        """Penalties and bad words look at all tokens, of which the last is not known in time."""
        sampling = request.sampling
        return needs_no_host(request) and not has_penalties(sampling) and not sampling.bad_words_token_ids

    def place(self, slots: Sequence[int], requests: Sequence[Request]) -> None:
        self._owners.update(zip(slots, requests, strict=True))

    def kind(self, slots: Sequence[int]) -> Hashable:  # noqa: ARG002 - one for all
        return None

    def choose(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        kind: Hashable,  # noqa: ARG002
    ) -> torch.Tensor:
        found = list(zip(slots.tolist(), positions.tolist(), strict=True))
        rows = [SampledRow(self._owners[slot], position) for slot, position in found if slot >= 0]
        used = [index for index, (slot, _) in enumerate(found) if slot >= 0]
        drawn = self._sampler.sample(logits if len(used) == len(found) else logits[used], rows)
        tokens = torch.zeros(len(found), dtype=torch.int64)
        for index, token in zip(used, drawn, strict=True):
            tokens[index] = NO_TOKEN if token.token_id is None else token.token_id
        return tokens.to(logits.device)
