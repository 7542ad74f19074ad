"""`/schema/openapi.json`: the schema that the framework derives from the handlers, completed with what it cannot see.

A handler declares that in its `opt`: `body` is the type of the request body that it decodes itself, which may be left out if
`optional_body` is true, `response` the type of the response that it encodes itself, `text` the media type of a response that is
not JSON, `query` its query parameters, `repeatable` those that take several values, `required` those that must be sent,
`headers` the headers that it reads beyond those of authentication, `security` the ways to authenticate (None: without) if they
are not those of its tag, and `errors` the error statuses that `_error_statuses` cannot derive.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import msgspec
from litestar import Litestar, Request, Response, Router
from litestar.exceptions import NotFoundException
from litestar.handlers import HTTPRouteHandler
from litestar.openapi.config import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin
from litestar.openapi.spec import Tag
from litestar.routes import HTTPRoute

from appliance.api.descriptions import describe_fields
from appliance.api.descriptions.parameters import describe_parameter
from appliance.api.error_responses import ErrorAnswer
from appliance.api.openapi_names import Operation, name_operations, rename_components, sort_paths
from appliance.api.parameter_schemas import parameter_schema
from appliance.api.queries import VALUES_MAX

ContentOf = Callable[[Any], dict[str, Any]]
"""Returns the OpenAPI `content` of a body of the given type."""

_PATH = "/schema/openapi.json"
_DESCRIPTION = """\
Tenants' programs call `/v1`, which is compatible with OpenAI's API, with an API key (`gh_...`); the same paths without `/v1`
work too. Administrators call `/admin/v1`, and OpenAI's organization API under `/v1/organization`, with an administrator token
(`gha_...`).

Every response has the header `x-request-id`. Every error has the body `{"error": {"message", "type", "param", "code"}}`.
Unknown fields of a request body are refused, not ignored.

Under `/admin/v1`, times are RFC 3339 in UTC, and lists come in pages: pass the `next_cursor` of a page as `cursor` to get the
next one.
"""
_TAGS = (
    Tag(name="inference", description="Chat completions and models, for programs with an API key. OpenAI-compatible."),
    Tag(name="administration", description="Tenants, keys, members, limits, usage, billing and the state of the appliance."),
    Tag(name="health", description="Health checks for load balancers, and metrics for Prometheus."),
)
_REFERENCE = "#/components/schemas/{name}"
_SECURITY_SCHEMES = {
    "api_key": {"type": "http", "scheme": "bearer", "description": "A tenant's API key: gh_..."},
    "api_key_header": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "A tenant's API key: gh_..."},
    "administrator": {"type": "http", "scheme": "bearer", "description": "An administrator's token: gha_..."},
}
_ERRORS = {
    400: "The request is invalid; `param` names the field",
    401: "The key or token is missing or invalid",
    403: "The key or token is valid but does not permit this operation",
    404: "The object or path does not exist",
    409: "The request conflicts with the current state on the server",
    413: "The request body is too large",
    429: "A limit has been reached; `retry-after` says when to retry, if that can help",
    503: "Temporarily unavailable: an engine is down or loading, the queue is full, or the appliance is shutting down",
}
_SUCCESSES = {200: "OK", 201: "Created", 204: "Done; the response has no body"}
_SECURITY_BY_TAG = {"inference": ("api_key", "api_key_header"), "administration": ("administrator",)}


class Document:
    """The document as JSON. Built on the first request, in a thread, because that takes tenths of a second."""

    def __init__(self) -> None:
        self._json: bytes | None = None
        self._building = asyncio.Lock()

    async def respond(self, request: Request[Any, Any, Any]) -> Response[bytes] | None:
        """Respond in place of the framework's handler, which would build its schema in the event loop. None for other paths."""
        if request.url.path != _PATH:
            return None
        async with self._building:
            if self._json is None:
                self._json = await asyncio.to_thread(_build, request.app)
        return Response(self._json, media_type="application/json")


def openapi_config(version: str) -> OpenAPIConfig:
    """Return the configuration: only the JSON document, no page that would load scripts from other hosts."""
    return OpenAPIConfig(
        title="Gatehouse",
        version=version,
        description=_DESCRIPTION,
        tags=list(_TAGS),
        use_handler_docstrings=True,
        openapi_router=_router(),
        render_plugins=[JsonRenderPlugin(path="/openapi.json")],
    )


def _router() -> Router:
    """Return the router of the document. The framework's own 404 page for unknown paths below it becomes a regular error."""
    return Router(
        "/schema",
        route_handlers=[],
        include_in_schema=False,
        dto=None,
        return_dto=None,
        before_request=Document().respond,
        after_request=_raise_not_found,
    )


def _raise_not_found(response: Response[Any]) -> Response[Any]:
    if response.status_code == NotFoundException.status_code:
        raise NotFoundException
    return response


