"""The audit log page: how entries are described, filters, and who sees which entries."""

from __future__ import annotations

import ast
import html
import re
from pathlib import Path

import pytest

import appliance
from appliance.base.acting import current_actor
from appliance.console.audit_descriptions import ACTIONS, NOT_SET, NOTHING, VALUE_CHARS_MAX, Change, audit_line
from appliance.tenancy.audit import record
from appliance.tenancy.audit_chain import AuditEntry, canonical_json
from tests.support.cast import OWNER
from tests.support.clock import START, FakeClock
from tests.support.console_fixtures import ConsoleApp

RECORDERS = ("record", "record_each", "_record", "note", "_remove")


def entry(action: str = "tenant.update", *, before: object = None, after: object = None, **changes: object) -> AuditEntry:
    """Return an entry about the tenant `tn_bob`."""
    fields = {
        "id": 7, "at": START, "actor_kind": "member", "actor_id": "mb_alice", "actor_name": "alice@example.com",
        "action": action, "target_kind": "tenant", "target_id": "tn_bob", "tenant_id": "tn_bob",
        "before": None if before is None else canonical_json(before), "after": None if after is None else canonical_json(after),
        "request_id": None, "address": None, "previous_hash": "0" * 64, "hash": "f" * 64,
    }  # fmt: skip
    return AuditEntry(**{**fields, **changes})  # type: ignore[arg-type]


def written_actions() -> set[str]:
    """Return the actions that the source code passes to the functions that write to the log."""
    calls = [
        call
        for path in Path(appliance.__file__).parent.rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(call, ast.Call) and _called_name(call.func) in RECORDERS
    ]
    texts = {constant.value for call in calls for constant in ast.walk(call) if isinstance(constant, ast.Constant)}
    return {text for text in texts if isinstance(text, str) and re.fullmatch(r"[a-z_]+\.[a-z_]+", text)}


def _called_name(called: ast.expr) -> str | None:
    return called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", None)


def test_an_invoice_draft_is_named_by_its_month() -> None:
    made = entry("invoice.draft", target_kind="invoice", target_id="inv_1", after={"month": "2026-11"})

    assert audit_line(made, {}).target == "2026-11"


def test_no_restriction_and_an_empty_list_are_told_apart() -> None:
    made = entry(before={"allowed_models": None}, after={"allowed_models": []})

    assert audit_line(made, {}).changes == (Change("allowed models", NOT_SET, NOTHING),)


def test_a_change_lists_each_value_before_and_after() -> None:
    before = {"limits": {"tokens_per_minute": None, "requests_per_minute": 5}, "suspended": False, "allowed_models": ["a"]}
    after = {"limits": {"tokens_per_minute": 9000, "requests_per_minute": 6}, "suspended": True, "allowed_models": []}
    assert set(audit_line(entry(before=before, after=after), {}).changes) == {
        Change("allowed models", "a", NOTHING),
        Change("limits › tokens per minute", NOT_SET, "9000"),
        Change("limits › requests per minute", "5", "6"),
        Change("suspended", "no", "yes"),
    }


def test_budgets_and_prices_are_shown_in_currency_units_not_micros() -> None:
    before = {"limits": {"monthly_budget": None}, "model_limits": {"m": {"monthly_budget": 12_500_000}}}
    after = {"limits": {"monthly_budget": 5_000_000}, "model_limits": {"m": {"monthly_budget": 1}}}
    assert audit_line(entry(before=before, after=after), {}).changes == (
        Change("limits › monthly budget", NOT_SET, "5.00"),
        Change("model limits › m › monthly budget", "12.50", "0.000001"),
    )
    price = {"model": "m", "prompt": 150_000, "completion": 600_000, "batch_percent": 100}
    price_values = {change.field: change.after for change in audit_line(entry("price.create", after=price), {}).changes}
    assert price_values == {"model": "m", "prompt": "0.15", "completion": "0.60", "batch percent": "100"}


def test_every_amount_of_an_entry_is_shown_in_currency_units() -> None:
    closed = {"number": "2026-0001", "currency": "EUR", "tax_micros": 670_000, "total_micros": 8_921_792}
    assert {change.field: change.after for change in audit_line(entry("invoice.close", after=closed), {}).changes} == {
        "number": "2026-0001",
        "currency": "EUR",
        "tax": "0.67",
        "total": "8.921792",
    }
    allowance = audit_line(entry("allowance.set", before={"monthly_micros": None}, after={"monthly_micros": 5_000_000}), {})
    assert allowance.changes == (Change("monthly", NOT_SET, "5.00"),)
    hosted = [
        {"cached_prompt": None, "completion": 10_000_000, "name": "Large", "prompt": 2_500_000},
        {"name": "Small", "prompt": 1},
    ]
    hardware = audit_line(entry("hardware.change", after={"hosted": hosted}), {})
    assert hardware.changes == (Change("hosted", None, "Large (completion 10.00, prompt 2.50), Small (prompt 0.000001)"),)
    correction = audit_line(entry("ledger.correct", after={"cost_picos": -39_600_432_000, "corrects_id": 1453}), {})
    assert correction.changes == (Change("corrects id", None, "1453"), Change("cost", None, "-0.039600432"))


