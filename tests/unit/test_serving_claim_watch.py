"""A lost and reacquired database claim: changes made by commands in between are read again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from typing import cast as typed

from appliance.base.database_claim import MayResume
from appliance.base.db import Database
from appliance.serving.claim_watch import stop_when_claim_lost
from tests.support.cast import Cast
from tests.support.clock import FakeClock
from tests.support.ledgers import euro_prices


class TakenAgain:
    """A claim that is retaken at once, asks its holder whether it may continue, and is then lost."""

    goes_on = False

    async def wait_until_lost(self, may_resume: MayResume) -> str:
        """Ask once."""
        self.goes_on = await may_resume()
        return "the server is gone"

    async def release(self) -> None:
        """Do nothing."""


async def test_a_price_added_while_the_database_was_unclaimed_applies_afterwards(
    database: Database, clock: FakeClock, cast: Cast
) -> None:
    of_gateway, of_command = euro_prices(database, clock), euro_prices(database, clock)
    terms = {"model": "demo", "currency": "EUR", "prompt": 1, "cached_prompt": 1}
    first = await of_gateway.add(**terms, completion=1)  # type: ignore[arg-type]
    assert await of_gateway.current("demo", clock.now()) == first
    clock.advance(1)
    second = await of_command.add(**terms, completion=2)  # type: ignore[arg-type]

    claim, generations = TakenAgain(), SimpleNamespace(end_all=lambda: None)
    parts = SimpleNamespace(db=database, epoch_id=cast.epoch_id, prices=of_gateway, generations=generations)
    await stop_when_claim_lost(claim, typed("Any", parts), lambda: None)
    assert claim.goes_on
    assert await of_gateway.current("demo", clock.now()) == second
