"""Converts the fields of a request to the engine's SamplingParams, with the model's defaults, and names invalid fields."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping
from typing import Any

from appliance.api.schemas import SEED_BITS, STOP_CHARS_MAX, STOP_TOKEN_IDS_MAX, TOKEN_ID_DIGITS_MAX, ChatCompletionRequest
from appliance.api.structured_output import find_constraint
from appliance.base.digits import whole_number
from appliance.base.errors import ContextLengthExceeded, InvalidValue, UnsupportedParameter
from appliance.serving.endings import with_client_field_name
from appliance.serving.model_registry import ServedModel
from appliance.serving.tokenizer import output_room
from appliance.tenancy.fields import LIMIT_MAX, check_whole
from engine.protocol import EngineInfo, InvalidOption, SamplingParams, UnsupportedOption

_PLAIN_FIELDS = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "bad_words",
)


def requested_max_tokens(body: ChatCompletionRequest) -> tuple[int | None, str]:
    """Return the requested output limit (None for none) and the field that sets it. Raises InvalidValue."""
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise InvalidValue(f"max_tokens ({old}) and max_completion_tokens ({new}) disagree", param="max_completion_tokens")
    max_tokens, field = (old, "max_tokens") if new is None else (new, "max_completion_tokens")
    if max_tokens is not None:
        check_whole(max_tokens, field, 1, LIMIT_MAX)  # Python does not print the sum of a longer one and the prompt
    return max_tokens, field


def field_names(body: ChatCompletionRequest) -> dict[str, str]:
    """Return the client's names of the engine fields that have another name there."""
    names = {
        "logprobs": "top_logprobs",
        "max_tokens": requested_max_tokens(body)[1],
        "prompt_token_ids": "messages",
        "bad_words_token_ids": "bad_words",
    }
    constraint = find_constraint(body)
    return names if constraint is None else {**names, constraint.engine_field: constraint.client_field}


def sampling_params(
    body: ChatCompletionRequest,
    info: EngineInfo,
    defaults: Mapping[str, Any],
    *,
    default_max_tokens: int | None,
    prompt_tokens: int,
) -> SamplingParams:
    """Return the engine's parameters for the request; `max_tokens` and `seed` are always set. `defaults` are the model's.
    `default_max_tokens` is the operator's; a larger `min_tokens` replaces it.

    Raises ContextLengthExceeded, InvalidValue or UnsupportedParameter, with the client's name of the field.
    """
    max_tokens, max_tokens_field = requested_max_tokens(body)
    if default_max_tokens is not None:
        default_max_tokens = max(default_max_tokens, body.min_tokens or 0)
    try:
        room = output_room(
            prompt_tokens=prompt_tokens,
            max_tokens=max_tokens,
            default_max_tokens=default_max_tokens,
            max_model_len=info.max_model_len,
        )
    except ContextLengthExceeded as error:
        if error.param == "max_tokens":
            error.param = max_tokens_field
        raise
    _check_stop_token_ids(body.stop_token_ids or [], info.vocab_size)
    given = {field: getattr(body, field) for field in _PLAIN_FIELDS if getattr(body, field) is not None}
    constraint = find_constraint(body)
    if constraint is not None:
        given[constraint.engine_field] = constraint.value
    return _build({**defaults, **given}, body, info.vocab_size, max_tokens=room)


async def with_bad_words(params: SamplingParams, model: ServedModel, *, tenant_id: str) -> SamplingParams:
    """Return `params` with its bad words tokenised, if it has any. Raises InvalidValue for too many tokens, and Overloaded."""
    if not params.bad_words:
        return params
    ids = await model.tokenizer.bad_words_token_ids(params.bad_words, tenant_id=tenant_id)
    try:
        return dataclasses.replace(params, bad_words_token_ids=ids)
    except InvalidOption as error:
        raise InvalidValue(f"bad_words: {error}", param="bad_words") from error


def _build(fields: Mapping[str, Any], body: ChatCompletionRequest, vocab_size: int, *, max_tokens: int) -> SamplingParams:
    try:
        return SamplingParams(
            **fields,
            max_tokens=max_tokens,
            seed=_seed(body.seed),
            stop=_stop(body.stop),
            logit_bias=_logit_bias(body.logit_bias, vocab_size),
            logprobs=_logprobs(body),
        )
    except InvalidOption as error:
        kind = UnsupportedParameter if isinstance(error, UnsupportedOption) else InvalidValue
        message, param = with_client_field_name(str(error), error.param, field_names(body))
        raise kind(message, param=param) from error


def _seed(seed: int | None) -> int:
    """Return the engine's seed: OpenAI's are signed 64-bit integers, so negative ones are mapped to non-negative ones."""
    if seed is None:
        return secrets.randbits(SEED_BITS)
    if not -(1 << SEED_BITS) <= seed < 1 << SEED_BITS:
        raise InvalidValue(f"seed must be a whole number from {-(1 << SEED_BITS)} to {(1 << SEED_BITS) - 1}", param="seed")
    return seed % (1 << SEED_BITS)


def _stop(stop: str | list[str] | None) -> list[str]:
    strings = [stop] if isinstance(stop, str) else stop or []
    if any(len(string) > STOP_CHARS_MAX for string in strings):
        raise InvalidValue(f"a stop string has at most {STOP_CHARS_MAX} characters", param="stop")
    return strings


def _check_stop_token_ids(token_ids: list[int], vocab_size: int) -> None:
    if len(token_ids) > STOP_TOKEN_IDS_MAX or not all(0 <= token_id < vocab_size for token_id in token_ids):
        raise InvalidValue(
            f"stop_token_ids takes at most {STOP_TOKEN_IDS_MAX} ids from 0 to {vocab_size - 1}",
            param="stop_token_ids",
        )


def _logit_bias(bias: Mapping[str, float] | None, vocab_size: int) -> dict[int, float] | None:
    if not bias:
        return None
    checked = {}
    for token, value in bias.items():
        token_id = whole_number(token, 10**TOKEN_ID_DIGITS_MAX - 1)
        if token_id is None or token_id >= vocab_size:
            raise InvalidValue(f"logit_bias: {token[:20]!r} is not a token id of this model", param="logit_bias")
        checked[token_id] = value
    return checked


def _logprobs(body: ChatCompletionRequest) -> int | None:
    if not body.logprobs:
        if body.top_logprobs:
            raise InvalidValue("top_logprobs needs logprobs to be true", param="top_logprobs")
        return None
    return body.top_logprobs or 0
