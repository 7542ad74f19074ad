"""The wire form of what a step did to a request. Knows no torch."""

from __future__ import annotations

from engine.protocol import TokenEvent
from engine.request import Request


def token_event(request: Request, token_ids: list[int]) -> TokenEvent:
    """The wire form of what just happened to `request`, with its exact counts."""
    return TokenEvent(
        request_id=request.request_id,
        token_ids=token_ids,
        num_output_tokens=len(request.token_ids) - request.num_prompt_tokens,
        num_prompt_tokens_computed=request.num_prompt_tokens_computed,
        num_cached_tokens=request.num_cached_tokens,
        num_preemptions=request.num_preemptions,
        queue_s=request.queue_s,
        finish_reason=request.finish_reason,
        index=request.index,
    )
