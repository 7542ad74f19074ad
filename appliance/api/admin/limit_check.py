"""`POST /admin/v1/limits/check`: dry run of a request against the limits. Reserves nothing."""

from __future__ import annotations

from typing import Annotated

import msgspec
from litestar import post

from appliance.api.auth import authenticate_administrator
from appliance.api.bodies import decode_body
from appliance.api.connection_services import services_of
from appliance.api.field_types import Limit, Name, one_of, within
from appliance.api.queries import AdminRequest
from appliance.api.shapes import Shape
from appliance.base.errors import NotFound
from appliance.metering.limits.admission_request import SERVICE_TIERS, is_batch_work
from appliance.serving.dry_runs import DryRunRequest, DryRunResult
from appliance.tenancy.fields import LIMIT_MAX, check_name, check_whole
from appliance.tenancy.roles import Action

CHOICES_MAX = 128


class LimitCheckBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A hypothetical request: who would send it, to which model, and how large it would be."""

    tenant_id: Name
    model: Name
    prompt_tokens: Limit
    key_id: Name | None = None
    max_tokens: Annotated[int, within(1, LIMIT_MAX)] | None = None
    n: Annotated[int, within(1, CHOICES_MAX)] = 1
    service_tier: Annotated[str, one_of(SERVICE_TIERS)] | None = None


class LimitDecisionShape(Shape, kw_only=True):
    """The decision of one limit. For a budget, `need`, `limit` and `level` are in pico-units of the currency."""

    scope: str
    model: str | None
    kind: str
    mode: str
    allowed: bool
    need: int
    limit: int
    level: int
    wait_s: float | None
    held: bool
    estimated: bool
    ahead: int


class LimitErrorShape(Shape, kw_only=True):
    """The error that the client would receive."""

    status: int
    type: str
    code: str
    message: str
    retry_after_s: float | None


class LimitCheckShape(Shape, kw_only=True):
    """The outcome: the request would be admitted immediately, wait for room, or be refused with `error`."""

    allowed: bool
    would_wait: bool
    wait_s: float | None
    admission_wait_ms: int
    reserved_tokens: int
    error: LimitErrorShape | None
    decisions: list[LimitDecisionShape]


@post(
    "/limits/check",
    status_code=200,
    summary="Check a request against the limits",
    opt={"body": LimitCheckBody, "errors": (404,)},
)
async def check_limits(request: AdminRequest) -> LimitCheckShape:
    """Return whether a request of this size would be admitted now, with the decision of each limit. Nothing is reserved."""
    access = await authenticate_administrator(request, Action.READ)
    body = decode_body(await request.body(), LimitCheckBody)
    services = services_of(request)
    tenant = await services.tenants.get(check_name(body.tenant_id, "tenant_id"), access=access)
    key = None if body.key_id is None else await services.keys.get(check_name(body.key_id, "key_id"), access=access)
    if key is not None and key.tenant_id != tenant.id:
        raise NotFound("no such key", param="key_id")
    hypothetical = DryRunRequest(
        tenant=tenant,
        key=key,
        model=check_name(body.model, "model"),
        prompt_tokens=check_whole(body.prompt_tokens, "prompt_tokens", 0, LIMIT_MAX),
        max_tokens=None if body.max_tokens is None else check_whole(body.max_tokens, "max_tokens", 1, LIMIT_MAX),
        num_answers=check_whole(body.n, "n", 1, CHOICES_MAX),
        batch=body.service_tier is not None and is_batch_work(body.service_tier),
    )
    return _shape(await services.dry_runs.run(hypothetical))


def _shape(result: DryRunResult) -> LimitCheckShape:
    return LimitCheckShape.of(
        result,
        reserved_tokens=result.limits.tokens,
        error=None if result.error is None else LimitErrorShape.of(result.error),
        decisions=[LimitDecisionShape.of(decision) for decision in result.limits.decisions],
    )
