"""Signing in with a password, signing out, and the choice of theme. Knows no password rule: `Members` decides."""

from __future__ import annotations

from urllib.parse import urlencode

from litestar import get, post

from appliance.base.errors import InvalidCredentials, RateLimitExceeded
from appliance.console.context import Console, ConsoleDependency
from appliance.console.rendering import THEME_COOKIE, THEMES, Html
from appliance.console.security import ConsoleRequest, current_session, form_of, is_secure, safe_next, session_cookie
from appliance.console.sign_in import address_of, close_session, first_factor_proven, note_refusal, wait_of, with_wait
from appliance.tenancy.members import EMAIL_CHARS_MAX, PASSWORD_CHARS_MAX

THEME_KEPT_S = 365 * 24 * 3600
# One sentence for an unknown address and a wrong password alike.
WRONG = "Wrong e-mail or password."


@get("/login", opt={"public": True})
async def show_login(request: ConsoleRequest, console: ConsoleDependency) -> Html:
    """The sign-in form; a visitor already signed in is sent on."""
    target = safe_next(request.query_params.get("next"))
    if current_session(request) is not None:
        return console.pages.redirect(request, target)
    return login_form(request, console, target=target)


@post("/login", opt={"public": True}, status_code=200)
async def sign_in(request: ConsoleRequest, console: ConsoleDependency) -> Html:
    """Check e-mail and password, then go on to the requested page, or to the code of the second factor."""
    form = await form_of(request)
    email, password = str(form.get("email", "")).strip(), str(form.get("password", ""))
    target = safe_next(str(form.get("next", "")))
    try:
        if len(email) > EMAIL_CHARS_MAX or len(password) > PASSWORD_CHARS_MAX:
            console.attempts.count_address(address=address_of(request))  # not counted for an account: no address is that long
            raise InvalidCredentials(WRONG)
        console.attempts.count(address=address_of(request), account=email)
        proven = await console.services.members.prove_password(email, password)
        answer = await first_factor_proven(
            request, console, proven.member, method="password", target=target, proof=proven.still_valid
        )
    except RateLimitExceeded as error:
        return with_wait(login_form(request, console, target=target, email=email, error=wait_of(error), status=429), error)
    except InvalidCredentials:
        await note_refusal(request, console, email=email, reason="password")
        return login_form(request, console, target=target, email=email, error=WRONG, status=401)
    console.attempts.reset_account(account=email)
    return answer


@post("/logout", status_code=200)
async def sign_out(request: ConsoleRequest, console: ConsoleDependency) -> Html:
    """Close the session on the server and remove its cookie."""
    await close_session(request, console)
    answer = console.pages.redirect(request, "/login", done="signed-out")
    answer.set_cookie(session_cookie(request, console.services, ""))
    return answer


@post("/theme", status_code=200)
async def choose_theme(request: ConsoleRequest, console: ConsoleDependency) -> Html:
    """Remember light, dark, or the preference of the device, and show the same page again."""
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


def login_form(
    request: ConsoleRequest, console: Console, *, target: str, email: str = "", error: str | None = None, status: int = 200
) -> Html:
    """Return the sign-in form, with what was typed and what is wrong."""
    provider = console.services.oidc
    return console.pages.page(
        request,
        "pages/login.html",
        status=status,
        next=target,
        email=email,
        error=error,
        provider=None if provider is None else provider.client.label,
        oidc_path=f"/login/oidc?{urlencode({'next': target})}",
    )


HANDLERS = (show_login, sign_in, sign_out, choose_theme)
