"""The step between password and session: the code of the second factor. Keeps only a ticket in the browser."""

from __future__ import annotations

from litestar import get, post

from appliance.base.errors import InvalidCredentials, RateLimitExceeded
from appliance.console.context import Context, ContextDependency
from appliance.console.forms import sentence
from appliance.console.rendering import Html
from appliance.console.security import form_of, safe_next, step_ticket
from appliance.console.sign_in import CODE_STEP, finish, record_refusal, wait_of, with_wait
from appliance.tenancy.second_factor import CODE_CHARS_MAX


@get("/login/code", opt={"public": True})
async def show_code(context: ContextDependency) -> Html:
    """The form of the code, for a browser that has just proven the first factor; any other starts at the beginning."""
    return _start_again(context) if _facts(context) is None else _form(context)


@post("/login/code", opt={"public": True}, status_code=200)
async def check_code(context: ContextDependency) -> Html:
    """Use up the code and open the session, or say that it is wrong."""
    facts = _facts(context)
    if facts is None:
        return _start_again(context)
    code = str((await form_of(context.request)).get("code", ""))[: CODE_CHARS_MAX + 1]
    services, member_id = context.services, facts["member_id"]
    try:
        context.attempts.count_code(address=context.address, member_id=member_id)
        kind = await services.second_factors.check(member_id, code, stamp=facts["stamp"])
    except RateLimitExceeded as error:
        return with_wait(_form(context, error=wait_of(error), status=429), error)
    except InvalidCredentials as error:
        await record_refusal(context, email=(await services.members.get(member_id)).email, reason="code")
        return _form(context, error=sentence(error.message), status=401)
    services.sign_in_tickets.mark_used(step_ticket(context.request, services, CODE_STEP) or "")
    context.attempts.reset_codes(member_id=member_id)
    member = await services.members.get(member_id)
    method = f"{facts['method']}+{kind}"
    proof = services.second_factors.proof_of(facts["stamp"])
    try:
        return await finish(context, member, method=method, target=safe_next(facts["next"]), proof=proof)
    except InvalidCredentials:
        await record_refusal(context, email=member.email, reason="password")
        return _start_again(context)


def _facts(context: Context) -> dict[str, str] | None:
    return context.services.sign_in_tickets.read(step_ticket(context.request, context.services, CODE_STEP))


def _start_again(context: Context) -> Html:
    return context.redirect("/login", done="sign-in-expired")


def _form(context: Context, *, error: str | None = None, status: int = 200) -> Html:
    return context.page("pages/login_code.html", status=status, error=error)
