"""Finds stored secrets (second factors, webhooks) that cannot be opened; with another `secret.key` none can. Reads only."""

from __future__ import annotations

from dataclasses import dataclass

import structlog
from sqlalchemy import ColumnElement, select
from sqlalchemy.ext.asyncio import AsyncConnection

from appliance.base.db import Database
from appliance.base.sealing import Sealer, Unsealable
from appliance.base.tables import members, webhooks
from appliance.metering.alerts.webhooks import SEALING_PURPOSE as OF_WEBHOOKS
from appliance.tenancy.second_factor import SEALING_PURPOSE as OF_SECOND_FACTORS

ADVICE = (
    "restore secret.key from the backup of this database; if it is lost, reset these second factors (gatehouse admin "
    "reset-second-factor), rotate these webhooks' secrets (gatehouse alerts rotate) and all API keys (gatehouse keys rotate)"
)


log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealed:
    """How many secrets are stored, and the e-mail addresses and webhooks whose secrets cannot be opened."""

    stored: int
    members: tuple[str, ...]
    webhooks: tuple[str, ...]

    @property
    def unreadable(self) -> int:
        """Return how many cannot be opened."""
        return len(self.members) + len(self.webhooks)


async def count(connection: AsyncConnection, pepper: bytes | None) -> Sealed:
    """Try to open every secret with `pepper`, the 32 bytes of `secret.key`; None (no such file) opens none."""
    of_members = (members.c.email, members.c.totp_secret)
    of_webhooks = (webhooks.c.id, webhooks.c.secret)
    num_members, closed_members = await _try(connection, of_members, _opener(pepper, OF_SECOND_FACTORS))
    num_webhooks, closed_webhooks = await _try(connection, of_webhooks, _opener(pepper, OF_WEBHOOKS))
    return Sealed(stored=num_members + num_webhooks, members=closed_members, webhooks=closed_webhooks)


async def warn(db: Database, pepper: bytes) -> None:
    """At a start, log which secrets cannot be opened: it may be long until somebody tries to sign in."""
    async with db.reading() as connection:
        found = await count(connection, pepper)
    if found.unreadable:
        log.error("secret.key is not the file that stored secrets were sealed with", secrets=found.unreadable, advice=ADVICE)


def _opener(pepper: bytes | None, purpose: str) -> Sealer | None:
    return None if pepper is None else Sealer(pepper, purpose)


async def _try(
    connection: AsyncConnection, columns: tuple[ColumnElement[str], ColumnElement[str]], sealer: Sealer | None
) -> tuple[int, tuple[str, ...]]:
    """Return how many rows have a secret, and the names of those whose secret does not open."""
    name, secret = columns
    rows = (await connection.execute(select(name, secret).where(secret.is_not(None)).order_by(name))).all()
    return len(rows), tuple(who for who, sealed in rows if not _opens(sealer, sealed))


def _opens(sealer: Sealer | None, sealed: str) -> bool:
    if sealer is None:
        return False
    try:
        sealer.open(sealed)
    except Unsealable:
        return False
    return True
