"""The usage page and its CSV export: totals, bars, rows, shares, currencies and periods."""

from __future__ import annotations

import csv
import html
import io
import re
import threading
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from appliance.base.ids import new_id
from appliance.console.charts import columns
from appliance.console.usage import GROUPS, MEASURES, PERIODS, bounds
from appliance.metering import usage
from appliance.metering.calendar import BillingCalendar
from appliance.metering.ledger.records import Settlement, Usage
from tests.support.cast import OWNER, Person, change_tenant
from tests.support.clock import START, FakeClock
from tests.support.console_fixtures import ConsoleApp, open_console
from tests.support.factories import pending, posted


async def bill_usage(
    console: ConsoleApp,
    person: Person,
    *,
    days_ago: float = 0,
    model: str = "demo",
    completion: int = 100,
    currency: str | None = None,
) -> None:
    price = await console.services.prices.current(model, START, currency=currency)
    entry = pending(person, request_id=new_id("req"), admitted_at=START - timedelta(days=days_ago), model=model, price=price)
    await console.services.ledger.open(entry)
    await console.services.ledger.settle(posted(entry.request_id, prompt=50, cached=20, completion=completion))


async def add_price(console: ConsoleApp) -> None:
    await console.services.prices.add(
        model="demo", currency="EUR", prompt=1_000_000, cached_prompt=0, completion=2_000_000, effective_from=START
    )


async def test_the_page_shows_totals_of_the_period_and_a_row_per_tenant(console: ConsoleApp) -> None:
    await add_price(console)
    await bill_usage(console, console.cast.bob)
    await bill_usage(console, console.cast.bob, days_ago=3)
    await bill_usage(console, console.cast.charlie, completion=1000)
    await bill_usage(console, console.cast.charlie, days_ago=40, completion=9000)

    page = (await (await console.alice()).get("/usage")).text

    assert "<dd>3</dd>" in page  # requests; the one of forty days ago is outside
    assert "<dd>1,200</dd>" in page
    assert "40 %" in page  # 60 of 150 prompt tokens were cached
    for person in (console.cast.bob, console.cast.charlie):
        assert f'href="/tenants/{person.tenant.id}" title="{person.tenant.name}"' in page
    assert page.index('title="charlie"') < page.index('title="bob"')  # highest cost first


async def test_a_period_without_usage_has_a_placeholder(console: ConsoleApp) -> None:
    page = (await (await console.alice()).get("/usage?period=last-month")).text
    assert "No usage in this period." in page


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("measure", MEASURES)
async def test_every_combination_of_choices_is_served_as_page_and_as_fragment(
    console: ConsoleApp, group: str, measure: str
) -> None:
    await bill_usage(console, console.cast.bob)
    alice = await console.alice()
    for period in PERIODS:
        address = f"/usage?period={period}&group={group}&measure={measure}"
        whole, part = await alice.get(address), await alice.fragment(address)
        assert whole.status_code == part.status_code == 200
        assert "<html" in whole.text
        assert "<html" not in part.text
        assert part.text.strip() in whole.text


async def test_rows_have_shares_of_the_total_and_the_chart_its_peak(console: ConsoleApp) -> None:
    for person in (console.cast.bob, console.cast.bob, console.cast.bob, console.cast.charlie):
        await bill_usage(console, person)

    page = (await (await console.alice()).fragment("/usage?measure=requests")).text

    assert re.findall(r'of-all muted">([^<]+)<', page) == ["75 %", "25 %"]
    assert '<span class="muted">peak 4</span>' in page


async def bill_usage_in_two_currencies(console: ConsoleApp) -> None:
    """Bill Charlie in CHF and Bob in the appliance's currency, EUR."""
    for currency in ("EUR", "CHF"):
        await console.services.prices.add(
            model="demo", currency=currency, prompt=0, cached_prompt=0, completion=2_000_000, effective_from=START
        )
    await change_tenant(console.services.tenants, console.cast.charlie, currency="CHF")
    await bill_usage(console, console.cast.bob)
    await bill_usage(console, console.cast.charlie, completion=1_000_000, currency="CHF")


async def test_shares_and_bars_of_costs_cover_only_the_appliance_s_currency(console: ConsoleApp) -> None:
    await bill_usage_in_two_currencies(console)
    part = (await (await console.alice()).fragment("/usage?measure=cost")).text

    assert re.findall(r'of-all muted">([^<]+)<', part) == ["100 %", "–"]  # EUR first, however large the cost in CHF
    assert part.index('title="bob"') < part.index('title="charlie"')
    assert "<dt>Cost, EUR</dt>" in part
    assert "Bars and shares are of costs in EUR, without those in CHF." in part