def _build(app: Litestar) -> bytes:
    """Return the document of `app`: the framework's schema, completed."""
    schema = app.openapi_schema.to_schema()
    components = schema.setdefault("components", {})
    components["securitySchemes"] = _SECURITY_SCHEMES
    schemas = components.setdefault("schemas", {})
    content_of = cache(partial(_json_content, components=schemas))  # nearly all operations share the same errors and lists
    operations: list[Operation] = []
    for route in app.routes:
        if not isinstance(route, HTTPRoute):
            continue
        for method, (handler, _) in route.route_handler_map.items():
            operation = schema["paths"].get(route.path_format, {}).get(method.lower())
            if operation is not None:
                _complete(operation, handler, content_of)
                _describe_errors(operation, route, handler, content_of)
                _describe_parameters(operation, route, handler)
                operations.append(Operation(operation, handler.handler_name, route.path_format))
    name_operations(operations)
    _describe_structs(app, schemas)
    describe_fields(schemas)
    schema["paths"] = sort_paths(schema["paths"])
    return msgspec.json.encode(rename_components(schema))


def _complete(operation: dict[str, Any], handler: HTTPRouteHandler, content_of: ContentOf) -> None:
    body, response, text = (handler.opt.get(name) for name in ("body", "response", "text"))
    operation["responses"][str(handler.status_code)]["description"] = _SUCCESSES[handler.status_code]
    if body is not None:
        required = not handler.opt.get("optional_body", False)
        operation["requestBody"] = {"required": required, "content": content_of(body)}
    if response is not None or text is not None:
        content = {} if response is None else content_of(response)
        texts = {} if text is None else {text: {"schema": {"type": "string"}}}
        operation["responses"][str(handler.status_code)]["content"] = {**content, **texts}
    for name in handler.opt.get("query", ()):
        if name.endswith("[]"):
            continue  # OpenAI's spelling of the same parameter: in generated clients the two names would collide
        required = name in handler.opt.get("required", ())
        operation.setdefault("parameters", []).append({"name": name, "in": "query", "required": required})
    for name in handler.opt.get("headers", ()):
        operation.setdefault("parameters", []).append({"name": name, "in": "header", "required": False})
    schemes = handler.opt.get("security", _security_of_tag(operation))
    operation["security"] = [{} if scheme is None else {scheme: []} for scheme in schemes]


def _describe_errors(operation: dict[str, Any], route: HTTPRoute, handler: HTTPRouteHandler, content_of: ContentOf) -> None:
    """Replace the framework's error schema, which is never sent, with ours for each status that can occur."""
    responses = operation["responses"]
    responses.pop("400", None)
    content = content_of(handler.opt.get("error_body", ErrorAnswer))
    for status in sorted(_error_statuses(operation, route, handler)):
        responses[str(status)] = {"description": _ERRORS[status], "content": content}
    responses["default"] = {"description": "An error", "content": content_of(ErrorAnswer)}


def _error_statuses(operation: dict[str, Any], route: HTTPRoute, handler: HTTPRouteHandler) -> set[int]:
    statuses = set(handler.opt.get("errors", ()))
    schemes = _security_of_tag(operation)
    if schemes:
        statuses |= {401, 403}
    if handler.opt.get("query") or "administrator" in schemes:
        statuses.add(400)  # every administrator path refuses unknown query parameters
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
            has_alias = f"{name}[]" in handler.opt.get("query", ())
            parameter["description"] = f"{text} `{name}[]` means the same." if has_alias else text


def _describe_structs(app: Litestar, schemas: dict[str, Any]) -> None:
    """Describe all components by the docstrings of their structs, which the framework leaves out for those of responses."""
    routes = (route for route in app.routes if isinstance(route, HTTPRoute))
    handlers = [handler for route in routes for handler, _ in route.route_handler_map.values()]
    return_types = [handler.parsed_fn_signature.return_type for handler in handlers]
    structs = [return_type.annotation for return_type in return_types if return_type.is_subclass_of(msgspec.Struct)]
    _, definitions = msgspec.json.schema_components(structs, ref_template=_REFERENCE)
    texts = {name.partition("_")[0]: definition.get("description") for name, definition in definitions.items()}
    for name, schema in schemas.items():
        text = texts.get(name.partition("_")[0])
        if text is not None:
            schema.setdefault("description", text)
        schema["description"] = inspect.cleandoc(schema.get("description", ""))


def _security_of_tag(operation: dict[str, Any]) -> tuple[str, ...]:
    return _SECURITY_BY_TAG.get((operation.get("tags") or [""])[0], ())


def _json_content(body_type: Any, components: dict[str, Any]) -> dict[str, Any]:
    """Return the OpenAPI `content` of a body of this type, and add its schemas to `components`."""
    (reference,), definitions = msgspec.json.schema_components([body_type], ref_template=_REFERENCE)
    components.update(definitions)
    return {"application/json": {"schema": reference}}
