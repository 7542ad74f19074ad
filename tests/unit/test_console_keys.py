"""API keys in the console: creating, listing, changing, rotating and revoking; a secret is shown once."""

from __future__ import annotations

import dataclasses
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from appliance.base.errors import ExpiredApiKey, InvalidApiKey
from appliance.tenancy.principals import KeyChanges, Limits
from tests.support.cast import OWNER, change_tenant
from tests.support.clock import FakeClock
from tests.support.console_fixtures import Browser, ConsoleApp, open_console
from tests.support.factories import pending, posted
from tests.support.spending import PICOS

SECRET = re.compile(r"gh_[a-z0-9]{8}_[a-z0-9]{26}")


async def create_key(console: ConsoleApp, browser: Browser, **fields: str) -> str:
    """Create a key of Bob's tenant through the form and return its secret."""
    answer = await browser.post(f"/tenants/{console.cast.bob.tenant.id}/keys", **{"name": "reports", **fields})
    assert answer.status_code == 200, answer.text
    (secret,) = set(SECRET.findall(answer.text))
    return str(secret)


async def test_a_new_secret_works_and_is_shown_only_once(console: ConsoleApp) -> None:
    alice, tenant = await console.alice(), console.cast.bob.tenant

    secret = await create_key(console, alice)

    principal = await console.services.keys.authenticate(secret, "192.0.2.1")
    assert (principal.tenant.id, principal.key.name) == (tenant.id, "reports")
    for path in (f"/tenants/{tenant.id}", "/keys", f"/keys/{principal.key.id}"):
        page = (await alice.get(path)).text
        assert principal.key.prefix in page
        assert secret not in page


async def test_the_page_with_a_new_secret_is_not_cached_and_has_a_curl_command(console: ConsoleApp) -> None:
    answer = await (await console.alice()).post(f"/tenants/{console.cast.bob.tenant.id}/keys", name="reports")

    assert answer.headers["cache-control"] == "no-store"
    assert "curl http://127.0.0.1:8000/v1/chat/completions" in answer.text
    assert '"model": "demo"' in answer.text


@pytest.mark.parametrize(
    ("changes", "address"),
    [({"external_url": "https://llm.example.com"}, "https://llm.example.com"), ({"host": "::1"}, "http://[::1]:8000")],
)
async def test_the_curl_command_has_the_external_base_url(
    console: ConsoleApp, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], address: str
) -> None:
    monkeypatch.setattr(console.services, "settings", dataclasses.replace(console.services.settings, **changes))

    answer = await (await console.alice()).post(f"/tenants/{console.cast.bob.tenant.id}/keys", name="reports")

    assert f"curl {address}/v1/chat/completions" in answer.text


async def test_the_curl_command_omits_models_that_the_key_may_not_use(console: ConsoleApp) -> None:
    answer = await (await console.alice()).post(
        f"/tenants/{console.cast.bob.tenant.id}/keys", name="reports", allowed_models="other"
    )

    assert '"model": "MODEL"' in answer.text


async def test_a_key_without_inference_scope_has_no_curl_command(console: ConsoleApp) -> None:
    answer = await (await console.alice()).post(f"/tenants/{console.cast.bob.tenant.id}/keys", name="reports", scopes="usage")

    assert SECRET.search(answer.text)
    assert "/v1/chat/completions" not in answer.text


async def test_a_key_is_created_with_expiry_limits_models_and_networks(console: ConsoleApp) -> None:
    secret = await create_key(
        console,
        await console.alice(),
        expires_on="2027-03-31",
        allowed_models="demo",
        allowed_networks="192.0.2.0/24, 10.0.0.1",
        requests_per_minute="5",
    )

    key = (await console.services.keys.authenticate(secret, "192.0.2.1")).key
    assert key.expires_at == datetime(2027, 3, 31, 23, 59, 59, tzinfo=UTC)
    assert (key.allowed_models, key.allowed_networks) == (("demo",), ("192.0.2.0/24", "10.0.0.1/32"))
    assert key.limits == Limits(requests_per_minute=5)


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("name", "", "Fill this in."),
        ("expires_on", "2026-11-20", "Enter today or a later day."),
        ("expires_on", "soon", "Enter a day like"),
        ("expires_on", "2027-13-01", "Enter a day like"),
        ("allowed_networks", "here", "is not a network"),
        ("tokens_per_minute", "-5", "Enter a whole number, or leave this empty."),
    ],
)
async def test_an_invalid_field_has_its_error_beside_it_and_nothing_is_created(
    console: ConsoleApp, field: str, value: str, sentence: str
) -> None:
    alice, tenant = await console.alice(), console.cast.bob.tenant

    answer = await alice.post(f"/tenants/{tenant.id}/keys", **{"name": "reports", field: value})

    assert answer.status_code == 422
    assert sentence in answer.text
    assert f'aria-describedby="sheet-{field}-note"' in answer.text
    assert len((await console.services.keys.list(tenant.id, access=OWNER)).data) == 1


