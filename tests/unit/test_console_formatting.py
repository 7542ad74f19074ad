"""Formatting of numbers and times, parsing of form fields, and geometry of charts."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from appliance.base.errors import InvalidValue
from appliance.console import formatting
from appliance.console.charts import Segment, spark_area, spark_points, stack, timeline
from appliance.console.forms import Form
from appliance.metering.calendar import BillingCalendar
from tests.support.clock import START


@pytest.mark.parametrize(
    ("micros", "text"),
    [(0, "0.00 EUR"), (12_500_000_000, "12,500.00 EUR"), (1_234_567, "1.234567 EUR"), (-500_000, "-0.50 EUR"), (None, "–")],
)
def test_a_budget_has_two_decimals_or_more_and_grouped_thousands(micros: int | None, text: str) -> None:
    assert formatting.budget(micros, "EUR") == text


def test_a_price_has_grouped_thousands_and_no_currency() -> None:
    assert formatting.unit_price(2_000_015_000) == "2,000.015"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (99_999, "99,999"), (100_000, "100 k"), (1_036_020, "1.04 M"), (2_500_000_000, "2.5 G"), (None, "–")],
)
def test_counts_below_100_000_are_exact_and_larger_ones_have_a_suffix(value: int | None, text: str) -> None:
    assert formatting.compact(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1024**2 * 30, "30.0 MiB"),
        (1024**3 * 140, "140 GiB"),
        (1024**5, "1024 TiB"),
    ],
)
def test_byte_counts_use_binary_units(value: int, text: str) -> None:
    assert formatting.size(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "–"),
        (0, "0 ms"),
        (0.0004, "0.4 ms"),
        (0.2404, "240 ms"),
        (0.9996, "1.00 s"),
        (3.417, "3.42 s"),
        (59.96, "60.0 s"),
        (65, "1 m 05 s"),
        (3600 * 3 + 60 * 12, "3 h 12 m"),
        (86400 * 5 + 3600 * 3, "5 d 3 h"),
    ],
)
def test_a_duration_has_about_three_digits_in_its_largest_units(seconds: float | None, text: str) -> None:
    assert formatting.duration(seconds) == text


@pytest.mark.parametrize(("seconds", "text"), [(1, "1 s"), (59, "59 s"), (60, "1 m 00 s"), (86400, "1 d 0 h")])
def test_durations_in_whole_seconds_have_no_decimals(seconds: int, text: str) -> None:
    assert formatting.duration_s(seconds) == text


def test_an_error_beside_its_field_omits_the_field_s_name() -> None:
    form = Form({})
    form.fail_with(InvalidValue("target must begin with https://", param="target"), ("target",))
    form.fail_with(InvalidValue("limits.weight must be 1", param="limits.weight"), ("weight",))
    form.fail_with(InvalidValue("kind must be one of webhook, email", param="kind"), ("target",))

    assert form.errors == {
        "target": "Must begin with https://.",
        "weight": "Must be 1.",
        "form": "Kind must be one of webhook, email.",
    }


@pytest.mark.parametrize(
    ("picos", "text"),
    [
        (0, "0.000000 EUR"),
        (1, "< 0.000001 EUR"),
        (-1, "> -0.000001 EUR"),
        (10**6, "0.000001 EUR"),
        (5_850_000, "0.000006 EUR"),
        (-2_422_500_000, "-0.002423 EUR"),
        (1_234_567_890_123, "1.234568 EUR"),
        (None, "–"),
    ],
)
def test_a_nonzero_cost_is_never_shown_as_zero(picos: int | None, text: str) -> None:
    assert formatting.money(picos, "EUR") == text


def test_short_costs_have_two_decimals_from_one_currency_unit_up() -> None:
    assert formatting.money_short(1_239_999_999_999, "EUR") == "1.24 EUR"
    assert formatting.money_short(999_999_400_000, "EUR") == "0.999999 EUR"


@pytest.mark.parametrize(
    ("picos", "text"),
    [
        (2_422_500_000, "0.0024225 EUR"),
        (1, "0.000000000001 EUR"),
        (-(10**13), "-10.000000 EUR"),
        (1_500_000_000_000, "1.500000 EUR"),
    ],
)
def test_an_exact_amount_has_all_significant_digits_and_at_least_six_decimals(picos: int, text: str) -> None:
    assert formatting.money_exactly(picos, "EUR") == text


@pytest.mark.parametrize("micros", [0, 1, 12_500_000, 250_000_000, 999_999_999_999_999])
def test_an_amount_formatted_for_a_form_is_parsed_back_unchanged(micros: int) -> None:
    assert Form({"amount": formatting.units(micros)}).amount_micros("amount") == micros


@pytest.mark.parametrize(
    ("typed", "micros"), [("1,5", 1_500_000), ("0,150", 150_000), ("1.500", 1_500_000), ("1500,125", 1_500_125_000)]
)
def test_an_amount_may_have_a_decimal_point_or_a_decimal_comma(typed: str, micros: int) -> None:
    assert Form({"amount": typed}).amount_micros("amount") == micros


@pytest.mark.parametrize("typed", ["1,500", "12,000", "999,999"])
def test_an_amount_whose_comma_may_group_thousands_is_refused_as_ambiguous(typed: str) -> None:
    form = Form({"amount": typed})
    assert form.amount_micros("amount") is None
    assert typed.replace(",", "") in form.errors["amount"]


@pytest.mark.parametrize(
    ("age", "text"),
    [
        (timedelta(0), "just now"),
        (timedelta(seconds=59), "59 s ago"),
        (timedelta(minutes=3), "3 m ago"),
        (timedelta(hours=30), "1 d ago"),
        (timedelta(days=-2), "in 2 d"),
    ],
)
def test_relative_times_carry_the_exact_time(age: timedelta, text: str) -> None:
    shown = str(formatting.ago(START - age, START))

    assert f">{text}</time>" in shown
    assert "datetime=" in shown
    assert "UTC" in shown


def test_lists_show_relative_times_for_a_day_and_then_the_local_minute() -> None:
    when = formatting.template_filters(BillingCalendar("Europe/Zurich"))["when"]
    moment = datetime(2026, 7, 1, 22, 30, 5, tzinfo=UTC)

    assert ">23 h ago</time>" in str(when(moment, moment + timedelta(hours=23)))
    older = str(when(moment, moment + timedelta(hours=24)))
    assert ">2026-07-02 00:30\N{NO-BREAK SPACE}CEST</time>" in older
    assert 'title="2026-07-01 22:30:05 UTC' in older


def test_the_live_clock_shows_and_names_the_billing_zone() -> None:
    moment = datetime(2026, 7, 1, 22, 30, 5, tzinfo=UTC)

    assert formatting.clock_time(moment) == "22:30:05 UTC"
    assert formatting.template_filters(BillingCalendar("Europe/Zurich"))["clock_time"](moment) == "00:30:05 Europe/Zurich"


def test_an_exact_time_repeats_the_date_in_the_billing_zone_only_if_it_differs() -> None:
    exact = formatting.template_filters(BillingCalendar("Europe/Zurich"))["exact_time"]

    assert exact(datetime(2026, 7, 1, 12, 0, tzinfo=UTC)) == "2026-07-01 12:00:00 UTC (14:00:00 Europe/Zurich)"
    late = exact(datetime(2026, 7, 1, 22, 30, tzinfo=UTC))
    assert late == "2026-07-01 22:30:00 UTC (2026-07-02\N{NO-BREAK SPACE}00:30:00 Europe/Zurich)"


@pytest.mark.parametrize(
    ("zone", "moment", "text"),
    [
        ("Europe/Zurich", datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC), "9999-12-31 23:59:59 UTC"),
        ("America/New_York", datetime(1, 1, 1, tzinfo=UTC), "0001-01-01 00:00:00 UTC"),
    ],
)
def test_an_exact_time_without_a_date_in_the_billing_zone_is_in_utc_alone(zone: str, moment: datetime, text: str) -> None:
    """Such as an expiry that was meant as `never`, or the start of a first price that was meant as `always`."""
    assert formatting.exact_time(moment, BillingCalendar(zone)) == text


def test_both_dates_of_a_moment_in_the_first_year_have_four_digits_of_the_year() -> None:
    exact = formatting.exact_time(datetime(1, 1, 1, 23, 0, tzinfo=UTC), BillingCalendar("Etc/GMT-2"))
    assert exact == "0001-01-01 23:00:00 UTC (0001-01-02\N{NO-BREAK SPACE}01:00:00 Etc/GMT-2)"


def test_missing_percentages_and_rates_are_shown_as_a_dash() -> None:
    assert (formatting.percent(0.374), formatting.percent(None)) == ("37 %", "–")
    assert (formatting.rate(12.34), formatting.rate(1234.5), formatting.rate(None)) == ("12.3", "1,234", "–")


def test_segments_of_a_stacked_bar_adjoin_and_end_at_its_width() -> None:
    segments = stack([("a", "A", 30), ("none", "None", 0), ("b", "B", 50), ("c", "C", 60)], 100)

    assert segments == [Segment("a", "A", 0, 30), Segment("b", "B", 30, 50), Segment("c", "C", 80, 20)]
    assert stack([("a", "A", 1)], 0) == []


def test_a_timeline_has_only_the_phases_that_were_reached() -> None:
    queue, prefill, decode = ("queue", "queue", 1.0), ("prefill", "prefill", 1.0), ("decode", "decode", 2.0)
    parts = [(part.name, part.width) for part in timeline([queue, prefill, decode])]
    assert parts == [("queue", 25), ("prefill", 25), ("decode", 50)]
    assert [part.name for part in timeline([queue, ("prefill", "prefill", None)])] == ["queue"]
    assert timeline([("queue", "queue", None)]) == []


def test_a_sparkline_is_aligned_right_with_zero_at_the_bottom() -> None:
    assert spark_points([], 3) == spark_area([], 3) == ""
    assert spark_points([0, 10], 3) == "120.0,39.0 240.0,1.0"
    assert spark_points([0, 0, 0, 0], 3) == "0.0,39.0 120.0,39.0 240.0,39.0"
    assert spark_area([5], 3) == "240.0,40 240.0,1.0 240,40"


def test_a_list_of_names_is_split_at_commas_and_line_feeds_only() -> None:
    assert Form({"models": " a model, b\nb,, "}).names("models") == ("a model", "b")
    assert Form({"models": " , "}).names("models") is None


def test_the_first_error_of_a_field_is_kept() -> None:
    form = Form({})
    form.text("name")
    form.fail("name", "another")

    assert form.errors == {"name": "Fill this in."}


@pytest.mark.parametrize(
    ("micros", "text"),
    [
        (None, "–"),
        (71_037_393_572, "71,037.39 EUR"),
        (267_072, "0.267072 EUR"),
        (-1_372_650_395, "-1,372.65 EUR"),
        (-5, "-0.000005 EUR"),
    ],
)
def test_an_estimate_has_two_decimals_or_up_to_six_below_one_unit(micros: int | None, text: str) -> None:
    assert formatting.estimate(micros, "EUR") == text


def test_large_costs_have_grouped_thousands() -> None:
    picos = 1_234_567_890_000_000_000

    assert formatting.money(picos, "EUR") == "1,234,567.890000 EUR"
    assert formatting.amount(-picos, "EUR") == "-1,234,567.890000"
    assert formatting.amount(picos, "EUR") == "1,234,567.89"
    assert formatting.money_exactly(picos + 1, "EUR") == "1,234,567.890000000001 EUR"
    assert formatting.money(-500_000_000_000, "EUR") == "-0.500000 EUR"
