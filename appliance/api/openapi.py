"""`/schema/openapi.json`: what the framework derives from the handlers, plus the bodies that the handlers decode themselves.

A handler names them in its `opt`: `body` is the type it takes, `answer` the type it returns when it encodes the bytes itself,
`text` the media type of an answer that is not JSON, `query` its parameters, `repeatable` those that take several values,
`required` those that must be sent, and `errors` the statuses that do not follow from the rest (`_error_statuses`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import msgspec
from litestar import Litestar, Request, Response, Router
from litestar.exceptions import NotFoundException
from litestar.handlers import HTTPRouteHandler
from litestar.openapi.config import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin
from litestar.routes import HTTPRoute

from appliance.api.descriptions import describe_fields
from appliance.api.descriptions.parameters import describe_parameter
from appliance.api.error_responses import ErrorAnswer
from appliance.api.openapi_names import Named, in_order, name_operations, rename_components
from appliance.api.parameter_schemas import parameter_schema
from appliance.api.queries import VALUES_MAX

ContentOf = Callable[[Any], dict[str, Any]]
"""The content of a body of some type."""

_PATH = "/schema/openapi.json"
_REFERENCE = "#/components/schemas/{name}"
_SECURITY_SCHEMES = {
    "api_key": {"type": "http", "scheme": "bearer", "description": "A tenant's API key: gh_..."},
    "api_key_header": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "A tenant's API key: gh_..."},
    "administrator": {"type": "http", "scheme": "bearer", "description": "An administrator's token: gha_..."},
}
_ERRORS = {
    400: "The request is not valid; `param` names the field",
    401: "No key or token was sent, or it is not valid",
    403: "The key or token is valid but does not allow this",
    404: "The object or path does not exist",
    409: "The request conflicts with the state on the server",
    413: "The body is larger than the appliance accepts",
    429: "A limit is reached; `retry-after` says when to try again",
    503: "Not available now: an engine is down or loading, the queue is full, or the appliance is stopping",
}
_SUCCESSES = {200: "OK", 201: "Created", 204: "Done, without a body"}
_SECURITY_BY_TAG = {"inference": ("api_key", "api_key_header"), "administration": ("administrator",)}


class Document:
    """The document as JSON. Built when it is first asked for, in a thread: it takes tenths of a second."""

    def __init__(self) -> None:
        self._json: bytes | None = None
        self._building = asyncio.Lock()

    async def answer(self, request: Request[Any, Any, Any]) -> Response[bytes] | None:
        """Answer in place of the framework's handler, which would build its schema in the event loop. None for other paths."""
        if request.url.path != _PATH:
            return None
        async with self._building:
            if self._json is None:
                self._json = await asyncio.to_thread(_build, request.app)
        return Response(self._json, media_type="application/json")


def openapi_config(version: str) -> OpenAPIConfig:
    """Return the configuration: one JSON document, and no page that would fetch scripts from elsewhere."""
    return OpenAPIConfig(
        title="Gatehouse",
        version=version,
        use_handler_docstrings=True,
        openapi_router=_router(),
        render_plugins=[JsonRenderPlugin(path="/openapi.json")],
    )


def _router() -> Router:
    """Return the router of the document. For unknown paths below it the framework adds a page of its own; this replaces it."""
    return Router(
        "/schema",
        route_handlers=[],
        include_in_schema=False,
        dto=None,
        return_dto=None,
        before_request=Document().answer,
        after_request=_found,
    )


def _found(response: Response[Any]) -> Response[Any]:
    if response.status_code == NotFoundException.status_code:
        raise NotFoundException
    return response


def _build(app: Litestar) -> bytes:
    """Return the document of `app`: the framework's schema, completed."""
    schema = app.openapi_schema.to_schema()
    components = schema.setdefault("components", {})
    components["securitySchemes"] = _SECURITY_SCHEMES
    schemas = components.setdefault("schemas", {})
    content_of = cache(partial(_json_content, components=schemas))  # of errors and lists nearly every operation has the same
    named: list[Named] = []
    for route in app.routes:
        if not isinstance(route, HTTPRoute):
            continue
        for method, (handler, _) in route.route_handler_map.items():
            operation = schema["paths"].get(route.path_format, {}).get(method.lower())
            if operation is not None:
                _complete(operation, handler, content_of)
                _describe_errors(operation, route, handler, content_of)
                _describe_parameters(operation, route, handler)
                named.append(Named(operation, handler.handler_name, route.path_format))
    name_operations(named)
    _describe_structs(app, schemas)
    describe_fields(schemas)
    schema["paths"] = in_order(schema["paths"])
    return msgspec.json.encode(rename_components(schema))


