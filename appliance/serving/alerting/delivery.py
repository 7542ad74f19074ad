"""The task that delivers the outbox: to many webhooks in parallel, to each one message at a time, with retries.

    outbox row ─► claim (attempts + 1) ─► send ─► delivered
                                           └────► retry with growing backoff ─► given up, logged and counted

It is woken by transactions that write to the outbox and by the end of every attempt. Knows no table and no protocol.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Literal, Protocol, get_args

import structlog

from appliance.base.background import Background
from appliance.base.clock import Clock
from appliance.base.consecutive_failures import ConsecutiveFailures
from appliance.base.db import Database
from appliance.base.errors import NotFound
from appliance.base.sealing import Unsealable
from appliance.metering.alerts.outbox import ATTEMPTS_MAX, RETRY_S_MAX, Delivery, Outbox, retry_delay_s
from appliance.metering.alerts.webhooks import Endpoint, Webhooks
from appliance.telemetry.metrics import Metrics

PARALLEL_MAX = 32
PAUSE_S_MIN = 0.05
RETRY_PAUSE_S = 5.0  # after an error of the database
PAUSE_S_MAX = 60.0  # because the wall clock, which decides what is due, may be set
STOP_TIMEOUT_S = 5.0

FailureReason = Literal[
    "name", "address", "connect", "timeout", "redirect", "refused", "failed", "gone", "mail", "secret", "removed"
]

log = structlog.get_logger()


class SendFailed(Exception):
    """An attempt did not reach the receiver, or the receiver did not accept the message. `reason` is the label of the metric.

    `retry_after_s` is the pause that the receiver asked for, 0 if none.
    """

    def __init__(self, reason: FailureReason, message: str, *, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.reason: FailureReason = reason
        self.retry_after_s = retry_after_s


def one_line(error: Exception, chars_max: int) -> str:
    """Return the message of `error`, or its type if it has none, as one printable line of at most `chars_max` characters."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__  # without the number of an OSError
    return "".join(character if character.isprintable() else " " for character in text)[:chars_max]


class Sender(Protocol):
    """Sends to one kind of webhook."""

    async def send(self, endpoint: Endpoint, delivery: Delivery, now: datetime) -> None:
        """Return when the receiver has accepted the message, within the lease of a claim. Raises SendFailed."""
        ...

    async def close(self) -> None:
        """Release connections and threads."""
        ...


class AlertDelivery:
    """Delivers the messages of the outbox. `randomness` returns numbers from 0 to 1, the jitter of the retries."""

    def __init__(
        self,
        db: Database,
        clock: Clock,
        outbox: Outbox,
        webhooks: Webhooks,
        senders: Mapping[str, Sender],
        metrics: Metrics,
        *,
        randomness: Callable[[], float],
        parallel_max: int = PARALLEL_MAX,
    ) -> None:
        self._db = db
        self._clock = clock
        self._outbox = outbox
        self._webhooks = webhooks
        self._senders = senders
        self._metrics = metrics
        metrics.add_alert_failures(get_args(FailureReason))
        self._randomness = randomness
        self._parallel_max = parallel_max
        self._running: dict[str, asyncio.Task[None]] = {}
        self._delivering = Background("alert delivery", self._run)

    def start(self) -> None:
        """Start the task."""
        self._delivering.start()

    async def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Stop. Running attempts get `timeout_s`; messages without a recorded result by then are sent again after a restart."""
        await self._delivering.stop()
        if self._running:
            await asyncio.wait(set(self._running.values()), timeout=timeout_s)
        running = set(self._running.values())
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
        for sender in self._senders.values():
            await sender.close()

    async def deliver_due(self) -> int:
        """Attempt one due message per webhook, and return how many attempts were made."""
        started = await self._start_due()
        if started:
            await asyncio.wait(set(started))
        return len(started)

    async def _run(self) -> None:
        released = False
        failures = ConsecutiveFailures()
        while True:
            self._db.outbox_written.clear()
            pause_s = RETRY_PAUSE_S
            try:
                if not released:
                    await self._outbox.release_claims()
                    released = True
                await self._start_due()
                self._metrics.alerts_pending(await self._outbox.count_pending())
                pause_s = await self._pause_s()
            except Exception:  # owned task: a short outage of the database must not end it
                if number := failures.count():
                    log.exception("the outbox could not be read", failures=number)
            else:
                if number := failures.end():
                    log.warning("works again", after="the outbox could not be read", failures=number)
            try:
                async with asyncio.timeout(pause_s):
                    await self._db.outbox_written.wait()
            except TimeoutError:
                pass

    async def _pause_s(self) -> float:
        """Return the time until a message is due for a webhook without a running attempt. The end of an attempt wakes this task
        anyway."""
        if len(self._running) >= self._parallel_max:
            return PAUSE_S_MAX
        due_s = await self._outbox.next_due_s(busy=self._running.keys())
        return PAUSE_S_MAX if due_s is None else min(max(due_s, PAUSE_S_MIN), PAUSE_S_MAX)

    async def _start_due(self) -> list[asyncio.Task[None]]:
        free = self._parallel_max - len(self._running)
        if free <= 0:
            return []
        started = []
        for delivery in await self._outbox.claim(free, busy=self._running.keys()):
            task = asyncio.create_task(self._deliver(delivery), name=f"alert {delivery.id}")
            self._running[delivery.webhook_id] = task
            started.append(task)
        return started

    async def _deliver(self, delivery: Delivery) -> None:
        try:
            await self._attempt(delivery)
        except Exception:  # owned task: its claim expires, and the message is sent again
            log.exception("an attempt to deliver an alert failed", delivery_id=delivery.id, webhook_id=delivery.webhook_id)
        finally:
            del self._running[delivery.webhook_id]
            self._db.outbox_written.set()

    async def _attempt(self, delivery: Delivery) -> None:
        try:
            if delivery.attempts > ATTEMPTS_MAX:
                raise SendFailed("failed", f"{ATTEMPTS_MAX} attempts were started and none completed")
            await self._send(delivery)
        except SendFailed as failure:
            await self._note_failure(delivery, failure)
            return
        await self._outbox.mark_delivered(delivery)
        self._metrics.alert_delivered()

    async def _send(self, delivery: Delivery) -> None:
        try:
            endpoint = await self._webhooks.read_endpoint(delivery.webhook_id)
        except NotFound as error:
            raise SendFailed("removed", "the webhook was removed") from error
        except Unsealable as error:
            raise SendFailed("secret", str(error)) from error
        sender = self._senders.get(endpoint.kind)
        if sender is None:
            raise SendFailed("mail", "no mail server is configured (smtp_url)")
        await sender.send(endpoint, delivery, self._clock.now())

    async def _note_failure(self, delivery: Delivery, failure: SendFailed) -> None:
        self._metrics.alert_failed(failure.reason)
        wait_s = None if failure.reason in ("gone", "removed") else retry_delay_s(delivery.attempts, self._randomness())
        if wait_s is not None:
            wait_s = max(wait_s, min(failure.retry_after_s, RETRY_S_MAX))
        await self._outbox.mark_failed(delivery, str(failure), wait_s)
        facts = {"delivery_id": delivery.id, "webhook_id": delivery.webhook_id, "alert": delivery.event}
        if wait_s is None:
            self._metrics.alert_given_up()
            log.error("an alert was given up", **facts, attempts=delivery.attempts, reason=str(failure))
        else:
            log.warning("an alert was not delivered", **facts, attempts=delivery.attempts, reason=str(failure), retry_s=wait_s)
        if failure.reason == "gone":
            await self._webhooks.disable(delivery.webhook_id, str(failure))
