"""Sealed secrets open only with the pepper and the purpose that they were sealed with; a start reports those that do not."""

from __future__ import annotations

import pytest
import structlog

from appliance.base.db import Database
from appliance.base.sealing import Sealer, Unsealable
from appliance.metering.alerts.webhooks import SEALING_PURPOSE
from appliance.metering.sealed_secrets import log_unreadable
from tests.support.alerts import TARGET, alert_parts
from tests.support.cast import OWNER, PEPPER
from tests.support.clock import FakeClock


@pytest.mark.parametrize(
    ("pepper", "purpose"), [(PEPPER, "another purpose"), (b"q" * 32, SEALING_PURPOSE)], ids=["purpose", "pepper"]
)
def test_a_text_opens_only_with_the_pepper_and_the_purpose_that_sealed_it(pepper: bytes, purpose: str) -> None:
    sealer, other = Sealer(PEPPER, SEALING_PURPOSE), Sealer(pepper, purpose)
    sealed = sealer.seal("a secret")
    assert (sealer.open(sealed), sealer.can_open(sealed)) == ("a secret", True)
    assert not other.can_open(sealed)
    with pytest.raises(Unsealable):
        other.open(sealed)


async def test_a_start_logs_how_many_secrets_cannot_be_opened_if_any(database: Database, clock: FakeClock) -> None:
    alerts = alert_parts(database, clock)
    for kind, target in (("webhook", TARGET), ("webhook", TARGET), ("email", "ops@example.com")):
        await alerts.webhooks.create(kind=kind, target=target, access=OWNER)
    with structlog.testing.capture_logs() as logs:
        await log_unreadable(database, PEPPER)
        assert logs == []
        await log_unreadable(database, b"q" * 32)
    assert [(entry["log_level"], entry["secrets"]) for entry in logs] == [("error", 2)]
    assert "restore secret.key from the backup" in logs[0]["advice"]
