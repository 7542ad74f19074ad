"""The step between password and session: the code of the second factor. Keeps only a ticket in the browser."""

from __future__ import annotations

from litestar import get, post

from appliance.base.errors import InvalidCredentials, RateLimitExceeded
from appliance.console.context import Console, ConsoleDependency
from appliance.console.forms import sentence
from appliance.console.rendering import Html
from appliance.console.security import ConsoleRequest, form_of, safe_next, step_ticket
from appliance.console.sign_in import CODE_STEP, address_of, finish, note_refusal, wait_of, with_wait
from appliance.tenancy.second_factor import CODE_CHARS_MAX


@get("/login/code", opt={"public": True})
async def show_code(request: ConsoleRequest, console: ConsoleDependency) -> Html:
    """The form of the code, for a browser that has just proven the first factor; any other starts at the beginning."""
    return _start_again(request, console) if _facts(request, console) is None else _form(request, console)


@post("/login/code", opt={"public": True}, status_code=200)
async def check_code(request: ConsoleRequest, console: ConsoleDependency) -> Html:
    """Use up the code and open the session, or say that it is wrong."""
    facts = _facts(request, console)
    if facts is None:
        return _start_again(request, console)
    code = str((await form_of(request)).get("code", ""))[: CODE_CHARS_MAX + 1]
    services, member_id = console.services, facts["member_id"]
    try:
        console.attempts.count_code(address=address_of(request), member_id=member_id)
        kind = await services.second_factors.check(member_id, code, stamp=facts["stamp"])
    except RateLimitExceeded as error:
        return with_wait(_form(request, console, error=wait_of(error), status=429), error)
    except InvalidCredentials as error:
        await note_refusal(request, console, email=(await services.members.get(member_id)).email, reason="code")
        return _form(request, console, error=sentence(error.message), status=401)
    services.sign_in_tickets.spend(step_ticket(request, services, CODE_STEP) or "")
    console.attempts.reset_codes(member_id=member_id)
    member = await services.members.get(member_id)
    method = f"{facts['method']}+{kind}"
    proof = services.second_factors.proof_of(facts["stamp"])
    try:
        return await finish(request, console, member, method=method, target=safe_next(facts["next"]), proof=proof)
    except InvalidCredentials:
        await note_refusal(request, console, email=member.email, reason="password")
        return _start_again(request, console)


def _facts(request: ConsoleRequest, console: Console) -> dict[str, str] | None:
    return console.services.sign_in_tickets.read(step_ticket(request, console.services, CODE_STEP))


def _start_again(request: ConsoleRequest, console: Console) -> Html:
    return console.pages.redirect(request, "/login", done="sign-in-expired")


def _form(request: ConsoleRequest, console: Console, *, error: str | None = None, status: int = 200) -> Html:
    return console.pages.page(request, "pages/login_code.html", status=status, error=error)


HANDLERS = (show_code, check_code)
