"""Error responses of the HTTP interface, all in one shape: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import structlog
from litestar import Request, Response
from litestar.exceptions import HTTPException

from appliance.api.connection_services import services_of
from appliance.base.allowed_methods import with_complete_allow
from appliance.base.clock import whole_seconds
from appliance.base.database_errors import as_outage
from appliance.base.errors import GatehouseError, InternalError

MEDIA_TYPE = "application/json"
CHALLENGE = 'Bearer realm="gatehouse"'  # required of 401 (RFC 9110, 15.5.2); Bearer needs a parameter (RFC 6750, 3)

# The `type` and `code` of errors that the framework itself raises, by status.
_FRAMEWORK_ERRORS = {
    400: ("invalid_request_error", "invalid_value"),
    404: ("invalid_request_error", "not_found"),
    405: ("invalid_request_error", "method_not_allowed"),
    413: ("invalid_request_error", "request_too_large"),
    415: ("invalid_request_error", "invalid_value"),
}

MESSAGE_CHARS_MAX = 2000  # messages name what the client sent, which may be as long as a body
PARAM_CHARS_MAX = 500

CHAT_PATH = "/chat/completions"
# First path segments of endpoints that similar servers offer and this version does not.
_PLANNED_PATHS = frozenset({
    "batches", "completions", "detokenize", "embeddings", "files", "messages", "responses", "tokenize",
})  # fmt: skip
_UNSUPPORTED_PATHS = frozenset({
    "assistants", "audio", "containers", "conversations", "evals", "fine_tuning", "images", "moderations", "realtime", "rerank",
    "score", "threads", "uploads", "vector_stores", "videos",
})  # fmt: skip

log = structlog.get_logger()


class ErrorFields(msgspec.Struct, kw_only=True):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str

    def __post_init__(self) -> None:
        self.message = _shortened(self.message, MESSAGE_CHARS_MAX)
        self.param = None if self.param is None else _shortened(self.param, PARAM_CHARS_MAX)


class ErrorAnswer(msgspec.Struct, kw_only=True):
    """The body of every error."""

    error: ErrorFields


def _shortened(text: str, chars_max: int) -> str:
    """Return `text`, without its middle if it has more than `chars_max` characters."""
    if len(text) <= chars_max:
        return text
    tail = chars_max // 4
    return f"{text[: chars_max - tail - len(' … ')]} … {text[-tail:]}"


def error_fields(error: GatehouseError) -> ErrorFields:
    """Return what clients see of `error`."""
    return ErrorFields(message=error.message, type=error.type, param=error.param, code=error.code)


def encode_error(error: GatehouseError) -> bytes:
    """Return the JSON of `error`: the body of an error response, or the payload of an error frame in a stream."""
    return _encode(error_fields(error))


def error_response(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    """Return the response to any exception that left a handler, or that the framework raised before it found one."""
    if isinstance(error, GatehouseError):
        return Response(encode_error(error), status_code=error.status, media_type=MEDIA_TYPE, headers=_headers(error))
    if isinstance(error, HTTPException) and error.status_code in _FRAMEWORK_ERRORS:
        return _framework_error_response(request, error)
    outage = as_outage(error, request.scope["method"])
    if outage is None:
        log.error("request failed", path=request.scope["path"], exc_info=error)
        return error_response(request, InternalError("an internal error occurred; look up the request id in the log"))
    if failures := services_of(request).database_watch.count_failed_request():
        log.error("request failed", path=request.scope["path"], failures=failures, exc_info=error)
    return error_response(request, outage)


def _framework_error_response(request: Request[Any, Any, Any], error: HTTPException) -> Response[bytes]:
    kind, code = _FRAMEWORK_ERRORS[error.status_code]
    method, path = request.scope["method"], request.scope["path"]
    limit = request.app.request_max_body_size
    messages = {
        404: _unknown_path_message(method, path),
        405: f"{path} does not accept {method}",
        413: f"the body is larger than the {limit} bytes that max_body_bytes allows",
    }
    message = messages.get(error.status_code, error.detail)
    content = _encode(ErrorFields(message=message, type=kind, param=None, code=code))
    headers = with_complete_allow(error.headers)
    return Response(content, status_code=error.status_code, media_type=MEDIA_TYPE, headers=headers)


def _unknown_path_message(method: str, path: str) -> str:
    """Return the message of a 404, with a hint for users whose client library calls the wrong path."""
    endpoint = path.removeprefix("/v1").removeprefix("/").split("/")[0]
    if endpoint in _PLANNED_PATHS or endpoint in _UNSUPPORTED_PATHS:
        state = "planned for a later version" if endpoint in _PLANNED_PATHS else "not supported"
        return f"{path} is {state}; this version generates text at POST /v1{CHAT_PATH} only"
    hint = "use a base URL that ends in /v1" if path.endswith(CHAT_PATH) else "GET /schema/openapi.json lists all paths"
    return f"no such path: {method} {path}; {hint}"


def _headers(error: GatehouseError) -> dict[str, str]:
    headers = {}
    if error.status == 401:
        headers["www-authenticate"] = CHALLENGE
    if error.retry_after_s is not None:
        headers["retry-after"] = str(whole_seconds(error.retry_after_s))
        headers["retry-after-ms"] = str(math.ceil(error.retry_after_s * 1000))
    elif error.status == 503 and error.should_retry:
        headers["retry-after"] = "1"
    if not error.should_retry:
        headers["x-should-retry"] = "false"
    return headers


def _encode(error: ErrorFields) -> bytes:
    return msgspec.json.encode(ErrorAnswer(error=error))
