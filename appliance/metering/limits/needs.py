"""What a request needs from each of its allowances: the prompt, whose length is known exactly, and the expected output."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from appliance.metering.limits.admission_request import AdmissionRequest
from appliance.metering.limits.allowances import Allowance, Amount, Need
from appliance.metering.limits.output_estimates import OutputEstimates
from appliance.tenancy.principals import Limits


class Needs(msgspec.Struct, frozen=True, kw_only=True):
    """What a request needs from each of its allowances; `enforced` is its need from all those that are not in shadow mode."""

    enforced: Need
    by_allowance: Mapping[Allowance, Need]


def needs_of(request: AdmissionRequest, allowances: Sequence[Allowance], estimates: OutputEstimates) -> Needs:
    """Return the need from each of `allowances`. They differ where the output estimate is cut to the room that limits leave:
    limits in shadow mode cut it only for themselves."""
    limits = [allowance.limits for allowance in allowances if allowance.is_enforced]
    enforced = _need(request, _smallest_token_limit(limits), estimates)
    return Needs(
        enforced=enforced,
        by_allowance={
            allowance: enforced
            if allowance.is_enforced
            else _need(request, _smallest_token_limit([*limits, allowance.limits]), estimates)
            for allowance in allowances
        },
    )


def _need(request: AdmissionRequest, limit: float, estimates: OutputEstimates) -> Need:
    room_per_answer = (limit - request.prompt_tokens) / request.num_answers
    per_answer = estimates.estimate_output(request, room_per_answer)
    expected = request.num_answers * per_answer
    longest = request.num_answers * max(per_answer, request.max_output_tokens or 0, request.output_room or 0)
    most_picos = request.cost_at_most(longest)
    expected_picos = max(request.cost(0, expected), min(most_picos, 1))  # not 0, or a spent budget would admit it
    return Need(
        expected=Amount(tokens=request.prompt_tokens + expected, cost_picos=expected_picos),
        worst=Amount(tokens=request.prompt_tokens + longest, cost_picos=most_picos),
        currency=request.currency,
    )


def _smallest_token_limit(all_limits: Sequence[Limits]) -> float:
    sizes = [size for limits in all_limits for size in (limits.tokens_per_minute, limits.tokens_per_day) if size is not None]
    return min(sizes, default=math.inf)
