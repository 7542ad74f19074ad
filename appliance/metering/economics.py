"""What a million tokens cost on this server, and from what usage on it is cheaper than hosted prices. Pure integers; no I/O.

Each figure names its source: entered by the operator, read from the GPU, measured from usage, or computed from others. A month
is 730 hours (8760 / 12). Amounts are micro-units of one currency; an unknown figure is None, never an estimate.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from appliance.base.errors import InvalidValue
from appliance.base.money import BASIS_POINTS, PRICE_MICROS_MAX, divide_half_up
from appliance.tenancy.fields import LIMIT_MAX, check_currency, check_line, check_whole

HOURS_PER_MONTH = 730
MEASURED_DAYS = 30
MEASURED_HOURS = MEASURED_DAYS * 24
MILLION = 10**6
MONTHS_MAX = 240
POWER_W_MAX = 1_000_000
HOSTED_MAX = 20
_WATTS_PER_KW = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedPrice:
    """A hosted price in micro-units per million tokens. `cached_prompt` None: the same as `prompt`."""

    name: str
    prompt: int
    completion: int
    cached_prompt: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", check_line(self.name, "hosted.name"))
        for param in ("prompt", "completion", "cached_prompt"):
            value = getattr(self, param)
            if value is not None:
                check_whole(value, f"hosted.{param}", 0, PRICE_MICROS_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Costs of the server as entered by the operator. `cost_micros` is spread evenly over `months`. `power_w` is its total
    draw; if None, it is what the GPUs report plus `other_power_w` (processor, fans, loss of the power supply).

    Raises InvalidValue naming the field.
    """

    currency: str
    cost_micros: int
    months: int
    kwh_price_micros: int
    power_w: int | None = None
    other_power_w: int = 0
    other_monthly_micros: int = 0
    hosted: tuple[HostedPrice, ...] = ()

    def __post_init__(self) -> None:
        check_currency(self.currency)
        check_whole(self.months, "months", 1, MONTHS_MAX)
        for param in ("cost_micros", "kwh_price_micros", "other_monthly_micros"):
            check_whole(getattr(self, param), param, 0, LIMIT_MAX)
        if self.power_w is not None:
            check_whole(self.power_w, "power_w", 0, POWER_W_MAX)
        check_whole(self.other_power_w, "other_power_w", 0, POWER_W_MAX)
        if len(self.hosted) > HOSTED_MAX:
            raise InvalidValue(f"hosted must be a list of at most {HOSTED_MAX} prices", param="hosted")

    def to_record(self) -> dict[str, Any]:
        """Return the JSON value to store."""
        return dataclasses.asdict(self) | {"hosted": [dataclasses.asdict(price) for price in self.hosted]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Usage of the server in the MEASURED_DAYS before `end`. `busy_hour_tokens`: prompt and completion in the busiest hour."""

    start: datetime
    end: datetime
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    busy_hour_tokens: int = 0
    busy_hour: datetime | None = None

    @property
    def tokens(self) -> int:
        """Return prompt plus completion tokens."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure with its unit and source. `value` None: it is unknown, and `source` says why."""

    name: str
    value: int | None
    unit: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEven:
    """This server against one hosted price, at the measured mix of tokens.

    `share_basis_points`: the break-even tokens as a share of a whole month at the rate of the busiest hour; above 10,000 it is
    more than the server has been seen to do. `saved_month_micros`: at the measured usage.
    """

    name: str
    hosted_per_million_micros: int | None
    break_even_tokens_month: int | None
    share_basis_points: int | None
    hosted_month_micros: int | None
    saved_month_micros: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Economics:
    """All figures, in order of derivation, and the break-even table."""

    currency: str
    figures: tuple[Figure, ...]
    break_even: tuple[BreakEven, ...]

    def value(self, name: str) -> int | None:
        """Return the value of the figure with this name."""
        return next(figure.value for figure in self.figures if figure.name == name)


def hardware_from_record(record: Mapping[str, Any]) -> Hardware:
    """Return the hardware of a stored record; fields added by a later version are ignored."""
    known = {field.name for field in dataclasses.fields(Hardware)}
    given = {name: value for name, value in record.items() if name in known}
    return Hardware(**given | {"hosted": tuple(HostedPrice(**price) for price in given.get("hosted", ()))})


def economics_of(hardware: Hardware, measured: Measured, gpu_power_w: Sequence[int]) -> Economics:
    """Compute all figures from the hardware, its measured usage and the power draw of its GPUs (empty: not readable)."""
    figures = (*_costs(hardware, gpu_power_w), *_use(measured))
    known = {figure.name: figure.value for figure in figures}
    total, mean_month, busy_month = known["total_month"], known["tokens_month_mean"], known["tokens_month_busy"]
    figures += (
        _per_million("cost_per_million_mean", total, mean_month, "tokens_month_mean"),
        _per_million("cost_per_million_busy", total, busy_month, "tokens_month_busy"),
    )
    table = tuple(_break_even(price, measured, total, mean_month, busy_month) for price in hardware.hosted)
    return Economics(currency=hardware.currency, figures=figures, break_even=table)


def _costs(hardware: Hardware, gpu_power_w: Sequence[int]) -> tuple[Figure, ...]:
    entered = "entered by the operator"
    amortisation = divide_half_up(hardware.cost_micros, hardware.months)
    power, power_source = _power(hardware, gpu_power_w)
    energy = None if power is None else divide_half_up(power * HOURS_PER_MONTH * hardware.kwh_price_micros, _WATTS_PER_KW)
    total = None if energy is None else amortisation + energy + hardware.other_monthly_micros
    unit = "micro-units a month"
    return (
        Figure(name="hardware_cost", value=hardware.cost_micros, unit="micro-units", source=entered),
        Figure(name="months", value=hardware.months, unit="months", source=entered),
        Figure(name="hardware_month", value=amortisation, unit=unit, source="hardware_cost / months"),
        Figure(name="power", value=power, unit="W", source=power_source),
        Figure(name="kwh_price", value=hardware.kwh_price_micros, unit="micro-units per kWh", source=entered),
        Figure(name="energy_month", value=energy, unit=unit, source=f"power × {HOURS_PER_MONTH} h × kwh_price"),
        Figure(name="other_month", value=hardware.other_monthly_micros, unit=unit, source=entered),
        Figure(name="total_month", value=total, unit=unit, source="hardware_month + energy_month + other_month"),
    )


def _power(hardware: Hardware, gpu_power_w: Sequence[int]) -> tuple[int | None, str]:
    if hardware.power_w is not None:
        return hardware.power_w, "entered by the operator"
    if not gpu_power_w:
        return None, "unknown: no GPU reports its power; enter power_w"
    gpus = f"{len(gpu_power_w)} GPU{'s' if len(gpu_power_w) > 1 else ''}"
    return sum(gpu_power_w) + hardware.other_power_w, f"what {gpus} draw now (NVML) + other_power_w as entered"


def _use(measured: Measured) -> tuple[Figure, ...]:
    period = f"usage from {measured.start:%Y-%m-%d %H:%M} to {measured.end:%Y-%m-%d %H:%M} UTC"
    busiest = "no usage in any hour" if measured.busy_hour is None else f"the hour from {measured.busy_hour:%Y-%m-%d %H:%M} UTC"
    mean_month = divide_half_up(measured.tokens * HOURS_PER_MONTH, MEASURED_HOURS)
    busy_month = measured.busy_hour_tokens * HOURS_PER_MONTH
    return (
        Figure(name="prompt_tokens", value=measured.prompt_tokens, unit="tokens", source=period),
        Figure(name="cached_tokens", value=measured.cached_tokens, unit="tokens", source=f"{period}; part of prompt_tokens"),
        Figure(name="completion_tokens", value=measured.completion_tokens, unit="tokens", source=period),
        Figure(name="busy_hour_tokens", value=measured.busy_hour_tokens, unit="tokens", source=f"{period}: {busiest}"),
        Figure(
            name="tokens_month_mean",
            value=mean_month,
            unit="tokens a month",
            source=f"(prompt_tokens + completion_tokens) × {HOURS_PER_MONTH} / {MEASURED_HOURS}",
        ),
        Figure(
            name="tokens_month_busy",
            value=busy_month,
            unit="tokens a month",
            source=f"busy_hour_tokens × {HOURS_PER_MONTH}: if every hour were as busy",
        ),
    )


def _per_million(name: str, total: int | None, tokens: int | None, tokens_name: str) -> Figure:
    unit, source = "micro-units per million tokens", f"total_month / {tokens_name}"
    if total is None or tokens is None or tokens <= 0:
        missing = "total_month is unknown" if total is None else "no usage was measured"
        return Figure(name=name, value=None, unit=unit, source=f"{source}; {missing}")
    return Figure(name=name, value=divide_half_up(total * MILLION, tokens), unit=unit, source=source)


def _break_even(
    price: HostedPrice, measured: Measured, total: int | None, mean_month: int | None, busy_month: int | None
) -> BreakEven:
    cached_price = price.prompt if price.cached_prompt is None else price.cached_prompt
    picos = (
        (measured.prompt_tokens - measured.cached_tokens) * price.prompt
        + measured.cached_tokens * cached_price
        + measured.completion_tokens * price.completion
    )
    per_million = divide_half_up(picos, measured.tokens) if measured.tokens > 0 else None
    # The tokens per month at which the hosted cost reaches the total cost, rounded up: with one fewer, this server costs more.
    needed = -(-total * MILLION * measured.tokens // picos) if total is not None and picos > 0 else None
    hosted_month = divide_half_up(picos * HOURS_PER_MONTH, MEASURED_HOURS * MILLION)
    return BreakEven(
        name=price.name,
        hosted_per_million_micros=per_million,
        break_even_tokens_month=needed,
        share_basis_points=divide_half_up(needed * BASIS_POINTS, busy_month) if needed is not None and busy_month else None,
        hosted_month_micros=hosted_month if mean_month else None,
        saved_month_micros=hosted_month - total if total is not None and mean_month else None,
    )
