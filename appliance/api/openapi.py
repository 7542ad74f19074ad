"""`/schema/openapi.json`: what the framework derives from the handlers, plus the bodies that the handlers decode themselves.

A handler names them in its `opt`: `body` is what it takes, `answer` is what it returns when it writes bytes of its own.
"""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import Litestar, Request
from litestar.handlers import HTTPRouteHandler
from litestar.openapi.config import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin
from litestar.routes import HTTPRoute

from appliance.api.error_responses import ErrorAnswer

_REFERENCE = "#/components/schemas/{name}"
_SECURITY_SCHEMES = {
    "api_key": {"type": "http", "scheme": "bearer", "description": "A tenant's API key: gh_..."},
    "api_key_header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    "administrator": {"type": "http", "scheme": "bearer", "description": "An administrator's token: gha_..."},
}
_SECURITY_BY_TAG = {"inference": ("api_key", "api_key_header"), "administration": ("administrator",)}


class CompleteJson(JsonRenderPlugin):
    """Renders the schema as JSON, completed and then kept."""

    def __init__(self) -> None:
        super().__init__(path="/openapi.json")
        self._rendered: bytes | None = None

    def render(self, request: Request[Any, Any, Any], openapi_schema: dict[str, Any]) -> bytes:
        """Return the schema of the application that serves `request`."""
        if self._rendered is None:
            self._rendered = msgspec.json.encode(_completed(request.app, openapi_schema))
        return self._rendered


def openapi_config(version: str) -> OpenAPIConfig:
    """Return the configuration: one JSON document, and no page that would fetch scripts from elsewhere."""
    return OpenAPIConfig(title="Gatehouse", version=version, path="/schema", render_plugins=[CompleteJson()])


def _completed(app: Litestar, schema: dict[str, Any]) -> dict[str, Any]:
    components = schema.setdefault("components", {})
    components["securitySchemes"] = _SECURITY_SCHEMES
    schemas = components.setdefault("schemas", {})
    for route in app.routes:
        if not isinstance(route, HTTPRoute):
            continue
        for method, (handler, _) in route.route_handler_map.items():
            operation = schema["paths"].get(route.path_format, {}).get(method.lower())
            if operation is not None:
                _complete(operation, handler, schemas)
    return schema


def _complete(operation: dict[str, Any], handler: HTTPRouteHandler, schemas: dict[str, Any]) -> None:
    body, answer = handler.opt.get("body"), handler.opt.get("answer")
    if body is not None:
        operation["requestBody"] = {"required": True, "content": _json_content(body, schemas)}
    if answer is not None:
        operation["responses"][str(handler.status_code)]["content"] = _json_content(answer, schemas)
    for name in handler.opt.get("query", ()):
        kind = "integer" if name == "limit" else "string"
        operation.setdefault("parameters", []).append({"name": name, "in": "query", "schema": {"type": kind}})
    operation["responses"].pop("400", None)  # the framework's own shape of an error, which is never sent
    operation["responses"]["default"] = {"description": "An error", "content": _json_content(ErrorAnswer, schemas)}
    operation["security"] = [{name: []} for name in _SECURITY_BY_TAG.get((operation.get("tags") or [""])[0], ())]


def _json_content(kind: Any, components: dict[str, Any]) -> dict[str, Any]:
    (reference,), definitions = msgspec.json.schema_components([kind], ref_template=_REFERENCE)
    components.update(definitions)
    return {"application/json": {"schema": reference}}
