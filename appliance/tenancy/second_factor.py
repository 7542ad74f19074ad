"""The second factor of members: codes of an authenticator app (TOTP, RFC 6238), and recovery codes in case it is lost.

    none ── a code that confirms the new secret ──► enabled ── a code, or the password ──► none
                                                       └─────── an owner resets it ──────► none

Checks codes only; callers check the password. Every change ends all sessions of the member in the same transaction; the caller
may open a new one for the member who made the change.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal
from urllib.parse import urlsplit

import pyotp
from sqlalchemy import ColumnElement, RowMapping, Update, delete, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from appliance.base.clock import Clock
from appliance.base.db import Database
from appliance.base.errors import Conflict, InvalidCredentials, NotFound, SecretUnreadable
from appliance.base.sealing import Sealer, Unsealable
from appliance.base.tables import members, sessions
from appliance.tenancy import audit, recovery_codes
from appliance.tenancy.members import Member, Proof, member_from_row
from appliance.tenancy.secrets import keyed_digest
from appliance.tenancy.tickets import Tickets

STEP_S = 30
WINDOW_STEPS = 1  # also accept the codes of the steps before and after: clocks differ, and people type slowly
ENROLMENT_LIFE_S = 15 * 60
CODE_CHARS_MAX = 64
WRONG_CODE = "the code is wrong, or was used already"
SEALING_PURPOSE = "second factor"
UNREADABLE = (
    "the code cannot be checked: this second factor was sealed with another secret.key than the one in the data folder; "
    "the operator can restore that file from a backup, or run `gatehouse admin reset-second-factor`"
)
_CODE = re.compile(r"\d{6}", re.ASCII)

Kind = Literal["totp", "recovery"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FactorState:
    """The state of a member's second factor; `enabled_at` None means that there is none."""

    enabled_at: datetime | None
    recovery_codes_left: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Enrolment:
    """A new secret, which becomes active when a code and `ticket` are sent back. `uri` is the content of the QR code."""

    secret: str = field(repr=False)
    uri: str = field(repr=False)
    ticket: str = field(repr=False)


