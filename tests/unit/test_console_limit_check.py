"""The limit check page shows what the limits would decide, and reserves nothing."""

from __future__ import annotations

from appliance.metering.limits.admission_request import AdmissionRequest
from appliance.tenancy.access import WHOLE_APPLIANCE
from appliance.tenancy.principals import Limits, Principal, TenantChanges
from tests.support.console_fixtures import ConsoleApp


async def limit_check_path(console: ConsoleApp, **limits: int) -> str:
    """Set these limits for Bob's tenant and return the path of its limit check."""
    tenant = console.cast.bob.tenant
    await console.services.tenants.update(tenant.id, TenantChanges(limits=Limits(**limits)), access=WHOLE_APPLIANCE)
    return f"/tenants/{tenant.id}/check"


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
    tenant = await console.services.tenants.get(person.tenant.id, access=WHOLE_APPLIANCE)
    running = AdmissionRequest(
        principal=Principal(tenant=tenant, key=person.key), model="demo", prompt_tokens=1, max_output_tokens=1, price=None
    )
    await console.services.admission.admit(running)
    page = (await (await console.alice()).fragment(f"{path}?model=demo")).text
    assert "about 1" in page
    assert "when running requests have probably ended" in page


async def test_in_shadow_mode_a_request_above_a_limit_is_admitted_and_marked(console: ConsoleApp) -> None:
    path = await limit_check_path(console, tokens_per_minute=10)
    await console.services.tenants.update(
        console.cast.bob.tenant.id, TenantChanges(limit_mode="shadow"), access=WHOLE_APPLIANCE
    )
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
    assert "Key: No such key, or it was revoked." in (await alice.fragment(f"{path}?model=demo&key=key_x")).text


async def test_the_check_of_another_tenant_is_not_found(console: ConsoleApp) -> None:
    path = await limit_check_path(console)
    mallory = await console.member_of(console.cast.charlie, "manager", email="mallory@example.com")
    assert (await mallory.get(path)).status_code == 404
