"""Administrator tokens: random bearer secrets for `/admin/v1`, shown once and stored as a digest."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import RowMapping, insert, select, update
from sqlalchemy.exc import IntegrityError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from appliance.base.clock import Clock
from appliance.base.db import Database
from appliance.base.errors import InvalidApiKey, NotFound
from appliance.base.ids import new_id
from appliance.base.tables import admin_tokens
from appliance.tenancy.audit import record, recorded_fields
from appliance.tenancy.fields import check_name
from appliance.tenancy.pages import PAGE_ROWS_DEFAULT, Page, read_page
from appliance.tenancy.roles import Role, check_token_role
from appliance.tenancy.secrets import new_admin_secret, plain_digest
from appliance.tenancy.token_attempts import TokenAttempts

_SECRET_CHARS_MAX = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminToken:
    """An administrator token without its secret, which is not stored."""

    id: str
    name: str
    role: Role
    revoked_at: datetime | None
    created_at: datetime


class AdminTokens:
    """The store of administrator tokens. Each use reads the database, so a revocation takes effect at once."""

    def __init__(self, db: Database, clock: Clock) -> None:
        self._db = db
        self._clock = clock
        self._attempts = TokenAttempts(clock)

    async def create(self, name: str, role: str) -> tuple[AdminToken, str]:
        """Return (token, secret); the secret cannot be read again. Raises InvalidValue."""
        secret = new_admin_secret()
        return await self._insert(secret, name, role), secret

    async def ensure(self, secret: str, name: str, role: str) -> AdminToken:
        """Return the token with this secret, chosen by the operator; create it if missing. A revoked token stays revoked."""
        known = await self._find(secret)
        if known is not None:
            return known
        try:
            return await self._insert(secret, name, role)
        except IntegrityError:
            known = await self._find(secret)
            assert known is not None, "the token that caused the conflict has disappeared"
            return known

    async def authenticate(self, secret: str, address: str = "") -> AdminToken:
        """Return the token of `secret`, sent from `address`. Raises InvalidApiKey, and RateLimitExceeded after too many wrong
        tokens from that address."""
        async with self._attempts.attempt(address, secret):
            try:
                token = await self._find(secret) if 0 < len(secret) <= _SECRET_CHARS_MAX else None
            except SQLAlchemyError:
                self._attempts.refund(address, secret)
                raise
            if token is None or token.revoked_at is not None:
                self._attempts.record_failure(secret)
                raise InvalidApiKey("the administrator token is unknown or was revoked")
            self._attempts.record_success(address, secret)
            return token

    async def revoke(self, token_id: str) -> AdminToken:
        """Revoke the token and return it. Raises NotFound; idempotent."""
        now = self._clock.now()
        async with self._db.writing() as connection:
            revoked = await connection.execute(
                update(admin_tokens)
                .where(admin_tokens.c.id == token_id, admin_tokens.c.revoked_at.is_(None))
                .values(revoked_at=now)
            )
            if revoked.rowcount:
                was, is_now = {"revoked_at": None}, {"revoked_at": now}
                await record(connection, self._clock, "token.revoke", "token", token_id, before=was, after=is_now)
            return await _get(connection, token_id)

    async def get(self, token_id: str) -> AdminToken:
        """Return the token, revoked or not. Raises NotFound."""
        async with self._db.reading() as connection:
            return await _get(connection, token_id)

    async def list(
        self,
        limit: int = PAGE_ROWS_DEFAULT,
        cursor: str | None = None,
        *,
        include_revoked: bool = True,
        newest_first: bool = False,
    ) -> Page[AdminToken]:
        """Return the tokens in order of creation, or the reverse."""
        query = select(admin_tokens)
        if not include_revoked:
            query = query.where(admin_tokens.c.revoked_at.is_(None))
        key = admin_tokens.c.id
        return await read_page(self._db, "admin_tokens", query, key, limit, cursor, _from_row, newest_first=newest_first)

    async def _find(self, secret: str) -> AdminToken | None:
        # The timing of the index look-up reveals nothing: it is by the digest of a secret that cannot be guessed.
        query = select(admin_tokens).where(admin_tokens.c.digest == plain_digest(secret))
        async with self._db.reading() as connection:
            row = (await connection.execute(query)).mappings().first()
        return None if row is None else _from_row(row)

    async def _insert(self, secret: str, name: str, role: str) -> AdminToken:
        token = AdminToken(
            id=new_id("adm"), name=check_name(name), role=check_token_role(role), revoked_at=None, created_at=self._clock.now()
        )
        row = {"id": token.id, "name": token.name, "role": token.role.value, "created_at": token.created_at}
        async with self._db.writing() as connection:
            await connection.execute(insert(admin_tokens).values(digest=plain_digest(secret), **row))
            await record(connection, self._clock, "token.create", "token", token.id, after=recorded_fields(token))
        return token


async def _get(connection: AsyncConnection, token_id: str) -> AdminToken:
    row = (await connection.execute(select(admin_tokens).where(admin_tokens.c.id == token_id))).mappings().first()
    if row is None:
        raise NotFound("no such administrator token", param="token_id")
    return _from_row(row)


def _from_row(row: RowMapping) -> AdminToken:
    return AdminToken(
        id=row["id"],
        name=row["name"],
        role=Role(row["role"]),
        revoked_at=row["revoked_at"],
        created_at=row["created_at"],
    )
