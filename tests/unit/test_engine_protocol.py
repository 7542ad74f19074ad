"""Sampling parameters are validated on construction, with errors that name field and limit, and survive serialisation."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from engine.protocol import GatewayFrame, GenerationRequest, InvalidOption, SamplingParams
from engine.sampling_params import (
    BAD_WORDS_CHARS_MAX,
    BAD_WORDS_MAX,
    GUIDED_CHARS_MAX,
    GUIDED_CHOICES_MAX,
    LOGIT_BIAS_MAX,
    N_MAX,
    STOP_CHARS_MAX,
    STOP_TOKEN_IDS_MAX,
    TOKENS_MAX,
)
from engine.transport import LENGTH, decode_gateway_frame, encode_frame

NUMBERS = (
    "temperature", "top_p", "min_p", "typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
INTEGERS = ("n", "top_k", "min_tokens")
OPTIONAL_INTEGERS = ("best_of", "seed", "max_tokens", "logprobs", "prompt_logprobs")


def assert_refused(**sampling: Any) -> InvalidOption:
    with pytest.raises(InvalidOption) as refused:
        SamplingParams(**sampling)
    assert refused.value.param in str(refused.value)
    assert len(str(refused.value)) < 300, "a message repeats what was sent"
    return refused.value


@pytest.mark.parametrize("penalty", [-1.0, 0.0, 1e-320, 1e-300, 0.0099, 10.1, math.inf, math.nan])
def test_repetition_penalty_outside_its_limits_is_refused(penalty: float) -> None:
    refused = assert_refused(repetition_penalty=penalty)
    assert refused.param == "repetition_penalty"
    assert "repetition_penalty must be between 0.01 and 10, not " in str(refused)


@pytest.mark.parametrize("param", NUMBERS)
@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, 10**5000, True, "1", None, [1.0], {}, 1j], ids=lambda value: type(value).__name__
)
def test_a_value_that_is_not_a_finite_number_is_refused(param: str, value: Any) -> None:
    assert assert_refused(**{param: value}).param == param


@pytest.mark.parametrize("param", INTEGERS + OPTIONAL_INTEGERS)
@pytest.mark.parametrize("value", [-2, 2**64, 10**5000, 1.0, math.nan, True, "1", [1]], ids=lambda value: type(value).__name__)
def test_a_value_that_is_not_an_integer_within_limits_is_refused(param: str, value: Any) -> None:
    assert assert_refused(**{param: value}).param == param


@pytest.mark.parametrize("param", INTEGERS)
def test_none_is_refused_for_a_required_integer(param: str) -> None:
    assert assert_refused(**{param: None}).param == param


@pytest.mark.parametrize(
    ("sampling", "param", "message"),
    [
        ({"n": 0}, "n", "between 1 and 128"),
        ({"n": N_MAX + 1}, "n", "not 129"),
        ({"best_of": N_MAX + 1}, "best_of", "between 1 and 128"),
        ({"n": 3, "best_of": 2}, "best_of", "at least n (3), not 2"),
        ({"max_tokens": 0}, "max_tokens", "between 1 and"),
        ({"max_tokens": TOKENS_MAX + 1}, "max_tokens", str(TOKENS_MAX)),
        ({"max_tokens": 4, "min_tokens": 5}, "min_tokens", "at most max_tokens (4), not 5"),
        ({"temperature": 2.1}, "temperature", "between 0 and 2, not 2.1"),
        ({"top_p": 0.0}, "top_p", "above 0 and at most 1"),
        ({"typical_p": 0.0}, "typical_p", "above 0 and at most 1"),
        ({"top_k": -2}, "top_k", "-1 and 0 are off"),
        ({"logprobs": 21}, "logprobs", "between 0 and 20"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "between 0 and 20"),
        ({"ignore_eos": 1}, "ignore_eos", "True or False"),
        ({"echo": "yes"}, "echo", "True or False"),
        ({"stop": ["a"] * 17}, "stop", "at most 16 strings, not 17"),
        ({"stop": ["a", ""]}, "stop", "empty"),
        ({"stop": [1]}, "stop", "list of strings"),
        ({"stop": 7}, "stop", "list of strings"),
        ({"stop": ["a" * 10_000_000]}, "stop", f"at most {STOP_CHARS_MAX} characters in all, not 10000000"),
        ({"stop": "a" * 10_000_000}, "stop", f"at most {STOP_CHARS_MAX} characters"),
        ({"stop": ["a" * 1000] * 10_000}, "stop", "at most 16 strings, not 10000"),
        ({"stop_token_ids": [1.0]}, "stop_token_ids", "integers from 0"),
        ({"stop_token_ids": [-1]}, "stop_token_ids", "integers from 0"),
        ({"stop_token_ids": [True]}, "stop_token_ids", "integers from 0"),
        ({"stop_token_ids": [2**31]}, "stop_token_ids", "integers from 0"),
        ({"stop_token_ids": 3}, "stop_token_ids", "list of token ids"),
        ({"stop_token_ids": [1] * (STOP_TOKEN_IDS_MAX + 1)}, "stop_token_ids", f"at most {STOP_TOKEN_IDS_MAX}"),
        ({"logit_bias": [1]}, "logit_bias", "map token ids"),
        ({"logit_bias": {"a": 1.0}}, "logit_bias", "integers from 0"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias", "integers from 0"),
        ({"logit_bias": {1: math.nan}}, "logit_bias", "between -100 and 100"),
        ({"logit_bias": {1: 101}}, "logit_bias", "between -100 and 100"),
        ({"logit_bias": {1: "1"}}, "logit_bias", "between -100 and 100"),
        ({"logit_bias": dict.fromkeys(range(LOGIT_BIAS_MAX + 1), 1.0)}, "logit_bias", f"at most {LOGIT_BIAS_MAX}"),
        ({"bad_words": "word"}, "bad_words", "list of strings"),
        ({"bad_words": ["a", None]}, "bad_words", "list of strings"),
        ({"bad_words": [""]}, "bad_words", "empty"),
        ({"bad_words": [" "]}, "bad_words", "spaces alone"),
        ({"bad_words": ["a"] * (BAD_WORDS_MAX + 1)}, "bad_words", f"at most {BAD_WORDS_MAX}"),
        ({"bad_words": ["a" * (BAD_WORDS_CHARS_MAX + 1)]}, "bad_words", f"at most {BAD_WORDS_CHARS_MAX} characters"),
        ({"bad_words_token_ids": [[]]}, "bad_words_token_ids", "none empty"),
        ({"bad_words_token_ids": [1]}, "bad_words_token_ids", "lists of token ids"),
        ({"bad_words_token_ids": [[1.5]]}, "bad_words_token_ids", "integers from 0"),
        ({"bad_words_token_ids": [[1]] * 2049}, "bad_words_token_ids", "at most 2048 words"),
        ({"bad_words_token_ids": [[1] * 200_000]}, "bad_words_token_ids", "at most 131072 ids"),
        ({"guided_json": 7}, "guided_json", "must be text"),
        ({"guided_json": {"a": math.nan}}, "guided_json", "cannot be written as JSON"),
        ({"guided_json": {"a": object()}}, "guided_json", "cannot be written as JSON"),
        ({"guided_json": "x" * (GUIDED_CHARS_MAX + 1)}, "guided_json", f"at most {GUIDED_CHARS_MAX} characters"),
        ({"guided_json": {"enum": ["x" * GUIDED_CHARS_MAX]}}, "guided_json", f"at most {GUIDED_CHARS_MAX} characters"),
        ({"guided_regex": ["a"]}, "guided_regex", "must be text"),
        ({"guided_choice": "a"}, "guided_choice", "list of strings"),
        ({"guided_choice": []}, "guided_choice", "at least one"),
        ({"guided_choice": ["a", ""]}, "guided_choice", "empty string"),
        ({"guided_choice": ["a"] * (GUIDED_CHOICES_MAX + 1)}, "guided_choice", f"at most {GUIDED_CHOICES_MAX}"),
        ({"guided_grammar": b"root"}, "guided_grammar", "must be text"),
        ({"guided_json": "{}", "guided_regex": "a"}, "guided_regex", "cannot be combined with guided_json"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_value_beyond_its_limit_is_refused_with_field_and_limit(sampling: dict[str, Any], param: str, message: str) -> None:
    refused = assert_refused(**sampling)
    assert refused.param == param
    assert message in str(refused)


def test_a_schema_that_contains_itself_is_refused() -> None:
    schema: dict[str, Any] = {}
    schema["properties"] = schema
    assert assert_refused(guided_json=schema).param == "guided_json"


def test_a_deeply_nested_schema_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(100_000):
        schema = {"items": schema}
    assert assert_refused(guided_json=schema).param == "guided_json"
    while schema:  # taken apart level by level: to free it at once would nest as deeply
        schema = schema["items"]


@pytest.mark.parametrize(
    "sampling",
    [
        {"repetition_penalty": 0.01}, {"repetition_penalty": 10.0}, {"temperature": 1e-320}, {"temperature": 1},
        {"top_p": 1e-320}, {"top_k": -1}, {"n": N_MAX}, {"best_of": N_MAX}, {"typical_p": 1}, {"logprobs": 0},
        {"prompt_logprobs": 20}, {"max_tokens": None}, {"seed": 2**63 - 1}, {"stop": ["a" * STOP_CHARS_MAX]},
        {"logit_bias": {0: -100, 5: 100.0}}, {"bad_words": ["a "]}, {"bad_words_token_ids": [[0], [1, 2]]}, {"echo": True},
        {"guided_regex": "a*"}, {"guided_choice": ["a", "b"]}, {"guided_grammar": "start: \"a\""}, {"guided_json": "{}"},
    ],
    ids=str,
)  # fmt: skip
def test_values_exactly_at_the_limits_are_accepted(sampling: dict[str, Any]) -> None:
    (name,) = sampling
    assert getattr(SamplingParams(**sampling), name) == sampling[name]


def test_stop_text_becomes_a_list_and_guided_json_its_serialisation() -> None:
    given: dict[str, Any] = {"stop": "a", "stop_token_ids": None, "guided_json": {"type": "object", "title": "ü"}}
    params = SamplingParams(**given)
    assert (params.stop, params.stop_token_ids, params.is_guided, params.guided_param) == (["a"], [], True, "guided_json")
    assert isinstance(params.guided_json, str)
    assert json.loads(params.guided_json) == given["guided_json"]
    assert SamplingParams(stop=None).stop == []  # type: ignore[arg-type]


@pytest.mark.parametrize(("n", "best_of", "expected"), [(1, None, 1), (3, None, 3), (1, 4, 4), (4, 4, 4)])
def test_num_answers_is_best_of_or_n(n: int, best_of: int | None, expected: int) -> None:
    assert SamplingParams(n=n, best_of=best_of).num_answers == expected


def test_all_parameters_survive_serialisation() -> None:
    sampling = SamplingParams(
        n=2, best_of=3, typical_p=0.5, bad_words=["x"], bad_words_token_ids=[[1], [2, 3]], seed=5, stop=["end"],
        logit_bias={7: -1.0}, prompt_logprobs=2, echo=True, guided_json={"type": "string"},
    )  # fmt: skip
    request = GenerationRequest(request_id="a", tenant_id="alice", prompt_token_ids=[1], sampling=sampling)
    body = encode_frame(GatewayFrame(submit=[request]))[LENGTH.size :]
    assert decode_gateway_frame(body).submit == [request]
