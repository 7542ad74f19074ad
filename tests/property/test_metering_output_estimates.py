"""Output estimates under random use: the 90th percentile, and bursts of long answers are never underestimated."""

from __future__ import annotations

import random
from datetime import datetime

import pytest

from appliance.metering.limits.output_estimates import EXPECTED_OUTPUT_TOKENS, OUTPUTS_KEPT, OUTPUTS_MIN
from appliance.metering.limits.reservations import Reservation
from tests.support.clock import FakeClock
from tests.support.empty_sums import EmptySums
from tests.support.factories import admission_request, principal
from tests.support.ledgers import utc_admission

STEPS = 600
CHEAP_MAX = OUTPUTS_KEPT // 9 + 1


class History(EmptySums):
    """A ledger with answers from before the start."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    async def outputs(self, key_id: str, model: str, before: datetime) -> list[int]:
        """Return them."""
        return self.lengths[-OUTPUTS_KEPT:]


class Seen:
    """The plain twin: every answer that ended, newest last, and who runs with what each of its answers holds and may take."""

    def __init__(self) -> None:
        self.ended: list[int] = []
        self.running: list[tuple[Reservation, int, int | None]] = []

    def expected(self, asked_max: int | None, answers: int) -> int:
        """Return the estimate as the guide defines it."""
        known = self.ended[-OUTPUTS_KEPT:]
        usual = sorted(known)[round_up(len(known) * 9, 10) - 1] if len(known) >= OUTPUTS_MIN else EXPECTED_OUTPUT_TOKENS
        at_once = sum(reservation.request.num_answers for reservation, _held, _most in self.running) + answers
        if at_once > len(known) / 9 + 1:
            usual = max(usual, EXPECTED_OUTPUT_TOKENS)
        return usual if asked_max is None else min(usual, asked_max)

    @property
    def cheap(self) -> int:
        """Return how many answers run that hold less than a key without a history would hold for them."""
        return sum(
            reservation.request.num_answers
            for reservation, held, most in self.running
            if held < min(EXPECTED_OUTPUT_TOKENS, EXPECTED_OUTPUT_TOKENS if most is None else most)
        )


def round_up(value: int, by: int) -> int:
    return -(-value // by)


@pytest.mark.parametrize("seed", range(8))
async def test_a_burst_is_never_underestimated_after_any_history(clock: FakeClock, seed: int) -> None:
    chance, seen, bob = random.Random(seed), Seen(), principal()
    history = [chance.choice([1, 30, 4000]) for _ in range(chance.choice([0, 15, 30, 150]))]
    admission, arrives = utc_admission(clock, History(history)), chance.choice([1, 20, 60, 200])
    longest = chance.choice([5, 300, 3000])
    for step in range(STEPS):
        if step == arrives:
            await admission.output_estimates.read()
            seen.ended = history + seen.ended
        if chance.random() < 0.1:
            longest = chance.choice([1, 5, 300, 3000])  # the game: a row of short ones, then long ones
        keeps = 1 if step % 100 < 50 else 60  # one at a time, then many at once
        if len(seen.running) < keeps or chance.random() < 0.3:
            most, answers = chance.choice([None, 3, 200, 5000]), chance.choice([1, 1, 1, 2, 14])
            expected = seen.expected(most, answers)
            asked = admission_request(bob, 7, most, num_answers=answers)
            reservation = await admission.admit(asked)
            assert reservation.reserved_tokens == 7 + answers * expected
            seen.running.append((reservation, expected, most))
            assert seen.cheap <= CHEAP_MAX
        else:
            reservation, _held, most = seen.running.pop(chance.randrange(len(seen.running)))
            if chance.random() < 0.1:
                reservation.void()
                continue
            each = chance.randint(1, min(longest, most or longest))
            reservation.settle(7 + reservation.request.num_answers * each)
            seen.ended.append(each)
    assert len(seen.ended) > OUTPUTS_KEPT
