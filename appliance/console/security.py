"""Authentication and authorization of console requests: session cookie, access, cross-site checks, security headers.

A guard resolves the session and the member's access before the handler runs; pages of invisible tenants do not exist for the
member. A second check compares the CSRF token of every form with the session. Knows no page.
"""

from __future__ import annotations

import dataclasses
import string
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from litestar import Request
from litestar.connection import ASGIConnection
from litestar.datastructures import Cookie, FormMultiDict, MutableScopeHeaders
from litestar.enums import ScopeType
from litestar.handlers import BaseRouteHandler
from litestar.middleware import ASGIMiddleware
from litestar.types import ASGIApp, Guard, Message, Receive, Scope, Send

from appliance.base.acting import act_as, current_actor
from appliance.base.errors import Forbidden, InvalidValue, PasswordChangeNeeded, Unauthenticated
from appliance.tenancy import browser_rules
from appliance.tenancy.browser_rules import CSRF_HEADER, SAFE_METHODS, is_csrf_token_of, is_from_own_site, session_cookie_name
from appliance.tenancy.roles import Action

if TYPE_CHECKING:
    from appliance.serving.services import Services
    from appliance.tenancy.access import Access
    from appliance.tenancy.sessions import Session

Connection = ASGIConnection[Any, Any, Any, Any]
ConsoleRequest = Request[Any, Any, Any]

OPEN_TO_TEMPORARY_PASSWORD = {"open_to_temporary_password": True}
"""`opt` of the handlers that a member needs to replace a temporary password, or to sign out."""

CSRF_FIELD = "csrf_token"
# Names of the cookies between the steps of a sign-in.
SECURE_STEP_COOKIE, PLAIN_STEP_COOKIE = "__Host-gatehouse-{step}", "gatehouse_{step}"

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
SECURITY_HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    # Not `no-referrer`: browsers would send `Origin: null` with our own forms, and `require_own_origin` would refuse them.
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=(), payment=()",
}


class SecurityHeaders(ASGIMiddleware):
    """Adds the security headers to every response, errors included."""

    scopes = (ScopeType.HTTP,)

    async def handle(self, scope: Scope, receive: Receive, send: Send, next_app: ASGIApp) -> None:
        """Add the headers that the response does not set itself."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableScopeHeaders.from_message(message)
                for name, value in SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await next_app(scope, receive, send_with_headers)


def is_secure(connection: Connection, services: Services) -> bool:
    """Return whether this connection uses HTTPS."""
    return browser_rules.is_secure(connection.scope["scheme"], services.settings)


def session_token(connection: Connection, services: Services) -> str | None:
    """Return the session token that the browser sent, if any."""
    return connection.cookies.get(session_cookie_name(secure=is_secure(connection, services)))


def session_cookie(connection: Connection, services: Services, token: str) -> Cookie:
    """Return the cookie that carries `token`; an empty token removes it."""
    secure = is_secure(connection, services)
    return Cookie(
        key=session_cookie_name(secure=secure),
        value=token,
        path="/",
        secure=secure,
        httponly=True,
        samesite="lax",
        max_age=None if token else 0,
    )


def step_ticket(connection: Connection, services: Services, step: str) -> str | None:
    """Return the ticket of a sign-in step from the browser's cookie, if any."""
    return connection.cookies.get(_step_cookie_name(connection, services, step))


def step_cookie(connection: Connection, services: Services, step: str, ticket: str, *, life_s: int = 0) -> Cookie:
    """Return the cookie with the ticket of a sign-in step; an empty ticket removes it."""
    return Cookie(
        key=_step_cookie_name(connection, services, step),
        value=ticket,
        path="/",
        secure=is_secure(connection, services),
        httponly=True,
        samesite="lax",
        max_age=life_s,
    )


def _step_cookie_name(connection: Connection, services: Services, step: str) -> str:
    name = SECURE_STEP_COOKIE if is_secure(connection, services) else PLAIN_STEP_COOKIE
    return name.format(step=step)


def current_session(connection: Connection) -> Session | None:
    """Return the session of this request, as resolved by the guard; may be None on public pages."""
    session: Session | None = connection.state.get("session")
    return session


def access_of(connection: Connection) -> Access:
    """Return the access of the signed-in member. Raises Unauthenticated."""
    access: Access | None = connection.state.get("access")
    if access is None:
        raise Unauthenticated("Sign in first.")
    return access


def may(connection: Connection, action: str, tenant_id: str | None = None) -> bool:
    """Return whether the signed-in member may do `action` in this tenant, or on the appliance when None."""
    access: Access | None = connection.state.get("access")
    return access is not None and access.may(Action(action), tenant_id)


