"""OpenAI's organization API, project rate limits: a tenant's limits per minute, for each model and for all models together.

OpenAI's type cannot express "no limit", so the largest possible limit stands for it, in responses and in requests.
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
from appliance.api.organization.queries import ListShape, list_shape, page_limit
from appliance.api.queries import AdminRequest
from appliance.base.errors import InvalidValue, NotFound, UnsupportedParameter
from appliance.tenancy.fields import LIMIT_MAX, check_whole
from appliance.tenancy.principals import Limits, Tenant, TenantChanges
from appliance.tenancy.roles import Action

ALL_MODELS = "*"
ID_PREFIX = "rl-"
PAGE_DEFAULT = 100
PAGE_MAX = 1000
_OUR_NAMES = {"max_requests_per_1_minute": "requests_per_minute", "max_tokens_per_1_minute": "tokens_per_minute"}


class RateLimitBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Rate limits to set. Limits left out keep their values; 1000000000000000 means no limit."""

    max_requests_per_1_minute: Limit | None = None
    max_tokens_per_1_minute: Limit | None = None
    max_requests_per_1_day: int | None = None
    max_images_per_1_minute: int | None = None
    max_audio_megabytes_per_1_minute: int | None = None
    batch_1_day_max_input_tokens: int | None = None

    def changes(self) -> dict[str, int | None]:
        """Return the given limits under our names. Raises UnsupportedParameter and InvalidValue."""
        given = {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not None}
        for name, value in given.items():
            if name not in _OUR_NAMES:
                raise UnsupportedParameter(f"{name} is not supported by this appliance", param=name)
            check_whole(value, name, 0, LIMIT_MAX)
        return {_OUR_NAMES[name]: None if value == LIMIT_MAX else value for name, value in given.items()}


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
    """Return a tenant's limits: first for all models together, then for each model that it may use or that has limits."""
    access = await authenticate_administrator(request, Action.READ, project_id)
    services = services_of(request)
    tenant = await services.tenants.get(project_id, access=access)
    served = [model.name for model in services.models.list()]
    models = _between_cursors(request, [ALL_MODELS, *sorted(_models_of(tenant, served))])
    limit = page_limit(request, PAGE_DEFAULT, PAGE_MAX)
    page = models[-limit:] if "before" in request.query_params else models[:limit]
    return list_shape(page, lambda model: rate_limit_shape(tenant, model), lambda row: row.id, has_more=len(models) > len(page))


@post(
    "/projects/{project_id:str}/rate_limits/{rate_limit_id:str}",
    status_code=200,
    summary="Change a project's rate limit",
    opt={"body": RateLimitBody, "errors": (409,)},
)
async def change_rate_limit(request: AdminRequest, project_id: FromPath[str], rate_limit_id: FromPath[str]) -> RateLimitShape:
    """Change a tenant's limits per minute. The change applies from the next request on."""
    access = await authenticate_administrator(request, Action.WRITE, project_id)
    changes = decode_body(await request.body(), RateLimitBody).changes()
    services = services_of(request)
    model = _model_of(rate_limit_id)
    if model == ALL_MODELS:
        changed = await services.tenants.update(project_id, TenantChanges(limits=changes), access=access)
        return rate_limit_shape(changed, model)
    tenant = await services.tenants.get(project_id, access=access)
    known = _models_of(tenant, [served.name for served in services.models.list()])
    if model not in known:
        raise NotFound("no such rate limit", param="rate_limit_id")
    return rate_limit_shape(await services.tenants.limit_model(project_id, model, changes, access=access), model)


def rate_limit_shape(tenant: Tenant, model: str) -> RateLimitShape:
    """Return the limits of `tenant` for `model`."""
    limits = tenant.limits if model == ALL_MODELS else tenant.model_limits.get(model, Limits())
    values = {name: getattr(limits, our_name) for name, our_name in _OUR_NAMES.items()}
    unlimited = RateLimitShape(
        id=_id_of(model), model=model, max_requests_per_1_minute=LIMIT_MAX, max_tokens_per_1_minute=LIMIT_MAX
    )
    return msgspec.structs.replace(unlimited, **{name: value for name, value in values.items() if value is not None})


def _models_of(tenant: Tenant, served: list[str]) -> set[str]:
    allowed = tenant.allowed_models
    return {model for model in served if allowed is None or model in allowed} | set(tenant.model_limits)


def _id_of(model: str) -> str:
    """Return an id that fits into one path segment, whatever the model's name."""
    return ID_PREFIX + quote(model, safe="*")


def _model_of(rate_limit_id: str) -> str:
    if not rate_limit_id.startswith(ID_PREFIX):
        raise NotFound("no such rate limit", param="rate_limit_id")
    return unquote(rate_limit_id.removeprefix(ID_PREFIX))


def _between_cursors(request: AdminRequest, models: list[str]) -> list[str]:
    """Return the models that follow `after` and precede `before`. Raises InvalidValue."""
    for name in ("after", "before"):
        rate_limit_id = request.query_params.get(name)
        if rate_limit_id is None:
            continue
        model = _model_of(rate_limit_id)
        if model not in models:
            raise InvalidValue(f"invalid {name} for this list", param=name)
        index = models.index(model)
        models = models[index + 1 :] if name == "after" else models[:index]
    return models
