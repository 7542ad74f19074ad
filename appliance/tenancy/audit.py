"""The audit log: who changed what, from where, with the values before and after. Entries are never changed.

Contains no secrets: of a field that could be one, only the fact of the change is recorded. Does not check permissions.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from sqlalchemy import ColumnElement, RowMapping, insert, select, update
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncConnection

from appliance.base.acting import current_actor
from appliance.base.clock import Clock
from appliance.base.db import Database, insert_for
from appliance.base.tables import admin_tokens, api_keys, audit_head, audit_log, members
from appliance.tenancy.access import Access
from appliance.tenancy.audit_chain import (
    COLUMNS,
    FIRST_HASH,
    AuditEntry,
    ChainVerifier,
    Head,
    Verification,
    canonical_json,
    changed_fault,
    hash_of,
)
from appliance.tenancy.pages import PAGE_ROWS_DEFAULT, Page, check_limit, decode_cursor, page_of
from appliance.tenancy.roles import Action

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

BATCH_ROWS = 1000
HIDDEN = "(hidden)"
_HEAD_ID = 1
_NAMES = {
    "key": (api_keys.c.id, api_keys.c.name),
    "member": (members.c.id, members.c.email),
    "membership": (members.c.id, members.c.email),
    "token": (admin_tokens.c.id, admin_tokens.c.name),
}
_SECRET = re.compile(r"(^|_)(password|secret|digest|hash|pepper|token|totp)$")


def recorded_fields(value: DataclassInstance | None, *excluded: str) -> dict[str, Any] | None:
    """Return the fields of a dataclass for `before` or `after` of an entry, without `excluded` ones; None for None."""
    if value is None:
        return None
    names = [field.name for field in dataclasses.fields(value) if field.name not in excluded]
    return {name: _to_json(getattr(value, name)) for name in names}


async def record(
    connection: AsyncConnection,
    clock: Clock,
    action: str,
    target_kind: str,
    target_id: str,
    *,
    tenant_id: str | None = None,
    before: Mapping[str, Any] | None = None,
    after: Mapping[str, Any] | None = None,
) -> None:
    """Do `record_each` for one change."""
    change = Change(target_id, tenant_id=tenant_id, before=before, after=after)
    await record_each(connection, clock, action, target_kind, [change])


@dataclass(frozen=True, slots=True)
class Change:
    """A change to one target, with its values before and after; `tenant_id` owns the target, None: the appliance."""

    target_id: str
    tenant_id: str | None = None
    before: Mapping[str, Any] | None = None
    after: Mapping[str, Any] | None = None


async def record_each(
    connection: AsyncConnection, clock: Clock, action: str, target_kind: str, changes: Sequence[Change]
) -> None:
    """Record that the current actor did `action` (noun.verb) to each target, in the transaction of the changes themselves.

    Stores only the fields in which `before` and `after` differ, and nothing if both are given and equal. Call it last in the
    transaction: it locks the head of the chain until the transaction ends.
    """
    recorded = []
    for change in changes:
        before, after = change.before, change.after
        if before is not None and after is not None:
            before, after = _differences(before, after)
            if not after and not before:
                continue
        recorded.append(dataclasses.replace(change, before=before, after=after))
    if not recorded:
        return
    last_id, previous_hash = await _lock_head(connection, len(recorded))
    actor, now = current_actor(), clock.now()
    rows = []
    for entry_id, change in enumerate(recorded, last_id - len(recorded) + 1):
        columns: dict[str, Any] = {
            "id": entry_id,
            "at": now,
            "actor_kind": actor.kind,
            "actor_id": one_line(actor.id, 40),
            "actor_name": one_line(actor.name, 320),
            "action": action,
            "target_kind": target_kind,
            "target_id": one_line(change.target_id, 200),
            "tenant_id": change.tenant_id,
            "before": None if change.before is None else canonical_json(_redact_secrets(change.before)),
            "after": None if change.after is None else canonical_json(_redact_secrets(change.after)),
            "request_id": one_line(actor.request_id, 40),
            "address": one_line(actor.address, 64),
        }
        own_hash = hash_of(columns, previous_hash)
        rows.append({**columns, "previous_hash": previous_hash, "hash": own_hash})
        previous_hash = own_hash
    await connection.execute(insert(audit_log), rows)
    await connection.execute(update(audit_head).where(audit_head.c.id == _HEAD_ID).values(hash=previous_hash))


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditFilter:
    """Filters of a page; None means no filter. `start <= at < end`. `actors` match ids or names, `actor_names` names only."""

    actors: Collection[str] | None = None
    actor_names: Collection[str] | None = None
    actions: Collection[str] | None = None
    targets: Collection[str] | None = None
    tenant_ids: Collection[str] | None = None
    start: datetime | None = None
    end: datetime | None = None


class AuditLog:
    """Reads pages of the log and verifies its chain."""

    def __init__(self, db: Database, clock: Clock) -> None:
        self._db = db
        self._clock = clock

    async def record(self, action: str, target_kind: str, target_id: str, *, tenant_id: str | None = None) -> None:
        """Record an action that changes no other row of this database, in a transaction of its own."""
        async with self._db.writing() as connection:
            await record(connection, self._clock, action, target_kind, target_id, tenant_id=tenant_id)

    async def page(
        self,
        limit: int = PAGE_ROWS_DEFAULT,
        cursor: str | None = None,
        filters: AuditFilter | None = None,
        *,
        before: int | None = None,
        access: Access,
    ) -> Page[AuditEntry]:
        """Return the entries visible to `access`, newest first; those of the appliance have no tenant. Raises InvalidValue.

        `before` is the id of an entry: only newer entries are returned. Without a cursor these are the ones next to that entry,
        and the page has no `next_cursor`: pass its first id as the next `before`. With a cursor the page begins there.
        """
        is_backward = before is not None and cursor is None
        query = select(audit_log).where(*_conditions(filters or AuditFilter()))
        if before is not None:
            query = query.where(audit_log.c.id > before)
        query = query.order_by(audit_log.c.id if is_backward else audit_log.c.id.desc())
        query = access.narrow(query, audit_log.c.tenant_id, Action.AUDIT)
        if cursor is not None:
            (last_id,) = decode_cursor("audit", cursor, [int])
            query = query.where(audit_log.c.id < last_id)
        async with self._db.reading() as connection:
            rows = (await connection.execute(query.limit(check_limit(limit) + 1))).mappings().all()
        page = page_of([_from_row(row) for row in rows], limit, "audit", lambda entry: [entry.id])
        return Page(data=page.data[::-1], next_cursor=None) if is_backward else page

    async def target_names(self, entries: Sequence[AuditEntry]) -> dict[str, str]:
        """Return the current names of keys, members and tokens that are targets of `entries`, by id."""
        names: dict[str, str] = {}
        async with self._db.reading() as connection:
            for kind, (target_id, name) in _NAMES.items():
                if ids := sorted({entry.target_id for entry in entries if entry.target_kind == kind}):
                    found = await connection.execute(select(target_id, name).where(target_id.in_(ids)))
                    names |= {row[0]: row[1] for row in found}
        return names

    async def verify(
        self, expect: str | None = None, on_progress: Callable[[float], None] = lambda _fraction: None
    ) -> Verification:
        """Verify the chain in batches, while others may append to it.

        `expect` is a hash printed by an earlier verification: some entry must still have it.
        """
        verifier = ChainVerifier(expect)
        while True:
            try:
                head, entries = await self._batch(verifier.seen.entries)
            except (ValueError, TypeError, OperationalError):
                return await self._verify_singly(verifier)
            verifier.feed(entries)
            on_progress(min(1.0, verifier.seen.entries / max(1, head.entries)))
            if verifier.fault is not None or len(entries) < BATCH_ROWS:
                return verifier.finish(head)

    async def _verify_singly(self, verifier: ChainVerifier) -> Verification:
        """Verify entry by entry, to find the one that cannot be decoded: SQLite accepts any value in a timestamp column."""
        head = Head()
        while verifier.fault is None:
            try:
                head, entries = await self._batch(verifier.seen.entries, rows_max=1)
            except (ValueError, TypeError, OperationalError):
                verifier.fault = changed_fault(verifier.seen.entries + 1)
                break
            verifier.feed(entries)
            if not entries:
                break
        return verifier.finish(head)

    async def _batch(self, after_id: int, rows_max: int = BATCH_ROWS) -> tuple[Head, list[AuditEntry]]:
        """Return the head and the entries after `after_id`, read in one snapshot."""
        query = select(audit_log).order_by(audit_log.c.id).limit(rows_max)
        if after_id > 0:  # no bound on the first batch, so that entries inserted before the first one are found
            query = query.where(audit_log.c.id > after_id)
        async with self._db.reading() as connection:
            head = (await connection.execute(select(audit_head.c.entries, audit_head.c.hash))).first()
            rows = (await connection.execute(query)).mappings().all()
        return Head() if head is None else Head(head.entries, head.hash), [_from_row(row) for row in rows]


async def _lock_head(connection: AsyncConnection, count: int) -> tuple[int, str]:
    """Return (id of the last of the next `count` entries, hash of the last one written) and lock the head until this
    transaction ends."""
    increment = (
        update(audit_head)
        .where(audit_head.c.id == _HEAD_ID)
        .values(entries=audit_head.c.entries + count)
        .returning(audit_head.c.entries, audit_head.c.hash)
    )
    row = (await connection.execute(increment)).first()
    if row is None:
        first = insert_for(connection.dialect.name, audit_head).values(id=_HEAD_ID, entries=0, hash=FIRST_HASH)
        await connection.execute(first.on_conflict_do_nothing())
        row = (await connection.execute(increment)).one()
    return row.entries, row.hash


def _to_json(value: Any) -> Any:
    """Return `value` in JSON types: nested dataclasses become dictionaries, tuples lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return recorded_fields(value)
    if isinstance(value, Mapping):
        return {name: _to_json(item) for name, item in value.items()}
    return list(value) if isinstance(value, tuple) else value


