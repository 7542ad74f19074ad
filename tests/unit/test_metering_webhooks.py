"""Webhooks: settings, secrets that are shown once and stored sealed, rotation, limits, and audit entries."""

from __future__ import annotations

import asyncio
import json

import pytest
from sqlalchemy import select, update

from appliance.base.acting import SYSTEM
from appliance.base.db import Database
from appliance.base.errors import Conflict, InvalidValue, NotFound, RoleNotAllowed
from appliance.base.sealing import Sealer, Unsealable
from appliance.base.tables import audit_log, webhooks
from appliance.metering.alerts.outbox import EVENTS, TENANT_EVENTS
from appliance.metering.alerts.webhooks import GRACE_S_DEFAULT, GRACE_S_MAX, WEBHOOKS_MAX, Webhook, WebhookChanges, Webhooks
from appliance.tenancy import audit
from appliance.tenancy.access import Access
from appliance.tenancy.members import Members
from appliance.tenancy.memberships import Memberships
from appliance.tenancy.roles import Action, Role, TenantRole
from appliance.tenancy.tenants import Tenants
from tests.support.alerts import LOOPBACK, TARGET, AlertParts, alert_parts
from tests.support.case_ids import case_id
from tests.support.cast import OWNER, Cast
from tests.support.clock import FakeClock
from tests.support.databases import transaction_is_blocked
from tests.support.polling import poll_until


@pytest.fixture
def alerts(database: Database, clock: FakeClock) -> AlertParts:
    """The components of alerting over this test's database."""
    return alert_parts(database, clock)


async def test_a_webhook_is_stored_as_created_and_subscribed_to_all_events_by_default(alerts: AlertParts, cast: Cast) -> None:
    bobs, _ = await alerts.webhooks.create(kind="webhook", target=TARGET, tenant_id=cast.bob.tenant.id, access=OWNER)
    appliance_webhook, _ = await alerts.webhooks.create(kind="email", target="ops@example.com", access=OWNER)
    assert await alerts.webhooks.get(bobs.id, access=OWNER) == bobs
    assert (bobs.kind, bobs.target, bobs.events, bobs.disabled) == ("webhook", TARGET, TENANT_EVENTS, False)
    assert (appliance_webhook.tenant_id, appliance_webhook.events) == (None, EVENTS)
    assert [webhook.id for webhook in (await alerts.webhooks.list(access=OWNER)).data] == sorted(
        [bobs.id, appliance_webhook.id]
    )
    assert (await alerts.webhooks.list(tenant_id=cast.bob.tenant.id, access=OWNER)).data == [bobs]


async def test_the_secret_is_returned_at_creation_and_stored_sealed(alerts: AlertParts) -> None:
    webhook, secret = await alerts.webhooks.create(kind="webhook", target=TARGET, access=OWNER)
    assert secret is not None
    async with alerts.db.reading() as connection:
        stored = (await connection.execute(select(webhooks.c.secret))).scalar_one()
    assert secret not in stored
    assert secret.removeprefix("whsec_") not in stored
    assert (await alerts.webhooks.read_endpoint(webhook.id)).secrets == (secret,)
    with_other_key = Webhooks(alerts.db, alerts.clock, Sealer(b"x" * 32, "another"), target_policy=LOOPBACK, mail=True)
    with pytest.raises(Unsealable):
        await with_other_key.read_endpoint(webhook.id)


async def test_e_mail_has_no_secret_and_needs_a_mail_server(alerts: AlertParts, database: Database, clock: FakeClock) -> None:
    webhook, secret = await alerts.webhooks.create(kind="email", target="ops@example.com", access=OWNER)
    assert secret is None
    assert (await alerts.webhooks.read_endpoint(webhook.id)).secrets == ()
    with pytest.raises(InvalidValue, match="no secret"):
        await alerts.webhooks.rotate(webhook.id, access=OWNER)
    without = alert_parts(database, clock, mail=False)
    with pytest.raises(InvalidValue, match="smtp_url"):
        await without.webhooks.create(kind="email", target="ops@example.com", access=OWNER)


