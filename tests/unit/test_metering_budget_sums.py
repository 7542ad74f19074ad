"""The query of a budget check reads only the sums of the owners concerned; test_metering_budget_owners.py tests its results."""

from __future__ import annotations

from datetime import date

import pytest

from appliance.base.db import Database
from appliance.metering.alerts.budgets import usage_query
from appliance.metering.alerts.rules import AlertRule, Period
from appliance.metering.calendar import BillingCalendar
from appliance.metering.limits.owner_sums import IN_LIST_MAX, sums_query
from appliance.metering.limits.owners import ALL_TENANTS, LimitScope, Owner
from tests.support.clock import START
from tests.support.query_plans import query_plan

MONTH, DAY = Period("budget", date(2026, 10, 1)), Period("tokens_per_day", date(2026, 10, 25))
_DAY_OF = "USING PRIMARY KEY (bucket=? AND start_at=? AND"
READ: dict[LimitScope, str] = {
    "tenant": f"SEARCH usage_rollups {_DAY_OF} tenant_id=?)",
    "key": f"SEARCH usage_rollups {_DAY_OF} tenant_id=? AND key_id=?)",
    "model": f"SEARCH usage_appliance_rollups {_DAY_OF} model=?)",
}


def rules_of(*scopes: LimitScope) -> dict[Owner, AlertRule]:
    """Return alert rules for three owners of each scope."""
    owners = [
        Owner(scope, ALL_TENANTS, f"m{n}") if scope == "model" else Owner(scope, f"{n}") for scope in scopes for n in "abc"
    ]
    terms = {"owner_fields": {}, "currency": "EUR", "limits": {"budget": 1, "tokens_per_day": 1}, "percents": (80,)}
    return {owner: AlertRule(owner=owner, **terms) for owner in owners}  # type: ignore[arg-type]


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize("period", [MONTH, DAY], ids=lambda period: period.kind)
@pytest.mark.parametrize("scopes", [("tenant",), ("key",), ("model",), ("tenant", "key", "model")], ids="+".join)
async def test_a_budget_check_reads_only_the_sums_of_its_owners(
    database: Database, scopes: tuple[LimitScope, ...], period: Period
) -> None:
    query = usage_query(BillingCalendar("Europe/Berlin"), period, rules_of(*scopes))
    read = [line.removesuffix(" LEFT-JOIN") for line in await query_plan(database, query, "usage_")]
    assert read == [READ[scope] for scope in scopes]


def test_the_days_of_a_month_are_those_of_the_billing_zone() -> None:
    query = usage_query(BillingCalendar("Europe/Berlin"), MONTH, rules_of("model"))
    compiled = str(query.compile(compile_kwargs={"literal_binds": True}))
    assert compiled.count("2026-") == 31
    assert "2026-10-25 22" not in compiled
    assert "2026-10-25 23" in compiled


@pytest.mark.parametrize("scope", ["tenant", "key", "model"])
def test_a_statement_lists_its_owners_only_up_to_a_limit(scope: LimitScope) -> None:
    owners = [Owner(scope, f"{number}", f"{number}" if scope == "model" else None) for number in range(IN_LIST_MAX + 1)]
    for some, is_named in ((owners[1:], True), (owners, False)):
        compiled = sums_query(some, [START]).compile(compile_kwargs={"render_postcompile": True})
        assert ("500" in compiled.params.values()) is is_named