async def test_the_costs_of_one_tenant_are_shown_in_its_currency(console: ConsoleApp) -> None:
    await bill_usage_in_two_currencies(console)
    part = (await (await console.alice()).fragment(f"/usage?measure=cost&tenant={console.cast.charlie.tenant.id}")).text

    assert re.findall(r'of-all muted">([^<]+)<', part) == ["100 %"]
    assert '<dt>Cost, CHF</dt><dd class="money">2.00</dd>' in part
    assert '<span class="muted">peak 2.00 CHF</span>' in part
    assert "EUR" not in part


async def test_without_usage_the_cost_is_shown_in_the_reader_s_billing_currency(console: ConsoleApp) -> None:
    assert "<dt>Cost, EUR</dt>" in (await (await console.alice()).get("/usage")).text
    await change_tenant(console.services.tenants, console.cast.charlie, currency="CHF")
    manager = await console.member_of(console.cast.charlie, "manager")
    assert "<dt>Cost, CHF</dt>" in (await manager.get("/usage")).text
    assert "<dt>Cost, EUR</dt>" in (await (await console.alice()).get("/usage")).text


async def test_rows_are_sorted_by_the_chosen_measure(console: ConsoleApp) -> None:
    await add_price(console)
    await bill_usage(console, console.cast.bob, completion=500)
    for _ in range(3):
        await bill_usage(console, console.cast.charlie, completion=1)
    alice = await console.alice()

    first = {}
    for measure in MEASURES:
        part = (await alice.fragment(f"/usage?measure={measure}")).text
        first[measure] = min(("bob", "charlie"), key=lambda name: part.index(f'title="{name}"'))

    assert first == {"tokens": "bob", "cost": "bob", "requests": "charlie"}


async def test_invalid_choices_are_ignored(console: ConsoleApp) -> None:
    await bill_usage(console, console.cast.bob)
    alice = await console.alice()
    plain = await alice.fragment("/usage")
    odd = await alice.fragment("/usage?period=century&group=planet&measure=love")
    assert plain.text == odd.text


async def test_the_csv_file_has_exact_numbers_and_no_formulas(console: ConsoleApp) -> None:
    await add_price(console)
    await bill_usage(console, console.cast.bob)
    await change_tenant(console.services.tenants, console.cast.bob, name="=HYPERLINK(1)")
    answer = await (await console.alice()).get("/usage.csv?group=tenant&period=today")
    rows = list(csv.DictReader(io.StringIO(answer.text)))
    assert answer.headers["content-type"].startswith("text/csv")
    assert [row["name"] for row in rows] == ["'=HYPERLINK(1)"]
    assert rows[0]["tenant"] == console.cast.bob.tenant.id
    assert int(rows[0]["cost_picos"]) == 30 * 1_000_000 + 100 * 2_000_000
    assert (rows[0]["prompt_tokens"], rows[0]["cached_tokens"], rows[0]["currency"]) == ("50", "20", "EUR")


async def test_the_cost_in_the_csv_file_follows_from_its_tokens_and_the_price(console: ConsoleApp) -> None:
    price = await console.services.prices.add(
        model="demo", currency="EUR", prompt=10**6, cached_prompt=1, completion=7, rejected_draft=5, effective_from=START
    )
    entry = pending(console.cast.bob, request_id=new_id("req"), price=price)
    await console.services.ledger.open(entry)
    used = Usage(prompt_tokens=50, cached_tokens=20, completion_tokens=9, rejected_tokens=3)
    settlement = Settlement(request_id=entry.request_id, status="posted", finish_reason="stop", usage=used)
    await console.services.ledger.settle(settlement)

    (row,) = csv.DictReader(io.StringIO((await (await console.alice()).get("/usage.csv?group=model")).text))

    names = ("prompt_tokens", "cached_tokens", "completion_tokens", "rejected_tokens")
    prompt, cached, completion, rejected = (int(row[name]) for name in names)
    assert int(row["cost_picos"]) == (prompt - cached) * 10**6 + cached + completion * 7 + rejected * 5
    assert rejected == 3


async def test_a_model_name_in_the_csv_file_is_no_formula(console: ConsoleApp) -> None:
    await bill_usage(console, console.cast.bob, model="=HYPERLINK(1)")
    (row,) = csv.DictReader(io.StringIO((await (await console.alice()).get("/usage.csv?group=model")).text))
    assert (row["model"], row["name"]) == ("'=HYPERLINK(1)", "'=HYPERLINK(1)")


async def test_a_csv_file_with_too_many_rows_is_refused(console: ConsoleApp, monkeypatch: pytest.MonkeyPatch) -> None:
    alice = await console.alice()
    for person in (console.cast.bob, console.cast.charlie):
        await bill_usage(console, person)
    monkeypatch.setattr("appliance.console.usage.CSV_ROWS_MAX", 1)

    refused, whole = [await alice.get(f"/usage.csv?tenant={tenant}") for tenant in ("", console.cast.bob.tenant.id)]

    assert (refused.status_code, "more than 1 rows" in refused.text) == (400, True)
    assert len(list(csv.DictReader(io.StringIO(whole.text)))) == 1


