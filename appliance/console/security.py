"""Who may open a page and who may change something: session cookie, access, cross-site checks, security headers.

A guard resolves the session and its member's access before anything else runs: a page of another tenant does not exist for that
member. A second check compares the session-bound token of every form. Knows no page.
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

OWN_PATHS = ("/account", "/logout", "/theme", "/login")  # what members who must choose a password may still open
CSRF_FIELD = "csrf_token"
# The cookies between the steps of signing in, by the name of the step.
SECURE_STEP_COOKIE, PLAIN_STEP_COOKIE = "__Host-gatehouse-{step}", "gatehouse_{step}"

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
SECURITY_HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    # Not `no-referrer`: with it a browser sends `Origin: null` on our own forms, and the check below would refuse them.
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=(), payment=()",
}


class SecurityHeaders(ASGIMiddleware):
    """Sets the security headers on every answer, errors included."""

    scopes = (ScopeType.HTTP,)

    async def handle(self, scope: Scope, receive: Receive, send: Send, next_app: ASGIApp) -> None:
        """Pass the request on and add the headers that the answer does not set itself."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableScopeHeaders.from_message(message)
                for name, value in SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await next_app(scope, receive, send_with_headers)


def is_secure(connection: Connection, services: Services) -> bool:
    """Return whether cookies of this connection travel over HTTPS."""
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
    """Return the ticket of a step of signing in that the browser sent, if any."""
    return connection.cookies.get(_step_cookie_name(connection, services, step))


def step_cookie(connection: Connection, services: Services, step: str, ticket: str, *, life_s: int = 0) -> Cookie:
    """Return the cookie that carries the ticket of a step; an empty ticket removes it."""
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
    """Return the session that the guard found for this request; may be None on pages that need none."""
    session: Session | None = connection.state.get("session")
    return session


def access_of(connection: Connection) -> Access:
    """Return what the signed-in member may see and do, as of this request. Raises Unauthenticated."""
    access: Access | None = connection.state.get("access")
    if access is None:
        raise Unauthenticated("Sign in first.")
    return access


def may(connection: Connection, action: str, tenant_id: str | None = None) -> bool:
    """Return whether the signed-in member may do `action` in this tenant, or on the box when None."""
    access: Access | None = connection.state.get("access")
    return access is not None and access.may(Action(action), tenant_id)


def session_guard(services: Services) -> Guard:
    """Return the guard of the whole console, which resolves the session and refuses visitors without one where it is needed.

    A handler with `opt={"public": True}` is served to anybody, but still learns of a session if there is one. The guard raises
    Unauthenticated without a live session, Forbidden for a change requested by another site, and NotFound if the path names a
    tenant that the member may not see. (A function, not an object, because the framework makes deep copies of objects when it
    registers them.)
    """

    async def guard(connection: Connection, handler: BaseRouteHandler) -> None:
        if connection.scope.get("method") not in SAFE_METHODS:
            require_own_origin(connection)
        session = await resolve_session(connection, services)
        if session is not None:
            access = access_of(connection)
            act_as(access.actor)
            if session.must_change_password and not connection.scope["path"].startswith(OWN_PATHS):
                raise PasswordChangeNeeded("Choose a new password first.")
            if (tenant_id := connection.path_params.get("tenant_id")) is not None:
                access.require(Action.READ, tenant_id)
        elif not handler.opt.get("public"):
            raise Unauthenticated("Sign in first.")

    return guard


async def resolve_session(connection: Connection, services: Services) -> Session | None:
    """Return the live session of a connection, if any, and store it, with its member's access, for `current_session` and
    `access_of`."""
    token = session_token(connection, services)
    session = await services.sessions.resolve(token) if token else None
    connection.state["session"] = session
    connection.state["access"] = None if session is None else await resolve_access(services, session)
    return session


async def resolve_access(services: Services, session: Session) -> Access:
    """Return what the member of `session` may see and do now."""
    member = session.member
    actor = dataclasses.replace(current_actor(), kind="member", id=member.id, name=member.email)
    return await services.memberships.access(member, actor)


def needs(action: Action) -> Guard:
    """Return a guard that raises RoleNotAllowed unless `action` is covered: in the tenant of the path, else anywhere.

    If the path names no tenant, the handler must check again for the tenant of the row it finds, or narrow what it lists.
    """

    def guard(connection: Connection, _: BaseRouteHandler) -> None:
        access, tenant_id = access_of(connection), connection.path_params.get("tenant_id")
        if tenant_id is None:
            access.require_somewhere(action)
        else:
            access.require(action, tenant_id)

    return guard


def require_own_origin(connection: Connection) -> None:
    """Raise Forbidden when a browser says that the request began on another site."""
    if not is_from_own_site(connection.headers):
        raise Forbidden("This form was sent from another site, so nothing was changed.")


async def require_csrf_token(request: ConsoleRequest) -> None:
    """Raise Forbidden unless a change carries the token of its session, in the form or in the header that htmx sends."""
    session = current_session(request)
    if request.method in SAFE_METHODS or session is None:
        return
    sent = request.headers.get(CSRF_HEADER) or (await form_of(request)).get(CSRF_FIELD) or ""
    if not is_csrf_token_of(session, str(sent)):
        raise Forbidden("The form is from an older session. Reload the page and send it again; nothing was changed.")


async def form_of(request: ConsoleRequest) -> FormMultiDict:
    """Return the fields of a form as sent. Raises InvalidValue for undecodable bytes, an unknown character set, and U+0000,
    with which PostgreSQL cannot even compare."""
    try:
        form = await request.form()
    except (LookupError, UnicodeError) as error:
        raise InvalidValue("the form cannot be read: send it as UTF-8") from error
    for name, value in form.multi_items():
        if "\0" in name or (isinstance(value, str) and "\0" in value):
            raise InvalidValue("a form must not contain the character U+0000")
    return form


def safe_next(target: str | None) -> str:
    """Return `target` if it is a path of this site, else the overview: never a way to another host."""
    if not target or not target.startswith("/") or target.startswith("//") or "\\" in target:
        return "/"
    if any(character < " " or character == "\x7f" for character in target):
        return "/"
    return quote(target, safe=string.punctuation, errors="replace")  # headers are ASCII


def address_asked(request: ConsoleRequest) -> str:
    """Return path and query of this request. Does not use the framework's URL, which fails for a bad Host header."""
    path, query = request.scope["path"], request.scope["query_string"].decode("ascii", "replace")
    return f"{path}?{query}" if query else path


def login_path(request: ConsoleRequest) -> str:
    """Return the address of the sign-in page, which leads back to the page in the browser."""
    target = page_shown(request)
    return "/login" if target == "/" else f"/login?next={quote(target, safe='')}"


def page_shown(request: ConsoleRequest) -> str:
    """Return the address of the page that a browser shows or opens: the requested page, or the page that contains the form or
    part.

    Of the latter, which the browser sends, only path and query are used.
    """
    whole = request.method in SAFE_METHODS and "hx-request" not in request.headers
    if whole:
        return address_asked(request)
    try:
        page = urlsplit(request.headers.get("hx-current-url") or request.headers.get("referer") or "")
    except ValueError:
        return "/"
    return safe_next(f"{page.path}?{page.query}" if page.query else page.path)
