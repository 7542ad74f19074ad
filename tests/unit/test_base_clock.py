"""Formatting of waiting times: at most two units, rounded up."""

from __future__ import annotations

import pytest

from appliance.base.clock import format_wait


@pytest.mark.parametrize(
    ("wait_s", "words"),
    [
        (0.0, "1 ms"),
        (0.0184, "19 ms"),
        (0.9989, "999 ms"),
        (0.9992, "1 s"),
        (12.345, "13 s"),
        (59.2, "1 min"),
        (60.0, "1 min"),
        (244.2, "4 min 5 s"),
        (3599.9, "1 h"),
        (3 * 3600 + 11 * 60 + 0.5, "3 h 12 min"),
        (7200, "2 h"),
        (86_399, "1 d"),
        (86_401, "1 d 1 h"),
        (30 * 86_400, "30 d"),
    ],
)
def test_a_wait_is_rounded_up_to_two_units(wait_s: float, words: str) -> None:
    assert format_wait(wait_s) == words
