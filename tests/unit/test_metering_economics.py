"""The cost of a million tokens on this machine, and the break-even usage: every figure computed by hand."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime, timedelta

import pytest

from appliance.base.db import Database
from appliance.base.errors import InvalidValue, NotFound
from appliance.metering.appliance_records import ApplianceRecords
from appliance.metering.calendar import BillingCalendar
from appliance.metering.economics import Economics, Hardware, HostedPrice, Measured, economics_of, hardware_from_record
from appliance.metering.economics_report import EconomicsReport
from appliance.metering.usage import UsageReports
from tests.support.cast import Cast
from tests.support.clock import START, FakeClock
from tests.support.factories import pending, posted
from tests.support.ledgers import running_ledger

UNIT = 10**6
HOSTED = HostedPrice(name="hosted, small", prompt=150_000, cached_prompt=75_000, completion=600_000)
# 36,000 EUR over 36 months is 1,000 a month; 1 kW for 730 h at 0.30 is 219; 81 for the rack: 1,300 a month.
BOX = Hardware(
    currency="EUR", cost_micros=36_000 * UNIT, months=36, power_w=1000, kwh_price_micros=300_000,
    other_monthly_micros=81 * UNIT, hosted=(HOSTED,),
)  # fmt: skip
# 720 M tokens in 720 hours are 730 M a month; 4 M in the busiest hour would be 2,920 M.
MEASURED = Measured(
    start=datetime(2026, 10, 22, tzinfo=UTC), end=datetime(2026, 11, 21, tzinfo=UTC), prompt_tokens=600 * UNIT,
    cached_tokens=200 * UNIT, completion_tokens=120 * UNIT, busy_hour_tokens=4 * UNIT,
    busy_hour=datetime(2026, 11, 3, 14, tzinfo=UTC),
)  # fmt: skip


def named(economics: Economics) -> dict[str, int | None]:
    return {figure.name: figure.value for figure in economics.figures}


def test_the_figures_are_those_of_the_worked_example() -> None:
    economics = economics_of(BOX, MEASURED, [])
    values = named(economics)

    assert values["hardware_month"] == 1_000 * UNIT
    assert values["energy_month"] == 219 * UNIT
    assert values["total_month"] == 1_300 * UNIT
    assert (values["tokens_month_mean"], values["tokens_month_busy"]) == (730 * UNIT, 2_920 * UNIT)
    assert values["cost_per_million_mean"] == 1_780_822  # 1,300 / 730
    assert values["cost_per_million_busy"] == 445_205  # 1,300 / 2,920
    (row,) = economics.break_even
    # 400 M × 0.15 + 200 M × 0.075 + 120 M × 0.60 = 147 for 720 M tokens
    assert row.hosted_per_million_micros == 204_167
    assert row.break_even_tokens_month == 6_367_346_939  # 1,300 / (147 / 720 M), rounded up
    assert row.share_basis_points == 21_806  # more than twice the busiest hour: this appliance has not shown that it can
    assert row.hosted_month_micros == 149_041_667
    assert row.saved_month_micros == 149_041_667 - 1_300 * UNIT


def test_a_hosted_price_without_one_for_cached_prompts_charges_them_like_others() -> None:
    plain = dataclasses.replace(HOSTED, cached_prompt=None)
    same = dataclasses.replace(HOSTED, cached_prompt=HOSTED.prompt)
    assert (
        economics_of(dataclasses.replace(BOX, hosted=(plain,)), MEASURED, []).break_even
        == economics_of(dataclasses.replace(BOX, hosted=(same,)), MEASURED, []).break_even
    )


def test_one_token_below_the_break_even_this_appliance_costs_more() -> None:
    (row,) = economics_of(BOX, MEASURED, []).break_even
    assert row.break_even_tokens_month is not None
    hosted_picos, total_picos = 147 * 10**12, 1_300 * 10**12
    assert row.break_even_tokens_month * hosted_picos >= total_picos * MEASURED.tokens
    assert (row.break_even_tokens_month - 1) * hosted_picos < total_picos * MEASURED.tokens


def test_figures_are_in_the_order_of_their_derivation_with_their_units() -> None:
    monthly, million = "micro-units a month", "micro-units per million tokens"
    assert [(figure.name, figure.unit) for figure in economics_of(BOX, MEASURED, []).figures] == [
        ("hardware_cost", "micro-units"), ("months", "months"), ("hardware_month", monthly), ("power", "W"),
        ("kwh_price", "micro-units per kWh"), ("energy_month", monthly), ("other_month", monthly), ("total_month", monthly),
        ("prompt_tokens", "tokens"), ("cached_tokens", "tokens"), ("completion_tokens", "tokens"),
        ("busy_hour_tokens", "tokens"), ("tokens_month_mean", "tokens a month"), ("tokens_month_busy", "tokens a month"),
        ("cost_per_million_mean", million), ("cost_per_million_busy", million),
    ]  # fmt: skip


def test_every_figure_names_its_source() -> None:
    sources = {figure.name: figure.source for figure in economics_of(BOX, MEASURED, []).figures}
    assert all(sources.values())
    assert sources["hardware_cost"] == sources["power"] == "entered by the operator"
    assert "2026-10-22 00:00 to 2026-11-21 00:00 UTC" in sources["prompt_tokens"]
    assert "2026-11-03 14:00" in sources["busy_hour_tokens"]


def test_power_is_read_from_the_gpus_unless_it_was_entered() -> None:
    unmeasured = Hardware(currency="EUR", cost_micros=0, months=1, kwh_price_micros=UNIT, other_power_w=200)
    read = economics_of(unmeasured, MEASURED, [350, 450])
    assert read.value("power") == 1000
    assert "2 GPUs" in next(figure.source for figure in read.figures if figure.name == "power")
    assert economics_of(BOX, MEASURED, [350]).value("power") == 1000
    one = economics_of(unmeasured, MEASURED, [350])
    assert "1 GPU " in next(figure.source for figure in one.figures if figure.name == "power")


def test_unknown_figures_are_none() -> None:
    unmeasured = Hardware(currency="EUR", cost_micros=UNIT, months=1, kwh_price_micros=UNIT, hosted=(HOSTED,))
    without_power = economics_of(unmeasured, MEASURED, [])
    assert without_power.value("total_month") is None
    assert without_power.value("cost_per_million_mean") is None
    assert "total_month is unknown" in without_power.figures[-1].source
    assert without_power.break_even[0].break_even_tokens_month is None
    unused = economics_of(BOX, Measured(start=MEASURED.start, end=MEASURED.end), [])
    assert unused.value("cost_per_million_busy") is None
    assert "no usage was measured" in unused.figures[-1].source
    assert set(dataclasses.astuple(unused.break_even[0])) == {HOSTED.name, None}


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"months": 0}, "months"),
        ({"months": 241}, "months"),
        ({"cost_micros": -1}, "cost_micros"),
        ({"kwh_price_micros": -1}, "kwh_price_micros"),
        ({"other_monthly_micros": -1}, "other_monthly_micros"),
        ({"currency": "eur"}, "currency"),
        ({"power_w": 1.5}, "power_w"),
        ({"power_w": -1}, "power_w"),
        ({"power_w": 1_000_001}, "power_w"),
        ({"other_power_w": -1}, "other_power_w"),
        ({"other_power_w": 1_000_001}, "other_power_w"),
        ({"hosted": (HOSTED,) * 21}, "hosted"),
    ],
    ids=str,
)
def test_an_invalid_hardware_field_is_named(changes: dict[str, object], param: str) -> None:
    fields: dict[str, object] = {"currency": "EUR", "cost_micros": 1, "months": 1, "kwh_price_micros": 1, **changes}
    with pytest.raises(InvalidValue) as refused:
        Hardware(**fields)  # type: ignore[arg-type]
    assert refused.value.param == param


@pytest.mark.parametrize(
    "changes",
    [{"name": "two\nlines"}, {"prompt": -1}, {"completion": -1}, {"cached_prompt": -1}, {"completion": 10**12 + 1}],
    ids=str,
)
def test_an_invalid_field_of_a_hosted_price_is_named(changes: dict[str, object]) -> None:
    with pytest.raises(InvalidValue) as refused:
        HostedPrice(**{"name": "hosted", "prompt": 1, "completion": 1, **changes})  # type: ignore[arg-type]
    assert refused.value.param == f"hosted.{next(iter(changes))}"


def test_the_smallest_and_the_largest_values_are_accepted() -> None:
    Hardware(currency="EUR", cost_micros=0, months=1, kwh_price_micros=0, power_w=0, other_power_w=1_000_000)
    most = dataclasses.replace(HOSTED, prompt=0, completion=10**12, cached_prompt=0)
    Hardware(currency="EUR", cost_micros=1, months=240, kwh_price_micros=1, power_w=1_000_000, hosted=(most,) * 20)


def test_fields_that_a_newer_version_has_stored_are_ignored() -> None:
    assert hardware_from_record(BOX.to_record() | {"cooling_micros": 7}) == BOX


async def test_the_hardware_is_stored_and_the_report_requires_it(database: Database, clock: FakeClock) -> None:
    report = EconomicsReport(ApplianceRecords(database, clock), UsageReports(database, calendar=BillingCalendar()), clock)
    with pytest.raises(NotFound, match="hardware"):
        await report.report([])
    await report.set_hardware(BOX)
    kept, economics = await report.report([])
    assert kept == BOX
    assert economics.value("prompt_tokens") == 0


async def test_usage_is_measured_in_the_thirty_days_before_the_last_full_hour(
    database: Database, clock: FakeClock, cast: Cast
) -> None:
    clock.advance(1234.5)
    first, last = START - timedelta(days=30), START - timedelta(microseconds=1)
    report = EconomicsReport(ApplianceRecords(database, clock), UsageReports(database, calendar=BillingCalendar()), clock)
    unused = await report.measured()
    async with running_ledger(database, clock, cast.epoch_id) as ledger:
        for admitted_at, completion in (
            (first - timedelta(microseconds=1), 1),
            (first, 2),
            (first + timedelta(hours=30), 3),
            (first + timedelta(hours=30), 5),
            (last - timedelta(hours=1), 8),
            (last, 2),
            (START, 1000),
        ):
            entry = pending(cast.bob, admitted_at=admitted_at)
            await ledger.open(entry)
            await ledger.settle(posted(entry.request_id, prompt=10, cached=4, completion=completion))

    nothing = Measured(start=first, end=START)
    assert unused == nothing
    assert await report.measured() == dataclasses.replace(
        nothing, prompt_tokens=50, cached_tokens=20, completion_tokens=20, busy_hour_tokens=28,
        busy_hour=first + timedelta(hours=30),
    )  # fmt: skip


async def test_of_two_equally_busy_hours_the_later_one_is_named(database: Database, clock: FakeClock, cast: Cast) -> None:
    report = EconomicsReport(ApplianceRecords(database, clock), UsageReports(database, calendar=BillingCalendar()), clock)
    async with running_ledger(database, clock, cast.epoch_id) as ledger:
        for hours in (3, 2, 4):
            entry = pending(cast.bob, admitted_at=START - timedelta(hours=hours))
            await ledger.open(entry)
            await ledger.settle(posted(entry.request_id))
    assert (await report.measured()).busy_hour == START - timedelta(hours=2)


def test_energy_is_priced_per_kilowatt_hour() -> None:
    economics = economics_of(dataclasses.replace(BOX, power_w=1_501, kwh_price_micros=301), MEASURED, [])
    assert economics.value("energy_month") == 329_815  # 1.501 kW × 730 h × 0.000301, rounded half up
