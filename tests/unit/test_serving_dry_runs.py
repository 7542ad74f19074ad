"""Dry runs ask admission what the hypothetical request would ask, and return the error that it would get."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from appliance.base.db import Database
from appliance.serving.dry_runs import DryRunRequest, DryRuns
from appliance.serving.model_registry import ModelRegistry
from appliance.tenancy.model_policies import ModelPolicies
from appliance.tenancy.principals import Limits
from appliance.tenancy.tenants import Tenants
from appliance.tenancy.tiers import Tiers
from tests.support.cast import Cast, Person, change_tenant
from tests.support.clock import FakeClock
from tests.support.fake_engine import MAX_MODEL_LEN, STALL
from tests.support.generations import LIMITS, MODEL, Serving
from tests.support.ledgers import euro_prices

PROMPT = [STALL, 5]


def make_dry_runs(serving: Serving, database: Database, clock: FakeClock, *, refuse_unpriced: bool = False) -> DryRuns:
    return DryRuns(
        serving.admission,
        prices=euro_prices(database, clock),
        tiers=Tiers(database, clock),
        policies=ModelPolicies(database, clock),
        models=ModelRegistry([serving.model]),
        clock=clock,
        limits=dataclasses.replace(LIMITS, refuse_unpriced=refuse_unpriced),
    )


async def changed(person: Person, database: Database, clock: FakeClock, **changes: Any) -> Person:
    tenant = await change_tenant(Tenants(database, clock), person, **changes)
    return dataclasses.replace(person, tenant=tenant)


@pytest.mark.parametrize(
    ("max_tokens", "default", "room", "num_answers", "batch"),
    [
        (None, None, MAX_MODEL_LEN - 2, 1, False),
        (None, 100, 100, 1, False),
        (None, 2 * MAX_MODEL_LEN, MAX_MODEL_LEN - 2, 1, False),
        (7, 3, 7, 3, False),
        (None, None, MAX_MODEL_LEN - 2, 2, True),
    ],
    ids=["no maximum", "default", "default beyond the context", "three answers", "batch work"],
)
async def test_a_dry_run_asks_admission_what_the_request_itself_asks(
    serving: Serving, cast: Cast, database: Database, clock: FakeClock, monkeypatch: pytest.MonkeyPatch,
    max_tokens: int | None, default: int | None, room: int, num_answers: int, batch: bool,
) -> None:  # fmt: skip
    bob = await changed(cast.bob, database, clock, currency="USD")
    for currency in ("EUR", "USD"):
        await euro_prices(database, clock).add(model=MODEL, currency=currency, prompt=1, cached_prompt=1, completion=2)
    await ModelPolicies(database, clock).put(MODEL, Limits(tokens_per_minute=10**6))
    await Tiers(database, clock).update(bob.tenant.tier, admission_wait_ms=1500)
    asked = []

    def record_calls(method: str) -> None:
        original = getattr(serving.admission, method)

        async def recorded(*arguments: Any) -> Any:
            asked.append(arguments)
            return await original(*arguments)

        monkeypatch.setattr(serving.admission, method, recorded)

    record_calls("admit")
    record_calls("dry_run")
    serving.model.default_max_tokens = default
    generation = await serving.start(bob, PROMPT, max_tokens=room, max_output_tokens=max_tokens, n=num_answers, batch=batch)
    generation.end_early("disconnected")
    await make_dry_runs(serving, database, clock).run(
        DryRunRequest(
            tenant=bob.tenant, key=bob.key, model=MODEL, prompt_tokens=len(PROMPT), max_tokens=max_tokens,
            num_answers=num_answers, batch=batch,
        )
    )  # fmt: skip
    (request, wait_s, _), dry_run = asked
    assert (request, wait_s) == dry_run


async def test_of_several_reasons_a_dry_run_returns_the_one_that_the_request_would_meet_first(
    serving: Serving, cast: Cast, database: Database, clock: FakeClock
) -> None:
    dry_runs = make_dry_runs(serving, database, clock, refuse_unpriced=True)

    async def error_message(person: Person) -> str:
        result = await dry_runs.run(DryRunRequest(tenant=person.tenant, key=person.key, model=MODEL, prompt_tokens=20))
        assert result.allowed == (result.error is None)
        assert result.wait_s == (0.0 if result.allowed else None)
        return "" if result.error is None else result.error.message

    bob = await changed(cast.bob, database, clock, currency="USD", limits=Limits(tokens_per_minute=10), suspended=True)
    assert "suspended" in await error_message(bob)
    bob = await changed(bob, database, clock, suspended=False)
    assert f"{MODEL} has no price in USD" in await error_message(bob)
    await euro_prices(database, clock).add(model=MODEL, currency="USD", prompt=1, cached_prompt=1, completion=2)
    dry_runs = make_dry_runs(serving, database, clock, refuse_unpriced=True)
    assert "tokens" in await error_message(bob)
    bob = await changed(bob, database, clock, limits=Limits())
    assert await error_message(bob) == ""
