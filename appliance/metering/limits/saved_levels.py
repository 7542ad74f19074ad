"""Saves the levels of token buckets, so that a restart forgets no debt, and reads them back.

About once a second the changed levels are written in one transaction. After a kill, usage since the last save is read from the
usage events, so no quota is granted twice. Knows no rules of limits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from appliance.base.background import Background, repeat
from appliance.base.db import Database, upsert_for
from appliance.base.prepared import Prepared
from appliance.base.tables import limit_levels
from appliance.metering.limits.decisions import LimitKind
from appliance.metering.limits.owners import Owner
from appliance.metering.limits.sums import SavedLevel

SAVE_INTERVAL_S = 1.0


Levels = dict[Owner, dict[LimitKind, SavedLevel]]


class LevelSource(Protocol):
    """The owner of the buckets, `Admission`."""

    def unsaved_levels(self) -> Levels:
        """Return the levels that changed since the last call."""
        ...

    def mark_unsaved(self, owners: Iterable[Owner]) -> None:
        """Return the levels of these owners again at the next call: they could not be written."""
        ...


class LevelSaver:
    """Writes the changed levels of `source` about once a second; `stop` writes the rest."""

    def __init__(self, db: Database, source: LevelSource, *, sleep: Callable[[float], Any] = asyncio.sleep) -> None:
        self._db = db
        self._source = source
        failure = "levels of limits could not be saved; retrying"
        self._saving = Background("limit levels", lambda: repeat(self.save, SAVE_INTERVAL_S, failure=failure, sleep=sleep))

    def start(self) -> None:
        """Start saving."""
        self._saving.start()

    async def stop(self) -> None:
        """Save what is unsaved and stop. Raises the database's error."""
        if self._saving.started:
            await self._saving.stop()
            await self.save()

    async def save(self) -> int:
        """Write every level that changed, and return how many. Raises the database's error; then none was written."""
        unsaved = self._source.unsaved_levels()
        rows = [_columns(owner, kind, level) for owner, levels in unsaved.items() for kind, level in levels.items()]
        if not rows:
            return 0
        try:
            await self._db.batch_write(_SAVE[self._db.kind].execute, rows)
        except BaseException:
            self._source.mark_unsaved(unsaved)
            raise
        return len(rows)


async def read_levels(connection: AsyncConnection, owners: Iterable[Owner]) -> Levels:
    """Return the saved levels of each of `owners` by kind of limit."""
    by_key = {(owner.id, owner.model or ""): owner for owner in owners}
    ids, models = ({key[column] for key in by_key} for column in (0, 1))
    query = select(limit_levels).where(limit_levels.c.owner.in_(ids), limit_levels.c.model.in_(models))
    found: Levels = {owner: {} for owner in by_key.values()}
    for row in (await connection.execute(query)).all():
        owner = by_key.get((row.owner, row.model))
        if owner is not None:
            found[owner][row.kind] = SavedLevel(capacity=row.capacity, units=int(row.level_units), saved_at=row.saved_at)
    return found


def _columns(owner: Owner, kind: LimitKind, level: SavedLevel) -> dict[str, Any]:
    return {
        "owner": owner.id,
        "model": owner.model or "",
        "kind": kind,
        "capacity": level.capacity,
        "level_units": str(level.units),
        "saved_at": level.saved_at,
    }


_SAVE = {
    kind: Prepared(upsert_for(kind, limit_levels, ["owner", "model", "kind"], ["capacity", "level_units", "saved_at"]))
    for kind in ("sqlite", "postgresql")
}
