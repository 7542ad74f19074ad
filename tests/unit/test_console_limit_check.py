"""The limit check page shows what the limits would decide, and reserves nothing."""

from __future__ import annotations

import re

from appliance.tenancy.principals import Limits, Principal, TenantChanges
from tests.support.cast import OWNER, change_tenant
from tests.support.console_fixtures import ConsoleApp
from tests.support.factories import admission_request


async def limit_check_path(console: ConsoleApp, **limits: int) -> str:
    """Set these limits for Bob's tenant and return the path of its limit check."""
    tenant = console.cast.bob.tenant
    await console.services.tenants.update(tenant.id, TenantChanges(limits=Limits(**limits)), access=OWNER)
    return f"/tenants/{tenant.id}/check"


def table_cells(page: str) -> list[list[str]]:
    """The texts of the table's cells, row by row, without the head."""
    rows = re.findall(r"<tr>(.*?)</tr>", page, re.DOTALL)[1:]
    cells = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL) for row in rows]
    return [[re.sub("<[^>]+>", "", cell) for cell in row] for row in cells]


async def test_without_limits_every_request_is_admitted(console: ConsoleApp) -> None:
    page = (await (await console.alice()).get(await limit_check_path(console))).text
    assert "Admitted: " in page
    assert "No limit applies to this request" in page


async def test_a_request_above_a_limit_shows_the_error_that_its_client_would_get(console: ConsoleApp) -> None:
    path = await limit_check_path(console, tokens_per_minute=1000, monthly_budget=5_000_000)
    page = (await (await console.alice()).fragment(f"{path}?model=demo&prompt_tokens=2000")).text
    assert "Refused with 429 request_exceeds_limit" in page
    assert "refuses" in page
    assert "never" in page
    assert "5.000000 EUR" in page
    assert "<html" not in page


async def test_the_service_tier_flex_checks_a_batch_request(console: ConsoleApp) -> None:
    await console.services.prices.add(
        model="demo", currency="EUR", prompt=1_000_000, cached_prompt=1_000_000, completion=1_000_000, batch_percent=50
    )
    path = await limit_check_path(console, monthly_budget=1000)
    alice = await console.alice()
    query = f"{path}?model=demo&prompt_tokens=1000&max_tokens=1000&service_tier"

    assert "Refused with 429 budget_exceeded" in (await alice.fragment(f"{query}=default")).text
    assert "Admitted: " in (await alice.fragment(f"{query}=flex")).text
    assert '<option value="flex" selected>' in (await alice.get(f"{query}=flex")).text
    refused = (await alice.fragment(f"{query}=scale")).text
    assert "Choose one of auto, default, flex." in refused
    assert "ervice_tier must" not in refused


async def test_repeated_checks_consume_no_limit(console: ConsoleApp) -> None:
    path = await limit_check_path(console, requests_per_minute=1, tokens_per_minute=1000)
    alice = await console.alice()
    for _ in range(3):
        assert "Admitted: " in (await alice.fragment(f"{path}?model=demo&prompt_tokens=400&max_tokens=100")).text


async def test_waiting_for_running_requests_is_shown_as_an_estimate(console: ConsoleApp) -> None:
    path = await limit_check_path(console, concurrent_requests=1)
    person = console.cast.bob
    tenant = await console.services.tenants.get(person.tenant.id, access=OWNER)
    running = admission_request(Principal(tenant=tenant, key=person.key), 1, 1)
    await console.services.admission.admit(running)
    page = (await (await console.alice()).fragment(f"{path}?model=demo")).text
    assert "about 1" in page
    assert "when running requests have probably ended" in page


async def test_in_shadow_mode_a_request_above_a_limit_is_admitted_and_marked(console: ConsoleApp) -> None:
    path = await limit_check_path(console, tokens_per_minute=10)
    await change_tenant(console.services.tenants, console.cast.bob, limit_mode="shadow")
    page = (await (await console.alice()).fragment(f"{path}?model=demo")).text
    assert "Admitted: " in page
    assert "would refuse (shadow)" in page


