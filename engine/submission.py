"""A submitted request: its checks against the loaded model, and a `Request` of the scheduler for each answer. Knows no torch.

What can be checked without the model is checked where the request's `SamplingParams` are made.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from engine.errors import PromptError
from engine.number_checks import is_number
from engine.protocol import (
    WEIGHT_MAX,
    EngineInfo,
    FinishReason,
    GenerationRequest,
    InvalidOption,
    Priority,
    TokenEvent,
)
from engine.sampling.randomness import seed_of_answer
from engine.scheduling.request import Request

PROMPT_PARAM = "prompt_token_ids"


def check_request(submitted: GenerationRequest, info: EngineInfo) -> None:
    """Raise `PromptError` for a prompt, `InvalidOption` for another field, naming the limit."""
    check_prompt(submitted.prompt_token_ids, vocab_size=info.vocab_size, max_model_len=info.max_model_len)
    sampling, vocab_size = submitted.sampling, info.vocab_size
    if sampling.seed is None:
        raise InvalidOption("seed", "the request has no seed: it must be set before it reaches the engine")
    _check_ids("stop_token_ids", sampling.stop_token_ids, vocab_size)
    _check_ids("logit_bias", sampling.logit_bias or (), vocab_size)
    for word in sampling.bad_words_token_ids or ():
        _check_ids("bad_words_token_ids", word, vocab_size)
    if sampling.bad_words and not sampling.bad_words_token_ids:
        raise InvalidOption("bad_words", "bad_words must come with bad_words_token_ids: the engine has no tokenizer")
    _check_service(submitted)


def check_prompt(token_ids: Collection[int], *, vocab_size: int, max_model_len: int) -> None:
    """Raise `PromptError` unless the prompt is a list of ids of the vocabulary that leaves room for an answer."""
    if not isinstance(token_ids, list | tuple):
        raise PromptError(f"the prompt must be a list of token ids, not {type(token_ids).__name__}")
    if not token_ids:
        raise PromptError("the prompt is empty")
    if len(token_ids) >= max_model_len:
        raise PromptError(f"the prompt has {len(token_ids)} tokens; at most {max_model_len - 1} fit the context")
    strangers = set(map(type, token_ids)) - {int}
    if strangers:
        names = ", ".join(sorted(stranger.__name__ for stranger in strangers))
        raise PromptError(f"the prompt has token ids that are not integers: {names}")
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        raise PromptError(f"the prompt has token ids outside 0 … {vocab_size - 1}")


def _check_ids(param: str, ids: Collection[int], vocab_size: int) -> None:
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        raise InvalidOption(param, f"{param} has token ids outside 0 … {vocab_size - 1}")


def _check_service(submitted: GenerationRequest) -> None:
    weight, deadline_s = submitted.weight, submitted.queue_deadline_s
    if type(weight) is not int or not 1 <= weight <= WEIGHT_MAX:
        raise InvalidOption("weight", f"weight must be an integer between 1 and {WEIGHT_MAX}, not {weight!r}")
    if not isinstance(submitted.priority, Priority):
        raise InvalidOption("priority", f"priority must be one of {', '.join(Priority)}, not {submitted.priority!r}")
    if deadline_s is None:
        return
    if not is_number(deadline_s) or not math.isfinite(deadline_s) or deadline_s < 0:
        raise InvalidOption("queue_deadline_s", f"queue_deadline_s must be a finite number from 0 on, not {deadline_s!r}")


def refusal_events(submitted: GenerationRequest, reason: str, param: str) -> list[TokenEvent]:
    """The events of a request that is not queued, one for each of its answers."""
    return [
        TokenEvent(
            request_id=submitted.request_id,
            token_ids=[],
            num_output_tokens=0,
            num_prompt_tokens_computed=0,
            finish_reason=FinishReason.ERROR,
            error=reason,
            index=index,
            error_param=param,
        )
        for index in range(submitted.sampling.num_answers)
    ]


def make_answers(submitted: GenerationRequest, info: EngineInfo, *, now_s: float) -> list[Request]:
    """One request per answer, each with a seed of its own, of a submission that passed `check_request`. Only the first answer
    has the queue deadline: once it has begun, the request no longer waits for its turn, and ending it would waste what it has
    generated. If the first one expires, the others end with it; else the gateway's deadline of the whole request bounds their
    wait."""
    sampling, limit, token_ids = submitted.sampling, info.max_model_len, list(submitted.prompt_token_ids)
    seed, deadline_s = sampling.seed, submitted.queue_deadline_s
    assert seed is not None, f"request {submitted.request_id} was not checked"
    stop_ids = frozenset(sampling.stop_token_ids).union(info.eos_token_ids if sampling.stops_at_eos else ())
    return [
        Request(
            request_id=submitted.request_id,
            tenant_id=submitted.tenant_id,
            sampling=sampling.with_checked(seed=seed_of_answer(seed, index)) if index else sampling,
            token_ids=token_ids,
            shares_token_ids=sampling.num_answers > 1,
            num_prompt_tokens=len(token_ids),
            max_total_tokens=min(limit, len(token_ids) + (sampling.max_tokens or limit)),
            stop_ids=stop_ids,
            arrived_s=now_s,
            index=index,
            weight=submitted.weight,
            priority=submitted.priority,
            queue_deadline_s=None if index or deadline_s is None else now_s + deadline_s,
        )
        for index in range(sampling.num_answers)
    ]
