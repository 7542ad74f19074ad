"""The cost of a million tokens on this machine, and the break-even usage: every figure computed by hand."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime

import pytest

from appliance.base.db import Database
from appliance.base.errors import InvalidValue, NotFound
from appliance.metering.appliance_records import ApplianceRecords
from appliance.metering.calendar import BillingCalendar
from appliance.metering.economics import Economics, Hardware, HostedPrice, Measured, economics_of
from appliance.metering.economics_report import EconomicsReport
from appliance.metering.usage import UsageReports
from tests.support.clock import FakeClock

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


def test_one_token_below_the_break_even_this_appliance_costs_more() -> None:
    (row,) = economics_of(BOX, MEASURED, []).break_even
    assert row.break_even_tokens_month is not None
    hosted_picos, total_picos = 147 * 10**12, 1_300 * 10**12
    assert row.break_even_tokens_month * hosted_picos >= total_picos * MEASURED.tokens
    assert (row.break_even_tokens_month - 1) * hosted_picos < total_picos * MEASURED.tokens


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


def test_unknown_figures_are_none() -> None:
    unmeasured = Hardware(currency="EUR", cost_micros=UNIT, months=1, kwh_price_micros=UNIT, hosted=(HOSTED,))
    without_power = economics_of(unmeasured, MEASURED, [])
    assert without_power.value("total_month") is None
    assert without_power.value("cost_per_million_mean") is None
    assert without_power.break_even[0].break_even_tokens_month is None
    unused = economics_of(BOX, Measured(start=MEASURED.start, end=MEASURED.end), [])
    assert unused.value("cost_per_million_busy") is None
    assert set(dataclasses.astuple(unused.break_even[0])) == {HOSTED.name, None}


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"months": 0}, "months"),
        ({"cost_micros": -1}, "cost_micros"),
        ({"currency": "eur"}, "currency"),
        ({"power_w": 1.5}, "power_w"),
        ({"hosted": (HOSTED,) * 21}, "hosted"),
    ],
    ids=str,
)
def test_an_invalid_hardware_field_is_named(changes: dict[str, object], param: str) -> None:
    fields: dict[str, object] = {"currency": "EUR", "cost_micros": 1, "months": 1, "kwh_price_micros": 1, **changes}
    with pytest.raises(InvalidValue) as refused:
        Hardware(**fields)  # type: ignore[arg-type]
    assert refused.value.param == param


async def test_the_hardware_is_stored_and_the_report_requires_it(database: Database, clock: FakeClock) -> None:
    report = EconomicsReport(ApplianceRecords(database, clock), UsageReports(database, calendar=BillingCalendar()), clock)
    with pytest.raises(NotFound, match="hardware"):
        await report.report([])
    await report.set_hardware(BOX)
    kept, economics = await report.report([])
    assert kept == BOX
    assert economics.value("prompt_tokens") == 0