async def test_invalid_numbers_models_and_keys_are_reported(console: ConsoleApp) -> None:
    path = await limit_check_path(console)
    alice = await console.alice()
    assert (
        "Prompt tokens: Enter a whole number, or leave this empty."
        in (await alice.fragment(f"{path}?model=demo&prompt_tokens=many")).text
    )
    assert "404 model_not_found" in (await alice.fragment(f"{path}?model=other")).text
    assert "Model: Fill this in." in (await alice.fragment(f"{path}?model=")).text
    assert "Admitted: 507 tokens" in (await alice.fragment(f"{path}?model=demo&prompt_tokens=&max_tokens=7")).text
    assert "max_tokens: " in (await alice.fragment(f"{path}?model=demo&max_tokens=0")).text
    assert "Model: " in (await alice.fragment(f"{path}?model={'a' * 300}")).text
    assert "Key: No such key, or it was revoked." in (await alice.fragment(f"{path}?model=demo&key=key_x")).text


async def test_the_check_of_another_tenant_is_not_found(console: ConsoleApp) -> None:
    path = await limit_check_path(console)
    mallory = await console.member_of(console.cast.charlie, "manager", email="mallory@example.com")
    assert (await mallory.get(path)).status_code == 404


async def test_the_table_shows_whose_each_limit_is_what_is_left_of_it_and_amounts_in_its_currency(console: ConsoleApp) -> None:
    path = await limit_check_path(console, tokens_per_minute=1000, monthly_budget=5_000_000)
    changes = TenantChanges(currency="USD", model_limits={"demo": Limits(requests_per_minute=3)})
    await console.services.tenants.update(console.cast.bob.tenant.id, changes, access=OWNER)
    await console.services.model_policies.put("demo", Limits(monthly_budget=2_000_000, concurrent_requests=4))
    page = (await (await console.alice()).fragment(f"{path}?model=demo&prompt_tokens=900&max_tokens=50")).text
    assert table_cells(page) == [
        ["Tokens per minute", "tenant", "admits", "950", "1,000", "1,000", "now"],
        ["Budget per month", "tenant", "admits", "0.000000 USD", "5.000000 USD", "5.000000 USD", "now"],
        ["Concurrent requests", "model", "admits", "1", "4", "4", "now"],
        ["Budget per month", "model", "admits", "0.000000 EUR", "2.000000 EUR", "2.000000 EUR", "now"],
        ["Requests per minute", "tenant, demo", "admits", "1", "3", "3", "now"],
    ]


async def test_a_request_that_its_tier_lets_wait_is_said_to_wait_for_that_long(console: ConsoleApp) -> None:
    path = await limit_check_path(console, tokens_per_minute=600)
    services = console.services
    tenant = await services.tenants.get(console.cast.bob.tenant.id, access=OWNER)
    await services.tiers.update(tenant.tier, admission_wait_ms=30_000)
    used = admission_request(Principal(tenant=tenant, key=console.cast.bob.key), 600)  # fmt: skip
    await services.admission.admit(used)
    page = (await (await console.alice()).fragment(f"{path}?model=demo&prompt_tokens=40&max_tokens=60")).text
    assert "Waits 10 s for room, and is then admitted unless other requests take it." in page
    assert table_cells(page) == [["Tokens per minute", "tenant", "refuses", "100", "0", "600", "10 s"]]


async def test_the_form_begins_with_the_first_model_and_offers_the_keys_that_are_not_revoked(console: ConsoleApp) -> None:
    path, keys, bob = await limit_check_path(console), console.services.keys, console.cast.bob
    revoked, _ = await keys.create(bob.tenant.id, "revoked key", access=OWNER)
    await keys.revoke(revoked.id, access=OWNER)
    page = (await (await console.alice()).get(path)).text
    assert 'name="model" value="demo"' in page
    assert 'name="prompt_tokens" value="500"' in page
    assert f'<option value="{bob.key.id}">' in page
    assert "revoked key" not in page