async def test_changes_of_a_key_are_saved(console: ConsoleApp) -> None:
    alice, key = await console.alice(), console.cast.bob.key

    answer = await alice.post(f"/keys/{key.id}", name="renamed", tokens_per_minute="1000")

    saved = await console.services.keys.get(key.id, access=OWNER)
    assert answer.headers["location"] == f"/keys/{key.id}"
    assert (saved.name, saved.limits) == ("renamed", Limits(tokens_per_minute=1000))


async def test_empty_allow_lists_stay_empty_when_a_key_is_renamed(console: ConsoleApp) -> None:
    alice, key = await console.alice(), console.cast.bob.key
    nothing = KeyChanges(allowed_models=[], allowed_networks=[])
    await console.services.keys.update(key.id, nothing, access=OWNER)
    page = (await alice.get(f"/keys/{key.id}")).text

    await alice.post(f"/keys/{key.id}", name="renamed", allowed_models="none", allowed_networks="none")

    saved = await console.services.keys.get(key.id, access=OWNER)
    assert page.count('type="text" value="none"') == 2
    assert (saved.name, saved.allowed_models, saved.allowed_networks) == ("renamed", (), ())


async def test_an_unchanged_expiry_date_keeps_its_exact_time(console: ConsoleApp) -> None:
    moment = datetime(2026, 12, 24, 18, 30, tzinfo=UTC)
    terms = KeyChanges(expires_at=moment)
    key, _ = await console.services.keys.create(console.cast.bob.tenant.id, "until Christmas", terms, access=OWNER)

    await (await console.alice()).post(f"/keys/{key.id}", name="until Christmas", expires_on="2026-12-24")

    assert (await console.services.keys.get(key.id, access=OWNER)).expires_at == moment


async def test_invalid_changes_of_a_key_are_reported_on_its_page(console: ConsoleApp) -> None:
    answer = await (await console.alice()).post(f"/keys/{console.cast.bob.key.id}", name="", tokens_per_minute="x")

    assert answer.status_code == 422
    assert "2 fields have an error" in answer.text


async def test_rotating_shows_the_new_secret_and_revokes_the_old_one(console: ConsoleApp) -> None:
    alice, bob = await console.alice(), console.cast.bob
    assert "new secret" in (await alice.get(f"/keys/{bob.key.id}/rotate")).text

    answer = await alice.post(f"/keys/{bob.key.id}/rotate")

    (secret,) = set(SECRET.findall(answer.text))
    assert (await console.services.keys.authenticate(secret, "192.0.2.1")).tenant == bob.tenant
    with pytest.raises(InvalidApiKey):
        await console.services.keys.authenticate(bob.secret, "192.0.2.1")


async def test_revoking_needs_a_confirmation_and_takes_effect_immediately(console: ConsoleApp) -> None:
    alice, bob = await console.alice(), console.cast.bob
    confirmation = await alice.fragment(f"/keys/{bob.key.id}/revoke")
    assert "refused permanently" in confirmation.text
    await console.services.keys.authenticate(bob.secret, "192.0.2.1")

    answer = await alice.post(f"/keys/{bob.key.id}/revoke")

    assert answer.headers["location"] == f"/tenants/{bob.tenant.id}"
    with pytest.raises(InvalidApiKey):
        await console.services.keys.authenticate(bob.secret, "192.0.2.1")


async def test_a_revoked_key_cannot_be_rotated_or_saved(console: ConsoleApp) -> None:
    alice, key = await console.alice(), console.cast.bob.key
    await console.services.keys.revoke(key.id, access=OWNER)

    assert (await alice.post(f"/keys/{key.id}/rotate")).status_code == 422
    assert (await alice.post(f"/keys/{key.id}", name="back")).status_code == 422
    assert ">Save<" not in (await alice.get(f"/keys/{key.id}")).text


async def test_an_expired_key_is_shown_as_expired(console: ConsoleApp, clock: FakeClock) -> None:
    await create_key(console, await console.alice(), expires_on="2026-11-21")
    clock.advance(24 * 3600)

    page = (await (await console.alice()).get("/keys")).text

    assert ">expired<" in page


@pytest.mark.parametrize("action", ["", "/rotate", "/revoke"])
async def test_an_unknown_key_is_not_found(console: ConsoleApp, action: str) -> None:
    alice = await console.alice()

    assert (await alice.get(f"/keys/key_nobody{action}")).status_code == 404
    assert (await alice.post(f"/keys/key_nobody{action}", name="x")).status_code == 404


