"""The store of API keys, and authentication by their secrets, which are never stored. Knows no HTTP."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from sqlalchemy import BindParameter, ColumnElement, bindparam, func, insert, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from appliance.base.clock import Clock
from appliance.base.db import Database
from appliance.base.errors import Conflict, InvalidValue, NotFound
from appliance.base.ids import new_id
from appliance.base.shared_reads import SharedReads
from appliance.base.tables import api_keys, tenants
from appliance.tenancy.access import Access
from appliance.tenancy.audit import record, recorded_fields
from appliance.tenancy.fields import (
    DEFAULT_SCOPES,
    LIMIT_MODES,
    check_choice,
    check_name,
    check_names,
    check_scopes,
    check_whole,
)
from appliance.tenancy.networks import Network, check_address, check_networks, parse_networks
from appliance.tenancy.pages import PAGE_ROWS_DEFAULT, Page, read_page
from appliance.tenancy.principals import ApiKey, KeyChanges, Principal, unknown_key
from appliance.tenancy.roles import Action
from appliance.tenancy.rows import (
    changed_columns,
    check_model_limits,
    key_from_row,
    model_limits_to_row,
    optional,
    tenant_from_row,
)
from appliance.tenancy.secrets import api_key_prefix, keyed_digest, new_api_key

CACHED_KEYS_MAX = 10_000
GRACE_S_MAX = 90 * 24 * 3600
KEYS_OF_TENANT_MAX = 1000
DEFAULT_TERMS = KeyChanges()
_NOT_INHERITED = ("id", "prefix", "digest", "created_at", "last_used_at", "revoked_at", "replaced_by")
"""Columns that a successor does not inherit."""


@dataclass(frozen=True, slots=True)
class _CachedKey:
    """A verified key, valid until it or its tenant changes."""

    principal: Principal
    networks: tuple[Network, ...] | None


class Keys:
    """The store of keys. Verified keys are cached until this process changes the key or its tenant."""

    def __init__(self, db: Database, clock: Clock, pepper: bytes) -> None:
        self._db = db
        self._clock = clock
        self._pepper = pepper
        self._cache: dict[bytes, _CachedKey] = {}
        self._reads: SharedReads[tuple[bytes, int], _CachedKey] = SharedReads()
        self._cache_secret = os.urandom(32)
        self._last_used: dict[str, datetime] = {}

    async def create(
        self, tenant_id: str, name: str, terms: KeyChanges = DEFAULT_TERMS, *, access: Access
    ) -> tuple[ApiKey, str]:
        """Return (key, secret); the secret cannot be read again. Raises NotFound, RoleNotAllowed, Conflict and InvalidValue."""
        access.require(Action.KEYS, tenant_id)
        columns = _DEFAULT_COLUMNS | self._changed_columns(dataclasses.replace(terms, name=name)) | {"tenant_id": tenant_id}
        key_id = new_id("key")
        async with self._db.changing_principals(key_id) as connection:
            await _check_tenant(connection, tenant_id)
            await _check_key_count(connection, tenant_id, self._clock.now())
            key, secret = await self._insert(connection, key_id, columns, access)
            await self._record(connection, "key.create", None, key)
        return key, secret

    async def get(self, key_id: str, *, access: Access, action: Action = Action.READ) -> ApiKey:
        """Return the key. Raises NotFound, also for a key of an invisible tenant, and RoleNotAllowed."""
        async with self._db.reading() as connection:
            return await _get(connection, key_id, access, action)

    async def named(self, key_ids: Collection[str], *, access: Access) -> Sequence[ApiKey]:
        """Return those of the keys that exist and are visible to `access`, in no order; used to show names for ids."""
        query = access.narrow(select(api_keys), api_keys.c.tenant_id).where(api_keys.c.id.in_(sorted(key_ids)))
        async with self._db.reading() as connection:
            rows = (await connection.execute(query)).mappings().all()
        return [key_from_row(row) for row in rows]

    async def list(
        self,
        tenant_id: str | None = None,
        limit: int = PAGE_ROWS_DEFAULT,
        cursor: str | None = None,
        *,
        include_revoked: bool = True,
        include_ended: bool = True,
        text: str | None = None,
        access: Access,
    ) -> Page[ApiKey]:
        """Return the keys visible to `access` of one tenant, or of all when None, in order of creation.

        A key has ended when it was revoked, when it expired after a rotation, or when its tenant is archived. A key that merely
        expired has not: it can still be extended. `text` is searched in name and prefix, ignoring case; a whole secret finds
        its key.
        """
        query = access.narrow(select(api_keys), api_keys.c.tenant_id)
        if tenant_id is not None:
            query = query.where(api_keys.c.tenant_id == tenant_id)
        if not include_revoked:
            query = query.where(api_keys.c.revoked_at.is_(None))
        if not include_ended:
            query = query.where(*_is_in_use(self._clock.now()))
        if text is not None:
            query = query.where(_matches_text(api_key_prefix(text) or text))
        return await read_page(self._db, "keys", query, api_keys.c.id, limit, cursor, key_from_row)

    async def update(self, key_id: str, changes: KeyChanges, *, access: Access) -> ApiKey:
        """Apply `changes` and return the key.

        Raises NotFound, RoleNotAllowed, InvalidValue, and Conflict for a revoked key or for the expiry of a rotated one.
        """
        columns = self._changed_columns(changes)
        not_replaced = [api_keys.c.replaced_by.is_(None)] if "expires_at" in columns else []
        async with self._db.changing_principals(key_id) as connection:
            before = await _get(connection, key_id, access, Action.KEYS, lock=True)
            if columns:
                await connection.execute(update(api_keys).where(_is_unrevoked(key_id), *not_replaced).values(**columns))
            key = await _get(connection, key_id, access, Action.KEYS)
            await self._record(connection, "key.update", before, key)
        if key.revoked_at is not None:
            raise Conflict("a revoked key cannot be changed", param="id")
        if not_replaced and key.replaced_by is not None:
            raise Conflict("the expiry of a rotated key cannot be changed; revoke the key to end it now", param="expires_at")
        return key

    async def revoke(self, key_id: str, *, access: Access) -> ApiKey:
        """Revoke the key and return it. Raises NotFound and RoleNotAllowed; idempotent."""
        async with self._db.changing_principals(key_id) as connection:
            before = await _get(connection, key_id, access, Action.KEYS, lock=True)
            await _revoke(connection, key_id, self._clock.now())
            key = await _get(connection, key_id, access, Action.KEYS)
            await self._record(connection, "key.revoke", before, key)
        return key

    async def rotate(self, key_id: str, *, grace_s: int = 0, access: Access) -> tuple[ApiKey, str]:
        """Replace the key; return (successor, its secret). The old key works for `grace_s` seconds, but not beyond its expiry.

        Raises NotFound, RoleNotAllowed, InvalidValue, and Conflict if the key is revoked, expired or already rotated, or its
        tenant archived.
        """
        check_whole(grace_s, "grace_s", 0, GRACE_S_MAX)
        successor_id, now = new_id("key"), self._clock.now()
        async with self._db.changing_principals(key_id) as connection:
            current = await _get(connection, key_id, access, Action.KEYS, lock=True)
            inherited = await _inherited(connection, key_id)
            await _check_tenant(connection, current.tenant_id)
            if grace_s:
                await _check_key_count(connection, current.tenant_id, now)
            if not await _retire(connection, current, successor_id, now, now + timedelta(seconds=grace_s)):
                raise Conflict(_rotation_conflict(current, now), param="id")
            retired = await _get(connection, key_id, access, Action.KEYS)
            successor, secret = await self._insert(connection, successor_id, inherited, access)
            await self._record(connection, "key.rotate", current, retired)
            await self._record(connection, "key.create", None, successor)
        return successor, secret

    async def authenticate(self, secret: str, address: str) -> Principal:
        """Return the tenant and key of `secret`, sent from `address`.

        Raises InvalidApiKey, ExpiredApiKey, TenantSuspended or AddressNotAllowed.
        """
        prefix = api_key_prefix(secret)
        if prefix is None:
            raise unknown_key()
        # Not the stored digest: it takes ten times as long and releases the GIL.
        cache_key = hashlib.blake2b(secret.encode(), key=self._cache_secret).digest()
        cached, changes = self._cache.get(cache_key), self._db.principal_changes
        if cached is None or not cached.principal.is_current(changes):
            # Of those that use the key at once, one reads it. The count keeps out reads that were begun before a change.
            cached = await self._reads.get((cache_key, changes.value), partial(self._read, cache_key, prefix, secret))
        now = self._clock.now()
        cached.principal.check_usable(now)
        check_address(address, cached.networks)
        self._last_used[cached.principal.key.id] = now
        return cached.principal

    async def flush_last_used(self) -> None:
        """Store the last-used times collected since the last flush, in one batch. A stored time never moves backwards."""
        used, self._last_used = self._last_used, {}
        if not used:
            return
        moment: BindParameter[datetime] = bindparam("used_at", type_=api_keys.c.last_used_at.type)
        later = or_(api_keys.c.last_used_at.is_(None), api_keys.c.last_used_at < moment)
        statement = update(api_keys).where(api_keys.c.id == bindparam("key_id"), later).values(last_used_at=moment)
        rows = [{"key_id": key_id, "used_at": used[key_id]} for key_id in sorted(used)]
        try:
            async with self._db.writing() as connection:
                await connection.execute(statement, rows)
        except BaseException:
            self._last_used = used | self._last_used
            raise

    async def _read(self, cache_key: bytes, prefix: str, secret: str) -> _CachedKey:
        """Read the key with this prefix and its tenant, and cache them. Raises InvalidApiKey if it is revoked or the secret is
        not its own."""
        change_count, digest = self._db.principal_changes.value, keyed_digest(self._pepper, secret)
        async with self._db.reading() as connection:
            row = (await connection.execute(select(api_keys).where(api_keys.c.prefix == prefix))).mappings().first()
            if row is None or not hmac.compare_digest(row["digest"], digest) or row["revoked_at"] is not None:
                raise unknown_key()
            owner = (await connection.execute(select(tenants).where(tenants.c.id == row["tenant_id"]))).mappings().one()
        key = key_from_row(row)
        principal = Principal(tenant=tenant_from_row(owner), key=key, change_count=change_count)
        read = _CachedKey(principal, parse_networks(key.allowed_networks))
        while len(self._cache) >= CACHED_KEYS_MAX:
            del self._cache[next(iter(self._cache))]
        self._cache[cache_key] = read
        return read

    async def _insert(
        self, connection: AsyncConnection, key_id: str, columns: Mapping[str, Any], access: Access
    ) -> tuple[ApiKey, str]:
        """Insert a key with a new secret and return both."""
        prefix, secret = new_api_key()
        own = {"id": key_id, "prefix": prefix, "digest": keyed_digest(self._pepper, secret), "created_at": self._clock.now()}
        await connection.execute(insert(api_keys).values(**columns, **own))
        return await _get(connection, key_id, access, Action.KEYS), secret

    async def _record(self, connection: AsyncConnection, action: str, before: ApiKey | None, after: ApiKey) -> None:
        was, now = recorded_fields(before, "last_used_at"), recorded_fields(after, "last_used_at")
        await record(connection, self._clock, action, "key", after.id, tenant_id=after.tenant_id, before=was, after=now)

    def _check_expiry(self, expires_at: datetime | None) -> datetime | None:
        if expires_at is None:
            return None
        if expires_at.tzinfo is None:
            raise InvalidValue("expires_at must include a UTC offset, e.g. 2026-01-31T12:00:00Z", param="expires_at")
        if expires_at <= self._clock.now():
            raise InvalidValue("expires_at must be in the future", param="expires_at")
        return expires_at

    def _changed_columns(self, changes: KeyChanges) -> dict[str, Any]:
        return changed_columns(changes, _CHECKS | {"expires_at": self._check_expiry})


_DEFAULT_COLUMNS: dict[str, Any] = {"scopes": [*DEFAULT_SCOPES]}
"""Defaults for a new key; the table defines those of the other columns."""
_CHECKS: dict[str, Callable[[Any], Any]] = {
    "name": check_name,
    "scopes": lambda value: list(check_scopes(value)),
    "model_limits": optional(lambda value: model_limits_to_row(check_model_limits(value))),
    "limit_mode": lambda value: check_choice(value, "limit_mode", LIMIT_MODES),
    "allowed_models": optional(lambda value: list(check_names(value, "allowed_models"))),
    "allowed_networks": optional(lambda value: list(check_networks(value))),
}


def _is_unrevoked(key_id: str) -> ColumnElement[bool]:
    return (api_keys.c.id == key_id) & api_keys.c.revoked_at.is_(None)


def _is_unexpired(now: datetime) -> ColumnElement[bool]:
    return or_(api_keys.c.expires_at.is_(None), api_keys.c.expires_at > now)


async def _get(connection: AsyncConnection, key_id: str, access: Access, action: Action, *, lock: bool = False) -> ApiKey:
    query = select(api_keys).where(api_keys.c.id == key_id)
    row = (await connection.execute(query.with_for_update(key_share=True) if lock else query)).mappings().first()
    return access.row(None if row is None else key_from_row(row), action, what="key", param="key_id")


async def _inherited(connection: AsyncConnection, key_id: str) -> dict[str, Any]:
    """Return the columns that a successor inherits: tenant, name, and all settings."""
    columns = [column for column in api_keys.c if column.name not in _NOT_INHERITED]
    return {**(await connection.execute(select(*columns).where(api_keys.c.id == key_id))).mappings().one()}


async def _revoke(connection: AsyncConnection, key_id: str, now: datetime) -> None:
    """Revoke the key now; a key that is already revoked keeps its time."""
    await connection.execute(update(api_keys).where(_is_unrevoked(key_id)).values(revoked_at=now))


async def _retire(connection: AsyncConnection, key: ApiKey, successor_id: str, now: datetime, last: datetime) -> bool:
    """Set the successor of a key and its end at `last`. Return False if the key may not be rotated (any more)."""
    if last <= now:
        ending: dict[str, Any] = {"revoked_at": now}
    else:
        ending = {"expires_at": last if key.expires_at is None else min(last, key.expires_at)}
    statement = update(api_keys).where(_is_unrevoked(key.id), api_keys.c.replaced_by.is_(None), _is_unexpired(now))
    return (await connection.execute(statement.values(replaced_by=successor_id, **ending))).rowcount == 1


def _is_in_use(now: datetime) -> tuple[ColumnElement[bool], ...]:
    active_tenants = select(tenants.c.id).where(tenants.c.archived_at.is_(None))
    return (
        api_keys.c.revoked_at.is_(None),
        or_(api_keys.c.replaced_by.is_(None), _is_unexpired(now)),
        api_keys.c.tenant_id.in_(active_tenants),
    )


def _matches_text(text: str) -> ColumnElement[bool]:
    return or_(*(column.icontains(text, autoescape=True) for column in (api_keys.c.name, api_keys.c.prefix)))


def _rotation_conflict(key: ApiKey, now: datetime) -> str:
    if key.revoked_at is not None:
        return "a revoked key cannot be rotated"
    if key.replaced_by is not None:
        return f"the key was rotated already; rotate its successor {key.replaced_by}"
    if key.expires_at is not None and key.expires_at <= now:
        return "an expired key cannot be rotated: its successor would be expired too"
    return "the key changed in the meantime; try again"


async def _check_tenant(connection: AsyncConnection, tenant_id: str) -> None:
    row = (await connection.execute(select(tenants.c.archived_at).where(tenants.c.id == tenant_id))).first()
    if row is None:
        raise NotFound("no such tenant", param="tenant_id")
    if row.archived_at is not None:
        raise Conflict("an archived tenant cannot have new keys", param="tenant_id")


async def _check_key_count(connection: AsyncConnection, tenant_id: str, now: datetime) -> None:
    """Raise InvalidValue if the tenant already has the maximum number of active keys."""
    active = select(func.count()).where(api_keys.c.tenant_id == tenant_id, api_keys.c.revoked_at.is_(None), _is_unexpired(now))
    if (await connection.execute(active)).scalar_one() >= KEYS_OF_TENANT_MAX:
        raise InvalidValue(f"a tenant can have at most {KEYS_OF_TENANT_MAX} active keys", param="tenant_id")
