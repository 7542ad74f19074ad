"""Finds sealed secrets (second factors, webhooks) that the current `secret.key` cannot open. Reads only."""

from __future__ import annotations

from dataclasses import dataclass

import structlog
from sqlalchemy import ColumnElement, select
from sqlalchemy.ext.asyncio import AsyncConnection

from appliance.base.db import Database
from appliance.base.sealing import Sealer
from appliance.base.tables import members, webhooks
from appliance.metering.alerts.webhooks import SEALING_PURPOSE as OF_WEBHOOKS
from appliance.tenancy.second_factor import SEALING_PURPOSE as OF_SECOND_FACTORS

ADVICE = (
    "restore secret.key from the backup of this database; if it is lost, reset these second factors (gatehouse admin "
    "reset-second-factor), rotate these webhooks' secrets (gatehouse alerts rotate) and all API keys (gatehouse keys rotate)"
)


log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedSecrets:
    """The number of stored secrets, and the members (by e-mail address) and webhooks whose secrets cannot be opened."""

    stored: int
    members: tuple[str, ...]
    webhooks: tuple[str, ...]

    @property
    def unreadable(self) -> int:
        """Return how many secrets cannot be opened."""
        return len(self.members) + len(self.webhooks)


async def find_unreadable(connection: AsyncConnection, pepper: bytes | None) -> SealedSecrets:
    """Try to open every secret with `pepper`, the 32 bytes of `secret.key`, or None if there is no such file."""
    of_members = (members.c.email, members.c.totp_secret)
    of_webhooks = (webhooks.c.id, webhooks.c.secret)
    num_members, unreadable_members = await _unreadable_rows(connection, of_members, _opener(pepper, OF_SECOND_FACTORS))
    num_webhooks, unreadable_webhooks = await _unreadable_rows(connection, of_webhooks, _opener(pepper, OF_WEBHOOKS))
    return SealedSecrets(stored=num_members + num_webhooks, members=unreadable_members, webhooks=unreadable_webhooks)


async def log_unreadable(db: Database, pepper: bytes) -> None:
    """Log at start how many secrets cannot be opened: the first sign-in that needs one may be much later."""
    async with db.reading() as connection:
        found = await find_unreadable(connection, pepper)
    if found.unreadable:
        log.error("secret.key is not the file that stored secrets were sealed with", secrets=found.unreadable, advice=ADVICE)


def _opener(pepper: bytes | None, purpose: str) -> Sealer | None:
    return None if pepper is None else Sealer(pepper, purpose)


async def _unreadable_rows(
    connection: AsyncConnection, columns: tuple[ColumnElement[str], ColumnElement[str]], sealer: Sealer | None
) -> tuple[int, tuple[str, ...]]:
    """Return the number of rows with a secret, and the names of those whose secret cannot be opened."""
    name, secret = columns
    rows = (await connection.execute(select(name, secret).where(secret.is_not(None)).order_by(name))).all()
    return len(rows), tuple(who for who, sealed in rows if sealer is None or not sealer.can_open(sealed))
