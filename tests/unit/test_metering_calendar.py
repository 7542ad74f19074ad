"""Days and months of the billing time zone, also at clock changes."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.base.errors import InvalidValue
from appliance.metering.calendar import BillingCalendar, first_day, last_day, next_month

BERLIN = BillingCalendar("Europe/Berlin")
ZONES = ("UTC", "Europe/Berlin", "America/New_York", "Asia/Kolkata", "Asia/Kathmandu", "America/Sao_Paulo", "Asia/Beirut")


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def test_a_day_begins_at_local_midnight() -> None:
    assert BERLIN.day_of(utc("2026-11-20T23:00:00")) == date(2026, 11, 21)
    assert BERLIN.day_of(utc("2026-11-20T22:59:59.999999")) == date(2026, 11, 20)
    assert BERLIN.day_start(utc("2026-11-21T13:00:00")) == utc("2026-11-20T23:00:00")
    assert BERLIN.next_day_start(date(2026, 11, 21)) == utc("2026-11-21T23:00:00")


@pytest.mark.parametrize(("day", "hours"), [(date(2026, 3, 29), 23), (date(2026, 10, 25), 25), (date(2026, 10, 26), 24)])
def test_a_day_of_a_clock_change_is_shorter_or_longer(day: date, hours: int) -> None:
    assert BERLIN.next_day_start(day) - BERLIN.day_start(day) == timedelta(hours=hours)


def test_a_day_whose_midnight_the_clocks_skip_begins_after_the_gap() -> None:
    sao_paulo = BillingCalendar("America/Sao_Paulo")
    start = sao_paulo.day_start(date(2018, 11, 4))
    assert start == utc("2018-11-04T03:00:00")
    assert sao_paulo.day_of(start - timedelta(microseconds=1)) == date(2018, 11, 3)


def test_a_day_whose_midnight_occurs_twice_begins_with_the_first() -> None:
    assert BillingCalendar("America/Havana").day_start(date(2026, 11, 1)) == utc("2026-11-01T04:00:00")


def test_a_moment_without_a_time_zone_is_rejected() -> None:
    with pytest.raises(ValueError, match="must have a time zone"):
        BERLIN.day_of(datetime(2026, 11, 21, 12))


def test_months_follow_the_zone_over_the_turn_of_the_year() -> None:
    assert BERLIN.month_of(utc("2026-12-31T23:30:00")) == "2027-01"
    assert BERLIN.month_start(utc("2027-01-31T22:59:59")) == utc("2026-12-31T23:00:00")
    assert BERLIN.next_month_start("2026-12") == utc("2026-12-31T23:00:00")
    assert (next_month("2026-12"), first_day("2027-02"), last_day("2028-02")) == (
        "2027-01",
        date(2027, 2, 1),
        date(2028, 2, 29),
    )


@pytest.mark.parametrize(
    "month", ["2026-13", "2026-00", "2026-1", "202-10", "2026/10", "２０２６-10", "+202-10", "2026-W1", "202610", "0000-01", ""]
)
def test_an_invalid_month_is_refused_naming_the_field(month: str) -> None:
    with pytest.raises(InvalidValue) as refused:
        first_day(month)
    assert refused.value.param == "month"


def test_the_calendar_ends_with_the_year_9999() -> None:
    assert next_month("9999-11") == "9999-12"
    with pytest.raises(InvalidValue, match="last supported month") as refused:
        next_month("9999-12")
    assert refused.value.param == "month"


@given(
    zone=st.sampled_from(ZONES),
    moment=st.datetimes(datetime(1990, 1, 1), datetime(2060, 1, 1)).map(lambda value: value.replace(tzinfo=UTC)),
)
def test_every_moment_is_within_the_day_that_day_of_returns(zone: str, moment: datetime) -> None:
    calendar = BillingCalendar(zone)
    start, end = calendar.day_start(moment), calendar.next_day_start(moment)
    assert start <= moment < end
    assert calendar.day_of(start) == calendar.day_of(moment) == calendar.day_of(end - timedelta(microseconds=1))
    assert calendar.day_start(end) == end
