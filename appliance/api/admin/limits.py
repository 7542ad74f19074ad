"""`/admin/v1/tiers` and `/admin/v1/model-limits`: limits that belong to no tenant."""

from __future__ import annotations

import msgspec
from litestar import delete, get, patch, put
from litestar.params import FromPath

from appliance.api.admin.tenants import LimitsBody
from appliance.api.auth import authenticate_administrator
from appliance.api.bodies import decode_body, named
from appliance.api.connection_services import services_of
from appliance.api.queries import PAGING, AdminRequest, short_page
from appliance.api.shapes import LimitsShape, PageShape, page_shape, shape_of
from appliance.tenancy.fields import TIERS
from appliance.tenancy.model_policies import ModelPolicy
from appliance.tenancy.principals import Limits
from appliance.tenancy.roles import Action
from appliance.tenancy.tiers import Tier

TAGS = ["administration"]


class TierShape(msgspec.Struct, kw_only=True):
    """A tier. `admission_wait_ms`: how long a request that a limit refuses waits for room before it hears 429."""

    name: str
    admission_wait_ms: int


class TierPatch(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What to change of a tier."""

    admission_wait_ms: int


class ModelLimitsShape(msgspec.Struct, kw_only=True):
    """What all tenants together may use of a model."""

    model: str
    limits: LimitsShape
    limit_mode: str
    updated_at: str


class ModelLimitsBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The limits of a model, which take the place of its former ones: what is left out is no limit."""

    limits: LimitsBody
    limit_mode: str = "enforce"


@get("/tiers", summary="List tiers", tags=TAGS, opt={"query": PAGING})
async def list_tiers(request: AdminRequest) -> PageShape[TierShape]:
    """Return the three tiers, from the most to the least urgent."""
    await authenticate_administrator(request, Action.READ_BOX)
    tiers = await services_of(request).tiers.list()
    return page_shape(short_page(request, tiers, "tiers", lambda tier: str(TIERS.index(tier.name))), _tier_shape)


@patch("/tiers/{name:str}", summary="Change a tier", tags=TAGS, opt={"body": TierPatch})
async def change_tier(request: AdminRequest, name: FromPath[str]) -> TierShape:
    """Change a tier; it counts from the next request on."""
    await authenticate_administrator(request, Action.WRITE)
    body = decode_body(await request.body(), TierPatch)
    return _tier_shape(await services_of(request).tiers.update(name, admission_wait_ms=body.admission_wait_ms))


@get("/model-limits", summary="List the limits of models", tags=TAGS, opt={"query": PAGING})
async def list_model_limits(request: AdminRequest) -> PageShape[ModelLimitsShape]:
    """Return the limits of every model that has some, by the model's name."""
    await authenticate_administrator(request, Action.READ_BOX)
    found = await services_of(request).model_policies.list()
    return page_shape(short_page(request, found, "model-limits", lambda policy: policy.model), _model_limits_shape)


@put("/model-limits/{model:path}", status_code=200, summary="Limit a model", tags=TAGS, opt={"body": ModelLimitsBody})
async def put_model_limits(request: AdminRequest, model: FromPath[str]) -> ModelLimitsShape:
    """Set what all tenants together may use of a model; it counts from the next request on."""
    await authenticate_administrator(request, Action.WRITE)
    body = decode_body(await request.body(), ModelLimitsBody)
    limits = Limits(**named(body.limits))
    policies = services_of(request).model_policies
    return _model_limits_shape(await policies.put(model.removeprefix("/"), limits, body.limit_mode))


@delete("/model-limits/{model:path}", status_code=200, summary="Lift the limits of a model", tags=TAGS)
async def remove_model_limits(request: AdminRequest, model: FromPath[str]) -> ModelLimitsShape:
    """Take the limits of a model away, and return those that were."""
    await authenticate_administrator(request, Action.WRITE)
    return _model_limits_shape(await services_of(request).model_policies.remove(model.removeprefix("/")))


def _tier_shape(tier: Tier) -> TierShape:
    return shape_of(TierShape, tier)


def _model_limits_shape(policy: ModelPolicy) -> ModelLimitsShape:
    return shape_of(ModelLimitsShape, policy)


HANDLERS = [list_tiers, change_tier, list_model_limits, put_model_limits, remove_model_limits]
