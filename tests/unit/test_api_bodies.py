"""A body that is no text is refused by the name of the field where it is not."""

from __future__ import annotations

import pytest

from appliance.api.admin.usage import NewPriceBody
from appliance.api.bodies import decode_body
from appliance.api.schemas import ChatCompletionRequest
from appliance.base.errors import InvalidValue


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (rb'{"model": "m", "messages": [{"role": "user", "content": "a\ud800"}]}', "messages"),
        (rb'{"model": "m\\\u00e9\ud83d\ude00", "messages": [], "stop": ["x", "\uDC00"]}', "stop"),
        (rb'{"model": "m", "messages": [{"role": "user", "content": "\ud800', None),
        (b'{"model": "\xff"}', None),
    ],
)
def test_half_a_surrogate_pair_is_refused_by_the_name_of_its_field(body: bytes, param: str | None) -> None:
    with pytest.raises(InvalidValue, match="not valid UTF-8 JSON") as refused:
        decode_body(body, ChatCompletionRequest)

    assert refused.value.param == param


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("prompt", "1.5", "prompt must be a whole number"),
        ("completion", '"many"', "completion must be a whole number"),
        ("cached_prompt", "true", "cached_prompt must be a whole number or null"),
    ],
)
def test_what_is_no_whole_number_is_refused_in_the_words_for_one_out_of_range(field: str, value: str, message: str) -> None:
    given = {"model": '"m"', "prompt": "1", "completion": "1", field: value}
    body = "{" + ", ".join(f'"{name}": {text}' for name, text in given.items()) + "}"
    with pytest.raises(InvalidValue) as refused:
        decode_body(body.encode(), NewPriceBody)

    assert (refused.value.message, refused.value.param) == (message, field)
