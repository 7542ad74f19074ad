"""What a request asks of each of its allowances: the prompt, which is known exactly, and the output that is expected."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from appliance.metering.limits.admission_request import AdmissionRequest
from appliance.metering.limits.allowances import Allowance, Amount, Need
from appliance.metering.limits.output_estimates import OutputEstimates
from appliance.tenancy.principals import Limits


class Needs(msgspec.Struct, frozen=True, kw_only=True):
    """What a request asks of each of its allowances; `common` is what it asks of all that refuse."""

    common: Need
    each: Mapping[Allowance, Need]


def needs_of(request: AdmissionRequest, allowances: Sequence[Allowance], estimates: OutputEstimates) -> Needs:
    """Return what is asked of each of `allowances`. It differs where a guess is cut to the room that limits leave: limits in
    shadow mode cut it for themselves alone."""
    enforced = [allowance.limits for allowance in allowances if allowance.enforces]
    common = _need(request, _room(enforced), estimates)
    return Needs(
        common=common,
        each={
            allowance: common if allowance.enforces else _need(request, _room([*enforced, allowance.limits]), estimates)
            for allowance in allowances
        },
    )


def _need(request: AdmissionRequest, room: float, estimates: OutputEstimates) -> Need:
    room_each = (room - request.prompt_tokens) / request.answers
    each = estimates.output(request, room_each)
    expected = request.answers * each
    longest = request.answers * max(each, request.max_output_tokens or 0, request.output_room or 0)
    return Need(
        expected=Amount(tokens=request.prompt_tokens + expected, cost_picos=request.cost(0, expected)),
        worst=Amount(tokens=request.prompt_tokens + longest, cost_picos=request.cost_at_most(longest)),
        currency=request.currency,
    )


def _room(limits: Sequence[Limits]) -> float:
    """Return the smallest limit in tokens."""
    sizes = [size for each in limits for size in (each.tokens_per_minute, each.tokens_per_day) if size is not None]
    return min(sizes, default=math.inf)
