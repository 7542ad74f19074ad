"""Renders every error of the console as a page, or as a short message for htmx. Tracebacks go to the log only."""

from __future__ import annotations

from collections.abc import Callable

import structlog
from litestar import Response
from litestar.exceptions import HTTPException

from appliance.base.allowed_methods import with_complete_allow
from appliance.base.clock import whole_seconds
from appliance.base.database_errors import as_outage
from appliance.base.errors import GatehouseError, PasswordChangeNeeded, Unauthenticated
from appliance.base.ids import new_id
from appliance.console.forms import sentence
from appliance.console.rendering import DONE_SHOWN_FOR_S, HTML, Html, Pages, done_cookie, is_fragment_request, toast_header
from appliance.console.security import SECURITY_HEADERS, ConsoleRequest, login_path
from appliance.tenancy.browser_rules import SAFE_METHODS

log = structlog.get_logger()

HEADINGS = {
    400: "Invalid request",
    403: "Not allowed",
    404: "Page not found",
    405: "Method not allowed",
    409: "Conflict",
    413: "Request too large",
    429: "Too many requests",
    500: "Something went wrong",
    503: "Service unavailable",
}
INTERNAL = "Internal error."
CHANGE_UNKNOWN = "Internal error. Check whether the change was made before you send it again."
WRONG_METHOD = "This address cannot be opened directly. Go to the page that links to it and start from there."
NOT_FOUND = "This page does not exist, or its content was removed."


def error_handler(pages: Pages) -> Callable[[ConsoleRequest, Exception], Html]:
    """Return the exception handler for all console paths, unknown paths included."""

    def answer(request: ConsoleRequest, error: Exception) -> Html:
        if isinstance(error, Unauthenticated):
            return _to_login(request)
        if isinstance(error, PasswordChangeNeeded):
            return pages.redirect(request, "/account", done="password-needed")
        shown = as_outage(error, request.method) or error
        status, message = _describe(request, shown)
        reference = _log_error(request, error) if status >= 500 else None
        response = _render(pages, request, status, message, reference)
        if isinstance(shown, HTTPException):
            response.headers.update(with_complete_allow(shown.headers))
        if isinstance(shown, GatehouseError) and shown.retry_after_s is not None:
            response.headers["retry-after"] = str(whole_seconds(shown.retry_after_s))
        return response

    return answer


def _describe(request: ConsoleRequest, error: Exception) -> tuple[int, str]:
    if isinstance(error, GatehouseError):
        return error.status, sentence(error.message)
    if isinstance(error, HTTPException) and error.status_code < 500:
        messages = {404: NOT_FOUND, 405: WRONG_METHOD}
        return error.status_code, messages.get(error.status_code, sentence(error.detail))
    return 500, INTERNAL if request.method in ("GET", "HEAD") else CHANGE_UNKNOWN


def _log_error(request: ConsoleRequest, error: Exception) -> str:
    reference = new_id("err")
    log.error("console request failed", request_id=reference, path=request.scope["path"], exc_info=error)
    return reference


def _render(pages: Pages, request: ConsoleRequest, status: int, message: str, reference: str | None) -> Html:
    heading = HEADINGS.get(status, "Request refused")
    template = "fragments/error.html" if is_fragment_request(request) else "pages/error.html"
    can_retry = status == 503 and request.method in SAFE_METHODS
    answer = pages.page(
        request,
        template,
        status=status,
        code=status,
        heading=heading,
        message=message,
        reference=reference,
        can_retry=can_retry,
    )
    answer.headers.update(SECURITY_HEADERS)
    if is_fragment_request(request):
        answer.headers["hx-trigger"] = toast_header(f"{heading}. {message}", "error")
    return answer


def _to_login(request: ConsoleRequest) -> Html:
    """Redirect to the sign-in page; htmx gets a 401 with `HX-Redirect`. After a request that would have changed something, that
    page says that nothing was changed."""
    headers = SECURITY_HEADERS | {"vary": "HX-Request, Cookie"}
    if is_fragment_request(request):
        answer = Response("", status_code=401, media_type=HTML, headers=headers | {"hx-redirect": login_path(request)})
    else:
        answer = Response("", status_code=303, media_type=HTML, headers=headers | {"location": login_path(request)})
    if request.method not in SAFE_METHODS:
        answer.set_cookie(done_cookie("session-over", DONE_SHOWN_FOR_S))
    return answer