@pytest.mark.parametrize("report", ["usage", "totals"])
async def test_the_rows_of_a_report_are_built_outside_the_event_loop(
    report: str, console: ConsoleApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bill_usage(console, console.cast.bob)
    threads: list[threading.Thread] = []
    build = usage._usage_row

    def build_noting_thread(*given: Any) -> usage.UsageRow:
        threads.append(threading.current_thread())
        return build(*given)

    monkeypatch.setattr(usage, "_usage_row", build_noting_thread)
    start = console.services.clock.now() - timedelta(days=1)
    method = getattr(console.services.reports, report)
    assert len(await method(start, start + timedelta(days=3), access=OWNER)) == 1
    assert len(threads) == 1
    assert threads[0] is not threading.main_thread()


async def test_the_csv_file_is_made_outside_the_event_loop(console: ConsoleApp, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    def make(*_given: object) -> str:
        threads.append(threading.current_thread())
        return ""

    monkeypatch.setattr("appliance.console.usage._csv", make)
    await (await console.alice()).get("/usage.csv")

    assert [thread is threading.main_thread() for thread in threads] == [False]


async def test_rows_by_key_show_name_prefix_and_tenant(console: ConsoleApp) -> None:
    await bill_usage(console, console.cast.bob)
    bob, alice = console.cast.bob, await console.alice()
    await console.services.keys.revoke(bob.key.id, access=OWNER)
    part = html.unescape((await alice.fragment("/usage?group=key")).text)
    assert f'href="/keys/{bob.key.id}" title="{bob.key.name}">{bob.key.name}</a>' in part
    assert f"{bob.key.prefix}… of {bob.tenant.name}" in part
    (row,) = csv.DictReader(io.StringIO((await alice.get("/usage.csv?group=key")).text))
    assert (row["key"], row["name"]) == (bob.key.id, bob.key.name)


async def test_the_tenant_filter_applies_to_the_whole_page(console: ConsoleApp) -> None:
    await bill_usage(console, console.cast.bob)
    await bill_usage(console, console.cast.charlie)
    part = (await (await console.alice()).fragment(f"/usage?tenant={console.cast.bob.tenant.id}")).text
    assert "<dd>1</dd>" in part
    assert 'title="charlie"' not in part


def test_a_day_of_the_billing_zone_may_have_25_hours() -> None:
    berlin = BillingCalendar("Europe/Berlin")
    start, end = bounds("today", datetime(2026, 10, 25, 12, tzinfo=UTC), berlin)
    assert (end - start) == timedelta(hours=25)
    start, end = bounds("30d", datetime(2026, 10, 25, 12, tzinfo=UTC), berlin)
    assert berlin.day_of(start) == date(2026, 9, 26)


async def test_hourly_bars_follow_a_time_zone_with_a_half_hour_offset(migrated_sqlite_file: Path, tmp_path: Path) -> None:
    async with open_console(migrated_sqlite_file, tmp_path, FakeClock(), time_zone="Asia/Kolkata") as console:
        await bill_usage(console, console.cast.bob)  # 17:30 in Kolkata
        await bill_usage(
            console, console.cast.bob, days_ago=17.25 / 24
        )  # 00:15 in Kolkata: its UTC hour began on the day before
        part = (await (await console.alice()).fragment("/usage?period=today&measure=requests")).text
    bars = dict(re.findall(r"<title>(\d\d:\d\d): (\d+)</title>", part))
    assert {label: value for label, value in bars.items() if value != "0"} == {"00:00": "1", "17:30": "1"}
    assert list(bars)[:2] == ["00:00", "00:30"]
    assert list(bars)[-1] == "23:30"


@pytest.mark.parametrize(
    ("period", "first", "last"),
    [("month", "2026-03-01", "2026-03-31"), ("last-month", "2026-02-01", "2026-02-28"), ("7d", "2026-03-25", "2026-03-31")],
)
def test_periods_consist_of_whole_days(period: str, first: str, last: str) -> None:
    calendar = BillingCalendar("Europe/Berlin")
    start, end = bounds(period, datetime(2026, 3, 31, 21, 59, tzinfo=UTC), calendar)
    assert str(calendar.day_of(start)) == first
    assert str(calendar.day_of(end - timedelta(seconds=1))) == last


def test_bars_adjoin_and_small_ones_have_a_minimum_height() -> None:
    bars = columns([("a", 0), ("b", 1), ("c", 1000), ("d", -5)])
    assert [(bar.height, bar.y) for bar in bars] == [(0.0, 100.0), (1.0, 99.0), (100.0, 0.0), (0.0, 100.0)]
    assert [bar.x for bar in bars] == [0.0, 25.0, 50.0, 75.0]
    assert all(bar.width <= 25 for bar in bars)
