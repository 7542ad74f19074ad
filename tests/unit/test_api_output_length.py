"""How long an answer may be: the request's maximum, else the operator's default, in any case within the context."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from appliance.api.sampling import sampling_params
from appliance.api.schemas import ChatCompletionRequest
from appliance.base.errors import ContextLengthExceeded, InvalidValue

CONTEXT_LEN = 100


def longest_output(default: int | None, *, prompt_tokens: int = 10, **fields: Any) -> int | None:
    body = ChatCompletionRequest(model="m", messages=[], **fields)
    info = cast(Any, SimpleNamespace(max_model_len=CONTEXT_LEN, vocab_size=9))
    return sampling_params(body, info, {}, default_max_tokens=default, prompt_tokens=prompt_tokens).max_tokens


@pytest.mark.parametrize(("default", "longest"), [(None, 90), (50, 50), (91, 90)])
def test_without_a_maximum_the_default_applies_within_the_context(default: int | None, longest: int) -> None:
    assert longest_output(default) == longest


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("requested", [1, 90])
def test_either_field_takes_precedence_over_the_default(field: str, requested: int) -> None:
    assert longest_output(50, **{field: requested}) == requested


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_a_requested_maximum_beyond_the_context_is_refused_with_its_field_whatever_the_default(field: str) -> None:
    with pytest.raises(ContextLengthExceeded) as refused:
        longest_output(50, **{field: 91})
    assert refused.value.param == field


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("requested", [0, 10**15 + 1, int("9" * 4300)], ids=["0", "above 10**15", "4300 digits"])
def test_a_requested_maximum_beyond_all_limits_is_refused_with_its_field(field: str, requested: int) -> None:
    with pytest.raises(InvalidValue) as refused:
        longest_output(50, **{field: requested})
    assert refused.value.message == f"{field} must be a whole number from 1 to 1000000000000000"


def test_a_long_prompt_is_not_refused_because_of_the_default() -> None:
    assert longest_output(50, prompt_tokens=99) == 1


@pytest.mark.parametrize(("min_tokens", "longest"), [(49, 50), (60, 60), (90, 90)])
def test_a_request_for_at_least_more_tokens_than_the_default_gets_them(min_tokens: int, longest: int) -> None:
    assert longest_output(50, min_tokens=min_tokens) == longest


def test_the_default_applies_to_each_of_several_choices() -> None:
    assert longest_output(50, n=3) == 50
