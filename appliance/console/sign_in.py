"""The last steps of every way to sign in: ask for a code if the member has a second factor, then open the session.

Between the two there is no session, only a ticket in a cookie of this browser. Knows no form of the first factor.
"""

from __future__ import annotations

import dataclasses
import math

from litestar.datastructures import Cookie

from appliance.base.acting import ActorKind, act_as, current_actor
from appliance.base.clock import format_wait
from appliance.base.errors import InvalidValue, RateLimitExceeded
from appliance.console.context import Context
from appliance.console.rendering import Html
from appliance.console.security import session_cookie, session_token, step_cookie, step_ticket
from appliance.tenancy.members import Member, Proof, check_email
from appliance.tenancy.second_factor import without_second_factor

CODE_STEP = "code"
CODE_PATH = "/login/code"
USER_AGENT_CHARS_MAX = 400
TARGET_CHARS_MAX = 1500  # sealed together with the rest, it stays below the 4 KiB limit of browsers for a cookie
NO_ADDRESS = "(no e-mail address)"


def kept_target(target: str) -> str:
    """Return `target`, where to go after signing in, if it fits a cookie; else the overview."""
    return target if len(target) <= TARGET_CHARS_MAX else "/"


async def first_factor_proven(
    context: Context, member: Member, *, method: str, target: str, proof: Proof | None = None
) -> Html:
    """Return the answer for a member who has proven the first factor by `method`: with a session, or leading to the code.

    Raises InvalidCredentials when `proof` of the first factor no longer holds, or no longer suffices alone.
    """
    stamp = await context.services.second_factors.challenge(member.id, proof=proof)
    if stamp is None:
        alone = without_second_factor(proof)
        return await finish(context, member, method=method, target=target, proof=alone)
    tickets = context.services.sign_in_tickets
    ticket = tickets.issue({"member_id": member.id, "stamp": stamp, "method": method, "next": kept_target(target)})
    answer = context.redirect(CODE_PATH)
    answer.set_cookie(step_cookie(context.request, context.services, CODE_STEP, ticket, life_s=tickets.life_s))
    return answer


async def finish(context: Context, member: Member, *, method: str, target: str, proof: Proof | None = None) -> Html:
    """Open a session with a new id, end the one that this browser had, and lead on to `target`.

    Raises InvalidCredentials when `proof` no longer holds.
    """
    _act_as(context, "member", member.email, member.id)
    await close_session(context)
    answer = context.redirect(target)
    answer.set_cookie(await open_session(context, member, method=method, proof=proof))
    if step_ticket(context.request, context.services, CODE_STEP):
        answer.set_cookie(step_cookie(context.request, context.services, CODE_STEP, ""))
    return answer


async def open_session(context: Context, member: Member, *, method: str, proof: Proof | None = None) -> Cookie:
    """Return the cookie of a new session of this browser, which the rest of this request uses.

    Raises InvalidCredentials when `proof` no longer holds.
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
    """Record that somebody could not sign in. What was typed is kept only if it is an address: it may be a password."""
    try:
        named = check_email(email)
    except InvalidValue:
        named = NO_ADDRESS
    _act_as(context, "system", "sign-in", None)
    await context.services.sessions.record_refusal(named, reason)


def _act_as(context: Context, kind: ActorKind, name: str, actor_id: str | None) -> None:
    act_as(dataclasses.replace(current_actor(), kind=kind, name=name, id=actor_id, address=context.address))


def wait_of(error: RateLimitExceeded) -> str:
    """Return the sentence for too many attempts."""
    return f"{error.message} Wait {format_wait(_whole_wait_s(error))}, then try again."


def with_wait(answer: Html, error: RateLimitExceeded) -> Html:
    """Return `answer` with the header that says after how long to try again."""
    answer.headers["retry-after"] = str(_whole_wait_s(error))
    return answer


def _whole_wait_s(error: RateLimitExceeded) -> int:
    return max(1, math.ceil(error.retry_after_s or 0))
