"""`TokenEvent`s that say what a step did to a request. Knows no torch."""

from __future__ import annotations

from engine.protocol import TokenEvent, TokenLogprob
from engine.scheduling.request import Request


def token_event(request: Request, token_ids: list[int], *, prompt_logprobs: list[TokenLogprob] | None = None) -> TokenEvent:
    """What just happened to `request`, with its exact counts."""
    return TokenEvent(
        request.request_id,
        token_ids,
        len(request.token_ids) - request.num_prompt_tokens - request.num_unknown_tokens,
        request.num_prompt_tokens_computed,
        request.num_cached_tokens,
        request.num_preemptions,
        request.queue_s,
        None,
        request.finish_reason,
        None,
        request.index,
        prompt_logprobs,
        None,
        request.num_rejected_draft_tokens,
    )
