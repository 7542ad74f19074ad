"""Recovery codes: ten single-use codes for members who lose their second-factor device. Stored as keyed digests."""

from __future__ import annotations

import re
import secrets
from datetime import datetime

from sqlalchemy import delete, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from appliance.base.tables import recovery_codes
from appliance.tenancy.secrets import keyed_digest

NUM_CODES = 10
_ALPHABET = "abcdefghijkmnpqrstuvwxyz23456789"  # 32 characters that are hard to confuse: no l, o, 0, 1
_HALF_CHARS = 5  # 50 bits in all
_CODE = re.compile(rf"[{_ALPHABET}]{{{2 * _HALF_CHARS}}}", re.ASCII)


def new_codes() -> list[str]:
    """Return ten new codes in display form: `abcde-fghjk`."""
    return [
        "-".join("".join(secrets.choice(_ALPHABET) for _ in range(_HALF_CHARS)) for _ in range(2)) for _ in range(NUM_CODES)
    ]


def normalise_code(typed: str) -> str | None:
    """Return the typed code in lower case without spaces and dashes, or None if it does not look like a code."""
    code = re.sub(r"[\s-]", "", typed).lower()
    return code if _CODE.fullmatch(code) else None


async def replace(connection: AsyncConnection, pepper: bytes, member_id: str, codes: list[str]) -> None:
    """Replace all codes of the member by `codes`."""
    await remove_all(connection, member_id)
    rows = [{"member_id": member_id, "digest": _digest(pepper, member_id, code.replace("-", ""))} for code in codes]
    await connection.execute(insert(recovery_codes), rows)


async def remove_all(connection: AsyncConnection, member_id: str) -> None:
    """Remove all codes of the member."""
    await connection.execute(delete(recovery_codes).where(recovery_codes.c.member_id == member_id))


async def use(connection: AsyncConnection, pepper: bytes, member_id: str, code: str, now: datetime) -> bool:
    """Use up a normalised code. Return whether it was valid: the member's and unused."""
    statement = update(recovery_codes).where(
        recovery_codes.c.member_id == member_id,
        recovery_codes.c.digest == _digest(pepper, member_id, code),
        recovery_codes.c.used_at.is_(None),
    )
    return (await connection.execute(statement.values(used_at=now))).rowcount == 1


async def count_left(connection: AsyncConnection, member_id: str) -> int:
    """Return how many codes of the member are unused."""
    query = select(func.count()).where(recovery_codes.c.member_id == member_id, recovery_codes.c.used_at.is_(None))
    return int((await connection.execute(query)).scalar_one())


def _digest(pepper: bytes, member_id: str, code: str) -> str:
    return keyed_digest(pepper, f"recovery code {member_id} {code}")
