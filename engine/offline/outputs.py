"""What `LLM` returns, with the field names that users of vLLM's offline interface know. Knows no torch."""

from __future__ import annotations

from dataclasses import dataclass

from engine.sampling_params import InvalidOption


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural logarithm of a token's probability before temperature; `rank` counts from 1, the likeliest token."""

    logprob: float
    rank: int | None
    decoded_token: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One answer. `stop_reason` is the stop string or stop token id that ended it, None for the model's own end.

    `logprobs[i]` maps token ids (the chosen one first, then the most likely ones) to their `Logprob` at position i. With
    `echo`, `text`, `token_ids` and `logprobs` begin with the prompt's; the first token of a prompt has an empty map.
    `cumulative_logprob` is that of the generated tokens, where it is known. `finish_reason` is stop, length or error; `error`
    then says what failed, and `error_param` which field of the request is to blame, if one is.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str
    stop_reason: int | str | None
    error: str | None = None
    error_param: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics:
    """Seconds since the request was submitted. `ttft_s` is None when no token was generated.

    `num_preemptions` and `num_accepted_draft_tokens` are those of all answers together; draft tokens are the tokens of a step
    beyond its first.
    """

    queue_s: float
    ttft_s: float | None
    total_s: float
    num_preemptions: int
    num_accepted_draft_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """Everything about one finished prompt. `prompt_logprobs[i]` is as in `CompletionOutput.logprobs`; its first is None."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    metrics: RequestMetrics
    finished: bool = True


class GenerationFailed(InvalidOption):
    """Answers could not be generated because of a field of their own request; `param` names the field of the first.

    The other prompts were run to their end: `outputs` holds what `generate` would have returned.
    """

    def __init__(self, param: str, message: str, outputs: list[RequestOutput]) -> None:
        super().__init__(param, message)
        self.outputs = outputs
