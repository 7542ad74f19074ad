"""`/admin/v1/economics`: what a million tokens cost on this box, next to the prices of hosted models."""

from __future__ import annotations

import msgspec
from litestar import get, put

from appliance.api.auth import authenticate_administrator
from appliance.api.bodies import decode_body
from appliance.api.connection_services import services_of
from appliance.api.queries import AdminRequest
from appliance.api.shapes import shape_of
from appliance.metering.economics import Hardware, HostedPrice
from appliance.tenancy.roles import Action

TAGS = ["administration"]


class HostedPriceShape(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What somebody else charges, in micro-units per million tokens; null for cached input: it costs as other input."""

    name: str
    prompt: int
    completion: int
    cached_prompt: int | None = None


class HardwareShape(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What the box costs. `power_w` null: what the GPUs report, and `other_power_w` beside it. Money in micro-units."""

    cost_micros: int
    months: int
    kwh_price_micros: int
    power_w: int | None = None
    other_power_w: int = 0
    other_monthly_micros: int = 0
    currency: str | None = None
    hosted: list[HostedPriceShape] = []


class FigureShape(msgspec.Struct, kw_only=True):
    """A figure, its unit and where it comes from; null: it cannot be known, and `source` says why."""

    name: str
    value: int | None
    unit: str
    source: str


class BreakEvenShape(msgspec.Struct, kw_only=True):
    """This box against one hosted price, at the measured mix of tokens. `share_basis_points` is of what the busiest hour would
    be, kept up all month."""

    name: str
    hosted_per_million_micros: int | None
    break_even_tokens_month: int | None
    share_basis_points: int | None
    hosted_month_micros: int | None
    saved_month_micros: int | None


class EconomicsShape(msgspec.Struct, kw_only=True):
    """All figures, in the order in which they follow from each other."""

    currency: str
    hardware: HardwareShape
    figures: list[FigureShape]
    break_even: list[BreakEvenShape]


@get("/economics", summary="What a million tokens cost here", tags=TAGS, opt={"errors": (404,)})
async def retrieve_economics(request: AdminRequest) -> EconomicsShape:
    """Return the figures that follow from the hardware, the power and the usage of the last thirty days."""
    (await authenticate_administrator(request, Action.READ_BOX)).require(Action.READ_BOX)
    return await _report(request)


@put("/economics", summary="Set the cost of the appliance", tags=TAGS, opt={"body": HardwareShape})
async def replace_hardware(request: AdminRequest) -> EconomicsShape:
    """Replace what was said of the hardware, and return the figures that follow."""
    (await authenticate_administrator(request, Action.BILLING)).require(Action.BILLING)
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
    hosted = [shape_of(HostedPriceShape, price) for price in hardware.hosted]
    return EconomicsShape(
        currency=economics.currency,
        hardware=shape_of(HardwareShape, hardware, hosted=hosted),
        figures=[shape_of(FigureShape, figure) for figure in economics.figures],
        break_even=[shape_of(BreakEvenShape, row) for row in economics.break_even],
    )


HANDLERS = [retrieve_economics, replace_hardware]
