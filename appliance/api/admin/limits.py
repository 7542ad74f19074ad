"""`/admin/v1/tiers` and `/admin/v1/model-limits`: limits that are not those of a single tenant."""

from __future__ import annotations

from typing import Annotated

import msgspec
from litestar import delete, get, patch, put
from litestar.params import FromPath

from appliance.api.admin.tenants import LimitsBody
from appliance.api.auth import authenticate_administrator
from appliance.api.bodies import decode_body, given_fields
from appliance.api.connection_services import services_of
from appliance.api.field_types import LimitMode, within
from appliance.api.queries import PAGING, AdminRequest, page_of_list
from appliance.api.shapes import LimitsShape, PageShape, Shape, page_shape
from appliance.tenancy.fields import TIERS
from appliance.tenancy.principals import Limits
from appliance.tenancy.roles import Action
from appliance.tenancy.tiers import ADMISSION_WAIT_MS_MAX


class TierShape(Shape, kw_only=True):
    """A tier of tenants."""

    name: str
    admission_wait_ms: int


class TierPatch(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields of a tier to change."""

    admission_wait_ms: Annotated[int, within(0, ADMISSION_WAIT_MS_MAX)]


class ModelLimitsShape(Shape, kw_only=True):
    """The limits of a model for all tenants together."""

    model: str
    limits: LimitsShape
    limit_mode: str
    updated_at: str


class ModelLimitsBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The new limits of a model. They replace all earlier ones: a limit left out is removed."""

    limits: LimitsBody
    limit_mode: LimitMode = "enforce"


@get("/tiers", summary="List tiers", opt={"query": PAGING})
async def list_tiers(request: AdminRequest) -> PageShape[TierShape]:
    """Return the three tiers, most urgent first."""
    await authenticate_administrator(request, Action.READ_APPLIANCE)
    tiers = await services_of(request).tiers.list()
    return page_shape(page_of_list(request, tiers, "tiers", lambda tier: str(TIERS.index(tier.name))), TierShape.of)


@patch("/tiers/{name:str}", summary="Change a tier", opt={"body": TierPatch})
async def change_tier(request: AdminRequest, name: FromPath[str]) -> TierShape:
    """Change a tier. The change applies from the next request on."""
    await authenticate_administrator(request, Action.WRITE)
    body = decode_body(await request.body(), TierPatch)
    return TierShape.of(await services_of(request).tiers.update(name, admission_wait_ms=body.admission_wait_ms))


@get("/model-limits", summary="List model limits", opt={"query": PAGING})
async def list_model_limits(request: AdminRequest) -> PageShape[ModelLimitsShape]:
    """Return the models that have limits for all tenants together, sorted by name."""
    await authenticate_administrator(request, Action.READ_APPLIANCE)
    policies = await services_of(request).model_policies.list()
    return page_shape(page_of_list(request, policies, "model-limits", lambda policy: policy.model), ModelLimitsShape.of)


@put("/model-limits/{model:path}", status_code=200, summary="Set a model's limits", opt={"body": ModelLimitsBody})
async def put_model_limits(request: AdminRequest, model: FromPath[str]) -> ModelLimitsShape:
    """Replace the limits of a model for all tenants together. The change applies from the next request on."""
    await authenticate_administrator(request, Action.WRITE)
    body = decode_body(await request.body(), ModelLimitsBody)
    limits = Limits(**given_fields(body.limits))
    policies = services_of(request).model_policies
    return ModelLimitsShape.of(await policies.put(model.removeprefix("/"), limits, body.limit_mode))


@delete("/model-limits/{model:path}", status_code=200, summary="Remove a model's limits")
async def remove_model_limits(request: AdminRequest, model: FromPath[str]) -> ModelLimitsShape:
    """Remove the limits of a model and return the removed ones."""
    await authenticate_administrator(request, Action.WRITE)
    return ModelLimitsShape.of(await services_of(request).model_policies.remove(model.removeprefix("/")))