def _differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields that differ, with their old and new values; nested mappings (limits) are compared field by field."""
    was: dict[str, Any] = {}
    now: dict[str, Any] = {}
    for name in before.keys() | after.keys():
        old, new = before.get(name), after.get(name)
        if old == new:
            continue
        was[name], now[name] = _differences(old, new) if isinstance(old, Mapping) and isinstance(new, Mapping) else (old, new)
    return was, now


def _redact_secrets(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: HIDDEN if _SECRET.search(name) and value is not None else value for name, value in fields.items()}


def one_line(value: str | None, chars_max: int) -> str | None:
    """Return `value` without unprintable characters, cut to the size of its column: clients control some of these values."""
    return None if value is None else "".join(character for character in value if character.isprintable())[:chars_max]


def _conditions(filters: AuditFilter) -> list[ColumnElement[bool]]:
    columns = audit_log.c
    conditions: list[ColumnElement[bool]] = []
    if filters.actors is not None:
        conditions.append(columns.actor_id.in_(filters.actors) | columns.actor_name.in_(filters.actors))
    filtered = {
        columns.actor_name: filters.actor_names,
        columns.action: filters.actions,
        columns.target_id: filters.targets,
        columns.tenant_id: filters.tenant_ids,
    }
    conditions += [column.in_(sorted(values)) for column, values in filtered.items() if values is not None]
    if filters.start is not None:
        conditions.append(columns.at >= filters.start)
    if filters.end is not None:
        conditions.append(columns.at < filters.end)
    return conditions


def _from_row(row: RowMapping) -> AuditEntry:
    return AuditEntry(**{name: row[name] for name in COLUMNS})