async def test_a_manager_can_send_mail_only_to_members_of_the_tenant(alerts: AlertParts, cast: Cast, clock: FakeClock) -> None:
    members, tenant_id = Members(alerts.db, clock), cast.bob.tenant.id
    people = Memberships(alerts.db, clock)
    for email in ("bella@example.com", "gone@example.com"):
        member = await members.create(email, "a long password", Role.MEMBER)
        await people.add(tenant_id, member.id, TenantRole.VIEWER, access=OWNER)
    await members.change(member.id, disabled=True)
    manager = Access(role=Role.MEMBER, actor=SYSTEM, tenants={tenant_id: TenantRole.MANAGER})
    mail = {"kind": "email", "tenant_id": tenant_id, "access": manager}

    made, _ = await alerts.webhooks.create(**mail, target="Bella@example.com")  # type: ignore[arg-type]
    for stranger in ("victim@example.com", "gone@example.com", cast.alice.email):
        with pytest.raises(InvalidValue, match="member of the tenant"):
            await alerts.webhooks.create(**mail, target=stranger)  # type: ignore[arg-type]
        with pytest.raises(InvalidValue, match="member of the tenant"):
            await alerts.webhooks.update(made.id, WebhookChanges(target=stranger), access=manager)
    by_owner, _ = await alerts.webhooks.create(kind="email", tenant_id=tenant_id, target="ops@example.com", access=OWNER)
    assert (await alerts.webhooks.update(by_owner.id, WebhookChanges(target="ops@example.com"), access=manager)) == by_owner
    hers = await alerts.webhooks.update(by_owner.id, WebhookChanges(target="bella@example.com"), access=manager)
    assert hers.target == "bella@example.com"


@pytest.mark.parametrize("leaves", ["removed", "disabled"])
async def test_mail_to_a_member_who_leaves_is_disabled(alerts: AlertParts, cast: Cast, clock: FakeClock, leaves: str) -> None:
    members, tenant_id = Members(alerts.db, clock), cast.bob.tenant.id
    people = Memberships(alerts.db, clock)
    bella = await members.create("bella@example.com", "a long password", Role.MEMBER)
    for person in (bella.id, cast.alice.id):
        await people.add(tenant_id, person, TenantRole.VIEWER, access=OWNER)

    async def mail(target: str, tenant: str | None) -> Webhook:
        return (await alerts.webhooks.create(kind="email", target=target, tenant_id=tenant, access=OWNER))[0]

    hers, of_appliance = await mail("Bella@example.com", tenant_id), await mail("bella@example.com", None)
    others = [await mail("ops@example.com", tenant_id), await mail(cast.alice.email, tenant_id)]
    already_disabled, gone = await mail("bella@example.com", tenant_id), await mail("bella@example.com", tenant_id)
    await alerts.webhooks.update(already_disabled.id, WebhookChanges(disabled=True), access=OWNER)
    await alerts.webhooks.remove(gone.id, access=OWNER)
    await members.change(cast.alice.id, role=Role.OWNER, disabled=False)  # changes nothing, so her mail stays enabled
    count = alerts.db.webhook_changes.value
    if leaves == "removed":
        await people.remove(tenant_id, bella.id, access=OWNER)
        await people.remove(tenant_id, cast.alice.id, access=OWNER)
    else:
        await members.change(bella.id, disabled=True)
    assert alerts.db.webhook_changes.value > count, "cached webhooks are invalidated"
    assert (await alerts.webhooks.get(hers.id, access=OWNER)).disabled
    assert (await alerts.webhooks.get(of_appliance.id, access=OWNER)).disabled is (leaves == "disabled")
    assert not any([(await alerts.webhooks.get(other.id, access=OWNER)).disabled for other in others])
    async with alerts.db.reading() as connection:
        columns = (audit_log.c.target_id, audit_log.c.tenant_id, audit_log.c.before, audit_log.c.after)
        query = select(*columns).where(audit_log.c.action == "webhook.disable")
        disabled = (await connection.execute(query.order_by(audit_log.c.id))).all()
    change = ('{"disabled":false}', '{"disabled":true}')
    assert disabled == [
        (hers.id, tenant_id, *change), *([(of_appliance.id, None, *change)] if leaves == "disabled" else []),
    ]  # fmt: skip
    assert (await alerts.webhooks.update(hers.id, WebhookChanges(disabled=False), access=OWNER)).disabled is False


