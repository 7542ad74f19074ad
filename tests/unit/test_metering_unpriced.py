"""Requests for models without a price in a tenant's currency are counted, reported, and refused if the appliance is set to."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from appliance.base.db import Database
from appliance.base.errors import BudgetExceeded, ModelNotPriced
from appliance.metering.ledger import rollups
from appliance.tenancy.principals import Limits
from tests.support import factories
from tests.support.cast import Cast
from tests.support.clock import FakeClock
from tests.support.empty_sums import EmptySums
from tests.support.factories import admission_request
from tests.support.generations import MODEL, open_serving, text_of
from tests.support.ledgers import euro_prices, num_running, running_ledger, utc_admission


async def test_models_used_without_a_price_are_reported(database: Database, clock: FakeClock, cast: Cast) -> None:
    prices = euro_prices(database, clock)
    await prices.add(model="demo", currency="EUR", prompt=1, cached_prompt=1, completion=1)
    async with running_ledger(database, clock, cast.epoch_id) as ledger:
        for currency in ("EUR", "USD"):
            entry = factories.pending(cast.bob, currency=currency)
            await ledger.open(entry)
            await ledger.settle(factories.posted(entry.request_id))
    async with database.reading() as connection:
        used = await rollups.models_used_since(connection, clock.now() - timedelta(days=30))
    assert sorted(used) == [("demo", "EUR"), ("demo", "USD")]
    assert await prices.unpriced(used, clock.now()) == [("demo", "USD")]


@pytest.mark.parametrize("refuse", [False, True])
async def test_a_request_without_a_price_is_counted_or_refused_without_a_reservation(
    database: Database, clock: FakeClock, cast: Cast, tmp_path: Path, refuse: bool
) -> None:
    async with open_serving(database, clock, tmp_path, cast.epoch_id, refuse_unpriced=refuse) as serving:
        if refuse:
            with pytest.raises(ModelNotPriced, match=f"{MODEL} has no price") as refused:
                await serving.start(cast.bob, "the answer")
            assert (refused.value.status, refused.value.code) == (403, "model_not_priced")
            assert num_running(serving.admission, cast.bob.tenant.id) == 0
        else:
            await text_of(await serving.start(cast.bob, "the answer"))
        counted = f'gatehouse_unpriced_requests_total{{model="{MODEL}"}} 1.0'
        assert (counted in (await serving.metrics.render()).decode()) is not refuse


async def test_the_refusal_of_a_spent_budget_names_the_amounts(clock: FakeClock) -> None:
    admission, bob = utc_admission(clock, EmptySums()), factories.principal(Limits(monthly_budget=300))
    request = admission_request(bob, 301, price=factories.price())
    with pytest.raises(BudgetExceeded) as refused:
        await admission.admit(request)
    assert (
        "budget of this month (0.0003 EUR) does not cover the request: 0.0003 EUR are left, the prompt and 0 tokens of "
        "expected output may cost 0.000301 EUR; shorten the prompt" in refused.value.message
    )