def _complete(operation: dict[str, Any], handler: HTTPRouteHandler, content_of: ContentOf) -> None:
    body, answer, text = (handler.opt.get(name) for name in ("body", "answer", "text"))
    operation["responses"][str(handler.status_code)]["description"] = _SUCCESSES[handler.status_code]
    if body is not None:
        operation["requestBody"] = {"required": True, "content": content_of(body)}
    if answer is not None or text is not None:
        content = {} if answer is None else content_of(answer)
        texts = {} if text is None else {text: {"schema": {"type": "string"}}}
        operation["responses"][str(handler.status_code)]["content"] = {**content, **texts}
    for name in handler.opt.get("query", ()):
        if name.endswith("[]"):
            continue  # the same parameter as OpenAI's clients spell it: in a generated client the two would have one name
        required = name in handler.opt.get("required", ())
        operation.setdefault("parameters", []).append({"name": name, "in": "query", "required": required})
    operation["security"] = [{name: []} for name in _security(operation)]


def _describe_errors(operation: dict[str, Any], route: HTTPRoute, handler: HTTPRouteHandler, content_of: ContentOf) -> None:
    """Replace the framework's error schema, which is never sent, by ours for each status that can occur."""
    responses = operation["responses"]
    responses.pop("400", None)
    content = content_of(handler.opt.get("error_body", ErrorAnswer))
    for status in sorted(_error_statuses(operation, route, handler)):
        responses[str(status)] = {"description": _ERRORS[status], "content": content}
    responses["default"] = {"description": "An error", "content": content_of(ErrorAnswer)}


def _error_statuses(operation: dict[str, Any], route: HTTPRoute, handler: HTTPRouteHandler) -> set[int]:
    statuses = set(handler.opt.get("errors", ()))
    if _security(operation):
        statuses |= {401, 403}
    if handler.opt.get("query") or "administrator" in _security(operation):
        statuses.add(400)  # every administrator's path refuses query parameters that it does not take
    if handler.opt.get("body") is not None:
        statuses |= {400, 413}
    if route.path_parameters:
        statuses.add(404)
    return statuses


def _describe_parameters(operation: dict[str, Any], route: HTTPRoute, handler: HTTPRouteHandler) -> None:
    for parameter in operation.get("parameters", ()):
        name = parameter["name"]
        schema = parameter_schema(route.path_format, name)
        is_repeatable = name in handler.opt.get("repeatable", ())
        parameter["schema"] = {"type": "array", "items": schema, "maxItems": VALUES_MAX} if is_repeatable else schema
        text = describe_parameter(route.path_format, name)
        if text is not None:
            is_spelled_twice = f"{name}[]" in handler.opt.get("query", ())
            parameter["description"] = f"{text} `{name}[]` means the same." if is_spelled_twice else text


def _describe_structs(app: Litestar, schemas: dict[str, Any]) -> None:
    """Give the components of answers the docstrings of their structs, which the framework leaves out."""
    handlers = [each for route in app.routes if isinstance(route, HTTPRoute) for each, _ in route.route_handler_map.values()]
    kinds = [handler.parsed_fn_signature.return_type for handler in handlers]
    structs = [kind.annotation for kind in kinds if kind.is_subclass_of(msgspec.Struct)]
    _, definitions = msgspec.json.schema_components(structs, ref_template=_REFERENCE)
    texts = {name.partition("_")[0]: definition.get("description") for name, definition in definitions.items()}
    for name, schema in schemas.items():
        text = texts.get(name.partition("_")[0])
        if text is not None:
            schema.setdefault("description", text)


def _security(operation: dict[str, Any]) -> tuple[str, ...]:
    return _SECURITY_BY_TAG.get((operation.get("tags") or [""])[0], ())


def _json_content(kind: Any, components: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a body of this type, whose schemas are added to `components`."""
    (reference,), definitions = msgspec.json.schema_components([kind], ref_template=_REFERENCE)
    components.update(definitions)
    return {"application/json": {"schema": reference}}