@pytest.mark.on_each_database
@pytest.mark.parametrize("leaves", ["removed", "disabled"])
async def test_a_member_leaves_while_another_change_of_the_mailbox_is_being_recorded(
    alerts: AlertParts, cast: Cast, clock: FakeClock, database_url: str, leaves: str
) -> None:
    members, people, tenant_id = Members(alerts.db, clock), Memberships(alerts.db, clock), cast.bob.tenant.id
    bella = await members.create("bella@example.com", "a long password", Role.MEMBER)
    await people.add(tenant_id, bella.id, TenantRole.VIEWER, access=OWNER)
    hers, _ = await alerts.webhooks.create(kind="email", target=bella.email, tenant_id=tenant_id, access=OWNER)
    async with alerts.db.writing() as connection:
        await connection.execute(update(webhooks).where(webhooks.c.id == hers.id).values(events=["invoice.closed"]))
        leaving = asyncio.create_task(
            people.remove(tenant_id, bella.id, access=OWNER) if leaves == "removed" else members.change(bella.id, disabled=True)
        )
        await poll_until(lambda: alerts.db.kind == "sqlite" or transaction_is_blocked(database_url))
        await audit.record(connection, clock, "webhook.update", "webhook", hers.id, tenant_id=tenant_id)
    await leaving
    assert (await alerts.webhooks.get(hers.id, access=OWNER)).disabled


async def test_after_a_rotation_both_secrets_are_valid_until_the_grace_period_ends(
    alerts: AlertParts, clock: FakeClock
) -> None:
    webhook, first = await alerts.webhooks.create(kind="webhook", target=TARGET, access=OWNER)
    rotated, second = await alerts.webhooks.rotate(webhook.id, 3600, access=OWNER)
    assert rotated.previous_secret_until is not None
    assert (await alerts.webhooks.read_endpoint(webhook.id)).secrets == (second, first)
    clock.advance(3600)
    assert (await alerts.webhooks.read_endpoint(webhook.id)).secrets == (second,)
    rotated, third = await alerts.webhooks.rotate(webhook.id, 0, access=OWNER)
    assert rotated.previous_secret_until is None
    assert (await alerts.webhooks.read_endpoint(webhook.id)).secrets == (third,)
    async with alerts.db.reading() as connection:
        assert (await connection.execute(select(webhooks.c.previous_secret))).scalar_one() is None


async def test_a_rotation_drops_a_previous_secret_that_can_no_longer_be_read(alerts: AlertParts) -> None:
    webhook, _lost = await alerts.webhooks.create(kind="webhook", target=TARGET, access=OWNER)
    with_new_key = Webhooks(alerts.db, alerts.clock, Sealer(b"x" * 32, "another"), target_policy=LOOPBACK, mail=True)
    rotated, secret = await with_new_key.rotate(webhook.id, 3600, access=OWNER)
    assert rotated.previous_secret_until is None
    assert (await with_new_key.read_endpoint(webhook.id)).secrets == (secret,)


