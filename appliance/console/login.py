"""Signing in with a password, signing out, and choosing the theme. `Members` checks the password."""

from __future__ import annotations

from urllib.parse import urlencode

from litestar import get, post

from appliance.base.errors import InvalidCredentials, RateLimitExceeded
from appliance.console.context import Context, ContextDependency
from appliance.console.rendering import THEME_COOKIE, THEMES, Html
from appliance.console.security import (
    OPEN_TO_TEMPORARY_PASSWORD,
    current_session,
    form_of,
    is_secure,
    safe_next,
    session_cookie,
)
from appliance.console.sign_in import close_session, continue_sign_in, record_refusal, wait_message, with_retry_after
from appliance.tenancy.members import EMAIL_CHARS_MAX, PASSWORD_CHARS_MAX

THEME_KEPT_S = 365 * 24 * 3600
# The same for an unknown address and a wrong password.
WRONG_CREDENTIALS = "Wrong e-mail or password."


@get("/login", opt={"public": True})
async def show_login(context: ContextDependency) -> Html:
    """The sign-in form; redirects a visitor who is already signed in."""
    target = safe_next(context.query.get("next"))
    if current_session(context.request) is not None:
        return context.redirect(target)
    return login_form(context, target=target)


@post("/login", opt={"public": True}, status_code=200)
async def sign_in(context: ContextDependency) -> Html:
    """Check e-mail and password, then redirect to the requested page or to the second factor."""
    form = await form_of(context.request)
    email, password = str(form.get("email", "")).strip(), str(form.get("password", ""))
    target = safe_next(str(form.get("next", "")))
    try:
        if len(email) > EMAIL_CHARS_MAX or len(password) > PASSWORD_CHARS_MAX:
            # Counted for the address only: no account has so long an e-mail address.
            context.attempts.count_address(address=context.address)
            raise InvalidCredentials(WRONG_CREDENTIALS)
        with context.attempts.counted(address=context.address, account=email):
            proven = await context.services.members.prove_password(email, password)
        answer = await continue_sign_in(context, proven.member, method="password", target=target, proof=proven.still_valid)
    except RateLimitExceeded as error:
        return with_retry_after(login_form(context, target=target, email=email, error=wait_message(error), status=429), error)
    except InvalidCredentials:
        await record_refusal(context, email=email, reason="password")
        return login_form(context, target=target, email=email, error=WRONG_CREDENTIALS, status=401)
    context.attempts.reset_account(account=email)
    return answer


@post("/logout", opt=OPEN_TO_TEMPORARY_PASSWORD, status_code=200)
async def sign_out(context: ContextDependency) -> Html:
    """Close the session on the server and remove its cookie."""
    await close_session(context)
    answer = context.redirect("/login", done="signed-out")
    answer.set_cookie(session_cookie(context.request, context.services, ""))
    return answer


@post("/theme", opt=OPEN_TO_TEMPORARY_PASSWORD, status_code=200)
async def choose_theme(context: ContextDependency) -> Html:
    """Store the theme (light, dark, or that of the device) in a cookie and show the same page again."""
    form = await form_of(context.request)
    theme = str(form.get("theme", ""))
    answer = context.redirect(safe_next(str(form.get("next", ""))))
    if theme in THEMES:
        answer.set_cookie(
            key=THEME_COOKIE,
            value=theme,
            path="/",
            max_age=THEME_KEPT_S,
            httponly=True,
            samesite="lax",
            secure=is_secure(context.request, context.services),
        )
    return answer


def login_form(context: Context, *, target: str, email: str = "", error: str | None = None, status: int = 200) -> Html:
    """Return the sign-in form with the typed e-mail and an error."""
    provider = context.services.oidc
    return context.page(
        "pages/login.html",
        status=status,
        next=target,
        email=email,
        error=error,
        provider=None if provider is None else provider.client.label,
        oidc_path=f"/login/oidc?{urlencode({'next': target})}",
    )