async def test_every_key_is_listed_with_its_tenant(console: ConsoleApp) -> None:
    page = (await (await console.alice()).get("/keys")).text

    for person in (console.cast.bob, console.cast.charlie):
        assert person.key.prefix in page
        assert f"/tenants/{person.tenant.id}" in page


async def test_with_several_tenants_the_list_of_keys_links_to_the_choice_of_a_tenant(console: ConsoleApp) -> None:
    page = (await (await console.alice()).get("/keys")).text

    assert '<a class="button" href="/tenants">New key: choose a tenant</a>' in page


async def test_with_one_tenant_the_list_of_keys_links_to_the_form_of_a_new_key(console: ConsoleApp) -> None:
    developer = await console.member_of(console.cast.bob, "developer")

    page = (await developer.get("/keys")).text

    assert f'href="/tenants/{console.cast.bob.tenant.id}/keys/new"' in page
    assert "choose a tenant" not in page


async def test_ended_keys_are_listed_on_request_and_found_by_name_prefix_or_secret(console: ConsoleApp) -> None:
    alice, bob = await console.alice(), console.cast.bob
    await console.services.keys.revoke(bob.key.id, access=OWNER)
    link = f"/keys/{bob.key.id}"

    assert link not in (await alice.get("/keys")).text
    assert link in (await alice.get("/keys?ended=yes")).text
    for text in (bob.key.prefix, bob.key.prefix[3:9].upper(), bob.secret, bob.key.name[1:]):
        assert link in (await alice.fragment(f"/keys?q={text}")).text, text
    nothing = (await alice.fragment("/keys?q=100%25")).text
    assert "No key matches." in nothing
    assert "<html" not in nothing


async def test_both_secrets_work_until_the_grace_period_of_a_rotation_ends(console: ConsoleApp, clock: FakeClock) -> None:
    alice, old = await console.alice(), console.cast.bob
    path = f"/keys/{old.key.id}/rotate"
    confirmation = (await alice.fragment(path)).text
    assert "Old key expires" in confirmation
    assert '<option value="86400" selected>' in confirmation
    assert (await alice.post(path, grace_s="7")).status_code == 422

    answer = await alice.post(path, grace_s="3600")

    (secret,) = set(SECRET.findall(answer.text))
    assert f"The old key works until {clock.now() + timedelta(hours=1):%Y-%m-%d %H:%M:%S} UTC" in answer.text
    successor = (await console.services.keys.authenticate(secret, "192.0.2.1")).key
    assert (await console.services.keys.authenticate(old.secret, "192.0.2.1")).key.replaced_by == successor.id
    page = (await alice.get(f"/keys/{old.key.id}")).text
    for text in ("Replaced by", f'href="/keys/{successor.id}"', ">replaced<"):
        assert text in page
    assert "/rotate" not in page
    clock.advance(3600)
    with pytest.raises(ExpiredApiKey):
        await console.services.keys.authenticate(old.secret, "192.0.2.1")


async def test_scopes_and_limit_mode_are_saved_and_kept_if_the_form_omits_them(console: ConsoleApp) -> None:
    alice = await console.alice()
    secret = await create_key(console, alice, scopes="inference, usage", limit_mode="shadow")
    key = (await console.services.keys.authenticate(secret, "192.0.2.1")).key
    assert (key.scopes, key.limit_mode) == (("inference", "usage"), "shadow")
    page = (await alice.get(f"/keys/{key.id}")).text
    for text in (
        "run models, read the tenant&#39;s usage",
        "shadow mode: counted, not enforced",
        '<option value="inference, usage" selected>',
    ):
        assert text in page

    await alice.post(f"/keys/{key.id}", name="other")
    same = await console.services.keys.get(key.id, access=OWNER)
    assert (same.name, same.scopes, same.limit_mode) == ("other", key.scopes, key.limit_mode)
    await alice.post(f"/keys/{key.id}", name="other", scopes="usage", limit_mode="enforce")
    changed = await console.services.keys.get(key.id, access=OWNER)
    assert (changed.scopes, changed.limit_mode) == (("usage",), "enforce")
    for wrong in ({"scopes": "everything"}, {"limit_mode": "never"}):
        answer = await alice.post(f"/keys/{key.id}", name="other", **wrong)
        assert answer.status_code == 422
        assert "Choose one of" in answer.text


