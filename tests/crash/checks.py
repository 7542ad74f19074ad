"""What must be true of the ledger after every start of an appliance, however earlier ones ended.

The ledger is compared with what clients observed and with the records of the engines. Every finding is a violation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from appliance.base.db import Database
from appliance.base.tables import counters, limit_levels, requests, usage_events, usage_rollups
from appliance.metering.invariants.check import check_ledger
from tests.crash.fork_server import StartOptions
from tests.crash.load import Seen
from tests.crash.points import Notes
from tests.support.engine_record import EngineRecord

STEP_SLACK_S = 0.1  # a step and the transfer of its tokens through two sockets
SETTLE_SLOW_S = 1.5  # of the two seconds for which a client's last frame waits for the record
COST_HIGH = 10**9
PROBE = "probe_"


@dataclass(slots=True, kw_only=True)
class Evidence:
    """What was observed of the lives since the last check. `records` are the folders with the records of their engines, `lag_s`
    and `round_s` the slowest iteration of an event loop and the slowest commit. `was_older`: the database was downgraded to a
    version without causes, and upgraded again."""

    seen: list[Seen] = field(default_factory=list)
    records: list[Path] = field(default_factory=list)
    engine_killed: bool = False
    was_older: bool = False
    interval_s: float = 0.0
    lag_s: float = 0.0
    round_s: float = 0.0

    def add(self, options: StartOptions, notes: Notes, *, engine_killed: bool) -> None:
        """Add the records and notes of a life."""
        self.records.append(Path(options.records))
        self.engine_killed |= engine_killed
        self.interval_s = max(self.interval_s, options.checkpoint_interval_s)
        self.lag_s = max(self.lag_s, notes.lag_s)
        self.round_s = max(self.round_s, notes.round_s)

    @property
    def unbilled_max_s(self) -> float:
        """Return for how many seconds the last tokens of a request may be unbilled: one checkpoint interval, and the rounds for
        which a checkpoint may have to wait: the running one, one of new requests, and its own."""
        return self.interval_s + 4 * self.round_s + 2 * self.lag_s + STEP_SLACK_S


@dataclass(slots=True)
class Tally:
    """Counts of all checks."""

    events: Counter[str] = field(default_factory=Counter)
    batch_events: int = 0
    seen: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    unbilled_tokens: int = 0
    unbilled_tokens_max: int = 0
    unbilled_s_max: float = 0.0
    failed_with_engine: int = 0


class LedgerCheck:
    """One check of one database, which collects `findings`."""

    def __init__(self, database: Database, evidence: Evidence, tally: Tally) -> None:
        self.findings: list[str] = []
        self._database = database
        self._evidence = evidence
        self._tally = tally
        self._records = [EngineRecord.read(path) for folder in evidence.records for path in sorted(folder.glob("*.record"))]

    async def run(self, after_id: int) -> int:
        """Check the events with ids above `after_id`, and the sums of the whole ledger; return the last id."""
        async with self._database.reading() as connection:
            query = select(usage_events).where(usage_events.c.id > after_id, usage_events.c.kind == "usage")
            rows = [dict(row) for row in (await connection.execute(query.order_by(usage_events.c.id))).mappings()]
            await self._check_sums(connection)
        self._check_posted_once(rows)
        events = {str(row["request_id"]): row for row in rows}
        self._check_completeness(events)
        works = {name: (record, work) for record in self._records for name, work in record.requests.items()}
        for name, row in events.items():
            self._check_event(row, *works.get(name, (None, None)))
        self._check_clients(events)
        self._tally.events.update(str(row["status"]) for row in rows)
        self._tally.batch_events += sum(bool(row["batch"]) for row in rows)
        self._tally.seen.update(seen.error or str(seen.status) for seen in self._evidence.seen)
        return max((int(row["id"]) for row in rows), default=after_id)

    async def check_invariants(self, url: str, *, running: bool) -> None:
        """Run `gatehouse db check`."""
        for finding in await check_ledger(url, running=running, time_zone="UTC"):
            if finding.state == "broken":
                self._find(f"db check: {finding.name}: {finding.text}")

    def _find(self, text: str) -> None:
        self.findings.append(text)

    def _check_posted_once(self, rows: Sequence[Mapping[str, Any]]) -> None:
        twice = [name for name, count in Counter(row["request_id"] for row in rows).items() if count > 1]
        if twice:
            self._find(f"posted twice: {twice[:3]}")

    def _check_completeness(self, events: Mapping[str, Any]) -> None:
        for seen in self._evidence.seen:
            if seen.status != 200:
                continue
            row = events.get(seen.request_id)
            if row is None:
                self._find(f"{seen.request_id} was admitted ({seen.manner}) and is not in the ledger")
            elif bool(row["batch"]) is not seen.batch:
                self._find(f"{seen.request_id} asked for batch work: {seen.batch}, and the ledger says {row['batch']}")
        for record in self._records:
            for name in record.requests:
                if not name.startswith(PROBE) and name not in events:
                    self._find(f"{name} was heard by the engine and is not in the ledger")

    def _check_event(self, row: Mapping[str, Any], record: EngineRecord | None, work: Any) -> None:
        name, status = row["request_id"], row["status"]
        billed = (row["prompt_tokens"], row["completion_tokens"])
        done = (work.prompt_tokens, work.generated) if work else (0, 0)
        if status == "pending":
            self._find(f"{name} is pending after a start")
            return
        if billed[0] > done[0] or billed[1] > done[1]:
            self._find(f"{name} is {status} with {billed} tokens and the engine made {done}")
        if status == "voided" and work is not None and work.sent:
            self._find(f"{name} is voided and the engine had sent {work.sent} tokens")
        if status == "posted":
            self._check_posted(row, work)
        if status == "recovered":
            self._check_recovered(row, record, work)
        elif row["estimated"]:
            self._find(f"{name} is {status} and estimated")
        self._tally.tokens += billed[1]

    def _check_posted(self, row: Mapping[str, Any], work: Any) -> None:
        """Check that an event settled by a gateway has every token received: all of them if the engine was not killed."""
        name, completion, killed = row["request_id"], row["completion_tokens"], self._evidence.engine_killed
        if row["finish_reason"] == "error":
            self._tally.failed_with_engine += 1
            if not killed or (row["cause"] != "engine_died" and not self._evidence.was_older):
                self._find(
                    f"{name} ended in an error because of {row['cause']}; an engine was {'' if killed else 'not '}killed"
                )
        if work is None or not ((work.sent if killed else work.generated) <= completion <= work.generated):
            self._find(f"{name} is posted ({row['finish_reason']}, {row['cause']}) with {completion} tokens, engine: {work}")

    def _check_recovered(self, row: Mapping[str, Any], record: EngineRecord | None, work: Any) -> None:
        name, completion = row["request_id"], row["completion_tokens"]
        if not row["estimated"] or row["finish_reason"] != "error":
            self._find(f"{name} is recovered and not flagged: {row['finish_reason']}, estimated {row['estimated']}")
        if record is None:
            return
        lost, lost_s = work.generated - completion, record.lost_s(name, completion)
        self._tally.unbilled_tokens += max(lost, 0)
        self._tally.unbilled_tokens_max = max(self._tally.unbilled_tokens_max, lost)
        self._tally.unbilled_s_max = max(self._tally.unbilled_s_max, lost_s)
        if lost_s > self._evidence.unbilled_max_s:
            self._find(f"{name}: {lost} tokens of {lost_s:.3f} s unbilled, allowed are {self._evidence.unbilled_max_s:.3f} s")

    def _check_clients(self, events: Mapping[str, Mapping[str, Any]]) -> None:
        """Check that a client that read the end of its answer got the figures of the settled record."""
        for seen in self._evidence.seen:
            row = events.get(seen.request_id)
            if row is None or seen.status != 200 or not seen.ended or seen.usage is None or seen.error is not None:
                continue
            reported = (seen.usage["prompt_tokens"], seen.usage["completion_tokens"])
            written = (row["prompt_tokens"], row["completion_tokens"])
            is_late = row["status"] == "recovered" and self._evidence.round_s > SETTLE_SLOW_S
            if (row["status"] != "posted" or reported != written) and not is_late:
                self._find(f"{seen.request_id} was told {reported} and the ledger has {row['status']} {written}")

    async def _check_sums(self, connection: AsyncConnection) -> None:
        settled = usage_events.c.status != "pending"
        numbered = select(
            func.count(), func.count(usage_events.c.posting), func.min(usage_events.c.posting), func.max(usage_events.c.posting)
        ).where(settled)
        count, with_number, first, last = (await connection.execute(numbered)).one()
        taken = select(counters.c.value).where(counters.c.name == "posting")
        counter = (await connection.execute(taken)).scalar_one_or_none() or 0
        if count != with_number or (count and (first, last) != (1, count)) or counter != count:
            self._find(f"postings: {count} settled, {with_number} numbered from {first} to {last}, counter {counter}")
        unfinished = select(func.count()).select_from(requests).where(requests.c.finished_at.is_(None))
        if left := (await connection.execute(unfinished)).scalar_one():
            self._find(f"{left} requests have not finished after a start")
        await self._check_rollups(connection)
        await self._check_limits(connection)

    async def _check_rollups(self, connection: AsyncConnection) -> None:
        """Check that the buckets of each width sum to the settled events, by tenant."""
        tokens = ("prompt_tokens", "cached_tokens", "completion_tokens", "rejected_tokens")
        events = await connection.execute(
            select(usage_events.c.tenant_id, *(usage_events.c[name] for name in tokens), usage_events.c.cost_picos).where(
                usage_events.c.status.in_(("posted", "recovered"))
            )
        )
        expected = _sums((row[0], row[1:5], row[5]) for row in events)
        for bucket in ("minute", "hour", "day"):
            rows = await connection.execute(
                select(
                    usage_rollups.c.tenant_id,
                    *(usage_rollups.c[name] for name in tokens),
                    usage_rollups.c.cost_high,
                    usage_rollups.c.cost_low,
                ).where(usage_rollups.c.bucket == bucket)
            )
            found = _sums((row[0], row[1:5], row[5] * COST_HIGH + row[6]) for row in rows)
            if found != expected:
                self._find(f"the rollups by {bucket} are {found}, the events {expected}")
                return

    async def _check_limits(self, connection: AsyncConnection) -> None:
        """Check that no saved token bucket is fuller than its capacity."""
        for row in (await connection.execute(select(limit_levels))).mappings():
            if int(row["level_units"]) > row["capacity"] * 60_000_000:
                self._find(f"a bucket of {row['capacity']} {row['kind']} holds {row['level_units']} units")


def _sums(rows: Iterable[tuple[str, Sequence[int], int]]) -> dict[str, tuple[int, ...]]:
    sums: dict[str, tuple[int, ...]] = {}
    for tenant, tokens, cost in rows:
        sums[tenant] = tuple(map(sum, zip(sums.get(tenant, (0,) * 5), (*tokens, cost), strict=True)))
    return {tenant: figures for tenant, figures in sums.items() if any(figures)}
