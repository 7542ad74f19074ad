"""The table of how full the buckets of limits were, so that a restart forgets no debt; and the task that writes it.

About once a second the levels that changed are written in one transaction. After a kill, what happened since the last of them
is read from the usage events, so nothing is given twice. Knows no rules of limits.
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
    """Whoever holds the buckets."""

    def unsaved_levels(self) -> Levels:
        """Return the levels that changed since the last call."""
        ...

    def save_again(self, owners: Iterable[Owner]) -> None:
        """Keep the levels of these owners unsaved: they could not be written."""
        ...


class LimitLevels:
    """Writes what `source` has changed about once a second; `stop` writes the rest."""

    def __init__(self, db: Database, source: LevelSource, *, sleep: Callable[[float], Any] = asyncio.sleep) -> None:
        self._db = db
        self._source = source
        failure = "levels of limits could not be saved; it is tried again"
        self._saving = Background("limit levels", lambda: repeat(self.save, SAVE_INTERVAL_S, failure=failure, sleep=sleep))

    def start(self) -> None:
        """Begin to save."""
        self._saving.start()

    async def stop(self) -> None:
        """Save what is unsaved and end. Raises the database's error."""
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
            self._source.save_again(unsaved)
            raise
        return len(rows)


async def find(connection: AsyncConnection, owners: Iterable[Owner]) -> Levels:
    """Return the saved levels of each of `owners` by the kind of limit."""
    places = {(owner.id, owner.model or ""): owner for owner in owners}
    ids, models = ({place[column] for place in places} for column in (0, 1))
    query = select(limit_levels).where(limit_levels.c.owner.in_(ids), limit_levels.c.model.in_(models))
    found: Levels = {owner: {} for owner in places.values()}
    for row in (await connection.execute(query)).all():
        owner = places.get((row.owner, row.model))
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
