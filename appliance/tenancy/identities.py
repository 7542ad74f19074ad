"""Links accounts at a sign-in provider to members: by issuer and subject, at the first sign-in by verified e-mail address.

Signing in creates no member: an owner must have created it before. If the operator changes the provider, the next sign-in
replaces the link. A link is never replaced by another subject of the same issuer: an address that the provider has given to
somebody else grants no access.
"""

from __future__ import annotations

from sqlalchemy import ColumnElement, RowMapping, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from appliance.base.clock import Clock
from appliance.base.db import Database
from appliance.base.errors import InvalidCredentials, NotFound
from appliance.base.tables import members
from appliance.tenancy import audit
from appliance.tenancy.id_tokens import Identity
from appliance.tenancy.members import Member, member_from_row


class Identities:
    """The store of links between members and provider accounts."""

    def __init__(self, db: Database, clock: Clock) -> None:
        self._db = db
        self._clock = clock

    async def member_of(self, identity: Identity) -> Member:
        """Return the member of `identity`, linked at a first sign-in. Raises InvalidCredentials with a message to show."""
        async with self._db.reading() as connection:
            row = await self._find_linked(connection, identity)
        if row is None:
            row = await self._link(identity)
        if row["disabled_at"] is not None:
            raise InvalidCredentials("This member may no longer sign in.")
        return member_from_row(row)

    async def issuer_of(self, member_id: str) -> str | None:
        """Return the issuer that the member is linked to, or None."""
        async with self._db.reading() as connection:
            query = select(members.c.oidc_issuer).where(members.c.id == member_id)
            issuer: str | None = (await connection.execute(query)).scalar_one_or_none()
        return issuer

    async def unlink(self, member_id: str) -> None:
        """Remove the member's link; the next sign-in at the provider links again. Raises NotFound; idempotent."""
        await _unlink(self._db, self._clock, members.c.id == member_id)

    async def _link(self, identity: Identity) -> RowMapping:
        if identity.email is None:
            raise InvalidCredentials("The provider sent no verified e-mail address for you.")
        try:
            async with self._db.writing() as connection:
                return await self._link_by_email(connection, identity, identity.email.strip().lower())
        except IntegrityError:  # a concurrent sign-in of the same person has created the link
            async with self._db.reading() as connection:
                row = await self._find_linked(connection, identity)
            assert row is not None, "the link that caused the conflict has disappeared"
            return row

    async def _link_by_email(self, connection: AsyncConnection, identity: Identity, email: str) -> RowMapping:
        query = select(members).where(members.c.email == email).with_for_update()  # concurrent first sign-ins wait here
        row = (await connection.execute(query)).mappings().first()
        if row is None:
            raise InvalidCredentials(
                "There is no member with your e-mail address: ask an owner of this appliance to invite you."
            )
        link = {"oidc_issuer": identity.issuer, "oidc_subject": identity.subject}
        is_free = members.c.oidc_issuer.is_(None) | (members.c.oidc_issuer != identity.issuer)
        may_link = (members.c.id == row["id"]) & members.c.disabled_at.is_(None) & is_free
        linked = (await connection.execute(update(members).where(may_link).values(**link))).rowcount == 1
        if linked:
            await audit.record(
                connection, self._clock, "member.link_provider", "member", row["id"], after={"email": email, **link}
            )
        elif row["disabled_at"] is None and row["oidc_subject"] != identity.subject:
            raise InvalidCredentials(
                "This member is linked to another account at the provider: ask an owner of this appliance to unlink it."
            )
        return row

    async def _find_linked(self, connection: AsyncConnection, identity: Identity) -> RowMapping | None:
        linked = (members.c.oidc_issuer == identity.issuer) & (members.c.oidc_subject == identity.subject)
        return (await connection.execute(select(members).where(linked))).mappings().first()


async def unlink_by_email(db: Database, clock: Clock, email: str) -> Member:
    """Like `Identities.unlink`, for the member with this e-mail address."""
    return await _unlink(db, clock, members.c.email == email.strip().lower())


async def _unlink(db: Database, clock: Clock, condition: ColumnElement[bool]) -> Member:
    async with db.writing() as connection:
        row = (await connection.execute(select(members).where(condition).with_for_update())).mappings().first()
        if row is None:
            raise NotFound("no such member", param="member_id")
        if row["oidc_issuer"] is not None:
            clear_link = update(members).where(members.c.id == row["id"]).values(oidc_issuer=None, oidc_subject=None)
            await connection.execute(clear_link)
            before = {name: row[name] for name in ("email", "oidc_issuer", "oidc_subject")}
            await audit.record(connection, clock, "member.unlink_provider", "member", row["id"], before=before)
    return member_from_row(row)
