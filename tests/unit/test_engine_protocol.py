"""Sampling parameters that no engine could compute are refused where they are made, by name and with the limit."""

from __future__ import annotations

import math
from typing import Any

import pytest

from engine.protocol import InvalidOption, SamplingParams


@pytest.mark.parametrize("penalty", [-1.0, 0.0, 1e-320, 1e-300, 0.0099, 10.1, math.inf, math.nan])
def test_a_repetition_penalty_beyond_its_limits_is_refused_by_name(penalty: float) -> None:
    with pytest.raises(InvalidOption, match=r"repetition_penalty must be between 0\.01 and 10, not ") as refused:
        SamplingParams(repetition_penalty=penalty)
    assert refused.value.param == "repetition_penalty"


@pytest.mark.parametrize(
    "sampling",
    [{"repetition_penalty": 0.01}, {"repetition_penalty": 10.0}, {"temperature": 1e-320}, {"top_p": 1e-320}],
    ids=str,
)
def test_the_limits_themselves_are_accepted(sampling: dict[str, Any]) -> None:
    (name,) = sampling
    assert getattr(SamplingParams(**sampling), name) == sampling[name]
