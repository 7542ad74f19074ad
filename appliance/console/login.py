"""Signing in and out, and the choice of colours. Knows no password rule: `Members` decides, this page only asks."""

from __future__ import annotations

import math

from litestar import get, post

from appliance.base.errors import InvalidCredentials, RateLimitExceeded
from appliance.console.context import Console, ConsoleDependency
from appliance.console.rendering import THEME_COOKIE, THEMES, Html
from appliance.console.security import (
    ConsoleRequest,
    current_session,
    form_of,
    is_secure,
    safe_next,
    session_cookie,
    session_token,
)

FIELD_CHARS_MAX = 1000
USER_AGENT_CHARS_MAX = 400
THEME_KEPT_S = 365 * 24 * 3600
# One sentence for an unknown address and a wrong password alike.
WRONG = "E-mail and password do not belong together."


@get("/login", opt={"public": True})
async def show_login(request: ConsoleRequest, console: ConsoleDependency) -> Html:
    """The sign-in form; whoever is signed in goes on."""
    target = safe_next(request.query_params.get("next"))
    if current_session(request) is not None:
        return console.pages.redirect(request, target)
    return _form(request, console, target=target)


@post("/login", opt={"public": True}, status_code=200)
async def sign_in(request: ConsoleRequest, console: ConsoleDependency) -> Html:
    """Check e-mail and password, open a session with a new id, and go on to the page that was asked for."""
    form = await form_of(request)
    email, password = str(form.get("email", "")).strip(), str(form.get("password", ""))
    target = safe_next(str(form.get("next", "")))
    address = request.client.host if request.client else "unknown"
    try:
        if len(email) > FIELD_CHARS_MAX or len(password) > FIELD_CHARS_MAX:
            raise InvalidCredentials(WRONG)
        console.attempts.count(address=address, account=email)
        member = await console.services.members.verify_password(email, password)
    except RateLimitExceeded as error:
        return _refused(request, console, error, target=target, email=email)
    except InvalidCredentials:
        return _form(request, console, target=target, email=email, error=WRONG, status=401)
    console.attempts.forgive(account=email)
    await _close_session(request, console)
    agent = request.headers.get("user-agent", "")[:USER_AGENT_CHARS_MAX]
    token, _ = await console.services.sessions.open(member.id, agent, address)
    answer = console.pages.redirect(request, target)
    answer.set_cookie(session_cookie(request, console.services, token))
    return answer


@post("/logout", status_code=200)
async def sign_out(request: ConsoleRequest, console: ConsoleDependency) -> Html:
    """Close the session on the server and remove its cookie."""
    await _close_session(request, console)
    answer = console.pages.redirect(request, "/login", done="signed-out")
    answer.set_cookie(session_cookie(request, console.services, ""))
    return answer


@post("/theme", status_code=200)
async def choose_theme(request: ConsoleRequest, console: ConsoleDependency) -> Html:
    """Remember light, dark, or whatever the device prefers, and show the same page again."""
    form = await form_of(request)
    theme = str(form.get("theme", ""))
    answer = console.pages.redirect(request, safe_next(str(form.get("next", ""))))
    if theme in THEMES:
        answer.set_cookie(
            key=THEME_COOKIE,
            value=theme,
            path="/",
            max_age=THEME_KEPT_S,
            httponly=True,
            samesite="lax",
            secure=is_secure(request, console.services),
        )
    return answer


async def _close_session(request: ConsoleRequest, console: Console) -> None:
    token = session_token(request, console.services)
    if token:
        await console.services.sessions.close(token)


def _form(
    request: ConsoleRequest, console: Console, *, target: str, email: str = "", error: str | None = None, status: int = 200
) -> Html:
    return console.pages.page(request, "pages/login.html", status=status, next=target, email=email, error=error)


def _refused(request: ConsoleRequest, console: Console, error: RateLimitExceeded, *, target: str, email: str) -> Html:
    wait_s = math.ceil(error.retry_after_s or 0)
    answer = _form(
        request, console, target=target, email=email, error=f"{error.message} Wait {wait_s} s, then try again.", status=429
    )
    answer.headers["retry-after"] = str(wait_s)
    return answer
