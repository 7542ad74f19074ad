"""`gatehouse db`: checks, migrations and sums; who may change a database that others use; what checks say of its secrets."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pyotp
import pytest

from appliance.api.http_server import data_dir_lock
from appliance.base.clock import SystemClock
from appliance.base.database_claim import DatabaseClaim, claim_database
from appliance.base.db import Database
from appliance.base.sealing import Sealer
from appliance.cli import output
from appliance.metering.alerts.targets import TargetPolicy
from appliance.metering.alerts.webhooks import SEALING_PURPOSE, Webhooks
from appliance.metering.calendar import BillingCalendar
from appliance.metering.ledger.journal_records import JournaledEvent, encode, open_journal, replay
from appliance.tenancy.second_factor import SecondFactors
from tests.support import factories
from tests.support.cast import OWNER, make_cast
from tests.support.databases import Cluster
from tests.support.ledgers import running_ledger, without_alerts
from tests.support.typed_commands import Run


@pytest.fixture
def gatehouse(run_command: Run) -> Run:
    return run_command


def test_the_database_can_be_checked_downgraded_and_upgraded(gatehouse: Any) -> None:
    assert gatehouse("db", "check").status == 0
    assert gatehouse("db", "downgrade", "base").status == 2
    assert gatehouse("db", "downgrade", "base", "--yes", "--json").json()["revision"] is None
    assert gatehouse("db", "check").status == 1
    upgraded = gatehouse("db", "upgrade", "--json").json()
    assert upgraded["revision"] == upgraded["head"]


def test_checking_the_database_shows_a_progress_bar(gatehouse: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[tuple[str, bool]] = []

    def progress(title: str, *, quiet: bool) -> Any:
        shown.append((title, quiet))
        return nullcontext(lambda _fraction: None)

    monkeypatch.setattr(output, "progress", progress)
    gatehouse("db", "check")
    gatehouse("db", "check", "--json")
    assert shown == [("Checking the ledger", False), ("Checking the ledger", True)]


def test_a_downgrade_is_refused_while_the_journal_has_records(gatehouse: Any, data_dir: Path) -> None:
    asyncio.run(write_journal_of_a_killed_appliance(data_dir / "gatehouse.db"))
    refused = gatehouse("db", "downgrade", "0003", "--yes", "--json")
    assert (refused.status, refused.json()["error"]["code"]) == (1, "journal")
    assert "has records of 2 requests that are not in the tables yet" in refused.json()["error"]["message"]
    assert "gatehouse serve" in refused.json()["error"]["message"]
    asyncio.run(replay_journal(data_dir / "gatehouse.db"))
    assert gatehouse("db", "downgrade", "0003", "--yes", "--json").json()["revision"] == "0003"
    assert gatehouse("db", "downgrade", "0002", "--yes", "--json").json()["revision"] == "0002"
    assert gatehouse("db", "downgrade", "base", "--yes", "--json").json()["revision"] is None
    assert gatehouse("db", "downgrade", "base", "--yes", "--json").status == 0


async def write_journal_of_a_killed_appliance(path: Path) -> None:
    """Write a journal with an admission and with the settlement of another request that already has its row."""
    url, clock = f"sqlite:///{path}", SystemClock()
    database = Database.open(url)
    journal = open_journal(url)
    assert journal is not None
    try:
        cast = await make_cast(database, clock)
        async with running_ledger(database, clock, cast.epoch_id) as ledger:
            await ledger.open(served := factories.pending(cast.bob))
        admitted = factories.pending(cast.bob, batch=True)
        entry = JournaledEvent(epoch_id=cast.epoch_id, currency="EUR", billing_day=clock.now().date(), event=admitted)
        for record in (entry, factories.posted(served.request_id)):
            await journal.append(encode(record))
    finally:
        await journal.close()
        await database.close()


async def replay_journal(path: Path) -> None:
    url = f"sqlite:///{path}"
    database, journal = Database.open(url), open_journal(url)
    assert journal is not None
    try:
        assert await replay(database, journal, SystemClock(), BillingCalendar(), without_alerts) == 2
    finally:
        await journal.close()
        await database.close()


def test_rollups_can_be_rebuilt(gatehouse: Any) -> None:
    assert gatehouse("db", "rebuild-rollups", "--json").json() == {"rows": 0}


def test_upgrading_to_an_unknown_revision_fails(gatehouse: Any) -> None:
    assert gatehouse("db", "upgrade", "9999").status == 1


async def _store_sealed_secrets(url: str, pepper: bytes) -> None:
    database, clock = Database.open(url), SystemClock()
    try:
        alice = (await make_cast(database, clock)).alice
        factors = SecondFactors(database, clock, pepper)
        enrolment = factors.begin(alice)
        await factors.enable(alice, enrolment, pyotp.TOTP(enrolment.secret).at(clock.now()))
        webhooks = Webhooks(database, clock, Sealer(pepper, SEALING_PURPOSE), target_policy=TargetPolicy(), mail=False)
        await webhooks.create(kind="webhook", target="https://192.0.78.9/hook", access=OWNER)
    finally:
        await database.close()


@pytest.mark.usefixtures("skip_tensor_check")
def test_doctor_and_db_check_report_a_wrong_or_missing_secret_key(gatehouse: Any, data_dir: Path) -> None:
    def secret_checks() -> tuple[str, str]:
        checks = gatehouse("db", "check", "--json").json()["data"], gatehouse("doctor", "--json").json()["data"]
        (checked,), (seen,) = ([row for row in rows if row["check"] == "secrets"] for rows in checks)
        return f"{checked['state']}: {checked['found']}", f"{seen['state']}: {seen['found']} {seen['advice']}"

    asyncio.run(_store_sealed_secrets(f"sqlite:///{data_dir / 'gatehouse.db'}", b"p" * 32))
    (data_dir / "secret.key").write_bytes(b"p" * 32)
    assert secret_checks() == ("holds: 2 sealed, each opens with secret.key", "ok: 2 sealed, all readable with secret.key ")
    (data_dir / "secret.key").write_bytes(b"q" * 32)
    checked, seen = secret_checks()
    assert checked.startswith("broken: cannot be opened: second factors: alice@example.com; webhooks: wh_")
    assert seen.startswith(f"wrong: {data_dir / 'secret.key'} is not the key that sealed 2 of 2 stored secrets")
    for text in (checked, seen):
        assert "restore secret.key from the backup" in text
        assert "reset-second-factor" in text
    (data_dir / "secret.key").unlink()
    assert ["does not exist" in text for text in secret_checks()] == [True, True]
    assert not (data_dir / "secret.key").exists(), "checking creates no key"


@pytest.mark.postgres
@pytest.mark.usefixtures("skip_tensor_check")
def test_doctor_reports_a_database_that_is_not_utf_8(gatehouse: Any, postgresql: Cluster) -> None:
    url = postgresql.create(encoding="SQL_ASCII")
    try:
        rows = {row["check"]: row for row in gatehouse("doctor", "--database", url, "--json").json()["data"]}
    finally:
        postgresql.drop(url)
    assert rows["database"]["state"] == "wrong"
    assert "SQL_ASCII" in rows["database"]["found"]
    assert "ENCODING 'UTF8'" in rows["database"]["advice"]


@contextmanager
def database_claimed(data_dir: Path) -> Iterator[None]:
    """Claim the database as an appliance with another data folder does."""

    async def claim() -> DatabaseClaim:
        return await claim_database(f"sqlite:///{data_dir}/gatehouse.db")

    held = asyncio.run(claim())
    try:
        yield
    finally:
        asyncio.run(held.release())


@pytest.mark.parametrize(
    "change",
    [("tenants", "create", "Acme"), ("db", "upgrade"), ("db", "downgrade", "base", "--yes"), ("db", "rebuild-rollups")],
    ids=" ".join,
)
def test_changes_are_refused_while_an_appliance_elsewhere_claims_the_database(
    change: tuple[str, ...], gatehouse: Any, data_dir: Path
) -> None:
    with database_claimed(data_dir):
        refused = gatehouse(*change, "--json")

        error = refused.json()["error"]
        assert (refused.status, error["code"]) == (1, "running")
        assert "Run the command where the appliance runs, with its --data-dir" in error["message"]
        assert gatehouse("tenants", "list", "--json").json()["data"] == []


def test_a_change_during_the_start_of_the_appliance_is_to_be_tried_again(gatehouse: Any, data_dir: Path) -> None:
    with data_dir_lock(data_dir), database_claimed(data_dir):
        refused = gatehouse("tenants", "create", "Acme", "--json")

    error = refused.json()["error"]
    assert (refused.status, error["code"]) == (1, "running")
    assert error["message"] == "the appliance is starting or stopping; nothing was changed. Try again in a few seconds"


def test_commands_can_change_a_database_concurrently(gatehouse: Any, data_dir: Path) -> None:
    async def claim() -> DatabaseClaim:
        return await claim_database(f"sqlite:///{data_dir}/gatehouse.db", shared=True)

    other = asyncio.run(claim())
    assert gatehouse("tenants", "create", "Acme").status == 0
    asyncio.run(other.release())
