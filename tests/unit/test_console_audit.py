"""The audit log page: entries in words, filters, and visibility."""

from __future__ import annotations

import ast
import html
import re
from pathlib import Path

import pytest

import appliance
from appliance.base.acting import current_actor
from appliance.console.audit_descriptions import ACTIONS, NOTHING, VALUE_CHARS_MAX, Change, audit_line
from appliance.tenancy.access import WHOLE_APPLIANCE
from appliance.tenancy.audit import record
from appliance.tenancy.audit_chain import AuditEntry, canonical_json
from tests.support.cast import ALICE_PASSWORD
from tests.support.clock import START, FakeClock
from tests.support.console_fixtures import Browser, ConsoleApp

RECORDERS = ("record", "_record", "note", "_remove")


def entry(action: str = "tenant.update", *, before: object = None, after: object = None, **changes: object) -> AuditEntry:
    """Return an entry about the tenant `tn_bob`."""
    fields = {
        "id": 7, "at": START, "actor_kind": "member", "actor_id": "mb_alice", "actor_name": "alice@example.com",
        "action": action, "target_kind": "tenant", "target_id": "tn_bob", "tenant_id": "tn_bob",
        "before": None if before is None else canonical_json(before), "after": None if after is None else canonical_json(after),
        "request_id": None, "address": None, "previous_hash": "0" * 64, "hash": "f" * 64,
    }  # fmt: skip
    return AuditEntry(**{**fields, **changes})  # type: ignore[arg-type]


async def manager(console: ConsoleApp, tenant_id: str, role: str = "manager") -> Browser:
    """Return the browser of a member who has this role in the tenant, and none on the appliance."""
    email = f"{role}-{tenant_id}@example.com"
    member = await console.services.members.create(email, ALICE_PASSWORD, "member")
    await console.services.memberships.add(tenant_id, member.id, role, access=WHOLE_APPLIANCE)
    return await console.visitor().sign_in(email, ALICE_PASSWORD)


def written_actions() -> set[str]:
    """Return the actions that the code names where it writes to the log."""
    calls = [
        call
        for path in Path(appliance.__file__).parent.rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(call, ast.Call) and _name_of(call.func) in RECORDERS
    ]
    texts = {constant.value for call in calls for constant in ast.walk(call) if isinstance(constant, ast.Constant)}
    return {text for text in texts if isinstance(text, str) and re.fullmatch(r"[a-z_]+\.[a-z_]+", text)}


def _name_of(called: ast.expr) -> str | None:
    return called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", None)


def test_a_draft_is_named_by_its_month() -> None:
    made = entry("invoice.draft", target_kind="invoice", target_id="inv_1", after={"month": "2026-11"})

    assert audit_line(made, {}).target == "2026-11"


def test_a_change_is_told_value_by_value() -> None:
    before = {"limits": {"tokens_per_minute": None, "requests_per_minute": 5}, "suspended": False, "allowed_models": ["a"]}
    after = {"limits": {"tokens_per_minute": 9000, "requests_per_minute": 6}, "suspended": True, "allowed_models": []}
    assert set(audit_line(entry(before=before, after=after), {}).changes) == {
        Change("allowed models", "a", NOTHING),
        Change("limits › tokens per minute", NOTHING, "9000"),
        Change("limits › requests per minute", "5", "6"),
        Change("suspended", "no", "yes"),
    }


def test_amounts_of_money_are_told_in_units_and_not_in_millionths() -> None:
    before = {"limits": {"monthly_budget": None}, "model_limits": {"m": {"monthly_budget": 12_500_000}}}
    after = {"limits": {"monthly_budget": 5_000_000}, "model_limits": {"m": {"monthly_budget": 1}}}
    assert audit_line(entry(before=before, after=after), {}).changes == (
        Change("limits › monthly budget", NOTHING, "5.00"),
        Change("model limits › m › monthly budget", "12.50", "0.000001"),
    )
    price = {"model": "m", "prompt": 150_000, "completion": 600_000, "batch_percent": 100}
    told = {change.field: change.after for change in audit_line(entry("price.create", after=price), {}).changes}
    assert told == {"model": "m", "prompt": "0.15", "completion": "0.60", "batch percent": "100"}


