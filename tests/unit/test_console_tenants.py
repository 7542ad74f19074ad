"""Tenants in the console: listing, creating, limits, suspending and archiving."""

from __future__ import annotations

import re

import pytest
from sqlalchemy import update

from appliance.base.tables import tenants
from appliance.console import tenants as tenant_pages
from appliance.tenancy.principals import Limits, TenantChanges
from tests.support.cast import OWNER, change_tenant
from tests.support.console_fixtures import ConsoleApp
from tests.support.factories import admission_request

NEW = {"name": "Acme", "tier": "standard", "weight": "2"}


async def test_the_list_shows_every_tenant_with_its_limits(console: ConsoleApp) -> None:
    limits = Limits(tokens_per_minute=60_000, monthly_budget=12_500_000)
    await console.services.tenants.create("limited", TenantChanges(limits=limits), access=OWNER)

    page = (await (await console.alice()).get("/tenants")).text

    for text in ("bob", "charlie", "limited", "60,000", "12.50 EUR"):
        assert text in page


async def test_names_are_escaped(console: ConsoleApp) -> None:
    await console.services.tenants.create(name="<script>alert(1)</script>", access=OWNER)

    page = (await (await console.alice()).get("/tenants")).text

    assert "<script>alert" not in page


async def test_a_tenant_is_created_with_its_limits_and_confirmed_once(console: ConsoleApp) -> None:
    alice = await console.alice()

    answer = await alice.post(
        "/tenants", **NEW, tokens_per_minute="60 000", monthly_budget="12.5", allowed_models="demo, other"
    )

    assert answer.status_code == 303
    created = await console.services.tenants.get(answer.headers["location"].rpartition("/")[2], access=OWNER)
    assert (created.name, created.weight, created.allowed_models) == ("Acme", 2, ("demo", "other"))
    assert created.limits == Limits(tokens_per_minute=60_000, monthly_budget=12_500_000)
    assert "Tenant created" in (await alice.get(answer.headers["location"])).text
    assert "Tenant created" not in (await alice.get(answer.headers["location"])).text


async def test_htmx_is_redirected_to_the_new_tenant(console: ConsoleApp) -> None:
    answer = await (await console.alice()).post_htmx("/tenants", **NEW)

    assert answer.status_code == 200
    assert answer.headers["hx-redirect"].startswith("/tenants/")


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("name", "", "Fill this in."),
        ("name", "x" * 201, "Enter at most 200 characters"),
        ("name", "bob", "There is a tenant named"),
        ("tier", "gold", "Choose one of"),
        ("weight", "", "Fill this in."),
        ("weight", "0", "Enter a number between 1 and"),
        ("weight", "-1", "Enter a whole number."),
        ("tokens_per_minute", "many", "Enter a whole number, or leave this empty."),
        ("requests_per_minute", "1e9", "Enter a whole number, or leave this empty."),
        ("tokens_per_day", "9" * 400, "Enter a number between 0 and"),
        ("tokens_per_day", str(10**15 + 1), "Enter a number between 0 and 1,000,000,000,000,000."),
        ("concurrent_requests", "٣", "Enter a whole number, or leave this empty."),
        ("monthly_budget", "12.1234567", "Enter an amount like"),
        ("monthly_budget", "-1", "Enter an amount like"),
    ],
)
async def test_an_invalid_field_has_its_error_beside_it_and_nothing_is_created(
    console: ConsoleApp, field: str, value: str, sentence: str
) -> None:
    alice = await console.alice()
    fields = {**NEW, field: value}

    page, fragment = await alice.post("/tenants", **fields), await alice.post_htmx("/tenants", **fields)

    for answer in (page, fragment):
        assert answer.status_code == 422
        assert sentence in answer.text
        assert f'aria-describedby="sheet-{field}-note"' in answer.text
    assert "<html" in page.text
    assert "<html" not in fragment.text

    assert {tenant.name for tenant in (await console.services.tenants.list(10, access=OWNER)).data} == {
        "bob",
        "charlie",
    }


@pytest.mark.parametrize(
    ("fields", "opened"),
    [({"weight": "0"}, False), ({"weight": "0", "tokens_per_day": "5"}, True), ({"monthly_budget": "-1"}, True)],
)
async def test_after_an_error_the_limits_are_expanded_if_they_were_filled_in(
    console: ConsoleApp, fields: dict[str, str], opened: bool
) -> None:
    given = {"name": "Acme", "tier": "standard", "weight": "1", **fields}

    page = (await (await console.alice()).post_htmx("/tenants", **given)).text

    assert ('<details class="more" open>' in page) == opened


