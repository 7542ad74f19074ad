"""Whatever number of requests a step has, a step before the first request had one for which the same kernels are compiled."""

from __future__ import annotations

from engine.options import SEATS_MAX
from engine.runner.warm_up import DECODES, FEW, MANY, SEARCHED
from engine.scheduling.limits import STEP_GUESSES_MAX
from kernels.triton.attention_splits import scheduled_requests

ROWS_MAX = SEATS_MAX + STEP_GUESSES_MAX


def test_every_number_of_decodes_and_of_chunks_is_of_a_size_that_was_compiled() -> None:
    for compiled in (DECODES, (FEW, MANY, *SEARCHED)):
        for most in (1, 33, 256, 257, 600, 1024, ROWS_MAX):
            asked = {scheduled_requests(min(number, most)) for number in compiled}
            assert {scheduled_requests(number) for number in range(1, most + 1)} <= asked, f"{compiled} up to {most}"


def test_no_size_is_compiled_that_no_engine_has_requests_for() -> None:
    assert max(DECODES) <= ROWS_MAX
