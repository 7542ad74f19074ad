"""Cursors are opaque, and whatever is no cursor of the list is refused by name."""

from __future__ import annotations

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.base.errors import InvalidValue
from appliance.tenancy.pages import PAGE_ROWS_MAX, check_limit, decode_cursor, encode_cursor, page_of


@given(st.integers(-(2**62), 2**62), st.from_regex(r"[a-z0-9_]{0,40}", fullmatch=True))
def test_a_cursor_leads_back_to_its_position(number: int, name: str) -> None:
    assert decode_cursor("list", encode_cursor("list", [number, name]), [int, str]) == [number, name]


def _encoded(value: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode()


@pytest.mark.parametrize(
    "cursor",
    [
        "",
        "nonsense!",
        "é",
        "A" * 501,
        _encoded(["other", 5]),
        _encoded(["list", "5"]),
        _encoded(["list", True]),
        _encoded(["list", 2**63]),
        _encoded(["list", 5, 6]),
        _encoded(["list"]),
        _encoded("list"),
        _encoded({"list": 5}),
        base64.b64encode(b"\xff\xfe").decode(),
        base64.b64encode(b"[" * 300).decode(),
    ],
)
def test_what_is_no_cursor_of_this_list_is_refused(cursor: str) -> None:
    with pytest.raises(InvalidValue) as refused:
        decode_cursor("list", cursor, [int])
    assert refused.value.param == "cursor"


@given(st.text(max_size=100))
def test_no_text_does_worse_than_being_refused(cursor: str) -> None:
    with pytest.raises(InvalidValue):
        decode_cursor("list", cursor, [int, int, int])


def test_a_cursor_with_control_characters_is_refused() -> None:
    with pytest.raises(InvalidValue):
        decode_cursor("list", encode_cursor("list", ["a\x00b"]), [str])


@pytest.mark.parametrize("limit", [0, -1, PAGE_ROWS_MAX + 1, True])
def test_a_limit_outside_its_range_is_refused(limit: int) -> None:
    with pytest.raises(InvalidValue) as refused:
        check_limit(limit)
    assert refused.value.param == "limit"


def test_a_page_has_a_cursor_only_when_there_is_more() -> None:
    full = page_of([1, 2, 3], 3, "list", lambda row: [row])
    assert (full.data, full.has_more, full.next_cursor) == ([1, 2, 3], False, None)
    more = page_of([1, 2, 3, 4], 3, "list", lambda row: [row])
    assert (more.data, more.has_more) == ([1, 2, 3], True)
    assert more.next_cursor is not None
    assert decode_cursor("list", more.next_cursor, [int]) == [3]
