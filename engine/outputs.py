"""What `LLM` returns, with the field names that users of vLLM's offline interface know. Knows no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural logarithm of a token's probability before temperature; `rank` counts from 1 and is None outside the top."""

    logprob: float
    rank: int | None
    decoded_token: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One answer. `stop_reason` is the stop string or stop token id that ended it, None for the model's own end.

    `logprobs[i]` maps token ids (the chosen one and the most likely ones) to their `Logprob` at output position i.
    `finish_reason` is stop, length or error; `error` then says what failed.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str
    stop_reason: int | str | None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics:
    """Seconds since the request was submitted. `ttft_s` is None when no token was generated."""

    queue_s: float
    ttft_s: float | None
    total_s: float
    num_preemptions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """Everything about one finished prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    metrics: RequestMetrics
    finished: bool = True
