"""Transactional outbox of messages to webhooks: written in the transaction of the event they report, delivered at least once.

    enqueue ──► pending ── attempt ──► delivered
                  ▲  │ └── attempt failed ──► pending, later       each arrow is one conditional UPDATE
            retry │  └──── ATTEMPTS_MAX failed, webhook gone ──► failed

A delivery attempt is claimed by moving `next_attempt_at` past the attempt's time limit. If the process dies after sending but
before recording it, the message is sent again at that time, or at once by the next process, under the same id, by which
receivers detect duplicates. Knows no protocol.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal, NamedTuple

from sqlalchemy import ColumnElement, Connection, RowMapping, func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from appliance.base.clock import Clock, rfc3339
from appliance.base.db import Database, after_commit, insert_for
from appliance.base.errors import Conflict, NotFound
from appliance.base.ids import new_id
from appliance.base.tables import outbox, webhooks
from appliance.metering.alerts.send_limits import TEST_EVENT, RetryLimiter, check_test_limit
from appliance.tenancy import audit
from appliance.tenancy.access import Access
from appliance.tenancy.pages import PAGE_ROWS_DEFAULT, Page, read_page
from appliance.tenancy.roles import Action

TENANT_EVENTS = ("budget.threshold", "tokens_per_day.threshold", "invoice.closed", "key.expiring")
BOX_EVENTS = ("engine.down", "engine.gpu_unused", "engine.kernels_refused")
EVENTS = (*TENANT_EVENTS, *BOX_EVENTS)

ATTEMPTS_MAX = 14
RETRY_S_MIN = 10.0
RETRY_S_MAX = 12 * 3600.0
RETRY_FACTOR = 3.0  # with these four, the last attempt is on average 2.9 days after the first
LEASE_S = 120.0  # longer than an attempt may take
ERROR_CHARS_MAX = 500

State = Literal["pending", "delivered", "failed"]
STATES = ("pending", "delivered", "failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """One message to one webhook. `attempts` counts attempts begun; `last_error` is the reason of the last failed one."""

    id: str
    webhook_id: str
    event: str
    payload: dict[str, Any]
    attempts: int
    next_attempt_at: datetime | None
    delivered_at: datetime | None
    last_error: str | None
    created_at: datetime

    @property
    def state(self) -> State:
        """Return the state; `failed` means that no further attempt is made."""
        if self.delivered_at is not None:
            return "delivered"
        return "failed" if self.next_attempt_at is None else "pending"


class _Owner(NamedTuple):
    """The owner of a webhook (None: the appliance), and since when the webhook is disabled."""

    tenant_id: str | None
    disabled_at: datetime | None


_FIELDS = tuple(field.name for field in dataclasses.fields(Delivery))


class Message(NamedTuple):
    """`subject` deduplicates: each webhook gets only one message per event and subject. With `tenant_id` None only the webhooks
    of the appliance get it."""

    event: str
    subject: str
    data: Mapping[str, Any]
    tenant_id: str | None = None


def enqueue(connection: Connection, now: datetime, messages: Sequence[Message]) -> int:
    """Write each message to each webhook of its tenant or of the appliance that is subscribed to its event, and return how many
    are new.

    Call it in the transaction of the events themselves.
    """
    columns = webhooks.c
    tenant_ids = sorted({message.tenant_id for message in messages if message.tenant_id is not None})
    owner = columns.tenant_id.is_(None) | columns.tenant_id.in_(tenant_ids)
    query = select(columns.id, columns.tenant_id, columns.events).where(owner, *_active_conditions()).order_by(columns.id)
    targets = connection.execute(query).all()
    num_new = 0
    for event, subject, data, tenant_id in messages:
        for webhook_id, owner_id, subscribed in targets:
            if owner_id in (None, tenant_id) and event in subscribed:
                dedupe_key = f"{event}:{subject}:{webhook_id}"
                num_new += _insert_message(connection, now, event, data, webhook_id, dedupe_key) is not None
    return num_new


def _active_conditions() -> tuple[ColumnElement[bool], ...]:
    return webhooks.c.disabled_at.is_(None), webhooks.c.removed_at.is_(None)


def _insert_message(
    connection: Connection, now: datetime, event: str, data: Mapping[str, Any], webhook_id: str, dedupe_key: str
) -> str | None:
    """Return the id of the new message, or None if `dedupe_key` exists."""
    message_id = new_id("msg")
    statement = insert_for(connection.dialect.name, outbox).values(
        id=message_id,
        webhook_id=webhook_id,
        dedupe_key=dedupe_key,
        event=event,
        payload={"type": event, "timestamp": rfc3339(now), "data": dict(data)},
        attempts=0,
        next_attempt_at=now,
        created_at=now,
    )
    written = statement.on_conflict_do_nothing(index_elements=["dedupe_key"]).returning(outbox.c.id)
    if connection.execute(written).first() is None:
        return None
    after_commit(connection, _wake_delivery)
    return message_id


def _wake_delivery(db: Database) -> None:
    db.outbox_written.set()


async def give_up_pending(connection: AsyncConnection, webhook_id: str, reason: str) -> None:
    """Mark all pending messages of a webhook as failed."""
    await connection.execute(
        update(outbox)
        .where(outbox.c.webhook_id == webhook_id, outbox.c.delivered_at.is_(None), outbox.c.next_attempt_at.is_not(None))
        .values(next_attempt_at=None, claimed_at=None, last_error=reason[:ERROR_CHARS_MAX])
    )


def retry_delay_s(attempts: int, randomness: float) -> float | None:
    """Return the backoff in seconds after failed attempt number `attempts`, or None to give up.

    Exponential by RETRY_FACTOR from RETRY_S_MIN to RETRY_S_MAX, with jitter: `randomness`, 0 to 1, scales it by 0.5 to 1.5, so
    that messages that failed together are not retried together.
    """
    if attempts >= ATTEMPTS_MAX:
        return None
    return min(RETRY_S_MIN * RETRY_FACTOR ** (attempts - 1), RETRY_S_MAX) * (0.5 + randomness)


class Outbox:
    """Claims due messages, records the outcome of attempts, and lists, retries and tests for administrators."""

    def __init__(self, db: Database, clock: Clock) -> None:
        self._db = db
        self._clock = clock
        self._retries = RetryLimiter(clock)

    async def claim(self, count: int, busy: Collection[str] = ()) -> list[Delivery]:
        """Claim and return the oldest due message of each of at most `count` webhooks that are not `busy`.

        One message at a time per webhook, so that a slow receiver delays only its own messages.
        """
        now = self._clock.now()
        oldest = func.min(outbox.c.id)
        query = (
            select(oldest)
            .join_from(outbox, webhooks, webhooks.c.id == outbox.c.webhook_id)
            .where(outbox.c.next_attempt_at <= now, outbox.c.webhook_id.not_in(sorted(busy)), *_active_conditions())
            .group_by(outbox.c.webhook_id)
            .order_by(func.min(outbox.c.next_attempt_at), oldest)
            .limit(count)
        )
        async with self._db.reading() as connection:
            due = (await connection.execute(query)).scalars().all()
        if not due:
            return []
        async with self._db.writing() as connection:
            claimed = [await self._claim_one(connection, message_id, now) for message_id in due]
        return [delivery for delivery in claimed if delivery is not None]

    @staticmethod
    async def _claim_one(connection: AsyncConnection, message_id: str, now: datetime) -> Delivery | None:
        statement = (
            update(outbox)
            .where(outbox.c.id == message_id, outbox.c.delivered_at.is_(None), outbox.c.next_attempt_at <= now)
            .values(attempts=outbox.c.attempts + 1, claimed_at=now, next_attempt_at=now + timedelta(seconds=LEASE_S))
            .returning(outbox)
        )
        row = (await connection.execute(statement)).mappings().first()
        return None if row is None else _from_row(row)

    async def release_claims(self) -> None:
        """Make messages claimed by a dead process due at once. Call it before the first claim of this process."""
        async with self._db.writing() as connection:
            await connection.execute(
                update(outbox)
                .where(outbox.c.next_attempt_at.is_not(None), outbox.c.claimed_at.is_not(None))
                .values(next_attempt_at=self._clock.now(), claimed_at=None)
            )

    async def mark_delivered(self, delivery: Delivery) -> None:
        """Record that the receiver accepted the message."""
        async with self._db.writing() as connection:
            await connection.execute(
                update(outbox)
                .where(outbox.c.id == delivery.id, outbox.c.delivered_at.is_(None))
                .values(delivered_at=self._clock.now(), next_attempt_at=None, claimed_at=None, last_error=None)
            )

    async def mark_failed(self, delivery: Delivery, error: str, wait_s: float | None) -> None:
        """Record why the claimed attempt failed; try again in `wait_s` seconds, or never if None. A message that was retried
        by hand meanwhile is not changed."""
        next_attempt_at = None if wait_s is None else self._clock.now() + timedelta(seconds=wait_s)
        async with self._db.writing() as connection:
            await connection.execute(
                update(outbox)
                .where(outbox.c.id == delivery.id, outbox.c.delivered_at.is_(None))
                .where(outbox.c.next_attempt_at == delivery.next_attempt_at)
                .values(next_attempt_at=next_attempt_at, claimed_at=None, last_error=error[:ERROR_CHARS_MAX])
            )

    async def next_due_s(self, busy: Collection[str] = ()) -> float | None:
        """Return the seconds until a message of a webhook that is not `busy` is due, or None if none is pending."""
        query = (
            select(func.min(outbox.c.next_attempt_at))
            .join_from(outbox, webhooks, webhooks.c.id == outbox.c.webhook_id)
            .where(outbox.c.next_attempt_at.is_not(None), outbox.c.webhook_id.not_in(sorted(busy)), *_active_conditions())
        )
        async with self._db.reading() as connection:
            earliest: datetime | None = (await connection.execute(query)).scalar_one()
        return None if earliest is None else max((earliest - self._clock.now()).total_seconds(), 0.0)

    async def count_pending(self) -> int:
        """Return how many messages are pending, without those that wait because their webhook is disabled."""
        query = (
            select(func.count())
            .select_from(outbox)
            .join(webhooks, webhooks.c.id == outbox.c.webhook_id)
            .where(outbox.c.next_attempt_at.is_not(None), *_active_conditions())
        )
        async with self._db.reading() as connection:
            return int((await connection.execute(query)).scalar_one())

    async def get(self, webhook_id: str, delivery_id: str, *, access: Access) -> Delivery:
        """Return one message of a webhook. Raises RoleNotAllowed, and NotFound (also for another tenant's webhook)."""
        async with self._db.reading() as connection:
            await _read_owner(connection, webhook_id, access, read_action(access))
            return await _get(connection, webhook_id, delivery_id)

    async def list(
        self,
        webhook_id: str,
        limit: int = PAGE_ROWS_DEFAULT,
        cursor: str | None = None,
        *,
        state: str | None = None,
        access: Access,
    ) -> Page[Delivery]:
        """Return the messages of a webhook, newest first. Raises the errors of `get`."""
        async with self._db.reading() as connection:
            await _read_owner(connection, webhook_id, access, read_action(access))
        query = select(outbox).where(outbox.c.webhook_id == webhook_id, *_state_conditions(state))
        return await read_page(self._db, "deliveries", query, outbox.c.id, limit, cursor, _from_row, newest_first=True)

    async def retry(self, webhook_id: str, delivery_id: str, *, access: Access) -> Delivery:
        """Make a message due now under the same id, with its attempts reset.

        Raises NotFound, RoleNotAllowed, Conflict and RateLimitExceeded.
        """
        async with self._db.writing() as connection:
            tenant_id = await _check_enabled(connection, webhook_id, access)
            before = await _get(connection, webhook_id, delivery_id)
            self._retries.acquire(tenant_id)
            await connection.execute(
                update(outbox)
                .where(outbox.c.id == delivery_id)
                .values(attempts=0, next_attempt_at=self._clock.now(), claimed_at=None, delivered_at=None)
            )
            after = await _get(connection, webhook_id, delivery_id)
            after_commit(connection, _wake_delivery)
            facts = {"delivery": delivery_id, "event": before.event, "was": before.state}
            await audit.record(
                connection, self._clock, "webhook.retry", "webhook", webhook_id, tenant_id=tenant_id, after=facts
            )
        return after

    async def send_test(self, webhook_id: str, *, access: Access) -> Delivery:
        """Enqueue a test message to one webhook.

        Raises NotFound, RoleNotAllowed, Conflict if the webhook is disabled, and RateLimitExceeded.
        """
        now = self._clock.now()
        async with self._db.writing() as connection:
            tenant_id = await _check_enabled(connection, webhook_id, access)
            await check_test_limit(connection, webhook_id, tenant_id, now)
            text = "This is a test. Nothing has happened."
            data = {"webhook_id": webhook_id, "note": text}
            message_id = await connection.run_sync(_insert_message, now, TEST_EVENT, data, webhook_id, new_id(TEST_EVENT))
            assert message_id is not None, "a new key is unique"
            delivery = await _get(connection, webhook_id, message_id)
            await audit.record(
                connection,
                self._clock,
                "webhook.test",
                "webhook",
                webhook_id,
                tenant_id=tenant_id,
                after={"delivery": message_id},
            )
        return delivery


def read_action(access: Access) -> Action:
    """Return the action required to read webhooks and their messages. Every role on the appliance may; in a tenant only those
    that manage them, because webhook URLs are often secrets."""
    return Action.READ_APPLIANCE if access.sees_all else Action.WEBHOOKS


async def _check_enabled(connection: AsyncConnection, webhook_id: str, access: Access) -> str | None:
    """Return the tenant of an enabled webhook. Raises NotFound, RoleNotAllowed, and Conflict if it is disabled."""
    owner = await _read_owner(connection, webhook_id, access, Action.WEBHOOKS)
    if owner.disabled_at is not None:
        raise Conflict("the webhook is disabled: nothing is sent to it", param="webhook_id")
    return owner.tenant_id


async def _read_owner(connection: AsyncConnection, webhook_id: str, access: Access, action: Action) -> _Owner:
    """Return the owner of a webhook. Raises NotFound and RoleNotAllowed."""
    query = select(webhooks.c.tenant_id, webhooks.c.disabled_at)
    row = (await connection.execute(query.where(webhooks.c.id == webhook_id, webhooks.c.removed_at.is_(None)))).first()
    return access.row(None if row is None else _Owner(*row), action, what="webhook", param="webhook_id")


async def _get(connection: AsyncConnection, webhook_id: str, delivery_id: str) -> Delivery:
    query = select(outbox).where(outbox.c.id == delivery_id, outbox.c.webhook_id == webhook_id)
    row = (await connection.execute(query)).mappings().first()
    if row is None:
        raise NotFound("no such delivery", param="delivery_id")
    return _from_row(row)


def _state_conditions(state: str | None) -> tuple[ColumnElement[bool], ...]:
    if state is None:
        return ()
    if state == "delivered":
        return (outbox.c.delivered_at.is_not(None),)
    pending = outbox.c.next_attempt_at.is_not(None)
    return outbox.c.delivered_at.is_(None), pending if state == "pending" else outbox.c.next_attempt_at.is_(None)


def _from_row(row: RowMapping) -> Delivery:
    return Delivery(**{name: row[name] for name in _FIELDS})
