"""The table of webhooks: targets of alerts, by signed HTTP request or by e-mail, of one tenant or of the whole appliance.

Validates settings and knows nothing of sending. Signing secrets are sealed (encrypted) here and opened only for the sender.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import RowMapping, func, insert, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from appliance.base.clock import Clock
from appliance.base.db import Database, after_commit
from appliance.base.errors import Conflict, InvalidValue, NotFound
from appliance.base.ids import new_id
from appliance.base.sealing import Sealer
from appliance.base.tables import members, memberships, outbox, tenants, webhooks
from appliance.metering.alerts.outbox import EVENTS, TENANT_EVENTS, give_up_pending, read_action
from appliance.metering.alerts.signature import new_signing_secret
from appliance.metering.alerts.targets import TargetPolicy, check_mailbox, check_web_target, redact_target
from appliance.tenancy import audit
from appliance.tenancy.access import WHOLE_APPLIANCE, Access
from appliance.tenancy.fields import UNSET, Unset, check_choice, check_whole
from appliance.tenancy.pages import PAGE_ROWS_DEFAULT, Page, read_page
from appliance.tenancy.roles import Action

KINDS = ("webhook", "email")
WEBHOOKS_MAX = 20
GRACE_S_DEFAULT = 86400
GRACE_S_MAX = 7 * 86400
SEALING_PURPOSE = "signing secrets of webhooks"


@dataclass(frozen=True, slots=True, kw_only=True)
class Webhook:
    """A target of alerts; with `tenant_id` None it gets those of every tenant. `previous_secret_until` is the end of the grace
    period after a rotation."""

    id: str
    tenant_id: str | None
    kind: str
    target: str
    events: tuple[str, ...]
    disabled_at: datetime | None
    previous_secret_until: datetime | None
    created_at: datetime

    @property
    def disabled(self) -> bool:
        """Return whether sending is paused."""
        return self.disabled_at is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """What a sender needs to know about a webhook. Messages are signed with each of `secrets`: two in a grace period."""

    id: str
    kind: str
    target: str
    secrets: tuple[str, ...] = dataclasses.field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookChanges:
    """What a PATCH of a webhook changes."""

    target: str | Unset = UNSET
    events: Sequence[str] | Unset = UNSET
    disabled: bool | Unset = UNSET


class Webhooks:
    """All webhooks. `mail`: whether a mail server is configured. `target_policy`: the addresses that are allowed."""

    def __init__(self, db: Database, clock: Clock, sealer: Sealer, *, target_policy: TargetPolicy, mail: bool) -> None:
        self._db = db
        self._clock = clock
        self._sealer = sealer
        self._target_policy = target_policy
        self._mail = mail

    async def create(
        self,
        *,
        kind: str,
        target: str,
        tenant_id: str | None = None,
        events: Sequence[str] | None = None,
        access: Access,
    ) -> tuple[Webhook, str | None]:
        """Create a webhook; return it and its signing secret, which is shown only once (None for e-mail).

        `events` None subscribes to every event that the owner may receive. Raises InvalidValue, NotFound, Conflict and
        RoleNotAllowed.
        """
        access.require(Action.WEBHOOKS, tenant_id)
        check_choice(kind, "kind", KINDS)
        columns = {
            "id": new_id("wh"),
            "tenant_id": tenant_id,
            "kind": kind,
            "target": self._check_target(kind, target),
            "events": _check_events(events, tenant_id),
            "created_at": self._clock.now(),
        }
        secret = new_signing_secret() if kind == "webhook" else None
        async with self._db.writing() as connection:
            await _check_can_add(connection, tenant_id)
            if kind == "email":
                await _check_recipient(connection, str(columns["target"]), tenant_id, access)
            sealed = None if secret is None else self._sealer.seal(secret)
            await connection.execute(insert(webhooks).values(**columns, secret=sealed))
            created = await _get(connection, str(columns["id"]), access, Action.WEBHOOKS)
            await self._record(connection, "webhook.create", None, created)
        return created, secret

    async def get(self, webhook_id: str, *, access: Access, action: Action | None = None) -> Webhook:
        """Return a webhook if the caller may perform `action` on it (None: may read it).

        Raises RoleNotAllowed, and NotFound (also for another tenant's webhook).
        """
        async with self._db.reading() as connection:
            return await _get(connection, webhook_id, access, action or read_action(access))

    async def list(
        self,
        limit: int = PAGE_ROWS_DEFAULT,
        cursor: str | None = None,
        *,
        tenant_id: str | None = None,
        access: Access,
    ) -> Page[Webhook]:
        """Return the webhooks that `access` may see, of one tenant if given, in the order of creation."""
        query = select(webhooks).where(webhooks.c.removed_at.is_(None))
        query = access.narrow(query, webhooks.c.tenant_id, read_action(access))
        if tenant_id is not None:
            query = query.where(webhooks.c.tenant_id == tenant_id)
        return await read_page(self._db, "webhooks", query, webhooks.c.id, limit, cursor, _from_row)

    async def names(self, webhook_ids: Collection[str]) -> dict[str, str]:
        """Return the redacted targets of `webhook_ids` by id, of removed webhooks too."""
        query = select(webhooks.c.id, webhooks.c.kind, webhooks.c.target).where(webhooks.c.id.in_(sorted(webhook_ids)))
        async with self._db.reading() as connection:
            return {row.id: redact_target(row.kind, row.target) for row in await connection.execute(query)}

    async def failing(self, webhook_ids: Collection[str]) -> frozenset[str]:
        """Return those of `webhook_ids` whose newest attempted message is not delivered."""
        tried = or_(outbox.c.delivered_at.is_not(None), outbox.c.last_error.is_not(None))
        newest = select(outbox.c.id).where(outbox.c.webhook_id == webhooks.c.id, tried).order_by(outbox.c.id.desc()).limit(1)
        query = select(webhooks.c.id).join(outbox, outbox.c.id == newest.correlate(webhooks).scalar_subquery())
        async with self._db.reading() as connection:
            found = await connection.execute(query.where(webhooks.c.id.in_(webhook_ids), outbox.c.delivered_at.is_(None)))
            return frozenset(found.scalars())

    async def update(self, webhook_id: str, changes: WebhookChanges, *, access: Access) -> Webhook:
        """Apply `changes` and return the webhook. Its pending messages wait while it is disabled.

        Raises NotFound, RoleNotAllowed and InvalidValue.
        """
        async with self._db.writing() as connection:
            before = await _get(connection, webhook_id, access, Action.WEBHOOKS)
            columns = self._changed_columns(before, changes)
            if before.kind == "email" and columns.get("target", before.target) != before.target:
                await _check_recipient(connection, columns["target"], before.tenant_id, access)
            if columns:
                await connection.execute(update(webhooks).where(webhooks.c.id == webhook_id).values(**columns))
            after = await _get(connection, webhook_id, access, Action.WEBHOOKS)
            await self._record(connection, "webhook.update", before, after)
        return after

    async def disable(self, webhook_id: str, reason: str) -> None:
        """Disable a webhook whose receiver answered that it is gone, and mark its pending messages as failed."""
        async with self._db.writing() as connection:
            before = await _get(connection, webhook_id, WHOLE_APPLIANCE, Action.WEBHOOKS)
            statement = update(webhooks).where(webhooks.c.id == webhook_id, webhooks.c.disabled_at.is_(None))
            await connection.execute(statement.values(disabled_at=self._clock.now()))
            await give_up_pending(connection, webhook_id, reason)
            after = await _get(connection, webhook_id, WHOLE_APPLIANCE, Action.WEBHOOKS)
            await self._record(connection, "webhook.disable", before, after)

    async def remove(self, webhook_id: str, *, access: Access) -> Webhook:
        """Remove a webhook, mark its pending messages as failed, and return it. Raises NotFound and RoleNotAllowed."""
        async with self._db.writing() as connection:
            removed = await _get(connection, webhook_id, access, Action.WEBHOOKS)
            columns = {"removed_at": self._clock.now(), "secret": None, "previous_secret": None}
            await connection.execute(update(webhooks).where(webhooks.c.id == webhook_id).values(**columns))
            await give_up_pending(connection, webhook_id, "the webhook was removed")
            await self._record(connection, "webhook.remove", removed, None)
        return removed

    async def rotate(self, webhook_id: str, grace_s: int = GRACE_S_DEFAULT, *, access: Access) -> tuple[Webhook, str]:
        """Replace the signing secret; return the webhook and the new secret, which is shown only once. For `grace_s` seconds
        messages are signed with the previous secret too, unless it was sealed with another `secret.key`."""
        check_whole(grace_s, "grace_s", 0, GRACE_S_MAX)
        secret = new_signing_secret()
        async with self._db.writing() as connection:
            before = await _get(connection, webhook_id, access, Action.WEBHOOKS)
            if before.kind != "webhook":
                raise InvalidValue("alerts by e-mail are not signed: there is no secret to rotate", param="kind")
            sealed = (await connection.execute(select(webhooks.c.secret).where(webhooks.c.id == webhook_id))).scalar_one()
            if not self._sealer.can_open(sealed):
                grace_s = 0
            columns = {
                "previous_secret": webhooks.c.secret if grace_s else None,
                "previous_secret_until": self._clock.now() + timedelta(seconds=grace_s) if grace_s else None,
                "secret": self._sealer.seal(secret),
            }
            await connection.execute(update(webhooks).where(webhooks.c.id == webhook_id).values(**columns))
            after = await _get(connection, webhook_id, access, Action.WEBHOOKS)
            await audit.record(
                connection,
                self._clock,
                "webhook.rotate",
                "webhook",
                webhook_id,
                tenant_id=after.tenant_id,
                after={"grace_s": grace_s},
            )
        return after, secret

    async def read_endpoint(self, webhook_id: str) -> Endpoint:
        """Return what is needed to send to a webhook, including its secrets. Only for delivery.

        Raises NotFound if it was removed, and Unsealable.
        """
        query = select(webhooks).where(webhooks.c.id == webhook_id, webhooks.c.removed_at.is_(None))
        async with self._db.reading() as connection:
            row = (await connection.execute(query)).mappings().first()
        if row is None:
            raise NotFound("no such webhook", param="webhook_id")
        until = row["previous_secret_until"]
        sealed = [row["secret"], row["previous_secret"] if until is not None and self._clock.now() < until else None]
        return Endpoint(
            id=row["id"],
            kind=row["kind"],
            target=row["target"],
            secrets=tuple(self._sealer.open(secret) for secret in sealed if secret is not None),
        )

    def _check_target(self, kind: str, target: object) -> str:
        if kind == "webhook":
            return check_web_target(target, self._target_policy)
        if not self._mail:
            raise InvalidValue("no e-mail can be sent: the operator has set no mail server (smtp_url)", param="kind")
        return check_mailbox(target)

    def _changed_columns(self, before: Webhook, changes: WebhookChanges) -> dict[str, Any]:
        columns: dict[str, Any] = {}
        if not isinstance(changes.target, Unset):
            columns["target"] = self._check_target(before.kind, changes.target)
        if not isinstance(changes.events, Unset):
            columns["events"] = _check_events(changes.events, before.tenant_id)
        if not isinstance(changes.disabled, Unset):
            columns["disabled_at"] = (before.disabled_at or self._clock.now()) if changes.disabled else None
        return columns

    async def _record(self, connection: AsyncConnection, action: str, before: Webhook | None, after: Webhook | None) -> None:
        """Write the change to the audit log, and make the alert sweeps run again."""
        webhook = after or before
        assert webhook is not None
        after_commit(connection, _notify_changed)
        await audit.record(
            connection,
            self._clock,
            action,
            "webhook",
            webhook.id,
            tenant_id=webhook.tenant_id,
            before=None if before is None else _facts(before),
            after=None if after is None else _facts(after),
        )


def _notify_changed(db: Database) -> None:
    db.webhook_changes.bump()
    db.outbox_written.set()  # messages of a webhook that was disabled may be due


def _facts(webhook: Webhook) -> dict[str, Any]:
    """Return what the audit log records; the digest shows that a target changed although the target itself is redacted."""
    return {
        "kind": webhook.kind,
        "target": redact_target(webhook.kind, webhook.target),
        "target_digest": hashlib.sha256(webhook.target.encode()).hexdigest(),
        "events": list(webhook.events),
        "disabled": webhook.disabled,
    }


def _check_events(events: object, tenant_id: str | None) -> list[str]:
    known = EVENTS if tenant_id is None else TENANT_EVENTS
    if events is None:
        return list(known)
    if not isinstance(events, Sequence) or isinstance(events, str) or not 1 <= len(events) <= len(known):
        raise InvalidValue(f"events must be a list of 1 to {len(known)} events", param="events")
    return list(dict.fromkeys(check_choice(event, "events", known) for event in events))


async def _check_can_add(connection: AsyncConnection, tenant_id: str | None) -> None:
    """Raise NotFound, Conflict or InvalidValue unless a webhook may be added to the tenant (None: to the appliance)."""
    if tenant_id is not None:
        query = select(tenants.c.archived_at).where(tenants.c.id == tenant_id)
        row = (await connection.execute(query)).first() if tenant_id.isprintable() else None  # no database accepts a NUL
        if row is None:
            raise NotFound("no such tenant", param="tenant_id")
        if row.archived_at is not None:
            raise Conflict("the tenant is archived", param="tenant_id")
    owner = webhooks.c.tenant_id.is_(None) if tenant_id is None else webhooks.c.tenant_id == tenant_id
    count = select(func.count()).select_from(webhooks).where(owner, webhooks.c.removed_at.is_(None))
    if (await connection.execute(count)).scalar_one() >= WEBHOOKS_MAX:
        raise InvalidValue(f"at most {WEBHOOKS_MAX} webhooks can exist: remove one first", param="tenant_id")


async def _check_recipient(connection: AsyncConnection, mailbox: str, tenant_id: str | None, access: Access) -> None:
    """Raise InvalidValue unless the mailbox belongs to a member of the tenant or the caller manages webhooks of the box.

    Tenants choose the names in their alerts: otherwise a tenant could send any text to anybody through the operator's mail
    server, by changing its limits.
    """
    if access.may(Action.WEBHOOKS):
        return
    of_tenant = (memberships.c.tenant_id == tenant_id) & (members.c.email == mailbox.lower()) & members.c.disabled_at.is_(None)
    query = select(members.c.id).join_from(members, memberships, memberships.c.member_id == members.c.id).where(of_tenant)
    if (await connection.execute(query)).first() is None:
        raise InvalidValue(
            "target must be the e-mail address of a member of the tenant; an administrator of the appliance may add another",
            param="target",
        )


async def _get(connection: AsyncConnection, webhook_id: str, access: Access, action: Action) -> Webhook:
    query = select(webhooks).where(webhooks.c.id == webhook_id, webhooks.c.removed_at.is_(None))
    row = (await connection.execute(query)).mappings().first()
    return access.row(None if row is None else _from_row(row), action, what="webhook", param="webhook_id")


def _from_row(row: RowMapping) -> Webhook:
    names = [field.name for field in dataclasses.fields(Webhook) if field.name != "events"]
    return Webhook(**{name: row[name] for name in names}, events=tuple(row["events"]))
