"""People who sign in to the console. Passwords are stored as Argon2 hashes, computed in threads, a few at a time."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError
from sqlalchemy import RowMapping, delete, insert, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from appliance.base.clock import Clock
from appliance.base.db import Database
from appliance.base.errors import InvalidCredentials, InvalidValue, LastOwner, NameTaken, NotFound, RateLimitExceeded
from appliance.base.ids import new_id
from appliance.base.tables import members, sessions
from appliance.tenancy import audit
from appliance.tenancy.fields import check_flag, is_email
from appliance.tenancy.mailboxes import disable_alerts
from appliance.tenancy.pages import PAGE_ROWS_DEFAULT, Page, read_page
from appliance.tenancy.roles import Role, check_role

EMAIL_CHARS_MAX = 320
PASSWORD_CHARS_MIN = 8
PASSWORD_CHARS_MAX = 1024
HASH_LANES = 1  # argon2 uses a thread for each; the memory and the passes, and so the work of guessing, are the same
HASHES_PARALLEL_MAX = 2  # each takes 64 MiB and a core
PASSWORD_CHECKS_MAX = 64  # running and waiting, of all addresses together; the last one waits for some three seconds
PASSWORD_CHECKS_RETRY_S = 5.0
WRONG_CREDENTIALS = "e-mail address or password is wrong"

Proof = Callable[[RowMapping], bool]
"""Checks whether an earlier proof of a password or code still holds, given the current row of `members`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A person who can sign in unless `disabled`. `password_temporary`: the password was created by somebody else."""

    id: str
    email: str
    role: Role
    disabled: bool
    created_at: datetime
    password_temporary: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Proven:
    """The result of a successful password check."""

    member: Member
    password_hash: str = field(repr=False)

    def still_valid(self, row: RowMapping) -> bool:
        """A `Proof`: return whether the member in `row` may still sign in with this password."""
        return row["password_hash"] == self.password_hash and row["disabled_at"] is None


class Members:
    """The store of members. E-mail addresses are compared in lower case."""

    def __init__(self, db: Database, clock: Clock, *, hasher: PasswordHasher | None = None) -> None:
        self._db = db
        self._clock = clock
        self._hasher = hasher or PasswordHasher(parallelism=HASH_LANES)
        self._hashing = asyncio.Semaphore(HASHES_PARALLEL_MAX)
        self._decoy_hash: str | None = None
        self._num_checks = 0

    async def create(
        self,
        email: str,
        password: str,
        role: str = Role.VIEWER,
        *,
        temporary: bool = False,
        in_transaction: Callable[[AsyncConnection, Member], Awaitable[None]] | None = None,
    ) -> Member:
        """Create a member; `in_transaction` runs in the same transaction, before the audit entry, whose lock comes last. Raises
        NameTaken and InvalidValue.

        A `temporary` password is known to somebody else, so the member must change it at the first sign-in.
        """
        member = Member(
            id=new_id("mb"),
            email=check_email(email),
            role=check_role(role),
            disabled=False,
            created_at=self._clock.now(),
            password_temporary=temporary,
        )
        password_hash = await self._hash(check_password(password))
        row = {"id": member.id, "email": member.email, "role": member.role.value, "created_at": member.created_at}
        try:
            async with self._db.writing() as connection:
                secrets = {"password_hash": password_hash, "password_temporary": temporary}
                await connection.execute(insert(members).values(**secrets, **row))
                if in_transaction is not None:
                    await in_transaction(connection, member)
                facts = audit.recorded_fields(member, "id", "created_at")
                await audit.record(connection, self._clock, "member.create", "member", member.id, after=facts)
        except IntegrityError as error:
            raise NameTaken(f"there is a member {member.email} already", param="email") from error
        return member

    async def get(self, member_id: str) -> Member:
        """Return the member. Raises NotFound."""
        async with self._db.reading() as connection:
            return await _get(connection, member_id)

    async def get_by_email(self, email: str) -> Member:
        """Return the member. Raises NotFound."""
        row = await self._row(email)
        if row is None:
            raise NotFound("no such member", param="email")
        return member_from_row(row)

    async def prove_password(self, email: str, password: str) -> Proven:
        """Check address and password; `still_valid` of the result repeats the check in a later transaction.

        Raises InvalidCredentials, and RateLimitExceeded if PASSWORD_CHECKS_MAX are running or waiting. Takes the same time for
        a known and an unknown address. A hash with other parameters than those of new hashes is replaced.
        """
        if self._num_checks >= PASSWORD_CHECKS_MAX:
            message = "Too many people are signing in."
            raise RateLimitExceeded(message, limit_type="requests", retry_after_s=PASSWORD_CHECKS_RETRY_S)
        self._num_checks += 1
        try:
            return await self._proven(email, password)
        finally:
            self._num_checks -= 1

    async def _proven(self, email: str, password: str) -> Proven:
        row = await self._row(email)
        expected = row["password_hash"] if row is not None else await self._decoy()
        matches = await self._matches(expected, password)
        if row is None or not matches or row["disabled_at"] is not None:
            raise InvalidCredentials(WRONG_CREDENTIALS)
        if self._hasher.check_needs_rehash(expected):
            expected = await self._renew_hash(row["id"], expected, password)
        return Proven(member=member_from_row(row), password_hash=expected)

    async def reset_password(self, email: str, password: str, *, temporary: bool = False) -> Member:
        """Replace the password and end every session of the member. Raises NotFound and InvalidValue."""
        password_hash = await self._hash(check_password(password))
        member = await self.get_by_email(email)
        async with self._db.writing() as connection:
            await _replace_password(connection, member.id, password_hash, temporary=temporary)
            facts = {"email": member.email, "password_temporary": temporary}
            await audit.record(connection, self._clock, "member.reset_password", "member", member.id, after=facts)
        return dataclasses.replace(member, password_temporary=temporary)

    async def change_password(self, member: Member, current: str, password: str) -> Proven:
        """Check the current password, replace it, and end every session of the member.

        Raises InvalidValue for an unusable new password. Raises InvalidCredentials for a wrong current one, also if it is
        replaced concurrently, so that whoever knows the old password cannot undo a reset.
        """
        check_password(password)
        proven = await self.prove_password(member.email, current)
        if password == current:
            raise InvalidValue("password must differ from the current one", param="password")
        password_hash = await self._hash(password)
        async with self._db.writing() as connection:
            await _replace_password(connection, member.id, password_hash, temporary=False, former=proven.password_hash)
            facts = {"email": member.email}
            await audit.record(connection, self._clock, "member.change_password", "member", member.id, after=facts)
        return Proven(member=member, password_hash=password_hash)

    async def change(self, member_id: str, *, role: str | None = None, disabled: bool | None = None) -> Member:
        """Change role or state, if given, and return the member. The new role applies from the next request on.

        A disabled member is signed out everywhere, cannot sign in, and gets no more alerts. Raises NotFound, InvalidValue, and
        LastOwner if no owner would be left who can sign in.
        """
        granted = None if role is None else check_role(role)
        async with self._db.writing() as connection:
            owners = await _lock_owners(connection)
            before = await _get(connection, member_id)
            after = dataclasses.replace(
                before,
                role=before.role if granted is None else granted,
                disabled=before.disabled if disabled is None else check_flag(disabled, "disabled"),
            )
            if owners == {member_id} and (after.disabled or after.role is not Role.OWNER):
                raise LastOwner("this is the last owner: make another member an owner first", param="member_id")
            values: dict[str, Any] = {"role": after.role.value}
            if after.disabled != before.disabled:
                values["disabled_at"] = self._clock.now() if after.disabled else None
            await connection.execute(update(members).where(members.c.id == member_id).values(**values))
            if after.disabled:
                await connection.execute(delete(sessions).where(sessions.c.member_id == member_id))
            if after.disabled and not before.disabled:
                await disable_alerts(connection, self._clock, after.email)
            was, now = (audit.recorded_fields(state, "id", "created_at") for state in (before, after))
            await audit.record(connection, self._clock, "member.change", "member", member_id, before=was, after=now)
        return after

    async def list(self, limit: int = PAGE_ROWS_DEFAULT, cursor: str | None = None) -> Page[Member]:
        """Return members in order of creation."""
        return await read_page(self._db, "members", select(members), members.c.id, limit, cursor, member_from_row)

    async def any_exist(self) -> bool:
        """Return whether there is any member."""
        async with self._db.reading() as connection:
            return (await connection.execute(select(members.c.id).limit(1))).first() is not None

    async def _row(self, email: str) -> RowMapping | None:
        query = select(members).where(members.c.email == email.strip().lower().replace("\x00", ""))
        async with self._db.reading() as connection:
            return (await connection.execute(query)).mappings().first()

    async def _hash(self, password: str) -> str:
        async with self._hashing:
            return await asyncio.to_thread(self._hasher.hash, password)

    async def _matches(self, password_hash: str, password: str) -> bool:
        if len(password) > PASSWORD_CHARS_MAX:
            return False
        async with self._hashing:
            try:
                return await asyncio.to_thread(self._hasher.verify, password_hash, password)
            except (VerificationError, InvalidHashError, UnicodeEncodeError):
                return False

    async def _renew_hash(self, member_id: str, former: str, password: str) -> str:
        """Return a new hash of `password`, and store it if `former` is still stored."""
        renewed = await self._hash(password)
        statement = update(members).where(members.c.id == member_id, members.c.password_hash == former)
        async with self._db.writing() as connection:
            await connection.execute(statement.values(password_hash=renewed))
        return renewed

    async def _decoy(self) -> str:
        """Return the hash of a random password, computed once, to compare with when the address is unknown."""
        if self._decoy_hash is None:
            self._decoy_hash = await self._hash(new_id("decoy"))
        return self._decoy_hash


async def _get(connection: AsyncConnection, member_id: str) -> Member:
    row = (await connection.execute(select(members).where(members.c.id == member_id))).mappings().first()
    if row is None:
        raise NotFound("no such member", param="member_id")
    return member_from_row(row)


async def _replace_password(
    connection: AsyncConnection, member_id: str, password_hash: str, *, temporary: bool, former: str | None = None
) -> None:
    """Store the new password hash and end every session of the member. With `former`, raise InvalidCredentials unless that
    hash is still stored."""
    values = {"password_hash": password_hash, "password_temporary": temporary}
    statement = update(members).where(members.c.id == member_id).values(**values)
    if former is not None:
        statement = statement.where(members.c.password_hash == former)
    if (await connection.execute(statement)).rowcount != 1 and former is not None:
        raise InvalidCredentials(WRONG_CREDENTIALS)
    await connection.execute(delete(sessions).where(sessions.c.member_id == member_id))


async def _lock_owners(connection: AsyncConnection) -> set[str]:
    """Return and lock the owners who can sign in, so that two owners cannot demote each other concurrently."""
    can_sign_in = (members.c.role == Role.OWNER.value) & members.c.disabled_at.is_(None)
    owners = await connection.execute(select(members.c.id).where(can_sign_in).order_by(members.c.id).with_for_update())
    return set(owners.scalars())


def member_from_row(row: RowMapping) -> Member:
    """Convert a row with the columns of `members`."""
    return Member(
        id=row["id"],
        email=row["email"],
        role=Role(row["role"]),
        disabled=row["disabled_at"] is not None,
        created_at=row["created_at"],
        password_temporary=row["password_temporary"],
    )


def check_email(value: object) -> str:
    """Return `value`, an e-mail address, stripped and in lower case. Raises InvalidValue."""
    if isinstance(value, str) and len(value) <= EMAIL_CHARS_MAX:
        email = value.strip().lower()
        if is_email(email):
            return email
    raise InvalidValue(f"email must be an e-mail address of at most {EMAIL_CHARS_MAX} characters", param="email")


def check_password(value: object) -> str:
    """Return `value` if its length is allowed; very long passwords would make hashing a DoS vector. Raises InvalidValue."""
    if not isinstance(value, str) or not PASSWORD_CHARS_MIN <= len(value) <= PASSWORD_CHARS_MAX:
        raise InvalidValue(f"password must have {PASSWORD_CHARS_MIN} to {PASSWORD_CHARS_MAX} characters", param="password")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidValue("password must be a string", param="password") from None
    return value
