"""The account page of the signed-in member: password, second factor, and signed-in devices.

A change of the password ends every session; the response opens a new one for this browser.
"""

from __future__ import annotations

from litestar import get, post
from litestar.params import FromPath

from appliance.base.errors import BadRequest, InvalidCredentials, RateLimitExceeded
from appliance.console.context import Context, ContextDependency
from appliance.console.forms import Form
from appliance.console.rendering import Html
from appliance.console.security import OPEN_TO_TEMPORARY_PASSWORD
from appliance.console.sign_in import open_session, wait_message
from appliance.tenancy.devices import device_of
from appliance.tenancy.members import Proof
from appliance.tenancy.pages import PAGE_ROWS_MAX
from appliance.tenancy.sessions import Session

WRONG_CREDENTIAL = "Wrong password."
METHODS = {"password": "password", "oidc": "provider", "totp": "code", "recovery": "recovery code"}


def describe_method(method: str) -> str:
    """Describe how a session was authenticated: `password+totp` becomes `password and code`."""
    return " and ".join(METHODS.get(part, part) for part in method.split("+"))


@get("/account", opt=OPEN_TO_TEMPORARY_PASSWORD)
async def show_account(context: ContextDependency) -> Html:
    """Password, second factor and devices of the signed-in member; the password alone while it is temporary."""
    return await _page(context)


@post("/account/password", opt=OPEN_TO_TEMPORARY_PASSWORD, status_code=200)
async def change_password(context: ContextDependency) -> Html:
    """Replace the password and sign out every other device, or show the page again with the errors."""
    session, form = context.session, await context.form()
    current, password = form.values.get("current", ""), form.values.get("password", "")
    if password != form.values.get("again", ""):
        form.fail("again", "The two new passwords differ.")
    if not form.errors:
        try:
            with context.attempts.counted(address=context.address, account=session.member.email):
                proven = await context.services.members.change_password(session.member, current, password)
            return await _redirect_with_new_session(context, session, proven.still_valid, done="password-changed")
        except RateLimitExceeded as error:
            form.fail("current", wait_message(error))
        except InvalidCredentials:
            form.fail("current", WRONG_CREDENTIAL)
        except BadRequest as error:
            form.fail_with(error, ("password",))
    form.values.clear()  # never send a password back
    return await _page(context, form)


@post("/account/sessions/{session_id:str}/end", status_code=200)
async def end_session(context: ContextDependency, session_id: FromPath[str]) -> Html:
    """Sign one of the member's own devices out."""
    session = context.session
    await context.services.sessions.end(session_id, member_id=session.member.id)
    if session_id == session.id:
        return context.redirect("/login", done="signed-out")
    return context.redirect("/account", done="session-ended")


@post("/account/sessions/end-others", status_code=200)
async def end_other_sessions(context: ContextDependency) -> Html:
    """Sign every device out but this one."""
    session = context.session
    await context.services.sessions.close_all(session.member.id, keep=session.id)
    return context.redirect("/account", done="sessions-ended")


async def _redirect_with_new_session(context: Context, session: Session, proof: Proof, *, done: str) -> Html:
    """Redirect back to the page with a new session: the change has ended all sessions of the member."""
    cookie = await open_session(context, session.member, method=session.method, proof=proof)
    context.attempts.reset_account(account=session.member.email)
    answer = context.redirect("/account", done=done)
    answer.set_cookie(cookie)
    return answer


async def _page(context: Context, form: Form | None = None) -> Html:
    session = context.session
    page = await context.services.sessions.list(session.member.id, PAGE_ROWS_MAX)
    provider = context.services.oidc
    devices = sorted(page.data, key=lambda other: (other.id != session.id, -other.last_seen_at.timestamp()))
    return context.page(
        "pages/account.html",
        form=form,
        current=session,
        provider=None if provider is None else provider.client.label,
        linked=provider is not None and await context.services.identities.issuer_of(session.member.id) is not None,
        factor=await context.services.second_factors.state(session.member.id),
        devices=devices,
        device_of=device_of,
        describe_method=describe_method,
    )
