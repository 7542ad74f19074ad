"""Composes the alerting of one appliance: watch task, outbox, webhooks and delivery task."""

from __future__ import annotations

import random

from appliance.base.clock import Clock
from appliance.base.db import Database
from appliance.base.sealing import Sealer
from appliance.base.settings import Settings
from appliance.metering.alerts.budgets import BudgetAlerts
from appliance.metering.alerts.key_expiry import KeyExpiryAlerts
from appliance.metering.alerts.outbox import Outbox
from appliance.metering.alerts.targets import TargetPolicy
from appliance.metering.alerts.webhooks import SEALING_PURPOSE, Webhooks
from appliance.metering.calendar import BillingCalendar
from appliance.serving.alerting.delivery import AlertDelivery, Sender
from appliance.serving.alerting.http import HttpSender
from appliance.serving.alerting.mail import MailSender
from appliance.serving.alerting.watch import AlertWatch
from appliance.serving.model_registry import ModelRegistry
from appliance.serving.readiness import Readiness
from appliance.telemetry.metrics import Metrics


class Alerts:
    """Webhooks and outbox can be used at once; nothing is watched or sent before `start`."""

    def __init__(self, settings: Settings, db: Database, clock: Clock, calendar: BillingCalendar, pepper: bytes) -> None:
        self._settings = settings
        self._db = db
        self._clock = clock
        self._target_policy = TargetPolicy(settings.webhook_networks)
        self.outbox = Outbox(db, clock)
        self.webhooks = Webhooks(
            db, clock, Sealer(pepper, SEALING_PURPOSE), target_policy=self._target_policy, mail=settings.smtp_url is not None
        )
        self.budgets = BudgetAlerts(db, clock, calendar, currency=settings.currency)
        self._delivery: AlertDelivery | None = None
        self._watch: AlertWatch | None = None

    def start(self, models: ModelRegistry, readiness: Readiness, metrics: Metrics, *, version: str) -> None:
        """Start to watch and to deliver."""
        keys = KeyExpiryAlerts(self._db, self._clock)
        self._watch = AlertWatch(self._db, self._clock, self.budgets, keys, models, readiness)
        self._delivery = AlertDelivery(
            self._db, self._clock, self.outbox, self.webhooks, self._senders(version), metrics, randomness=random.random
        )
        self._watch.start()
        self._delivery.start()

    async def stop(self) -> None:
        """Stop both tasks. Pending messages are delivered after the next start."""
        if self._watch is not None:
            await self._watch.stop()
        if self._delivery is not None:
            await self._delivery.stop()

    def _senders(self, version: str) -> dict[str, Sender]:
        senders: dict[str, Sender] = {"webhook": HttpSender(self._target_policy, version=version)}
        url, sender = self._settings.smtp_url, self._settings.smtp_from
        if url is not None and sender is not None:
            senders["email"] = MailSender(url, sender, address=self._settings.external_url)
        return senders