async def test_after_an_error_the_form_keeps_its_input(console: ConsoleApp) -> None:
    answer = await (await console.alice()).post("/tenants", **{**NEW, "tokens_per_minute": "many", "monthly_budget": "77.25"})

    assert 'value="Acme"' in answer.text
    assert 'value="many"' in answer.text
    assert 'value="77.25"' in answer.text


async def test_limits_are_saved_and_an_empty_field_removes_a_limit(console: ConsoleApp) -> None:
    alice, tenant = await console.alice(), console.cast.bob.tenant
    path = f"/tenants/{tenant.id}"
    fields = {"name": "bob", "tier": "interactive", "weight": "3"}

    await alice.post(path, **fields, requests_per_minute="600", concurrent_requests="4")
    assert (await console.services.tenants.get(tenant.id, access=OWNER)).limits == Limits(
        requests_per_minute=600, concurrent_requests=4
    )

    answer = await alice.post(path, **fields, concurrent_requests="4")
    saved = await console.services.tenants.get(tenant.id, access=OWNER)
    assert answer.headers["location"] == path
    assert (saved.tier, saved.weight, saved.limits) == ("interactive", 3, Limits(concurrent_requests=4))


@pytest.mark.parametrize(
    ("stored", "shown", "typed", "saved"),
    [
        ((), "none", "none", ()),
        (("a, b",), "a, b", "a, b", ("a, b",)),
        (("demo",), "demo", "None", ()),
        ((), "none", "", None),
        (None, "", "none", ()),
    ],
)
async def test_the_model_list_is_saved_as_typed_and_kept_when_unchanged(
    console: ConsoleApp, stored: tuple[str, ...] | None, shown: str, typed: str, saved: tuple[str, ...] | None
) -> None:
    alice, path = await console.alice(), f"/tenants/{console.cast.bob.tenant.id}"
    await change_tenant(console.services.tenants, console.cast.bob, allowed_models=stored)
    (value,) = re.findall(r'name="allowed_models" type="text" value="([^"]*)"', (await alice.get(path)).text)

    await alice.post(path, name="bob", tier="standard", weight="7", allowed_models=typed)

    tenant = await console.services.tenants.get(console.cast.bob.tenant.id, access=OWNER)
    assert (value, tenant.weight, tenant.allowed_models) == (shown, 7, saved)


async def test_a_stored_name_that_is_no_longer_valid_is_kept_when_other_fields_change(console: ConsoleApp) -> None:
    bob, old = console.cast.bob.tenant.id, "b\u200bob"
    async with console.services.db.writing() as connection:
        await connection.execute(update(tenants).where(tenants.c.id == bob).values(name=old))

    answer = await (await console.alice()).post(f"/tenants/{bob}", name=old, tier="standard", weight="7")

    saved = await console.services.tenants.get(bob, access=OWNER)
    assert (answer.status_code, saved.name, saved.weight) == (303, old, 7)


async def test_renaming_to_a_taken_name_is_reported_on_the_tenant_s_page(console: ConsoleApp) -> None:
    tenant = console.cast.bob.tenant

    answer = await (await console.alice()).post(f"/tenants/{tenant.id}", name="charlie", tier="standard", weight="1")

    assert answer.status_code == 422
    assert "There is a tenant named &#39;charlie&#39; already." in answer.text


async def test_the_page_shows_the_usage_of_each_limit(console: ConsoleApp) -> None:
    bob = console.cast.bob
    alice = await console.alice()
    await alice.post(
        f"/tenants/{bob.tenant.id}",
        name="bob",
        tier="standard",
        weight="1",
        tokens_per_minute="1000",
        requests_per_minute="60",
        concurrent_requests="4",
        tokens_per_day="5000",
        monthly_budget="1",
    )
    principal = await console.services.keys.authenticate(bob.secret, "192.0.2.1")
    assert principal.tenant.limits.monthly_budget == 1_000_000
    await console.services.admission.admit(admission_request(principal, 100, 50))

    page = (await alice.get(f"/tenants/{bob.tenant.id}")).text

    for text in ("150 of 1,000", "1 of 60", "1 of 4", "0 of 5,000", "0.000000 EUR of 1.00 EUR"):
        assert text in page


async def test_a_truncated_list_of_keys_links_to_all_keys(console: ConsoleApp, monkeypatch: pytest.MonkeyPatch) -> None:
    bob, alice = console.cast.bob.tenant, await console.alice()
    for _ in range(2):
        assert "The first" not in (await alice.get(f"/tenants/{bob.id}")).text
        monkeypatch.setattr(tenant_pages, "KEYS_SHOWN_MAX", 1)
    await console.services.keys.create(bob.id, name="one more", access=OWNER)

    assert 'The first 1 are shown; <a href="/keys">Keys</a> lists all.' in (await alice.get(f"/tenants/{bob.id}")).text


