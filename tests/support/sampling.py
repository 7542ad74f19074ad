"""Requests whose only interest is their sampling parameters."""

from __future__ import annotations

from typing import Any

from engine.protocol import SamplingParams
from engine.request import Request


def sampling_request(
    name: str = "a", *, prompt: tuple[int, ...] = (1,), output: tuple[int, ...] = (), **sampling: Any
) -> Request:
    """A live request that has generated `output` after `prompt`; stop ids are the end-of-sequence id 0 and its own."""
    params = SamplingParams(**{"seed": 1, **sampling})
    return Request(
        request_id=name,
        tenant_id="alice",
        sampling=params,
        token_ids=[*prompt, *output],
        num_prompt_tokens=len(prompt),
        max_total_tokens=100_000,
        stop_ids=frozenset({0, *params.stop_token_ids}),
        arrived_s=0.0,
    )
