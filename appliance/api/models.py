"""`GET /v1/models`: the available models with their context length. Never rate-limited, because clients call it often."""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import Request, get
from litestar.params import FromPath

from appliance.api.auth import authenticate_tenant
from appliance.api.connection_services import services_of
from appliance.serving.model_registry import ServedModel, model_not_found

OWNER = "gatehouse"


class ModelShape(msgspec.Struct, kw_only=True):
    """An available model."""

    id: str
    created: int
    max_model_len: int | None
    default_max_tokens: int | None
    object: str = "model"
    owned_by: str = OWNER


class ModelListShape(msgspec.Struct, kw_only=True):
    """The models that the key may use."""

    data: list[ModelShape]
    object: str = "list"


@get(["/v1/models", "/models"], summary="List models")
async def list_models(request: Request[Any, Any, Any]) -> ModelListShape:
    """Return the models that this key may use."""
    principal = await authenticate_tenant(request)
    models = services_of(request).models.list()
    return ModelListShape(data=[model_shape(model) for model in models if principal.may_use(model.name)])


@get(["/v1/models/{model_id:path}", "/models/{model_id:path}"], summary="Retrieve a model")
async def retrieve_model(request: Request[Any, Any, Any], model_id: FromPath[str]) -> ModelShape:
    """Return one model. 404 for a model that this key may not use."""
    principal = await authenticate_tenant(request)
    name = model_id.removeprefix("/")
    model = services_of(request).models.get(name)
    if not principal.may_use(model.name):
        raise model_not_found(name)
    return model_shape(model)


def model_shape(model: ServedModel) -> ModelShape:
    """Return the JSON of `model`."""
    return ModelShape(
        id=model.name,
        created=int(model.created.timestamp()),
        max_model_len=model.max_model_len,
        default_max_tokens=model.default_max_tokens,
    )
