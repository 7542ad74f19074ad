"""Enabling and disabling the second factor, and new recovery codes. Each requires the password or a code again.

Secrets and codes are shown in one response only. `SecondFactors` checks the codes.
"""

from __future__ import annotations

import io
from collections.abc import Awaitable, Callable, Sequence
from textwrap import wrap

import segno
from litestar import get, post
from markupsafe import Markup

from appliance.base.errors import Conflict, InvalidCredentials, RateLimitExceeded
from appliance.console.account import WRONG_CREDENTIAL
from appliance.console.context import Context, ContextDependency
from appliance.console.forms import FORM_ERROR, Form, sentence
from appliance.console.rendering import Html
from appliance.console.sign_in import open_session, wait_message
from appliance.tenancy.members import Member, Proof
from appliance.tenancy.recovery_codes import normalise_code
from appliance.tenancy.second_factor import Enrolment
from appliance.tenancy.sessions import Session

EXPIRED = "The setup has expired. Scan the new QR code."
WRONG_PROOF = "Wrong password or code."


@get("/account/second-factor")
async def new_second_factor(context: ContextDependency) -> Html:
    """The QR code, with fields for a code from the app and the password."""
    member = context.session.member
    return _enrolment_form(context, context.services.second_factors.begin(member), None)


@post("/account/second-factor", status_code=200)
async def enable_second_factor(context: ContextDependency) -> Html:
    """Check password and code, enable the second factor, open a new session, and show the recovery codes."""
    session, form = context.session, await context.form()
    factors, member = context.services.second_factors, session.member
    enrolment = factors.resume(member, form.values.get("ticket", ""))
    if enrolment is None:
        form.fail(FORM_ERROR, EXPIRED)
        return _enrolment_form(context, factors.begin(member), form)
    try:
        with context.attempts.counted(address=context.address, account=member.email):
            proven = await context.services.members.prove_password(member.email, form.values.get("password", ""))
        codes = await factors.enable(member, enrolment, form.raw("code"), proof=proven.still_valid)
    except (RateLimitExceeded, InvalidCredentials, Conflict) as error:
        _add_error(form, error)
        return _enrolment_form(context, enrolment, form)
    context.attempts.reset_account(account=member.email)
    return await _show_codes_in_new_session(context, session, codes, proven.still_valid)


@get("/account/second-factor/disable")
async def confirm_disable(context: ContextDependency) -> Html:
    """The form to disable the second factor, which asks for the password or a code."""
    return _proof_form(context, "disable", None)


@post("/account/second-factor/disable", status_code=200)
async def disable_second_factor(context: ContextDependency) -> Html:
    """Disable the second factor; every other device is signed out."""
    session, form = context.session, await context.form()
    proof = await _verify_proof(context, session.member, form)
    if proof is None:
        return _proof_form(context, "disable", form)
    proof = await context.services.second_factors.disable(session.member.id, proof=proof)
    cookie = await open_session(context, session.member, method=session.method, proof=proof)
    answer = context.redirect("/account", done="second-factor-off")
    answer.set_cookie(cookie)
    return answer


@get("/account/recovery-codes")
async def confirm_renew(context: ContextDependency) -> Html:
    """The form for new recovery codes, which asks for the password or a code."""
    return _proof_form(context, "renew", None)


@post("/account/recovery-codes", status_code=200)
async def renew_recovery_codes(context: ContextDependency) -> Html:
    """Replace the recovery codes and show the new ones."""
    session, form = context.session, await context.form()
    proof = await _verify_proof(context, session.member, form)
    if proof is None:
        return _proof_form(context, "renew", form)
    with form.refusals(()):
        codes = await context.services.second_factors.renew_recovery_codes(session.member.id, proof=proof)
        return _show_codes(context, codes)
    return _proof_form(context, "renew", form)


async def _verify_proof(context: Context, member: Member, form: Form) -> Proof | None:
    """Check the field `proof`, the member's password or a code; return None, with a form error, if it is neither."""
    typed = form.values.get("proof", "")
    for check in _candidate_checks(typed):
        try:
            return await check(context, member, typed)
        except RateLimitExceeded as error:
            form.fail("proof", wait_message(error))
            return None
        except InvalidCredentials:
            continue
    form.fail("proof", WRONG_PROOF)
    return None


def _candidate_checks(typed: str) -> Sequence[Callable[[Context, Member, str], Awaitable[Proof]]]:
    """Return the checks to try: a text in the form of a recovery code may also be a password."""
    digits = typed.replace(" ", "")
    if len(digits) == 6 and digits.isdigit():
        return (_check_code,)
    return (_check_password,) if normalise_code(typed) is None else (_check_code, _check_password)


async def _check_code(context: Context, member: Member, code: str) -> Proof:
    factors = context.services.second_factors
    context.attempts.count_code(address=context.address, member_id=member.id)
    stamp = await factors.challenge(member.id)
    if stamp is None:
        raise InvalidCredentials(WRONG_PROOF)
    await factors.check(member.id, code, stamp=stamp)
    context.attempts.reset_codes(member_id=member.id)
    return factors.proof_of(stamp)


async def _check_password(context: Context, member: Member, password: str) -> Proof:
    with context.attempts.counted(address=context.address, account=member.email):
        proven = await context.services.members.prove_password(member.email, password)
    context.attempts.reset_account(account=member.email)
    return proven.still_valid


def _add_error(form: Form, error: RateLimitExceeded | InvalidCredentials | Conflict) -> None:
    if isinstance(error, RateLimitExceeded):
        form.fail(FORM_ERROR, wait_message(error))
    elif isinstance(error, Conflict):
        form.fail(FORM_ERROR, sentence(error.message))
    elif error.param == "code":
        form.fail("code", sentence(error.message))
    else:
        form.fail("password", WRONG_CREDENTIAL)


async def _show_codes_in_new_session(context: Context, session: Session, codes: list[str], proof: Proof) -> Html:
    method = f"{session.method.partition('+')[0]}+totp"
    cookie = await open_session(context, session.member, method=method, proof=proof)
    answer = _show_codes(context, codes)
    answer.set_cookie(cookie)
    return answer


def _show_codes(context: Context, codes: list[str]) -> Html:
    return context.sheet("fragments/recovery_codes.html", title="Your recovery codes", codes=codes)


def _enrolment_form(context: Context, enrolment: Enrolment, form: Form | None) -> Html:
    if form is not None:
        form.values.clear()  # never send back a password or code
    return context.sheet(
        "fragments/second_factor_new.html",
        title="Set up a second factor",
        form=form,
        enrolment=enrolment,
        secret_in_groups=" ".join(wrap(enrolment.secret, 4)),
        qr_code=qr_code(enrolment.uri),
    )


def _proof_form(context: Context, verb: str, form: Form | None) -> Html:
    if form is not None:
        form.values.clear()
    title = {"disable": "Disable the second factor", "renew": "New recovery codes"}[verb]
    return context.sheet("fragments/second_factor_proof.html", title=title, form=form, verb=verb)


def qr_code(text: str) -> Markup:
    """Return `text` as a QR code: an SVG without inline styles, dark on light in every theme."""
    image = io.BytesIO()
    segno.make(text, error="m", micro=False).save(
        image, kind="svg", xmldecl=False, svgns=True, omitsize=True, nl=False, svgclass="qr", lineclass=None, border=3
    )
    return Markup(image.getvalue().decode())  # noqa: S704 - drawn by segno; contains no part of the text