def test_every_amount_of_an_entry_is_told_in_units() -> None:
    closed = {"number": "2026-0001", "currency": "EUR", "tax_micros": 670_000, "total_micros": 8_921_792}
    assert {change.field: change.after for change in audit_line(entry("invoice.close", after=closed), {}).changes} == {
        "number": "2026-0001",
        "currency": "EUR",
        "tax": "0.67",
        "total": "8.921792",
    }
    allowance = audit_line(entry("allowance.set", before={"monthly_micros": None}, after={"monthly_micros": 5_000_000}), {})
    assert allowance.changes == (Change("monthly", NOTHING, "5.00"),)
    hosted = [
        {"cached_prompt": None, "completion": 10_000_000, "name": "Large", "prompt": 2_500_000},
        {"name": "Small", "prompt": 1},
    ]
    hardware = audit_line(entry("hardware.change", after={"hosted": hosted}), {})
    assert hardware.changes == (Change("hosted", None, "Large (completion 10.00, prompt 2.50), Small (prompt 0.000001)"),)
    correction = audit_line(entry("ledger.correct", after={"cost_picos": -39_600_432_000, "corrects_id": 1453}), {})
    assert correction.changes == (Change("corrects id", None, "1453"), Change("cost", None, "-0.039600432"))


def test_a_time_reads_as_times_do_elsewhere_in_the_console() -> None:
    line = audit_line(entry(before={"expires_at": None}, after={"expires_at": START}), {})
    assert line.changes == (Change("expires at", NOTHING, "2026-11-21 12:00:00 UTC"),)


def test_what_is_new_has_no_before_and_what_is_gone_no_after() -> None:
    assert audit_line(entry("tenant.create", after={"id": "tn_bob", "name": "bob"}), {}).changes == (
        Change("name", None, "bob"),
    )
    assert audit_line(entry("webhook.remove", before={"target": "x"}), {}).changes == (Change("target", "x", None),)


def test_a_long_value_is_cut_and_an_unknown_action_shown_as_it_is_written() -> None:
    line = audit_line(entry("moon.paint", after={"colour": "x" * 500}), {})
    assert (line.label, len(line.changes[0].after or "")) == ("moon.paint", VALUE_CHARS_MAX)


def test_a_target_is_called_what_the_entry_calls_it_else_what_the_tenant_is_called() -> None:
    assert audit_line(entry(after={"name": "new"}, before={"name": "old"}), {"tn_bob": "bob"}).target == "new"
    assert audit_line(entry(before={"weight": 1}, after={"weight": 2}), {"tn_bob": "bob"}).target == "bob"
    assert audit_line(entry(before={"weight": 1}, after={"weight": 2}), {}).target == "tn_bob"


async def test_a_change_in_the_console_names_the_member_and_both_values(console: ConsoleApp) -> None:
    alice = await console.alice()
    await alice.post(f"/tenants/{console.cast.bob.tenant.id}/suspend")
    page = (await alice.get("/audit")).text
    row = page.split('<tr id="entry-')[1]
    for text in ("Tenant changed", "alice@example.com", ">bob<", "suspended", "<del>no</del>", "<ins>yes</ins>", "req_"):
        assert text in row


async def test_signing_in_and_failing_to_do_so_are_entries(console: ConsoleApp) -> None:
    await console.visitor().post("/login", email="alice@example.com", password="a wrong password")
    page = (await (await console.alice()).get("/audit")).text
    assert ">Could not sign in<" in page
    assert "Signed in" in page


async def test_cancelling_a_request_is_an_entry(console: ConsoleApp) -> None:
    console.engine_side.add(console.cast.bob, "req_live")
    alice = await console.alice()
    await alice.post("/requests/cancel", request_id="req_live")
    (found,) = (await console.services.audit.page(1, access=WHOLE_APPLIANCE)).data
    assert (found.action, found.target_id, found.tenant_id) == ("request.abort", "req_live", console.cast.bob.tenant.id)
    assert (found.actor_name, found.actor_kind) == ("alice@example.com", "member")
    assert (found.request_id or "").startswith("req_")


