"""Cursors of lists are opaque, and an invalid one is refused by name."""

from __future__ import annotations

import base64
import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from appliance.base.errors import InvalidValue
from appliance.tenancy.fields import NAME_CHARS_MAX
from appliance.tenancy.pages import CURSOR_CHARS_MAX, PAGE_ROWS_MAX, check_limit, decode_cursor, encode_cursor, page_of


@given(st.integers(-(2**62), 2**62), st.from_regex(r"[a-z0-9_]{0,40}", fullmatch=True))
def test_a_cursor_decodes_to_its_position(number: int, name: str) -> None:
    assert decode_cursor("list", encode_cursor("list", [number, name]), [int, str]) == [number, name]


# Text that both databases can store: any character but NUL, up to the longest name.
_STORED = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=NAME_CHARS_MAX)


@given(st.lists(st.integers(-(2**63) + 1, 2**63 - 1), max_size=3), st.lists(_STORED, max_size=4))
@example([], ["\u200b", "\u6a21" * 200, "\U0001f9ee" * 200, "\u2028"])
@example([2**63 - 1] * 3, ["\x01" * 200])
def test_every_storable_position_has_a_valid_cursor(numbers: list[int], names: list[str]) -> None:
    position: list[str | int] = [*numbers, *names]
    assert decode_cursor("list", encode_cursor("list", position), [type(value) for value in position]) == position


def _encoded(value: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode()


@pytest.mark.parametrize(
    "cursor",
    [
        "",
        "nonsense!",
        "é",
        "A" * (CURSOR_CHARS_MAX + 1),
        _encoded(["other", 5]),
        _encoded(["list", "5"]),
        _encoded(["list", True]),
        _encoded(["list", 2**63]),
        _encoded(["list", 5, 6]),
        _encoded(["list"]),
        _encoded("list"),
        _encoded({"list": 5}),
        base64.b64encode(b"\xff\xfe").decode(),
        base64.b64encode(b"[" * 3000).decode(),
    ],
)
def test_an_invalid_cursor_is_refused_by_name(cursor: str) -> None:
    with pytest.raises(InvalidValue) as refused:
        decode_cursor("list", cursor, [int])
    assert refused.value.param == "cursor"


@given(st.text(max_size=100))
def test_any_other_text_is_refused_as_a_cursor(cursor: str) -> None:
    with pytest.raises(InvalidValue):
        decode_cursor("list", cursor, [int, int, int])


@pytest.mark.parametrize("text", ["a\0b", "a\ud800b", "\udfff"])
def test_a_cursor_with_unstorable_text_is_refused(text: str) -> None:
    for cursor in (_encoded(["list", text]), encode_cursor("list", [text])):
        with pytest.raises(InvalidValue):
            decode_cursor("list", cursor, [str])


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
