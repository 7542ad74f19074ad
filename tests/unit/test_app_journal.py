"""The journal in the whole appliance: a start that cannot use it, and pages with requests whose rows are still pending."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import pytest

from appliance.app import Appliance
from appliance.base.database_claim import claim_database
from appliance.base.settings import UnusableData, load_settings
from appliance.console.requests import _find
from appliance.metering.ledger import rows
from appliance.metering.ledger.records import PendingEvent
from tests.support.api_app import ApiApp
from tests.support.cast import OWNER, make_cast
from tests.support.clock import FakeClock
from tests.support.factories import pending


@pytest.fixture
async def entry(api: ApiApp, clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> PendingEvent:
    """An entry that is only in the journal until a reader waits for its rows."""
    people = await make_cast(api.services.db, clock)
    entry = pending(people.bob)
    row = rows.event_row(entry, people.epoch_id, "EUR", clock.now().date())
    written: list[str] = []

    async def catch_up() -> None:
        if not written:
            written.append(entry.request_id)
            await api.services.db.batch_write(rows.insert, [entry], [row])

    monkeypatch.setattr(api.services.db, "catch_up", catch_up)
    return entry


async def test_a_just_admitted_request_is_in_the_list_of_requests(api: ApiApp, entry: PendingEvent) -> None:
    assert [row["id"] for row in (await api.call("GET", "/requests"))["data"]] == [entry.request_id]


async def test_a_just_admitted_request_is_in_the_ledger(api: ApiApp, entry: PendingEvent) -> None:
    listed = await api.call("GET", "/ledger", params={"status": "pending"})
    assert [row["request_id"] for row in listed["data"]] == [entry.request_id]


async def test_the_currency_of_a_tenant_is_fixed_by_its_first_admitted_request(api: ApiApp, entry: PendingEvent) -> None:
    refused = await api.call("PATCH", f"/tenants/{entry.tenant_id}", status=400, json={"currency": "USD"})
    assert refused["error"]["param"] == "currency"


async def test_a_just_admitted_request_has_a_page(api: ApiApp, entry: PendingEvent) -> None:
    _, event = await _find(api.services, entry.request_id, OWNER)
    assert event is not None
    assert event.status == "pending"


async def test_a_start_with_an_unusable_journal_is_refused_and_leaves_nothing_behind(tmp_path: Path) -> None:
    os.mkdir(tmp_path / "gatehouse.db.admitted-2")
    settings = load_settings(options={"data_dir": tmp_path}, environ={})

    with pytest.raises(UnusableData, match=r"^the journal .*gatehouse\.db\.admitted cannot be used: Is a directory"):
        await Appliance(settings).start()

    await (await claim_database(settings.database_url)).release()
    with sqlite3.connect(tmp_path / "gatehouse.db") as connection:
        assert connection.execute("SELECT count(*) FROM epochs").fetchone() == (0,)