@pytest.mark.parametrize("grace_s", [-1, GRACE_S_MAX + 1, 1.5, "60", None, True])
async def test_an_invalid_grace_period_is_refused(alerts: AlertParts, grace_s: object) -> None:
    webhook, first = await alerts.webhooks.create(kind="webhook", target=TARGET, access=OWNER)
    with pytest.raises(InvalidValue) as refused:
        await alerts.webhooks.rotate(webhook.id, grace_s, access=OWNER)  # type: ignore[arg-type]
    assert refused.value.param == "grace_s"
    assert (await alerts.webhooks.read_endpoint(webhook.id)).secrets == (first,)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"kind": "pager"}, "kind"),
        ({"kind": None}, "kind"),
        ({"target": "http://example.com:x"}, "target"),
        ({"kind": "email"}, "target"),
        ({"events": []}, "events"),
        ({"events": ["everything"]}, "events"),
        ({"events": "invoice.closed"}, "events"),
        ({"events": [None]}, "events"),
        ({"events": ["invoice.closed"] * 1000}, "events"),
        ({"events": ["webhook.test"]}, "events"),
        ({"tenant_id": "tn_unknown"}, "tenant_id"),
        ({"tenant_id": "tn\u0000"}, "tenant_id"),
    ],
    ids=case_id,
)
async def test_an_invalid_field_is_refused_by_name(alerts: AlertParts, changes: dict[str, object], param: str) -> None:
    with pytest.raises((InvalidValue, NotFound)) as refused:
        await alerts.webhooks.create(**{"kind": "webhook", "target": TARGET, **changes}, access=OWNER)  # type: ignore[arg-type]
    assert refused.value.param == param
    assert (await alerts.webhooks.list(access=OWNER)).data == []


async def test_a_tenant_cannot_subscribe_to_events_of_the_appliance(alerts: AlertParts, cast: Cast) -> None:
    with pytest.raises(InvalidValue) as refused:
        await alerts.webhooks.create(
            kind="webhook", target=TARGET, tenant_id=cast.bob.tenant.id, events=["engine.down"], access=OWNER
        )
    assert refused.value.param == "events"


async def test_webhooks_are_limited_per_owner_and_refused_for_an_archived_tenant(
    alerts: AlertParts, cast: Cast, clock: FakeClock
) -> None:
    for _ in range(WEBHOOKS_MAX):
        last, _ = await alerts.webhooks.create(kind="webhook", target=TARGET, tenant_id=cast.bob.tenant.id, access=OWNER)
    with pytest.raises(InvalidValue, match=f"{WEBHOOKS_MAX} webhooks"):
        await alerts.webhooks.create(kind="webhook", target=TARGET, tenant_id=cast.bob.tenant.id, access=OWNER)
    await alerts.webhooks.create(kind="webhook", target=TARGET, access=OWNER)
    await alerts.webhooks.remove(last.id, access=OWNER)
    await alerts.webhooks.create(kind="webhook", target=TARGET, tenant_id=cast.bob.tenant.id, access=OWNER)
    await Tenants(alerts.db, clock).archive(cast.charlie.tenant.id, access=OWNER)
    with pytest.raises(Conflict, match="archived"):
        await alerts.webhooks.create(kind="webhook", target=TARGET, tenant_id=cast.charlie.tenant.id, access=OWNER)


async def test_an_update_changes_only_the_given_fields(alerts: AlertParts) -> None:
    webhook, _ = await alerts.webhooks.create(kind="webhook", target=TARGET, access=OWNER)
    other = "https://other.example.com/in"
    changed = await alerts.webhooks.update(webhook.id, WebhookChanges(target=other, events=["invoice.closed"]), access=OWNER)
    assert (changed.target, changed.events, changed.disabled) == (other, ("invoice.closed",), False)
    assert (await alerts.webhooks.update(webhook.id, WebhookChanges(disabled=True), access=OWNER)).disabled
    assert (await alerts.webhooks.update(webhook.id, WebhookChanges(), access=OWNER)).disabled
    for bad in (WebhookChanges(target="nowhere"), WebhookChanges(events=["x"])):
        with pytest.raises(InvalidValue):
            await alerts.webhooks.update(webhook.id, bad, access=OWNER)
    assert (await alerts.webhooks.update(webhook.id, WebhookChanges(disabled=False), access=OWNER)).target == other