async def test_the_log_is_narrowed_by_what_who_target_tenant_and_day(console: ConsoleApp, clock: FakeClock) -> None:
    alice = await console.alice()
    bob, charlie = console.cast.bob, console.cast.charlie
    await alice.post(f"/keys/{bob.key.id}/revoke")
    clock.advance(2 * 86400)
    alice = await console.alice()
    await alice.post(f"/tenants/{charlie.tenant.id}/suspend")
    both = {"Key revoked", "Tenant changed"}
    queries = {
        "": both,
        "action=key.revoke": {"Key revoked"},
        "actor=alice@example.com": both,
        "actor=nobody": set(),
        f"target={charlie.tenant.id}": {"Tenant changed"},
        f"tenant={bob.tenant.id}": {"Key revoked"},
        f"start={clock.now().date()}": {"Tenant changed"},
        f"end={START.date()}": {"Key revoked"},
        "start=never": both,
    }
    for query, expected in queries.items():
        rows = (await alice.fragment(f"/audit?{query}")).text.split("<tbody>")[-1]
        assert {words for words in both if words in rows} == expected, query


async def test_a_filter_that_nothing_matches_says_so(console: ConsoleApp) -> None:
    page = (await (await console.alice()).get("/audit?target=nobody")).text
    assert "No entry matches" in page
    assert 'value="nobody"' in page


async def test_older_entries_are_a_page_away_with_the_same_filters(console: ConsoleApp, clock: FakeClock) -> None:
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


async def test_a_manager_sees_the_entries_of_the_tenant_alone(console: ConsoleApp) -> None:
    alice = await console.alice()
    for person in (console.cast.bob, console.cast.charlie):
        await alice.post(f"/keys/{person.key.id}/revoke")
    page = (await (await manager(console, console.cast.bob.tenant.id)).get("/audit")).text
    assert console.cast.bob.key.id in page
    assert console.cast.charlie.key.id not in page
    assert console.cast.charlie.tenant.id not in page
    rows = page.split("<tbody>")[1]
    assert "Signed in" not in rows  # a matter of the appliance
    forged = (
        await (await manager(console, console.cast.charlie.tenant.id)).get(f"/audit?tenant={console.cast.bob.tenant.id}")
    ).text
    assert "No entry matches" in forged


@pytest.mark.parametrize("role", ["developer", "viewer"])
async def test_who_is_no_manager_has_no_audit_page(console: ConsoleApp, role: str) -> None:
    browser = await manager(console, console.cast.bob.tenant.id, role)
    assert (await browser.get("/audit")).status_code == 403
    assert 'href="/audit"' not in (await browser.get("/requests")).text


async def test_text_that_is_no_html_stays_text(console: ConsoleApp, clock: FakeClock) -> None:
    async with console.services.db.writing() as connection:
        await record(connection, clock, "<b>x", "tier", "<script>1</script>", after={"<i>": "<u>"})
    page = (await (await console.alice()).get("/audit")).text
    assert not {"<script>1", "<b>x", "<i>", "<u>"} & {part for part in ("<script>1", "<b>x", "<i>", "<u>") if part in page}


def test_every_action_that_is_written_has_words_and_stands_once_in_the_filter() -> None:
    listed = [action for group in ACTIONS.values() for action in group]
    written = written_actions()
    assert len(listed) == len(set(listed))
    assert written <= set(listed)
    assert set(listed) - written == {"seller.change", "hardware.change"}  # named by the record that changes


async def test_nobody_acts_once_a_request_is_over(console: ConsoleApp) -> None:
    await console.alice()
    assert current_actor().kind == "system"


async def test_a_key_is_called_by_its_name_where_the_entry_does_not_say_it(console: ConsoleApp) -> None:
    key = console.cast.bob.key
    await console.services.keys.rotate(key.id, access=WHOLE_APPLIANCE)
    page = html.unescape((await (await console.alice()).get("/audit?action=key.rotate")).text)
    (row,) = re.findall(r'data-label="Target".*', page)
    assert f">{key.name}<" in row