async def test_keys_of_an_archived_tenant_are_marked_and_have_no_actions(console: ConsoleApp) -> None:
    bob = console.cast.bob
    await console.services.tenants.archive(bob.tenant.id, access=OWNER)
    alice = await console.alice()
    for path in ("/keys?ended=yes", f"/tenants/{bob.tenant.id}", f"/keys/{bob.key.id}"):
        page = (await alice.get(path)).text
        assert ">tenant archived</span>" in page
        assert f'href="/keys/{bob.key.id}/rotate"' not in page
        assert f'href="/keys/{bob.key.id}/revoke"' not in page
    assert f'href="/keys/{console.cast.charlie.key.id}/revoke"' in (await alice.get("/keys")).text


async def test_an_expired_key_can_be_revoked_but_not_rotated(console: ConsoleApp, clock: FakeClock) -> None:
    bob, alice = console.cast.bob, await console.alice()
    soon = KeyChanges(expires_at=clock.now() + timedelta(seconds=1))
    await console.services.keys.update(bob.key.id, soon, access=OWNER)
    clock.advance(1)

    for path in ("/keys", f"/tenants/{bob.tenant.id}", f"/keys/{bob.key.id}"):
        page = (await alice.get(path)).text
        assert f'href="/keys/{bob.key.id}/revoke"' in page
        assert f'href="/keys/{bob.key.id}/rotate"' not in page


async def test_a_key_of_a_suspended_tenant_can_be_rotated_and_revoked(console: ConsoleApp) -> None:
    bob, alice = console.cast.bob, await console.alice()
    await change_tenant(console.services.tenants, bob, suspended=True)
    for path in ("/keys", f"/tenants/{bob.tenant.id}", f"/keys/{bob.key.id}"):
        page = (await alice.get(path)).text
        assert ">tenant suspended</span>" in page
        assert f'href="/keys/{bob.key.id}/rotate"' in page
        assert f'href="/keys/{bob.key.id}/revoke"' in page

    await alice.post(f"/keys/{bob.key.id}/revoke")

    await change_tenant(console.services.tenants, bob, suspended=False)
    with pytest.raises(InvalidApiKey):
        await console.services.keys.authenticate(bob.secret, "192.0.2.1")


async def test_an_expiry_date_ends_at_midnight_of_the_billing_zone(
    migrated_sqlite_file: Path, tmp_path: Path, clock: FakeClock
) -> None:
    async with open_console(migrated_sqlite_file, tmp_path, clock, time_zone="Asia/Tokyo") as console:
        alice = await console.alice()
        secret = await create_key(console, alice, expires_on="2027-03-31")
        key = (await console.services.keys.authenticate(secret, "192.0.2.1")).key
        assert key.expires_at == datetime(2027, 3, 31, 14, 59, 59, tzinfo=UTC)
        page = (await alice.get(f"/keys/{key.id}")).text
        assert 'value="2027-03-31"' in page
        assert "Through this day, Asia/Tokyo." in page


async def test_a_key_that_expires_at_the_end_of_the_calendar_has_its_pages_in_every_zone(
    migrated_sqlite_file: Path, tmp_path: Path, clock: FakeClock
) -> None:
    async with open_console(migrated_sqlite_file, tmp_path, clock, time_zone="Asia/Tokyo") as console:
        alice, changes = await console.alice(), KeyChanges(expires_at=datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC))
        key = await console.services.keys.update(console.cast.bob.key.id, changes, access=OWNER)

        assert "9999-12-31 23:59:59 UTC" in (await alice.get("/keys")).text
        assert 'value="9999-12-31"' in (await alice.get(f"/keys/{key.id}")).text


async def test_key_and_tenant_pages_show_daily_tokens_and_monthly_budget_used(console: ConsoleApp, clock: FakeClock) -> None:
    alice, bob = await console.alice(), console.cast.bob
    await change_tenant(console.services.tenants, bob, currency="CHF", limits=Limits(tokens_per_day=100))
    budget = KeyChanges(limits=Limits(monthly_budget=20_000_000, tokens_per_day=50))
    await console.services.keys.update(bob.key.id, budget, access=OWNER)
    price = await console.services.prices.add(model="demo", currency="CHF", prompt=0, cached_prompt=0, completion=PICOS)
    for at, tokens in ((clock.now() - timedelta(days=1), 3), (clock.now(), 5)):
        entry = pending(bob, price=price, admitted_at=at)
        await console.services.ledger.open(entry)
        await console.services.ledger.settle(posted(entry.request_id, prompt=0, completion=tokens))
    of_key = (await alice.get(f"/keys/{bob.key.id}")).text
    of_tenant = (await alice.get(f"/tenants/{bob.tenant.id}")).text
    assert ("5 of 50" in of_key, "8.00 CHF of 20.00 CHF" in of_key) == (True, True)
    assert "5 of 100" in of_tenant
    for page in (of_key, of_tenant):
        assert "Budget per month, CHF" in page
