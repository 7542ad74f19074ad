"""Console sessions: the token is new at each sign-in, and only its hash is stored, so that a leaked table is useless."""

from __future__ import annotations

import secrets
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, RowMapping, Select, delete, func, insert, select, update

from appliance.base.clock import Clock
from appliance.base.db import Database
from appliance.base.errors import InvalidCredentials, InvalidValue, NotFound
from appliance.base.ids import new_id
from appliance.base.tables import members, sessions
from appliance.tenancy import audit
from appliance.tenancy.members import Member, Proof, check_email, member_from_row
from appliance.tenancy.pages import PAGE_ROWS_DEFAULT, Page, read_page
from appliance.tenancy.secrets import plain_digest

IDLE_S = 8 * 3600
ABSOLUTE_S = 7 * 24 * 3600
TOUCH_INTERVAL = timedelta(minutes=1)  # minimum interval between updates of `last_seen_at`
TOKEN_BYTES = 32
_TOKEN_CHARS_MAX = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A signed-in browser. `expires_at` is the absolute limit; an idle one ends earlier. `method`: how the member signed in."""

    id: str
    member: Member
    csrf_token: str
    method: str
    user_agent: str
    address: str
    created_at: datetime
    last_seen_at: datetime
    expires_at: datetime

    @property
    def must_change_password(self) -> bool:
        """Return whether the member signed in with a temporary password: such a session may only change the password."""
        return self.member.password_temporary and self.method.startswith("password")


class Sessions:
    """The store of sessions. A token is stored as its SHA-256; only the browser that signed in gets it."""

    def __init__(self, db: Database, clock: Clock, *, idle_s: float = IDLE_S, absolute_s: float = ABSOLUTE_S) -> None:
        self._db = db
        self._clock = clock
        self._idle = timedelta(seconds=idle_s)
        self._absolute = timedelta(seconds=absolute_s)

    async def open(
        self, member_id: str, user_agent: str, address: str, *, method: str = "password", proof: Proof | None = None
    ) -> tuple[str, Session]:
        """Open a session for an authenticated member; return (token, session). Removes the member's ended sessions.

        Raises InvalidCredentials if `proof` no longer holds, because the password was changed during the sign-in.
        """
        token = secrets.token_urlsafe(TOKEN_BYTES)
        now = self._clock.now()
        columns: dict[str, Any] = {
            "id": new_id("ses"),
            "csrf_token": secrets.token_urlsafe(TOKEN_BYTES),
            "method": method,
            "user_agent": audit.one_line(user_agent, 400),
            "address": audit.one_line(address, 64),
            "created_at": now,
            "last_seen_at": now,
            "expires_at": now + self._absolute,
        }
        # Lock order as in a change of password: first the member's row, then the sessions.
        query = select(members).where(members.c.id == member_id).with_for_update(key_share=True)
        async with self._db.writing() as connection:
            row = (await connection.execute(query)).mappings().one()
            if proof is not None and not proof(row):
                raise InvalidCredentials("the password was changed in the meantime")
            await connection.execute(delete(sessions).where(sessions.c.member_id == member_id, ~self._is_live(now)))
            await connection.execute(insert(sessions).values(token_hash=plain_digest(token), member_id=member_id, **columns))
            facts = {"member_id": member_id, "email": row["email"], "method": method, "user_agent": columns["user_agent"]}
            await audit.record(connection, self._clock, "session.open", "session", columns["id"], after=facts)
        return token, Session(member=member_from_row(row), **columns)

    async def resolve(self, token: str) -> Session | None:
        """Return the live session of `token`, or None if it has ended or its member is disabled."""
        if not 0 < len(token) <= _TOKEN_CHARS_MAX:
            return None
        token_hash = plain_digest(token)
        async with self._db.reading() as connection:
            row = (await connection.execute(_joined().where(sessions.c.token_hash == token_hash))).mappings().first()
        now = self._clock.now()
        if row is None or row["owner_disabled_at"] is not None:
            return None
        if row["expires_at"] <= now or row["last_seen_at"] <= now - self._idle:
            return None
        if row["last_seen_at"] <= now - TOUCH_INTERVAL:
            await self._touch(token_hash, now)
        return _from_row(row)

    async def list(
        self, member_id: str | None = None, limit: int = PAGE_ROWS_DEFAULT, cursor: str | None = None
    ) -> Page[Session]:
        """Return the live sessions of one member, or of all, newest first."""
        query = _joined().where(self._is_live(self._clock.now()), members.c.disabled_at.is_(None))
        if member_id is not None:
            query = query.where(sessions.c.member_id == member_id)
        return await read_page(self._db, "sessions", query, sessions.c.id, limit, cursor, _from_row, newest_first=True)

    async def last_seen_of(self, member_ids: Collection[str]) -> dict[str, datetime]:
        """Return the time of last activity by member, from the sessions that still exist, in one query."""
        query = select(sessions.c.member_id, func.max(sessions.c.last_seen_at).label("last_seen_at"))
        query = query.where(sessions.c.member_id.in_(member_ids)).group_by(sessions.c.member_id)
        async with self._db.reading() as connection:
            return {row.member_id: row.last_seen_at for row in await connection.execute(query)}

    async def close(self, token: str) -> None:
        """End the session of `token`, if there is one."""
        await self._end(sessions.c.token_hash == plain_digest(token))

    async def end(self, session_id: str, *, member_id: str | None = None) -> None:
        """End a session; if `member_id` is given, only one of that member. Raises NotFound."""
        condition = sessions.c.id == session_id
        if member_id is not None:
            condition &= sessions.c.member_id == member_id
        if not await self._end(condition):
            raise NotFound("no such session", param="session_id")

    async def close_all(self, member_id: str, *, keep: str | None = None) -> int:
        """End every session of the member except `keep` (a session id); return how many ended."""
        condition = sessions.c.member_id == member_id
        return await self._end(condition if keep is None else condition & (sessions.c.id != keep))

    async def record_refusal(self, email: str, reason: str) -> None:
        """Record a failed sign-in with this address in the audit log.

        Text that is not an e-mail address is not recorded: it may be a password typed into the wrong field.
        """
        try:
            target = check_email(email)
        except InvalidValue:
            target = "(no e-mail address)"
        async with self._db.writing() as connection:
            await audit.record(connection, self._clock, "session.refuse", "member", target, after={"reason": reason})

    async def _end(self, condition: ColumnElement[bool]) -> int:
        async with self._db.writing() as connection:
            ended = (
                await connection.execute(delete(sessions).where(condition).returning(sessions.c.id, sessions.c.member_id))
            ).all()
            owners = select(members.c.id, members.c.email).where(members.c.id.in_({row.member_id for row in ended}))
            emails = {row.id: row.email for row in await connection.execute(owners)} if ended else {}
            for row in ended:
                facts = {"member_id": row.member_id, "email": emails[row.member_id]}
                await audit.record(connection, self._clock, "session.close", "session", row.id, before=facts)
        return len(ended)

    def _is_live(self, now: datetime) -> ColumnElement[bool]:
        return (sessions.c.expires_at > now) & (sessions.c.last_seen_at > now - self._idle)

    async def _touch(self, token_hash: str, now: datetime) -> None:
        statement = update(sessions).where(sessions.c.token_hash == token_hash, sessions.c.last_seen_at < now)
        async with self._db.writing() as connection:
            await connection.execute(statement.values(last_seen_at=now))


def _joined() -> Select[Any]:
    owner = (column.label(f"owner_{column.name}") for column in members.columns)
    return select(sessions, *owner).join_from(sessions, members, members.c.id == sessions.c.member_id)


def _from_row(row: RowMapping) -> Session:
    prefix = "owner_"
    owner: Any = {name.removeprefix(prefix): value for name, value in row.items() if name.startswith(prefix)}
    return Session(
        id=row["id"],
        member=member_from_row(owner),
        csrf_token=row["csrf_token"],
        method=row["method"],
        user_agent=row["user_agent"],
        address=row["address"],
        created_at=row["created_at"],
        last_seen_at=row["last_seen_at"],
        expires_at=row["expires_at"],
    )