def session_guard(services: Services) -> Guard:
    """Return the guard of the whole console, which resolves the session and requires one on pages that are not public.

    Handlers with `opt={"public": True}` accept anybody; a session is resolved if there is one. They and handlers with
    `opt=OPEN_TO_TEMPORARY_PASSWORD` accept members who signed in with a temporary password. The guard raises Unauthenticated
    without a live session, PasswordChangeNeeded for a temporary password, Forbidden for a change requested by another site, and
    NotFound if the path names an invisible tenant. (A closure, because Litestar deep-copies guards that are objects.)
    """

    async def guard(connection: Connection, handler: BaseRouteHandler) -> None:
        if connection.scope.get("method") not in SAFE_METHODS:
            require_own_origin(connection)
        session = await resolve_session(connection, services)
        if session is not None:
            access = access_of(connection)
            act_as(access.actor)
            if session.must_change_password and not handler.opt.keys() & {"public", *OPEN_TO_TEMPORARY_PASSWORD}:
                raise PasswordChangeNeeded("Choose a new password first.")
            if (tenant_id := connection.path_params.get("tenant_id")) is not None:
                access.require(Action.READ, tenant_id)
        elif not handler.opt.get("public"):
            raise Unauthenticated("Sign in first.")

    return guard


async def resolve_session(connection: Connection, services: Services) -> Session | None:
    """Return the live session of a connection, if any. Stores it and its access for `current_session` and `access_of`."""
    token = session_token(connection, services)
    session = await services.sessions.resolve(token) if token else None
    connection.state["session"] = session
    connection.state["access"] = None if session is None else await resolve_access(services, session)
    return session


async def resolve_access(services: Services, session: Session) -> Access:
    """Return the current access of the session's member."""
    member = session.member
    actor = dataclasses.replace(current_actor(), kind="member", id=member.id, name=member.email)
    return await services.memberships.access(member, actor)


def needs(action: Action) -> Guard:
    """Return a guard that raises RoleNotAllowed unless `action` is allowed in the tenant of the path.

    If the path names no tenant, it must be allowed anywhere; the handler must then check the row or narrow the list.
    """

    def guard(connection: Connection, _: BaseRouteHandler) -> None:
        access, tenant_id = access_of(connection), connection.path_params.get("tenant_id")
        if tenant_id is None:
            access.require_somewhere(action)
        else:
            access.require(action, tenant_id)

    return guard


def require_own_origin(connection: Connection) -> None:
    """Raise Forbidden if the request was started by another site, according to the browser's headers."""
    if not is_from_own_site(connection.headers):
        raise Forbidden("This form was sent from another site. Nothing was changed.")


async def require_csrf_token(request: ConsoleRequest) -> None:
    """Raise Forbidden unless a change carries the CSRF token of its session, as a form field or in the header sent by htmx."""
    session = current_session(request)
    if request.method in SAFE_METHODS or session is None:
        return
    sent = request.headers.get(CSRF_HEADER) or (await form_of(request)).get(CSRF_FIELD) or ""
    if not is_csrf_token_of(session, str(sent)):
        raise Forbidden("The form is from an older session. Reload the page and send it again; nothing was changed.")


async def form_of(request: ConsoleRequest) -> FormMultiDict:
    """Return the form fields. Raises InvalidValue for undecodable bytes, an unknown charset, and U+0000, which PostgreSQL does
    not accept even in comparisons."""
    try:
        form = await request.form()
    except (LookupError, UnicodeError) as error:
        raise InvalidValue("the form cannot be read: send it as UTF-8") from error
    for name, value in form.multi_items():
        if "\0" in name or (isinstance(value, str) and "\0" in value):
            raise InvalidValue("a form must not contain the character U+0000")
    return form


def safe_next(target: str | None) -> str:
    """Return `target` if it is a path on this site, else `/`, to prevent open redirects."""
    if not target or not target.startswith("/") or target.startswith("//") or "\\" in target:
        return "/"
    if any(character < " " or character == "\x7f" for character in target):
        return "/"
    return quote(target, safe=string.punctuation, errors="replace")  # headers must be ASCII


def requested_url(request: ConsoleRequest) -> str:
    """Return path and query of this request. `request.url` would fail for an invalid Host header."""
    path, query = request.scope["path"], request.scope["query_string"].decode("ascii", "replace")
    return f"{path}?{query}" if query else path


def login_path(request: ConsoleRequest) -> str:
    """Return the URL of the sign-in page, which leads back to the current page."""
    target = current_page_url(request)
    return "/login" if target == "/" else f"/login?next={quote(target, safe='')}"


def current_page_url(request: ConsoleRequest) -> str:
    """Return path and query of the page in the browser: the requested page, or the one that contains the form or fragment,
    according to the headers `HX-Current-URL` or `Referer`."""
    is_whole_page = request.method in SAFE_METHODS and "hx-request" not in request.headers
    if is_whole_page:
        return requested_url(request)
    try:
        page = urlsplit(request.headers.get("hx-current-url") or request.headers.get("referer") or "")
    except ValueError:
        return "/"
    return safe_next(f"{page.path}?{page.query}" if page.query else page.path)
