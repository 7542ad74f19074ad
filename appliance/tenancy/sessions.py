"""Sessions of the console: our own table, because a session id must be new at login and worthless when the table leaks."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import delete, insert, select, update

from appliance.base.clock import Clock
from appliance.base.db import Database
from appliance.base.ids import new_id
from appliance.base.tables import members, sessions
from appliance.tenancy.members import Member, member_from_row
from appliance.tenancy.roles import Role
from appliance.tenancy.secrets import plain_digest

IDLE_S = 8 * 3600
ABSOLUTE_S = 7 * 24 * 3600
SEEN_EVERY = timedelta(minutes=1)
TOKEN_BYTES = 32
_TOKEN_CHARS_MAX = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A signed-in browser. `expires_at` is the absolute limit; an idle session ends earlier."""

    member: Member
    csrf_token: str
    user_agent: str
    address: str
    created_at: datetime
    last_seen_at: datetime
    expires_at: datetime


class Sessions:
    """All sessions. A token is stored as its SHA-256 and shown once, to the browser that signed in."""

    def __init__(self, db: Database, clock: Clock, *, idle_s: float = IDLE_S, absolute_s: float = ABSOLUTE_S) -> None:
        self._db = db
        self._clock = clock
        self._idle = timedelta(seconds=idle_s)
        self._absolute = timedelta(seconds=absolute_s)

    async def open(self, member_id: str, user_agent: str, address: str) -> tuple[str, Session]:
        """Return (token, session) for a member who has just proved a password, and remove the member's ended sessions."""
        token = secrets.token_urlsafe(TOKEN_BYTES)
        now = self._clock.now()
        session_id = new_id("ses")
        columns = {
            "csrf_token": secrets.token_urlsafe(TOKEN_BYTES),
            "user_agent": _header(user_agent, 400),
            "address": _header(address, 64),
            "created_at": now,
            "last_seen_at": now,
            "expires_at": now + self._absolute,
        }
        ended = (sessions.c.expires_at <= now) | (sessions.c.last_seen_at <= now - self._idle)
        async with self._db.writing() as connection:
            await connection.execute(delete(sessions).where(sessions.c.member_id == member_id, ended))
            await connection.execute(
                insert(sessions).values(token_hash=plain_digest(token), id=session_id, member_id=member_id, **columns)
            )
            row = (await connection.execute(select(members).where(members.c.id == member_id))).mappings().one()
        return token, Session(member=member_from_row(row), **columns)  # type: ignore[arg-type]

    async def resolve(self, token: str) -> Session | None:
        """Return the session of `token`, or None when it has ended, or its member may no longer sign in."""
        if not 0 < len(token) <= _TOKEN_CHARS_MAX:
            return None
        token_hash = plain_digest(token)
        query = (
            select(sessions, *(column.label(f"owner_{column.name}") for column in members.columns))
            .join_from(sessions, members, members.c.id == sessions.c.member_id)
            .where(sessions.c.token_hash == token_hash)
        )
        async with self._db.reading() as connection:
            row = (await connection.execute(query)).mappings().first()
        now = self._clock.now()
        if row is None or row["owner_disabled_at"] is not None:
            return None
        if row["expires_at"] <= now or row["last_seen_at"] <= now - self._idle:
            return None
        if row["last_seen_at"] <= now - SEEN_EVERY:
            await self._see(token_hash, now)
        return Session(
            member=Member(
                id=row["owner_id"],
                email=row["owner_email"],
                role=Role(row["owner_role"]),
                disabled=False,
                created_at=row["owner_created_at"],
            ),
            csrf_token=row["csrf_token"],
            user_agent=row["user_agent"],
            address=row["address"],
            created_at=row["created_at"],
            last_seen_at=row["last_seen_at"],
            expires_at=row["expires_at"],
        )

    async def close(self, token: str) -> None:
        """End the session of `token`, if there is one."""
        async with self._db.writing() as connection:
            await connection.execute(delete(sessions).where(sessions.c.token_hash == plain_digest(token)))

    async def close_all(self, member_id: str) -> None:
        """End every session of the member."""
        async with self._db.writing() as connection:
            await connection.execute(delete(sessions).where(sessions.c.member_id == member_id))

    async def _see(self, token_hash: str, now: datetime) -> None:
        statement = update(sessions).where(sessions.c.token_hash == token_hash, sessions.c.last_seen_at < now)
        async with self._db.writing() as connection:
            await connection.execute(statement.values(last_seen_at=now))


def _header(value: str, chars_max: int) -> str:
    """Return a header's value as it is shown later: printable and not longer than its column."""
    return "".join(character for character in value if character.isprintable())[:chars_max]
