"""The steps after the first factor, whatever that was: the code of the second factor, if there is one, then a new session.

Between the two steps there is no session, only a ticket in a cookie.
"""

from __future__ import annotations

import dataclasses

from litestar.datastructures import Cookie

from appliance.base.acting import ActorKind, act_as, current_actor
from appliance.base.clock import format_wait, whole_seconds
from appliance.base.errors import RateLimitExceeded
from appliance.console.context import Context
from appliance.console.rendering import Html
from appliance.console.security import session_cookie, session_token, step_cookie, step_ticket
from appliance.tenancy.members import Member, Proof
from appliance.tenancy.second_factor import without_second_factor

CODE_STEP = "code"
CODE_PATH = "/login/code"
USER_AGENT_CHARS_MAX = 400
TARGET_CHARS_MAX = 1500  # so that the sealed ticket stays below 4 KiB, the limit of browsers for a cookie


def fitting_target(target: str) -> str:
    """Return `target`, the path to open after signing in, if it fits into a cookie, else `/`."""
    return target if len(target) <= TARGET_CHARS_MAX else "/"


async def continue_sign_in(context: Context, member: Member, *, method: str, target: str, proof: Proof | None = None) -> Html:
    """Respond to a successful first factor: open the session, or redirect to the code of the second factor.

    Raises InvalidCredentials if `proof` of the first factor no longer holds, or no longer suffices alone.
    """
    stamp = await context.services.second_factors.challenge(member.id, proof=proof)
    if stamp is None:
        proof = without_second_factor(proof)
        return await complete_sign_in(context, member, method=method, target=target, proof=proof)
    tickets = context.services.sign_in_tickets
    ticket = tickets.issue({"member_id": member.id, "stamp": stamp, "method": method, "next": fitting_target(target)})
    answer = context.redirect(CODE_PATH)
    answer.set_cookie(step_cookie(context.request, context.services, CODE_STEP, ticket, life_s=tickets.life_s))
    return answer


async def complete_sign_in(context: Context, member: Member, *, method: str, target: str, proof: Proof | None = None) -> Html:
    """Replace this browser's session by a new one for `member` and redirect to `target`.

    Raises InvalidCredentials if `proof` no longer holds.
    """
    _set_actor(context, "member", member.email, member.id)
    await close_session(context)
    answer = context.redirect(target)
    answer.set_cookie(await open_session(context, member, method=method, proof=proof))
    if step_ticket(context.request, context.services, CODE_STEP):
        answer.set_cookie(step_cookie(context.request, context.services, CODE_STEP, ""))
    return answer


async def open_session(context: Context, member: Member, *, method: str, proof: Proof | None = None) -> Cookie:
    """Open a session, also used for the rest of this request, and return its cookie.

    Raises InvalidCredentials if `proof` no longer holds.
    """
    agent, address = context.request.headers.get("user-agent", "")[:USER_AGENT_CHARS_MAX], context.address
    token, session = await context.services.sessions.open(member.id, agent, address, method=method, proof=proof)
    context.request.state["session"] = session
    return session_cookie(context.request, context.services, token)


async def close_session(context: Context) -> None:
    """End the session of this browser, if it has one."""
    token = session_token(context.request, context.services)
    if token:
        await context.services.sessions.close(token)


async def record_refusal(context: Context, *, email: str, reason: str) -> None:
    """Record a failed sign-in, as an act of the appliance itself: nobody is signed in."""
    _set_actor(context, "system", "sign-in", None)
    await context.services.sessions.record_refusal(email, reason)


def _set_actor(context: Context, kind: ActorKind, name: str, actor_id: str | None) -> None:
    act_as(dataclasses.replace(current_actor(), kind=kind, name=name, id=actor_id, address=context.address))


def wait_message(error: RateLimitExceeded) -> str:
    """Return the error message for too many attempts."""
    return f"{error.message} Wait {format_wait(whole_seconds(error.retry_after_s or 0.0))}, then try again."


def with_retry_after(answer: Html, error: RateLimitExceeded) -> Html:
    """Return `answer` with a `Retry-After` header."""
    answer.headers["retry-after"] = str(whole_seconds(error.retry_after_s or 0.0))
    return answer
