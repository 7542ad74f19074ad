"""OpenAI's organization API, rate limits of a project: the limits per minute of a tenant, for each model and for all together.

The client's type cannot express "no limit": it is shown and set as the largest number that a limit can have.
"""

from __future__ import annotations

from urllib.parse import quote, unquote

import msgspec
from litestar import get, post
from litestar.params import FromPath

from appliance.api.auth import authenticate_administrator
from appliance.api.bodies import decode_body
from appliance.api.connection_services import services_of
from appliance.api.field_types import Limit
from appliance.api.organization.queries import ListShape, count, list_shape
from appliance.api.queries import AdminRequest
from appliance.base.errors import InvalidValue, NotFound, UnsupportedParameter
from appliance.tenancy.fields import LIMIT_MAX, check_whole
from appliance.tenancy.principals import Limits, Tenant, TenantChanges
from appliance.tenancy.roles import Action

EVERY_MODEL = "*"
ID_PREFIX = "rl-"
LISTED = 100
LISTED_MAX = 1000
LIMIT_OF = {"max_requests_per_1_minute": "requests_per_minute", "max_tokens_per_1_minute": "tokens_per_minute"}


class RateLimitBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Rate limits to set. Limits left out keep their values; 1000000000000000 means no limit."""

    max_requests_per_1_minute: Limit | None = None
    max_tokens_per_1_minute: Limit | None = None
    max_requests_per_1_day: int | None = None
    max_images_per_1_minute: int | None = None
    max_audio_megabytes_per_1_minute: int | None = None
    batch_1_day_max_input_tokens: int | None = None

    def changes(self) -> dict[str, int | None]:
        """Return the limits that were given, by our names. Raises UnsupportedParameter."""
        given = {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not None}
        for name, value in given.items():
            if name not in LIMIT_OF:
                raise UnsupportedParameter(f"{name} is not a limit of this appliance", param=name)
            check_whole(value, name, 0, LIMIT_MAX)
        return {LIMIT_OF[name]: None if value == LIMIT_MAX else value for name, value in given.items()}


class RateLimitShape(msgspec.Struct, kw_only=True):
    """The rate limits of a project for one model, or for all models together (`*`)."""

    id: str
    model: str
    max_requests_per_1_minute: int
    max_tokens_per_1_minute: int
    object: str = "project.rate_limit"


@get(
    "/projects/{project_id:str}/rate_limits",
    summary="List a project's rate limits",
    opt={"query": ("limit", "after", "before")},
)
async def list_rate_limits(request: AdminRequest, project_id: FromPath[str]) -> ListShape[RateLimitShape]:
    """Return the limits of a tenant: first for all models together, then for each model that it may use or that has limits."""
    access = await authenticate_administrator(request, Action.READ, project_id)
    services = services_of(request)
    tenant = await services.tenants.get(project_id, access=access)
    served = [model.name for model in services.models.list()]
    models = [EVERY_MODEL, *sorted(_models_of(tenant, served))]
    models = _between(request, models)
    limit = count(request, LISTED, LISTED_MAX)
    shown = models[-limit:] if "before" in request.query_params else models[:limit]
    return list_shape(
        shown, lambda model: rate_limit_shape(tenant, model), lambda row: row.id, has_more=len(models) > len(shown)
    )


@post(
    "/projects/{project_id:str}/rate_limits/{rate_limit_id:str}",
    status_code=200,
    summary="Change a project's rate limit",
    opt={"body": RateLimitBody, "errors": (409,)},
)
async def change_rate_limit(request: AdminRequest, project_id: FromPath[str], rate_limit_id: FromPath[str]) -> RateLimitShape:
    """Change limits per minute of a tenant. The change applies from the next request on."""
    access = await authenticate_administrator(request, Action.WRITE, project_id)
    changes = decode_body(await request.body(), RateLimitBody).changes()
    services = services_of(request)
    model = _model_of(rate_limit_id)
    if model == EVERY_MODEL:
        changed = await services.tenants.update(project_id, TenantChanges(limits=changes), access=access)
        return rate_limit_shape(changed, model)
    tenant = await services.tenants.get(project_id, access=access)
    known = _models_of(tenant, [served.name for served in services.models.list()])
    if model not in known:
        raise NotFound("no such rate limit", param="rate_limit_id")
    return rate_limit_shape(await services.tenants.limit_model(project_id, model, changes, access=access), model)


def rate_limit_shape(tenant: Tenant, model: str) -> RateLimitShape:
    """Return the limits of `tenant` for `model`."""
    limits = tenant.limits if model == EVERY_MODEL else tenant.model_limits.get(model, Limits())
    shown = {name: getattr(limits, ours) for name, ours in LIMIT_OF.items()}
    shape = RateLimitShape(
        id=_id_of(model), model=model, max_requests_per_1_minute=LIMIT_MAX, max_tokens_per_1_minute=LIMIT_MAX
    )
    return msgspec.structs.replace(shape, **{name: value for name, value in shown.items() if value is not None})


def _models_of(tenant: Tenant, served: list[str]) -> set[str]:
    allowed = tenant.allowed_models
    return {model for model in served if allowed is None or model in allowed} | set(tenant.model_limits)


def _id_of(model: str) -> str:
    """Return an id that fits in one segment of a path, whatever the model is called."""
    return ID_PREFIX + quote(model, safe="*")


def _model_of(rate_limit_id: str) -> str:
    if not rate_limit_id.startswith(ID_PREFIX):
        raise NotFound("no such rate limit", param="rate_limit_id")
    return unquote(rate_limit_id.removeprefix(ID_PREFIX))


def _between(request: AdminRequest, models: list[str]) -> list[str]:
    """Return the models that follow `after` and precede `before`."""
    for name in ("after", "before"):
        rate_limit_id = request.query_params.get(name)
        if rate_limit_id is None:
            continue
        model = _model_of(rate_limit_id)
        if model not in models:
            raise InvalidValue(f"invalid {name} for this list", param=name)
        place = models.index(model)
        models = models[place + 1 :] if name == "after" else models[:place]
    return models
