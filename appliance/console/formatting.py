"""Template filters: pure functions that format numbers, times and money. Knows no service."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any

from markupsafe import Markup

from appliance.base.clock import rfc3339
from appliance.base.money import MICROS_PER_UNIT, PICOS_PER_MICRO, PICOS_PER_UNIT, format_exactly, format_picos, micros_of_picos
from appliance.metering.calendar import BillingCalendar

NOTHING = "–"
_NO_TIME = Markup("–")
_NO_BREAK = "\N{NO-BREAK SPACE}"
_TIME = Markup('<time datetime="{}" title="{}">{}</time>')
_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_MINUTE_S, _HOUR_S, _DAY_S = 60, 3600, 86400
_EXACT_COUNT_MAX = 99_999
_CENTS_DECIMALS = 2
_MONEY_DECIMALS = 6
_DAY, _TIME_OF_DAY = "%Y-%m-%d", "%H:%M:%S"
_MINUTE = f"{_DAY} %H:%M{_NO_BREAK}%Z"  # 2026-10-24 14:03 CEST
_UTC = BillingCalendar()


def count(value: int | None) -> str:
    """Format an integer with thousands separators: 12,345."""
    return NOTHING if value is None else f"{value:,}"


def compact(value: float | None) -> str:
    """Format a count: exact up to five digits, then with three significant digits: 123 k, 4.56 M."""
    if value is None:
        return NOTHING
    if abs(value) <= _EXACT_COUNT_MAX:
        return f"{round(value):,}"
    for unit, size in (("G", 1e9), ("M", 1e6)):
        if abs(value) >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e3:.0f} k"


def size(value: int | None) -> str:
    """Format bytes in binary units with at most one decimal: 10.2 GiB."""
    if value is None:
        return NOTHING
    number, unit = float(value), _BYTE_UNITS[0]
    for unit in _BYTE_UNITS:
        if abs(number) < 1024 or unit == _BYTE_UNITS[-1]:
            break
        number /= 1024
    decimals = 0 if unit in ("B", "KiB") or number >= 100 else 1
    return f"{number:.{decimals}f} {unit}"


def duration(seconds: float | None) -> str:
    """Format a duration with about three significant digits: 240 ms, 3.42 s, 4 m 05 s, 3 h 12 m, 5 d 3 h."""
    if seconds is None:
        return NOTHING
    if 0 < seconds < 0.00995:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < _MINUTE_S:
        return f"{seconds:.1f} s"
    return duration_s(int(seconds))


def duration_s(whole: int) -> str:
    """Format a duration in whole seconds, for values updated once a second: 54 s, 4 m 05 s, 3 h 12 m, 5 d 3 h."""
    if whole < _MINUTE_S:
        return f"{whole} s"
    if whole < _HOUR_S:
        return f"{whole // _MINUTE_S} m {whole % _MINUTE_S:02d} s"
    if whole < _DAY_S:
        return f"{whole // _HOUR_S} h {whole % _HOUR_S // _MINUTE_S:02d} m"
    return f"{whole // _DAY_S} d {whole % _DAY_S // _HOUR_S} h"


def rate(per_second: float | None) -> str:
    """Format a rate without its unit, with one decimal below 100."""
    if per_second is None:
        return NOTHING
    return f"{per_second:.1f}" if per_second < 99.95 else f"{per_second:,.0f}"


def percent(fraction: float | None) -> str:
    """Format a fraction of 1 as a whole percentage."""
    return NOTHING if fraction is None else f"{fraction * 100:,.0f} %"


def money(picos: int | None, currency: str) -> str:
    """Format a cost in pico-units with six decimals, rounded half up; one that would round to zero as `< 0.000001`."""
    if picos is None:
        return NOTHING
    if picos and not micros_of_picos(picos):
        sign, bound = ("<", PICOS_PER_MICRO) if picos > 0 else (">", -PICOS_PER_MICRO)
        return f"{sign} {format_picos(bound, currency, _MONEY_DECIMALS)}"
    return _grouped(format_picos(picos, currency, _MONEY_DECIMALS))


def money_exactly(picos: int, currency: str) -> str:
    """Format a cost in pico-units exactly, with up to twelve decimals."""
    return _grouped(format_exactly(picos, currency))


def money_short(picos: int | None, currency: str) -> str:
    """Format a cost in pico-units for a tile: with two decimals from one unit up, else like `money`."""
    if picos is None or picos < PICOS_PER_UNIT:
        return money(picos, currency)
    return _grouped(format_picos(picos, currency, _CENTS_DECIMALS))


def _grouped(amount: str) -> str:
    """Insert thousands separators into the integer part of `amount`, a decimal number followed by any text."""
    return re.sub(r"\d+", lambda digits: f"{int(digits[0]):,}", amount, count=1)


def amount(picos: int | None, currency: str) -> str:
    """Like `money_short` without the currency, for a tile whose label names it."""
    return money_short(picos, currency).removesuffix(f" {currency}")


def budget(micros: int | None, currency: str) -> str:
    """Format an amount in micro-units exactly, with at least two decimals."""
    if micros is None:
        return NOTHING
    return f"{unit_price(micros)} {currency}"


def unit_price(micros: int) -> str:
    """Format micro-units exactly with grouped thousands, without the currency: 2,000.00."""
    return _grouped(units(micros))


def estimate(micros: int | None, currency: str) -> str:
    """Format a computed, possibly negative amount in micro-units like `money_short`."""
    if micros is None:
        return NOTHING
    return ("-" if micros < 0 else "") + money_short(abs(micros) * PICOS_PER_MICRO, currency)


def units(micros: int | None) -> str:
    """Format micro-units as a decimal number of units without the currency, as a form takes it: 1012.50."""
    if micros is None:
        return ""
    whole, rest = divmod(abs(micros), MICROS_PER_UNIT)
    return f"{'-' if micros < 0 else ''}{whole}.{f'{rest:06d}'.rstrip('0').ljust(_CENTS_DECIMALS, '0')}"


def exact_time(moment: datetime | None, calendar: BillingCalendar = _UTC) -> str:
    """Format a time in UTC, to the second, followed by the local time (and date, if it differs) in the billing time zone."""
    if moment is None:
        return NOTHING
    utc, local = moment.astimezone(UTC), calendar.local(moment)
    text = f"{utc.date()} {utc:{_TIME_OF_DAY}} UTC"
    if calendar.time_zone == "UTC" or local.tzinfo is UTC:
        return text
    local_day = "" if local.date() == utc.date() else f"{local.date()}{_NO_BREAK}"
    return f"{text} ({local_day}{local:{_TIME_OF_DAY}} {calendar.time_zone})"


def ago(moment: datetime | None, now: datetime, calendar: BillingCalendar = _UTC) -> Markup:
    """Return a `<time>` element relative to `now` (3 m ago, in 2 d), with the exact time as its tooltip."""
    if moment is None:
        return _NO_TIME
    return _TIME.format(rfc3339(moment), exact_time(moment, calendar), distance(moment, now))


def when(moment: datetime, now: datetime, calendar: BillingCalendar = _UTC) -> Markup:
    """Like `ago` for the last 24 hours; earlier times as date and minute in the billing zone, for lists searched by time."""
    if (now - moment).total_seconds() < _DAY_S:
        return ago(moment, now, calendar)
    return _TIME.format(rfc3339(moment), exact_time(moment, calendar), f"{calendar.local(moment):{_MINUTE}}")


def distance(moment: datetime, now: datetime) -> str:
    """Format the distance of `moment` from `now` in its largest unit."""
    seconds = (now - moment).total_seconds()
    size_s = abs(seconds)
    if size_s < 5:
        return "just now"
    length = _largest_unit(size_s)
    return f"{length} ago" if seconds > 0 else f"in {length}"


def _largest_unit(seconds: float) -> str:
    for unit, unit_s in (("d", _DAY_S), ("h", _HOUR_S), ("m", _MINUTE_S)):
        if seconds >= unit_s:
            return f"{int(seconds // unit_s)} {unit}"
    return f"{int(seconds)} s"


def clock_time(moment: datetime, calendar: BillingCalendar = _UTC) -> str:
    """Format the time of day in the billing time zone, to the second, with the name of the zone."""
    return f"{calendar.local(moment):{_TIME_OF_DAY}} {calendar.time_zone}"


def template_filters(calendar: BillingCalendar) -> dict[str, Callable[..., Any]]:
    """Return the template filters; those that format times use the time zone of `calendar`."""
    return FILTERS | {format_.__name__: partial(format_, calendar=calendar) for format_ in (ago, clock_time, exact_time, when)}


FILTERS: dict[str, Callable[..., Any]] = {
    "ago": ago,
    "amount": amount,
    "budget": budget,
    "clock_time": clock_time,
    "compact": compact,
    "count": count,
    "duration": duration,
    "estimate": estimate,
    "exact_time": exact_time,
    "money": money,
    "money_exactly": money_exactly,
    "money_short": money_short,
    "percent": percent,
    "rate": rate,
    "rfc3339": rfc3339,
    "size": size,
    "unit_price": unit_price,
    "units": units,
    "when": when,
}