async def test_removing_a_webhook_deletes_its_secrets(alerts: AlertParts) -> None:
    webhook, _ = await alerts.webhooks.create(kind="webhook", target=TARGET, access=OWNER)
    await alerts.webhooks.rotate(webhook.id, access=OWNER)
    await alerts.webhooks.remove(webhook.id, access=OWNER)
    for work in (
        alerts.webhooks.get(webhook.id, access=OWNER),
        alerts.webhooks.remove(webhook.id, access=OWNER),
        alerts.webhooks.rotate(webhook.id, access=OWNER),
        alerts.webhooks.read_endpoint(webhook.id),
        alerts.webhooks.update(webhook.id, WebhookChanges(disabled=True), access=OWNER),
    ):
        with pytest.raises(NotFound) as refused:
            await work
        assert refused.value.param == "webhook_id"
    async with alerts.db.reading() as connection:
        assert (await connection.execute(select(webhooks.c.secret, webhooks.c.previous_secret))).one() == (None, None)


async def test_changes_of_one_webhook_affect_no_other(alerts: AlertParts, cast: Cast, clock: FakeClock) -> None:
    made = [
        (await alerts.webhooks.create(kind="webhook", target=TARGET, tenant_id=tenant_id, access=OWNER))[0].id
        for tenant_id in (cast.bob.tenant.id, cast.bob.tenant.id, None)
    ]
    changed, others = made[0], made[1:]

    async def state_of_others() -> list[object]:
        return [(await alerts.webhooks.get(each, access=OWNER), await alerts.webhooks.read_endpoint(each)) for each in others]

    before = await state_of_others()
    await alerts.webhooks.rotate(changed, access=OWNER)
    await alerts.webhooks.update(changed, WebhookChanges(target=TARGET + "/other", disabled=True), access=OWNER)
    disabled_at = clock.now()
    clock.advance(60)
    await alerts.webhooks.update(changed, WebhookChanges(disabled=True), access=OWNER)
    await alerts.webhooks.disable(changed, "gone for good")
    assert (await alerts.webhooks.get(changed, access=OWNER)).disabled_at == disabled_at, (
        "it keeps the time at which it was first disabled"
    )
    assert await state_of_others() == before
    await alerts.webhooks.remove(changed, access=OWNER)
    assert await state_of_others() == before


async def test_disabling_a_webhook_automatically_is_in_the_audit_log(alerts: AlertParts) -> None:
    webhook, _ = await alerts.webhooks.create(kind="webhook", target=TARGET, access=OWNER)
    await alerts.webhooks.disable(webhook.id, "gone for good")
    query = select(audit_log.c.target_id, audit_log.c.before, audit_log.c.after).where(audit_log.c.action == "webhook.disable")
    async with alerts.db.reading() as connection:
        (entry,) = (await connection.execute(query)).all()
    assert (entry.target_id, json.loads(entry.before), json.loads(entry.after)) == (
        webhook.id,
        {"disabled": False},
        {"disabled": True},
    )


async def test_webhooks_are_paged_in_order_of_creation(alerts: AlertParts) -> None:
    made = [(await alerts.webhooks.create(kind="webhook", target=TARGET, access=OWNER))[0] for _ in range(3)]
    first = await alerts.webhooks.list(2, access=OWNER)
    second = await alerts.webhooks.list(2, first.next_cursor, access=OWNER)
    assert (first.data, second.data) == (made[:2], made[2:])
    assert (first.has_more, second.has_more) == (True, False)


async def test_the_store_checks_permission_for_each_operation(alerts: AlertParts, cast: Cast) -> None:
    bob = cast.bob.tenant.id
    viewer, manager, stranger = (
        Access(role=Role.MEMBER, actor=SYSTEM, tenants={tenant_id: role})
        for tenant_id, role in (
            (bob, TenantRole.VIEWER),
            (bob, TenantRole.MANAGER),
            (cast.charlie.tenant.id, TenantRole.MANAGER),
        )
    )
    made, _ = await alerts.webhooks.create(kind="webhook", target=TARGET, tenant_id=bob, access=manager)
    other = WebhookChanges(target=TARGET + "/other")
    for access, error in ((viewer, RoleNotAllowed), (stranger, NotFound)):
        for work in (
            alerts.webhooks.get(made.id, access=access),
            alerts.webhooks.update(made.id, other, access=access),
            alerts.webhooks.rotate(made.id, access=access),
            alerts.webhooks.remove(made.id, access=access),
        ):
            with pytest.raises(error):
                await work
    for access in (viewer, stranger):
        with pytest.raises((RoleNotAllowed, NotFound)):
            await alerts.webhooks.create(kind="webhook", target=TARGET, tenant_id=bob, access=access)
    reader = Access(role=Role.VIEWER, actor=SYSTEM)
    assert await alerts.webhooks.get(made.id, access=reader) == made
    with pytest.raises(RoleNotAllowed):
        await alerts.webhooks.get(made.id, access=reader, action=Action.WEBHOOKS)
    assert (await alerts.webhooks.update(made.id, other, access=manager)).target == other.target
    assert len((await alerts.webhooks.list(access=OWNER)).data) == 1


