"""Error responses are short, whatever the request contained."""

from __future__ import annotations

import msgspec

from appliance.api.error_responses import MESSAGE_CHARS_MAX, PARAM_CHARS_MAX, ErrorAnswer, encode_error
from appliance.base.errors import InvalidValue
from tests.support.api_app import ApiApp


def test_a_long_message_and_parameter_are_shortened_in_the_middle() -> None:
    name = "x" * 1_000_000
    error = msgspec.json.decode(encode_error(InvalidValue(f"the name {name} is wrong", param=name)), type=ErrorAnswer).error
    assert (len(error.message), len(error.param or "")) == (MESSAGE_CHARS_MAX, PARAM_CHARS_MAX)
    assert error.message.startswith("the name xxx")
    assert error.message.endswith("xxx is wrong")
    assert " … " in error.message


def test_a_message_of_the_longest_length_is_sent_as_it_is() -> None:
    message = "m" * MESSAGE_CHARS_MAX
    error = msgspec.json.decode(encode_error(InvalidValue(message, param="p" * PARAM_CHARS_MAX)), type=ErrorAnswer).error
    assert (error.message, error.param) == (message, "p" * PARAM_CHARS_MAX)


async def test_a_path_that_does_not_exist_is_shortened_in_the_response(api: ApiApp) -> None:
    error = (await api.client.get("/v1/" + "x" * 50_000)).json()["error"]
    assert len(error["message"]) == MESSAGE_CHARS_MAX
    assert error["message"].endswith("GET /schema/openapi.json lists all paths")
