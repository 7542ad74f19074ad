"""`gatehouse prices` and `gatehouse ledger`: the price book, usage events and their corrections."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from appliance.base.clock import SystemClock
from appliance.base.db import Database
from tests.support import factories
from tests.support.cast import make_cast
from tests.support.ledgers import running_ledger
from tests.support.typed_commands import Run


@pytest.fixture
def gatehouse(run_command: Run) -> Run:
    return run_command


def test_prices_are_added_and_listed(gatehouse: Any) -> None:
    options = ("--prompt", "1000", "--completion", "3000", "--currency", "CHF", "--tier-percent", "batch=50")
    made = gatehouse("prices", "add", "demo", *options, "--json").json()
    assert (made["cached_prompt"], made["currency"], made["tier_percents"]) == (1000, "CHF", {"batch": 50})
    assert gatehouse("prices", "list", "--model", "demo", "--json").json()["data"] == [made]
    assert gatehouse("prices", "list", "--model", "other", "--json").json()["data"] == []
    plain = gatehouse("prices", "add", "plain", *options[:4], "--json").json()
    cells = {line.split("\t")[0]: line.split("\t")[-1] for line in gatehouse("prices", "list").out.splitlines()}
    assert (cells[made["id"]], cells[plain["id"]]) == ("batch=50", "-")
    for wrong in ("batch", "batch=101", f"batch={'9' * 5000}"):
        assert gatehouse("prices", "add", "demo", *options[:4], "--tier-percent", wrong).status == 2
    past = gatehouse("prices", "add", "demo", *options, "--from", "2020-01-01T00:00:00Z", "--json")
    assert (past.status, past.json()["error"]["code"]) == (2, "invalid_value")


def test_a_future_price_can_be_withdrawn_but_not_a_current_one(gatehouse: Any) -> None:
    options = ("--prompt", "1000", "--completion", "3000")
    now = gatehouse("prices", "add", "demo", *options, "--json").json()
    later = gatehouse("prices", "add", "demo", *options, "--from", "2190-01-01T00:00:00Z", "--json").json()
    assert gatehouse("prices", "withdraw", later["id"], "--json").json() == later
    refused = gatehouse("prices", "withdraw", now["id"], "--json")
    assert (refused.status, refused.json()["error"]["code"]) == (1, "price_begun")
    assert gatehouse("prices", "list", "--json").json()["data"] == [now]


def test_a_price_is_added_with_all_that_was_given(gatehouse: Any) -> None:
    parts = {
        "prompt": "1000", "completion": "3000", "cached-prompt": "100", "rejected-draft": "7", "currency": "CHF",
        "from": "2190-01-01T00:00:00Z", "batch-percent": "50", "tier-percent": "batch=80",
    }  # fmt: skip
    given = [word for name, value in parts.items() for word in (f"--{name}", value)]
    added = gatehouse("prices", "add", "demo", *given, "--json").done()
    del added["id"]
    assert added == {
        "model": "demo", "prompt": 1000, "completion": 3000, "cached_prompt": 100, "rejected_draft": 7, "currency": "CHF",
        "effective_from": "2190-01-01T00:00:00.000Z", "batch_percent": 50, "tier_percents": {"batch": 80},
    }  # fmt: skip


def test_a_withdrawal_is_confirmed(gatehouse: Any) -> None:
    later = ("--prompt", "1000", "--completion", "3000", "--from", "2190-01-01T00:00:00Z")
    price = gatehouse("prices", "add", "demo", *later, "--json").json()
    assert gatehouse("prices", "withdraw", price["id"]).err == "This price was withdrawn: it never takes effect.\n"


@pytest.mark.parametrize(
    ("model", "note"),
    [
        ("gatehouse-demo", ""),
        ("gatehouse-dem", "; did you mean 'gatehouse-demo'?"),
        ("llama", ""),
    ],
)
def test_a_price_for_a_model_that_no_engine_serves_is_added_with_a_note(gatehouse: Any, model: str, note: str) -> None:
    added = gatehouse("prices", "add", model, "--prompt", "1", "--completion", "2", "--json")
    served = model == "gatehouse-demo"
    assert (added.status, added.json()["model"]) == (0, model)
    assert added.err == (
        "" if served else f"gatehouse: no engine serves a model named '{model}'; its price applies when one does{note}\n"
    )


def test_an_empty_ledger_is_listed_and_correcting_a_missing_event_fails(gatehouse: Any) -> None:
    assert gatehouse("ledger", "list", "--json").json() == {"data": [], "has_more": False}
    assert "request_id" in gatehouse("ledger", "list").out.split(), (
        "the id by which responses, log and console identify a request"
    )
    assert gatehouse("ledger", "correct", "7", "--note", "why", "--completion-tokens", "-5").status == 1


def post_a_request(data_dir: Path, **fields: Any) -> None:
    """Post a request of Bob in the ledger; `fields` change its pending entry."""

    async def post() -> None:
        clock, database = SystemClock(), Database.open(f"sqlite:///{data_dir / 'gatehouse.db'}")
        try:
            cast = await make_cast(database, clock)
            entry = factories.pending(cast.bob, admitted_at=clock.now(), **fields)
            async with running_ledger(database, clock, cast.epoch_id) as ledger:
                await ledger.open(entry)
                await ledger.settle(factories.posted(entry.request_id))
        finally:
            await database.close()

    asyncio.run(post())


def test_a_large_correction_needs_the_yes_option(gatehouse: Any, data_dir: Path) -> None:
    post_a_request(data_dir)
    options = ("ledger", "correct", "1", "--note", "why", "--completion-tokens", "20000000")
    refused = gatehouse(*options)
    assert refused.status == 2
    assert "needs `--yes`" in refused.err
    assert gatehouse(*options, "--yes").status == 0


def test_a_correction_repeated_with_its_key_is_made_once(gatehouse: Any, data_dir: Path) -> None:
    post_a_request(data_dir)
    options = ("ledger", "correct", "1", "--note", "why", "--completion-tokens", "-1", "--idempotency-key")
    made = [gatehouse(*options, "refund 1", "--json").json() for _ in range(2)]

    assert made[0] == made[1]
    assert gatehouse(*options, "refund 2", "--json").json()["id"] != made[0]["id"]
    assert gatehouse(*options, "refünd").status == 2


@pytest.mark.usefixtures("skip_tensor_check")
def test_doctor_reports_models_served_without_a_price(gatehouse: Any, data_dir: Path) -> None:
    post_a_request(data_dir, currency="USD")
    rows = gatehouse("doctor", "--json").json()["data"]
    (price,) = [row for row in rows if row["check"] == "prices"]
    assert (price["state"], price["found"]) == ("note", "demo has no price in USD: its requests cost nothing")
