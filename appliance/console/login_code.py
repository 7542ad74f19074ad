"""The second step of a sign-in: the code of the second factor. Between the steps the browser holds a ticket."""

from __future__ import annotations

from litestar import get, post

from appliance.base.errors import InvalidCredentials, RateLimitExceeded
from appliance.console.context import Context, ContextDependency
from appliance.console.forms import sentence
from appliance.console.rendering import Html
from appliance.console.security import form_of, safe_next, step_ticket
from appliance.console.sign_in import CODE_STEP, complete_sign_in, record_refusal, wait_message, with_retry_after
from appliance.tenancy.second_factor import CODE_CHARS_MAX


@get("/login/code", opt={"public": True})
async def show_code(context: ContextDependency) -> Html:
    """The form for the code; without a valid ticket of the first step, redirects to the start."""
    return _start_again(context) if _read_ticket(context) is None else _form(context)


@post("/login/code", opt={"public": True}, status_code=200)
async def check_code(context: ContextDependency) -> Html:
    """Check and use up the code, then open the session."""
    payload = _read_ticket(context)
    if payload is None:
        return _start_again(context)
    code = str((await form_of(context.request)).get("code", ""))[: CODE_CHARS_MAX + 1]
    services, member_id = context.services, payload["member_id"]
    try:
        context.attempts.count_code(address=context.address, member_id=member_id)
        kind = await services.second_factors.check(member_id, code, stamp=payload["stamp"])
    except RateLimitExceeded as error:
        return with_retry_after(_form(context, error=wait_message(error), status=429), error)
    except InvalidCredentials as error:
        await record_refusal(context, email=(await services.members.get(member_id)).email, reason="code")
        return _form(context, error=sentence(error.message), status=401)
    services.sign_in_tickets.mark_used(step_ticket(context.request, services, CODE_STEP) or "")
    context.attempts.reset_codes(member_id=member_id)
    member = await services.members.get(member_id)
    method = f"{payload['method']}+{kind}"
    proof = services.second_factors.proof_of(payload["stamp"])
    try:
        return await complete_sign_in(context, member, method=method, target=safe_next(payload["next"]), proof=proof)
    except InvalidCredentials:
        await record_refusal(context, email=member.email, reason="password")
        return _start_again(context)


def _read_ticket(context: Context) -> dict[str, str] | None:
    return context.services.sign_in_tickets.read(step_ticket(context.request, context.services, CODE_STEP))


def _start_again(context: Context) -> Html:
    return context.redirect("/login", done="sign-in-expired")


def _form(context: Context, *, error: str | None = None, status: int = 200) -> Html:
    return context.page("pages/login_code.html", status=status, error=error)
