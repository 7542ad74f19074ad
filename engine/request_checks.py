"""Checks of a request against the loaded model, before it is queued. Knows no torch.

What can be checked without the model is checked where the request's `SamplingParams` are made.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from engine.errors import PromptError
from engine.number_checks import is_number
from engine.protocol import WEIGHT_MAX, EngineInfo, GenerationRequest, InvalidOption, Priority

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