class SecondFactors:
    """The store of second factors. `label` is the name of this appliance in an authenticator app."""

    def __init__(self, db: Database, clock: Clock, pepper: bytes, *, label: str = "Gatehouse") -> None:
        self._db = db
        self._clock = clock
        self._pepper = pepper
        self._label = label
        self._sealer = Sealer(pepper, SEALING_PURPOSE)
        self._enrolments = Tickets(pepper, "second factor enrolment", clock, life_s=ENROLMENT_LIFE_S)

    async def state(self, member_id: str) -> FactorState:
        """Return the state of the member's second factor."""
        async with self._db.reading() as connection:
            row = await _row(connection, member_id)
            left = await recovery_codes.count_left(connection, member_id)
        return FactorState(enabled_at=row["totp_confirmed_at"], recovery_codes_left=left)

    async def challenge(self, member_id: str, *, proof: Proof | None = None) -> str | None:
        """Return None if the first factor suffices, else a stamp for `check`, valid until the password or the secret changes.

        Raises InvalidCredentials if `proof` of the first factor no longer holds.
        """
        async with self._db.reading() as connection:
            row = _check(await _row(connection, member_id), proof)
        return None if row["totp_confirmed_at"] is None else self._stamp(row)

    def proof_of(self, stamp: str) -> Proof:
        """Return a proof that holds while `stamp` is valid and the member may sign in."""
        return lambda row: hmac.compare_digest(stamp, self._stamp(row)) and row["disabled_at"] is None

    async def enabled_of(self, member_ids: Collection[str]) -> frozenset[str]:
        """Return which of these members have a second factor, in one query."""
        query = select(members.c.id).where(members.c.id.in_(member_ids), members.c.totp_confirmed_at.is_not(None))
        async with self._db.reading() as connection:
            return frozenset((await connection.execute(query)).scalars())

    def begin(self, member: Member) -> Enrolment:
        """Return a new secret for `member`. Nothing is stored: the ticket contains the secret, encrypted."""
        secret = pyotp.random_base32()
        return self._build_enrolment(member, secret, self._enrolments.issue({"member_id": member.id, "secret": secret}))

    def resume(self, member: Member, ticket: str) -> Enrolment | None:
        """Return the enrolment in `ticket`; None if it has expired or belongs to another member."""
        payload = self._enrolments.read(ticket)
        if payload is None or payload["member_id"] != member.id:
            return None
        return self._build_enrolment(member, payload["secret"], ticket)

    async def enable(self, member: Member, enrolment: Enrolment, code: str, *, proof: Proof | None = None) -> list[str]:
        """Enable the second factor and return the recovery codes, which cannot be read again. `proof` is that of the password.

        Raises InvalidCredentials if the code is wrong or `proof` no longer holds, and Conflict if one is already enabled.
        """
        now = self._clock.now()
        step = next((step for step in _steps(now) if _is_code_of(enrolment.secret, step, code)), None)
        if step is None:
            raise InvalidCredentials("the code is wrong: check the clock of your device", param="code")
        codes = recovery_codes.new_codes()
        async with self._db.writing() as connection:
            _check(await _row(connection, member.id, lock=True), proof)
            changed = await connection.execute(
                update(members)
                .where(members.c.id == member.id, members.c.totp_confirmed_at.is_(None))
                .values(totp_secret=self._sealer.seal(enrolment.secret), totp_confirmed_at=now, totp_last_step=step)
            )
            if changed.rowcount != 1:
                raise Conflict("a second factor is already set up; disable it first")
            await recovery_codes.replace(connection, self._pepper, member.id, codes)
            await connection.execute(delete(sessions).where(sessions.c.member_id == member.id))
            await self._record(connection, "second_factor.enable", member.id)
        return codes

    async def check(self, member_id: str, code: str, *, stamp: str | None = None) -> Kind:
        """Use up a code, which is valid once, and return its kind. Raises InvalidCredentials, always with the same message.

        With `stamp`, the code is also refused if password or second factor have changed since `challenge`. Raises
        SecretUnreadable if `secret.key` was replaced: then not even recovery codes can be checked.
        """
        refusal = InvalidCredentials(WRONG_CODE, param="code")
        if len(code) > CODE_CHARS_MAX:
            raise refusal
        async with self._db.reading() as connection:
            row = await _row(connection, member_id)
        if row["totp_confirmed_at"] is None or row["disabled_at"] is not None:
            raise refusal
        if stamp is not None and not self.proof_of(stamp)(row):
            raise refusal
        secret = self._unseal_secret(row)
        digits = re.sub(r"\s", "", code)
        if _CODE.fullmatch(digits):
            used = await self._use_step(row, secret, digits)
            kind: Kind = "totp"
        else:
            used = await self._use_recovery_code(member_id, code)
            kind = "recovery"
        if not used:
            raise refusal
        return kind

    async def renew_recovery_codes(self, member_id: str, *, proof: Proof | None = None) -> list[str]:
        """Replace the recovery codes by ten new ones and return them.

        Raises Conflict without a second factor, and InvalidCredentials if `proof` of password or code no longer holds.
        """
        codes = recovery_codes.new_codes()
        async with self._db.writing() as connection:
            if _check(await _row(connection, member_id, lock=True), proof)["totp_confirmed_at"] is None:
                raise Conflict("this member has no second factor")
            await recovery_codes.replace(connection, self._pepper, member_id, codes)
            await self._record(connection, "second_factor.renew_codes", member_id)
        return codes

    async def disable(self, member_id: str, *, proof: Proof | None = None) -> Proof:
        """Remove the second factor on behalf of the member, and return the proof for a new session. Idempotent.

        Raises InvalidCredentials if `proof` of password or code no longer holds.
        """
        row = await _remove(self._db, self._clock, members.c.id == member_id, "second_factor.disable", proof)
        return self.proof_of(self._stamp({"password_hash": row["password_hash"], "totp_secret": None}))

    async def reset(self, member_id: str) -> Member:
        """Remove the second factor of a member who lost the device, and end all sessions. Raises NotFound."""
        return member_from_row(await _remove(self._db, self._clock, members.c.id == member_id, "second_factor.reset"))

    def _unseal_secret(self, row: RowMapping) -> str:
        try:
            return self._sealer.open(row["totp_secret"])
        except Unsealable as error:
            raise SecretUnreadable(UNREADABLE) from error

    async def _use_step(self, row: RowMapping, secret: str, code: str) -> bool:
        """Return whether `code` is valid for an unused step. A conditional UPDATE advances the last used step."""
        for step in _steps(self._clock.now()):
            if not _is_code_of(secret, step, code):
                continue
            is_unused = members.c.totp_last_step < step
            statement = _update_of(row["id"]).where(members.c.totp_secret == row["totp_secret"], is_unused)
            async with self._db.writing() as connection:
                if (await connection.execute(statement.values(totp_last_step=step))).rowcount == 1:
                    return True
        return False

    async def _use_recovery_code(self, member_id: str, typed: str) -> bool:
        code = recovery_codes.normalise_code(typed)
        if code is None:
            return False
        async with self._db.writing() as connection:
            used = await recovery_codes.use(connection, self._pepper, member_id, code, self._clock.now())
            if used:
                await self._record(connection, "second_factor.use_recovery_code", member_id)
        return used

    async def _record(self, connection: AsyncConnection, action: str, member_id: str) -> None:
        await _record(connection, self._clock, action, await _row(connection, member_id))

    def _stamp(self, row: Mapping[str, Any] | RowMapping) -> str:
        return keyed_digest(self._pepper, f"first factor {row['password_hash']} {row['totp_secret']}")

    def _build_enrolment(self, member: Member, secret: str, ticket: str) -> Enrolment:
        uri = pyotp.TOTP(secret, interval=STEP_S).provisioning_uri(name=member.email, issuer_name=self._label)
        return Enrolment(secret=secret, uri=uri, ticket=ticket)


