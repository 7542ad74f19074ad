"""Requests that differ in their sampling parameters only, and the sampler applied to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from engine.protocol import SamplingParams
from engine.sampling.logits_rules import SampledRow
from engine.sampling.sampler import SampledToken, Sampler
from engine.scheduling.request import Request


def sampling_request(
    name: str = "a",
    *,
    prompt: tuple[int, ...] = (1,),
    output: tuple[int, ...] = (),
    end_ids: tuple[int, ...] = (0,),
    **sampling: Any,
) -> Request:
    """A live request that has generated `output` after `prompt`; stop ids are `end_ids` and its own."""
    params = SamplingParams(**{"seed": 1, **sampling})
    return Request(
        request_id=name,
        tenant_id="alice",
        sampling=params,
        token_ids=[*prompt, *output],
        num_prompt_tokens=len(prompt),
        max_total_tokens=100_000,
        stop_ids=frozenset({*end_ids, *params.stop_token_ids}),
        arrived_s=0.0,
    )


def next_rows(requests: Sequence[Request]) -> list[SampledRow]:
    """The rows that choose the next token of each request."""
    return [SampledRow(request, request.num_tokens) for request in requests]


def sample(logits: torch.Tensor, requests: Sequence[Request], masks: torch.Tensor | None = None) -> list[SampledToken]:
    """One token for each row of `logits`, by a fresh sampler."""
    return Sampler(logits.device).sample(logits.clone(), next_rows(requests), masks)


def distributions(logits: torch.Tensor, requests: Sequence[Request], masks: torch.Tensor | None = None) -> torch.Tensor:
    """The distribution from which each row is sampled: [B, V]"""
    return Sampler(logits.device).distributions(logits.clone(), next_rows(requests), masks)