async def test_the_page_links_to_the_tenant_s_requests_usage_and_audit_log(console: ConsoleApp) -> None:
    bob, alice = console.cast.bob, await console.alice()

    page = (await alice.get(f"/tenants/{bob.tenant.id}")).text

    for path in (
        f"/requests?tenant={bob.tenant.id}",
        f"/usage?group=key&amp;tenant={bob.tenant.id}",
        f"/audit?tenant={bob.tenant.id}",
    ):
        assert f'href="{path}"' in page
        assert (await alice.get(path.replace("&amp;", "&"))).status_code == 200
    assert f'href="/requests?q={bob.key.prefix}"' in (await alice.get(f"/keys/{bob.key.id}")).text


async def test_a_tenant_can_be_suspended_and_resumed(console: ConsoleApp) -> None:
    alice, tenant = await console.alice(), console.cast.bob.tenant

    await alice.post(f"/tenants/{tenant.id}/suspend")
    assert (await console.services.tenants.get(tenant.id, access=OWNER)).suspended

    page = (await alice.get(f"/tenants/{tenant.id}")).text
    assert "Resume" in page
    await alice.post(f"/tenants/{tenant.id}/resume")
    assert not (await console.services.tenants.get(tenant.id, access=OWNER)).suspended


async def test_archiving_needs_the_typed_name_as_confirmation(console: ConsoleApp) -> None:
    alice, tenant = await console.alice(), console.cast.bob.tenant
    path = f"/tenants/{tenant.id}/archive"

    refused = await alice.post(path, confirm="Bob")
    assert refused.status_code == 422
    assert "not the tenant" in refused.text
    assert not (await console.services.tenants.get(tenant.id, access=OWNER)).archived

    done = await alice.post(path, confirm="bob")
    assert done.headers["location"] == "/tenants"
    assert (await console.services.tenants.get(tenant.id, access=OWNER)).archived
    assert f"/tenants/{tenant.id}" not in (await alice.get("/tenants")).text
    assert f"/tenants/{tenant.id}" in (await alice.get("/tenants?archived=yes")).text


async def test_tenants_can_be_searched_by_a_part_of_their_name(console: ConsoleApp) -> None:
    alice = await console.alice()

    found = (await alice.fragment("/tenants?q=BO")).text

    assert f"/tenants/{console.cast.bob.tenant.id}" in found
    assert f"/tenants/{console.cast.charlie.tenant.id}" not in found
    assert "<html" not in found
    assert "No tenant matches." in (await alice.get("/tenants?q=_")).text


async def test_an_archived_tenant_cannot_be_changed(console: ConsoleApp) -> None:
    alice, tenant = await console.alice(), console.cast.bob.tenant
    await console.services.tenants.archive(tenant.id, access=OWNER)

    assert ">Save<" not in (await alice.get(f"/tenants/{tenant.id}")).text
    answer = await alice.post(f"/tenants/{tenant.id}", name="back", tier="standard", weight="1")
    assert answer.status_code == 422
    assert (await alice.post(f"/tenants/{tenant.id}/resume")).status_code == 409


@pytest.mark.parametrize("path", ["/tenants/tn_nobody", "/tenants/tn_nobody/archive", "/tenants/tn_nobody/keys/new"])
async def test_an_unknown_tenant_is_not_found(console: ConsoleApp, path: str) -> None:
    alice = await console.alice()

    assert (await alice.get(path)).status_code == 404
    fragment = await alice.fragment(path)
    assert fragment.status_code == 404
    assert "gatehouse:toast" in fragment.headers["hx-trigger"]
    assert "<html" not in fragment.text


async def test_the_form_of_a_new_tenant_is_served_as_page_and_as_fragment(console: ConsoleApp) -> None:
    alice = await console.alice()

    assert "<html" in (await alice.get("/tenants/new")).text
    assert "<html" not in (await alice.fragment("/tenants/new")).text


async def test_an_invalid_cursor_is_a_bad_request(console: ConsoleApp) -> None:
    assert (await (await console.alice()).get("/tenants?cursor=bm9wZQ")).status_code == 400


async def test_the_budget_field_explains_that_only_priced_models_count(console: ConsoleApp) -> None:
    page = (await (await console.alice()).get("/tenants/new")).text

    assert "Counts only models that have a price" in page