def appliance_label(external_url: str | None) -> str:
    """Return the name of this appliance in an authenticator app."""
    host = urlsplit(external_url).hostname if external_url else None
    return f"Gatehouse {host}" if host else "Gatehouse"


def without_second_factor(proof: Proof | None) -> Proof:
    """Return a proof for a sign-in without a code: `proof` holds, and the member still has no second factor."""
    return lambda row: row["totp_confirmed_at"] is None and row["disabled_at"] is None and (proof is None or proof(row))


def _check(row: RowMapping, proof: Proof | None) -> RowMapping:
    """Return `row` if `proof` holds for it. Raises InvalidCredentials."""
    if proof is not None and not proof(row):
        raise InvalidCredentials("the password or the second factor was changed in the meantime")
    return row


async def reset_by_email(db: Database, clock: Clock, email: str) -> Member:
    """Like `SecondFactors.reset`, by e-mail address; works without `secret.key`."""
    return member_from_row(await _remove(db, clock, members.c.email == email.strip().lower(), "second_factor.reset"))


async def _remove(
    db: Database, clock: Clock, condition: ColumnElement[bool], action: str, proof: Proof | None = None
) -> RowMapping:
    """Remove the second factor and return the member's row from before the change."""
    async with db.writing() as connection:
        row = (await connection.execute(select(members).where(condition).with_for_update(key_share=True))).mappings().first()
        if row is None:
            raise NotFound("no such member", param="member_id")
        _check(row, proof)
        if row["totp_confirmed_at"] is None:
            return row
        await connection.execute(_update_of(row["id"]).values(totp_secret=None, totp_confirmed_at=None, totp_last_step=None))
        await recovery_codes.remove_all(connection, row["id"])
        await connection.execute(delete(sessions).where(sessions.c.member_id == row["id"]))
        await _record(connection, clock, action, row)
    return row


async def _record(connection: AsyncConnection, clock: Clock, action: str, row: RowMapping) -> None:
    await audit.record(connection, clock, action, "member", row["id"], after={"email": row["email"]})


def _update_of(member_id: str) -> Update:
    return update(members).where(members.c.id == member_id)


async def _row(connection: AsyncConnection, member_id: str, *, lock: bool = False) -> RowMapping:
    query = select(members).where(members.c.id == member_id)
    row = (await connection.execute(query.with_for_update(key_share=True) if lock else query)).mappings().first()
    if row is None:
        raise NotFound("no such member", param="member_id")
    return row


def _steps(now: datetime) -> Iterator[int]:
    """Yield the TOTP steps whose codes are valid at `now`, earliest first."""
    current = int(now.timestamp()) // STEP_S
    yield from range(current - WINDOW_STEPS, current + WINDOW_STEPS + 1)


def _is_code_of(secret: str, step: int, code: str) -> bool:
    expected = pyotp.TOTP(secret, interval=STEP_S).generate_otp(step)
    return hmac.compare_digest(expected.encode(), re.sub(r"\s", "", code).encode(errors="replace"))
