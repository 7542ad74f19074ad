"""Alerts for tests: their components over a test database, a local webhook receiver, and senders that only record."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sqlalchemy import select

from appliance.base.clock import Clock
from appliance.base.db import Database
from appliance.base.sealing import Sealer
from appliance.base.tables import outbox as outbox_table
from appliance.metering.alerts import outbox as outbox_module
from appliance.metering.alerts.outbox import Delivery, Outbox
from appliance.metering.alerts.targets import TargetPolicy
from appliance.metering.alerts.webhooks import SEALING_PURPOSE, Endpoint, Webhooks
from appliance.serving.alerting.delivery import AlertDelivery, Sender
from appliance.telemetry.metrics import Metrics
from tests.support.cast import PEPPER
from tests.support.polling import DEADLINE_S

LOOPBACK = TargetPolicy((ipaddress.ip_network("127.0.0.0/8"), ipaddress.ip_network("::1/128")))
TARGET = "https://alerts.example.com/in"


class RecordingSender:
    """A sender that raises `failures` in order and records every message that it is given."""

    def __init__(self, *failures: Exception) -> None:
        self.sent: list[tuple[str, Delivery]] = []
        self.failures = list(failures)
        self.gates: dict[str, asyncio.Event] = {}

    async def send(self, endpoint: Endpoint, delivery: Delivery, now: datetime) -> None:
        """Record the message, wait while the target has a gate, then raise the next failure, if any."""
        self.sent.append((endpoint.target, delivery))
        gate = self.gates.get(endpoint.target)
        if gate is not None:
            await gate.wait()
        if self.failures:
            raise self.failures.pop(0)

    async def close(self) -> None:
        """There is nothing to close."""

    @property
    def ids(self) -> list[str]:
        """Return the ids of the messages, in the order in which they were sent."""
        return [delivery.id for _, delivery in self.sent]


@dataclass(slots=True, kw_only=True)
class AlertParts:
    """The components of alerting over one database."""

    db: Database
    clock: Clock
    outbox: Outbox
    webhooks: Webhooks
    metrics: Metrics = field(default_factory=Metrics)

    def delivery(self, sender: Sender, *, randomness: float = 0.5, parallel_max: int = 8) -> AlertDelivery:
        """Return a delivery that sends everything through `sender`. `randomness` of the retries: 0.5 leaves waits unchanged."""
        senders: Mapping[str, Sender] = {"webhook": sender, "email": sender}
        return AlertDelivery(
            self.db,
            self.clock,
            self.outbox,
            self.webhooks,
            senders,
            self.metrics,
            randomness=lambda: randomness,
            parallel_max=parallel_max,
        )

    async def enqueue(self, subject: str = "one", tenant_id: str | None = None, event: str = "key.expiring") -> int:
        """Enqueue an event in a transaction of its own."""
        async with self.db.writing() as connection:
            message = outbox_module.Message(event, subject, {"subject": subject}, tenant_id)
            return await connection.run_sync(outbox_module.enqueue, self.clock.now(), [message])

    async def messages(self) -> list[Delivery]:
        """Return all messages of the outbox, in order."""
        query = select(outbox_table).order_by(outbox_table.c.id)
        async with self.db.reading() as connection:
            rows = (await connection.execute(query)).mappings().all()
        return [Delivery(**{name: row[name] for name in Delivery.__slots__}) for row in rows]


def alert_parts(database: Database, clock: Clock, *, mail: bool = True) -> AlertParts:
    """Return the components over `database`."""
    webhooks = Webhooks(database, clock, Sealer(PEPPER, SEALING_PURPOSE), target_policy=LOOPBACK, mail=mail)
    return AlertParts(db=database, clock=clock, outbox=Outbox(database, clock), webhooks=webhooks)


@dataclass(slots=True)
class Receiver:
    """A webhook receiver. `answers` are sent in order, the last one repeatedly; an empty one never answers."""

    answers: list[bytes] = field(default_factory=lambda: [b"HTTP/1.1 204 No Content\r\n\r\n"])
    requests: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)
    port: int = 0
    serving: set[asyncio.Task[None]] = field(default_factory=set)

    def json(self, index: int = -1) -> Any:
        """Return the body of a request."""
        return json.loads(self.requests[index][2])

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read one request and answer it."""
        task = asyncio.current_task()
        assert task is not None
        self.serving.add(task)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("ascii").split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
            body = await reader.readexactly(int(headers.get("content-length", "0")))
            self.requests.append((head[0], headers, body))
            answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
            if answer:
                writer.write(answer)
                await writer.drain()
            else:
                await reader.read()  # until the sender gives up
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()
            with suppress(ConnectionError, ssl.SSLError):
                await writer.wait_closed()


@asynccontextmanager
async def receiving(*answers: bytes, tls: ssl.SSLContext | None = None) -> AsyncIterator[Receiver]:
    """Yield a receiver on a free port of this machine."""
    receiver = Receiver(list(answers)) if answers else Receiver()
    server = await asyncio.start_server(receiver.serve, "127.0.0.1", 0, ssl=tls)
    receiver.port = server.sockets[0].getsockname()[1]
    try:
        yield receiver
    finally:
        server.close()
        await server.wait_closed()
        if receiver.serving:
            await asyncio.wait(receiver.serving, timeout=DEADLINE_S)