def test_a_time_is_formatted_as_elsewhere_in_the_console() -> None:
    line = audit_line(entry(before={"expires_at": None}, after={"expires_at": START}), {})
    assert line.changes == (Change("expires at", NOT_SET, "2026-11-21 12:00:00 UTC"),)


def test_a_creation_has_no_value_before_and_a_removal_none_after() -> None:
    assert audit_line(entry("tenant.create", after={"id": "tn_bob", "name": "bob"}), {}).changes == (
        Change("name", None, "bob"),
    )
    assert audit_line(entry("webhook.remove", before={"target": "x"}), {}).changes == (Change("target", "x", None),)


def test_a_long_value_is_truncated_and_an_unknown_action_shown_verbatim() -> None:
    line = audit_line(entry("moon.paint", after={"colour": "x" * 500}), {})
    assert (line.label, len(line.changes[0].after or "")) == ("moon.paint", VALUE_CHARS_MAX)


def test_a_target_is_shown_by_its_name_in_the_entry_else_by_the_tenant_s_name_else_by_its_id() -> None:
    assert audit_line(entry(after={"name": "new"}, before={"name": "old"}), {"tn_bob": "bob"}).target == "new"
    assert audit_line(entry(before={"weight": 1}, after={"weight": 2}), {"tn_bob": "bob"}).target == "bob"
    assert audit_line(entry(before={"weight": 1}, after={"weight": 2}), {}).target == "tn_bob"


async def test_a_change_in_the_console_is_logged_with_member_and_both_values(console: ConsoleApp) -> None:
    alice = await console.alice()
    await alice.post(f"/tenants/{console.cast.bob.tenant.id}/suspend")
    page = (await alice.get("/audit")).text
    row = page.split('<tr id="entry-')[1]
    for text in ("Tenant changed", "alice@example.com", ">bob<", "suspended", "<del>no</del>", "<ins>yes</ins>", "req_"):
        assert text in row


async def test_sign_ins_and_failed_attempts_are_logged(console: ConsoleApp) -> None:
    await console.visitor().post("/login", email="alice@example.com", password="a wrong password")
    page = (await (await console.alice()).get("/audit")).text
    assert ">Could not sign in<" in page
    assert "Signed in" in page


async def test_cancelling_a_request_is_logged(console: ConsoleApp) -> None:
    console.engine_side.add(console.cast.bob, "req_live")
    alice = await console.alice()
    await alice.post("/requests/cancel", request_id="req_live")
    (found,) = (await console.services.audit.page(1, access=OWNER)).data
    assert (found.action, found.target_id, found.tenant_id) == ("request.abort", "req_live", console.cast.bob.tenant.id)
    assert (found.actor_name, found.actor_kind) == ("alice@example.com", "member")
    assert (found.request_id or "").startswith("req_")


async def test_the_log_can_be_filtered_by_action_actor_target_tenant_and_day(console: ConsoleApp, clock: FakeClock) -> None:
    alice = await console.alice()
    bob, charlie = console.cast.bob, console.cast.charlie
    await alice.post(f"/keys/{bob.key.id}/revoke")
    clock.advance(2 * 86400)
    alice = await console.alice()
    await alice.post(f"/tenants/{charlie.tenant.id}/suspend")
    all_labels = {"Key revoked", "Tenant changed"}
    queries = {
        "": all_labels,
        "action=key.revoke": {"Key revoked"},
        "actor=alice@example.com": all_labels,
        "actor=nobody": set(),
        f"target={charlie.tenant.id}": {"Tenant changed"},
        f"tenant={bob.tenant.id}": {"Key revoked"},
        f"start={clock.now().date()}": {"Tenant changed"},
        f"end={START.date()}": {"Key revoked"},
        "start=never": all_labels,
    }
    for query, expected in queries.items():
        rows = (await alice.fragment(f"/audit?{query}")).text.split("<tbody>")[-1]
        assert {label for label in all_labels if label in rows} == expected, query


async def test_a_filter_without_matches_is_reported_and_kept(console: ConsoleApp) -> None:
    page = (await (await console.alice()).get("/audit?target=nobody")).text
    assert "No entry matches" in page
    assert 'value="nobody"' in page


async def test_paging_to_older_entries_keeps_the_filters(console: ConsoleApp, clock: FakeClock) -> None:
    async with console.services.db.writing() as connection:
        for number in range(60):
            await record(connection, clock, "tier.update", "tier", f"tier {number:02d}", after={"admission_wait_ms": number})
    alice = await console.alice()
    first = (await alice.get("/audit?action=tier.update")).text
    assert "tier 59" in first
    assert "tier 09" not in first
    older = first.split('" rel="next"')[0].rsplit('href="', 1)[1].replace("&amp;", "&")
    assert "action=tier.update" in older
    second = (await alice.get(older)).text
    assert "tier 09" in second
    assert "Newest" in second