async def test_a_webhook_is_failing_if_its_latest_attempt_failed(alerts: AlertParts) -> None:
    names = ("failed", "recovered", "failing again", "not attempted")
    made = {name: (await alerts.webhooks.create(kind="webhook", target=TARGET, access=OWNER))[0].id for name in names}
    taken = {"one": ("failing again",), "two": ("recovered",)}
    for subject, by in taken.items():
        await alerts.enqueue(subject)
        for claimed in await alerts.outbox.claim(10, busy={made["not attempted"]}):
            if claimed.webhook_id in [made[name] for name in by]:
                await alerts.outbox.mark_delivered(claimed)
            else:
                await alerts.outbox.mark_failed(claimed, "no answer", None)
    await alerts.enqueue("three")  # no attempt yet
    assert await alerts.webhooks.failing(made.values()) == {made["failed"], made["failing again"]}
    assert await alerts.webhooks.failing([made["failed"], made["recovered"]]) == {made["failed"]}


async def test_every_change_is_audited_without_secrets_or_url_paths(alerts: AlertParts, cast: Cast) -> None:
    webhook, first = await alerts.webhooks.create(kind="webhook", target=TARGET, tenant_id=cast.bob.tenant.id, access=OWNER)
    changes = WebhookChanges(target=TARGET + "/other", events=["invoice.closed"])
    await alerts.webhooks.update(webhook.id, changes, access=OWNER)
    _, second = await alerts.webhooks.rotate(webhook.id, access=OWNER)
    delivery = await alerts.outbox.send_test(webhook.id, access=OWNER)
    await alerts.outbox.retry(webhook.id, delivery.id, access=OWNER)
    await alerts.webhooks.remove(webhook.id, access=OWNER)
    query = select(audit_log).where(audit_log.c.target_kind == "webhook").order_by(audit_log.c.id)
    async with alerts.db.reading() as connection:
        entries = (await connection.execute(query)).mappings().all()
    actions = [entry["action"].removeprefix("webhook.") for entry in entries]
    assert actions == ["create", "update", "rotate", "test", "retry", "remove"]
    assert [json.loads(entry["after"]) for entry in entries[2:5]] == [
        {"grace_s": GRACE_S_DEFAULT},
        {"delivery": delivery.id},
        {"delivery": delivery.id, "event": "webhook.test", "was": "pending"},
    ]
    assert {entry["tenant_id"] for entry in entries} == {cast.bob.tenant.id}
    assert {entry["target_id"] for entry in entries} == {webhook.id}
    created, (before, after) = json.loads(entries[0]["after"]), [json.loads(entries[1][side]) for side in ("before", "after")]
    shown = {"kind": "webhook", "target": "https://alerts.example.com", "events": list(TENANT_EVENTS), "disabled": False}
    assert {name: created[name] for name in shown} == shown
    assert before.keys() == after.keys() == {"target_digest", "events"}, "only the path has changed, which is not shown"
    assert (before["events"], after["events"]) == (list(TENANT_EVENTS), ["invoice.closed"])
    assert (entries[0]["before"], entries[5]["after"]) == (None, None)
    assert json.loads(entries[5]["before"])["events"] == ["invoice.closed"]
    written = " ".join(str(entry["before"]) + str(entry["after"]) for entry in entries)
    assert first is not None
    for secret in (first, second, "/in"):
        assert secret not in written
    assert "https://alerts.example.com" in written
