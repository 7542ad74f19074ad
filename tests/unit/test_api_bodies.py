"""A body that is no text is refused by the name of the field where it is not."""

from __future__ import annotations

import pytest

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
