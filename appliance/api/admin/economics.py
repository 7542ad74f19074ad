"""`/admin/v1/economics`: the cost of a million tokens on this appliance, compared with the prices of hosted models."""

from __future__ import annotations

from typing import Annotated

import msgspec
from litestar import get, put

from appliance.api.auth import authenticate_administrator
from appliance.api.bodies import decode_body
from appliance.api.connection_services import services_of
from appliance.api.field_types import Amount, Currency, Name, UnitPrice, items, within
from appliance.api.queries import AdminRequest
from appliance.api.shapes import Shape
from appliance.metering.economics import HOSTED_MAX, MONTHS_MAX, POWER_W_MAX, Hardware, HostedPrice
from appliance.tenancy.roles import Action

Power = Annotated[int, within(0, POWER_W_MAX)]


class HostedPriceShape(Shape, kw_only=True, forbid_unknown_fields=True):
    """The price of a hosted model for comparison, in micro-units of the currency per million tokens."""

    name: Name
    prompt: UnitPrice
    completion: UnitPrice
    cached_prompt: UnitPrice | None = None


class HardwareShape(Shape, kw_only=True, forbid_unknown_fields=True):
    """The cost of the appliance's hardware and power. Amounts are in micro-units of the currency."""

    cost_micros: Amount
    months: Annotated[int, within(1, MONTHS_MAX)]
    kwh_price_micros: Amount
    power_w: Power | None = None
    other_power_w: Power = 0
    other_monthly_micros: Amount = 0
    currency: Currency | None = None
    hosted: Annotated[list[HostedPriceShape], items(0, HOSTED_MAX)] = []


class FigureShape(Shape, kw_only=True):
    """A figure of the report, with its unit and source."""

    name: str
    value: int | None
    unit: str
    source: str


class BreakEvenShape(Shape, kw_only=True):
    """This appliance compared with one hosted price, at the measured mix of prompt, cached and output tokens."""

    name: str
    hosted_per_million_micros: int | None
    break_even_tokens_month: int | None
    share_basis_points: int | None
    hosted_month_micros: int | None
    saved_month_micros: int | None


class EconomicsShape(msgspec.Struct, kw_only=True):
    """The cost of a million tokens on this appliance, as a list of figures, each after those from which it is computed."""

    currency: str
    hardware: HardwareShape
    figures: list[FigureShape]
    break_even: list[BreakEvenShape]


@get("/economics", summary="Retrieve the cost of a million tokens", opt={"errors": (404,)})
async def retrieve_economics(request: AdminRequest) -> EconomicsShape:
    """Return the figures computed from the hardware, the power and the usage of the last 30 days; 404 until a cost is set."""
    await authenticate_administrator(request, Action.READ_APPLIANCE)
    return await _report(request)


@put("/economics", summary="Set the cost of the appliance", opt={"body": HardwareShape})
async def replace_hardware(request: AdminRequest) -> EconomicsShape:
    """Replace the cost of the hardware and power, and return the new figures. Fields left out get their defaults."""
    await authenticate_administrator(request, Action.BILLING)
    body = decode_body(await request.body(), HardwareShape)
    services = services_of(request)
    fields = msgspec.structs.asdict(body)
    hosted = tuple(HostedPrice(**msgspec.structs.asdict(price)) for price in body.hosted)
    currency = services.settings.currency if body.currency is None else body.currency
    await services.economics.set_hardware(Hardware(**fields | {"hosted": hosted, "currency": currency}))
    return await _report(request)


async def _report(request: AdminRequest) -> EconomicsShape:
    services = services_of(request)
    hardware, economics = await services.economics.report(services.sampler.latest.gpu_power_w)
    hosted = [HostedPriceShape.of(price) for price in hardware.hosted]
    return EconomicsShape(
        currency=economics.currency,
        hardware=HardwareShape.of(hardware, hosted=hosted),
        figures=[FigureShape.of(figure) for figure in economics.figures],
        break_even=[BreakEvenShape.of(row) for row in economics.break_even],
    )