async def test_a_manager_sees_only_the_entries_of_the_own_tenant(console: ConsoleApp) -> None:
    alice = await console.alice()
    for person in (console.cast.bob, console.cast.charlie):
        await alice.post(f"/keys/{person.key.id}/revoke")
    manager = await console.member_of(console.cast.bob, "manager")
    page = (await manager.get("/audit")).text
    assert console.cast.bob.key.id in page
    assert console.cast.charlie.key.id not in page
    assert console.cast.charlie.tenant.id not in page
    rows = page.split("<tbody>")[1]
    assert "Signed in" not in rows  # sign-ins belong to the appliance
    mallory = await console.member_of(console.cast.charlie, "manager", email="mallory@example.com")
    forged = (await mallory.get(f"/audit?tenant={console.cast.bob.tenant.id}")).text
    assert "No entry matches" in forged


@pytest.mark.parametrize("role", ["developer", "viewer"])
async def test_developers_and_viewers_of_a_tenant_have_no_audit_page(console: ConsoleApp, role: str) -> None:
    browser = await console.member_of(console.cast.bob, role)
    assert (await browser.get("/audit")).status_code == 403
    assert 'href="/audit"' not in (await browser.get("/requests")).text


async def test_markup_in_entries_is_escaped(console: ConsoleApp, clock: FakeClock) -> None:
    async with console.services.db.writing() as connection:
        await record(connection, clock, "<b>x", "tier", "<script>1</script>", after={"<i>": "<u>"})
    page = (await (await console.alice()).get("/audit")).text
    assert [markup for markup in ("<script>1", "<b>x", "<i>", "<u>") if markup in page] == []


def test_every_action_that_the_code_logs_has_a_label_and_is_listed_once_in_the_filter() -> None:
    listed = [action for group in ACTIONS.values() for action in group]
    written = written_actions()
    assert len(listed) == len(set(listed))
    assert written <= set(listed)
    assert set(listed) - written == {"seller.change", "hardware.change"}  # named by the record that changes


async def test_after_a_request_the_actor_is_the_system_again(console: ConsoleApp) -> None:
    await console.alice()
    assert current_actor().kind == "system"


async def test_a_key_is_shown_by_its_name_if_the_entry_has_only_its_id(console: ConsoleApp) -> None:
    key = console.cast.bob.key
    await console.services.keys.rotate(key.id, access=OWNER)
    page = html.unescape((await (await console.alice()).get("/audit?action=key.rotate")).text)
    (row,) = re.findall(r'data-label="Target".*', page)
    assert f">{key.name}<" in row


async def test_members_tokens_and_alert_targets_are_shown_by_name_if_the_entry_has_only_their_id(console: ConsoleApp) -> None:
    services, bob = console.services, console.cast.bob.tenant
    member = await services.members.create("dora@example.com", "a password of tests", "member")
    await services.members.change(member.id, role="viewer")
    await services.memberships.add(bob.id, member.id, "viewer", access=OWNER)
    await services.memberships.change(bob.id, member.id, "developer", access=OWNER)
    token, _ = await services.admin_tokens.create("the nightly report", "viewer")
    await services.admin_tokens.revoke(token.id)
    url = "https://hooks.example.com/secret-path"
    webhook, _ = await services.alerts.webhooks.create(kind="webhook", target=url, access=OWNER)
    await services.alerts.outbox.send_test(webhook.id, access=OWNER)
    await services.alerts.webhooks.remove(webhook.id, access=OWNER)
    alice, shown = await console.alice(), {}
    for action in ("member.change", "membership.change", "token.revoke", "webhook.test"):
        page = html.unescape((await alice.get(f"/audit?action={action}")).text)
        shown[action] = re.findall(r'data-label="Target"><span class="clip" title="(\w+)">([^<]+)<', page)

    assert shown == {
        "member.change": [(member.id, "dora@example.com")],
        "membership.change": [(member.id, "dora@example.com")],
        "token.revoke": [(token.id, "the nightly report")],
        "webhook.test": [(webhook.id, "https://hooks.example.com")],
    }


async def test_a_manager_sees_names_in_entries_of_the_own_tenant_only(console: ConsoleApp) -> None:
    services, bob = console.services, console.cast.bob
    webhook, _ = await services.alerts.webhooks.create(
        kind="webhook", target="https://bob.example.com/x", tenant_id=bob.tenant.id, access=OWNER
    )
    await services.alerts.webhooks.create(kind="webhook", target="https://alice.example.com/x", access=OWNER)
    await services.alerts.outbox.send_test(webhook.id, access=OWNER)
    page = (await (await console.member_of(bob, "manager")).get("/audit?action=webhook.test")).text
    assert ">https://bob.example.com<" in page
    assert "alice.example.com" not in page
