"""Setting up and removing the second factor, and new recovery codes: each asks for a proof of identity again.

Secrets and codes are shown in one answer only. Knows no rule of codes: `SecondFactors` decides.
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

EXPIRED = "The setup took too long. Scan the new code."
NO_PROOF = "Wrong password or code."


@get("/account/second-factor")
async def new_second_factor(context: ContextDependency) -> Html:
    """The QR code, and the fields that prove that the right person scanned it."""
    member = context.session.member
    return _enrolment_form(context, context.services.second_factors.begin(member), None)


@post("/account/second-factor", status_code=200)
async def enable_second_factor(context: ContextDependency) -> Html:
    """Check password and code, store the secret, and show the recovery codes in a new session."""
    session, form = context.session, await context.form()
    factors, member = context.services.second_factors, session.member
    enrolment = factors.resume(member, form.values.get("ticket", ""))
    if enrolment is None:
        form.fail(FORM_ERROR, EXPIRED)
        return _enrolment_form(context, factors.begin(member), form)
    try:
        context.attempts.count(address=context.address, account=member.email)
        proven = await context.services.members.prove_password(member.email, form.values.get("password", ""))
        codes = await factors.enable(member, enrolment, form.raw("code"), proof=proven.still_valid)
    except (RateLimitExceeded, InvalidCredentials, Conflict) as error:
        _explain(form, error)
        return _enrolment_form(context, enrolment, form)
    context.attempts.reset_account(account=member.email)
    return await _codes_in_new_session(context, session, codes, proven.still_valid)


@get("/account/second-factor/disable")
async def confirm_disable(context: ContextDependency) -> Html:
    """Ask for a proof before the second factor is removed."""
    return _proof_form(context, "disable", None)


@post("/account/second-factor/disable", status_code=200)
async def disable_second_factor(context: ContextDependency) -> Html:
    """Remove the second factor; every other device is signed out."""
    session, form = context.session, await context.form()
    proof = await _proven(context, session.member, form)
    if proof is None:
        return _proof_form(context, "disable", form)
    proof = await context.services.second_factors.disable(session.member.id, proof=proof)
    cookie = await open_session(context, session.member, method=session.method, proof=proof)
    answer = context.redirect("/account", done="second-factor-off")
    answer.set_cookie(cookie)
    return answer


@get("/account/recovery-codes")
async def confirm_renew(context: ContextDependency) -> Html:
    """Ask for a proof before the old codes are replaced."""
    return _proof_form(context, "renew", None)


@post("/account/recovery-codes", status_code=200)
async def renew_recovery_codes(context: ContextDependency) -> Html:
    """Show ten new codes; the old ones are refused from now on."""
    session, form = context.session, await context.form()
    proof = await _proven(context, session.member, form)
    if proof is None:
        return _proof_form(context, "renew", form)
    try:
        codes = await context.services.second_factors.renew_recovery_codes(session.member.id, proof=proof)
    except Conflict as error:
        form.fail_with(error, ())
        return _proof_form(context, "renew", form)
    return _codes(context, codes)


async def _proven(context: Context, member: Member, form: Form) -> Proof | None:
    """Return the proof in the field `proof`: the member's password or a valid code; None, with an error in the form, if it is
    neither."""
    typed = form.values.get("proof", "")
    for proven_by in _ways(typed):
        try:
            return await proven_by(context, member, typed)
        except RateLimitExceeded as error:
            form.fail("proof", wait_message(error))
            return None
        except InvalidCredentials:
            continue
    form.fail("proof", NO_PROOF)
    return None


def _ways(typed: str) -> Sequence[Callable[[Context, Member, str], Awaitable[Proof]]]:
    """Return the checks to try on `typed`: ten letters may be a recovery code, or a password that looks like one."""
    digits = typed.replace(" ", "")
    if len(digits) == 6 and digits.isdigit():
        return (_code_proven,)
    return (_password_proven,) if normalise_code(typed) is None else (_code_proven, _password_proven)


async def _code_proven(context: Context, member: Member, code: str) -> Proof:
    factors = context.services.second_factors
    context.attempts.count_code(address=context.address, member_id=member.id)
    stamp = await factors.challenge(member.id)
    if stamp is None:
        raise InvalidCredentials(NO_PROOF)
    await factors.check(member.id, code, stamp=stamp)
    context.attempts.reset_codes(member_id=member.id)
    return factors.proof_of(stamp)


async def _password_proven(context: Context, member: Member, password: str) -> Proof:
    context.attempts.count(address=context.address, account=member.email)
    proven = await context.services.members.prove_password(member.email, password)
    context.attempts.reset_account(account=member.email)
    return proven.still_valid


def _explain(form: Form, error: RateLimitExceeded | InvalidCredentials | Conflict) -> None:
    if isinstance(error, RateLimitExceeded):
        form.fail(FORM_ERROR, wait_message(error))
    elif isinstance(error, Conflict):
        form.fail(FORM_ERROR, sentence(error.message))
    elif error.param == "code":
        form.fail("code", sentence(error.message))
    else:
        form.fail("password", WRONG_CREDENTIAL)


async def _codes_in_new_session(context: Context, session: Session, codes: list[str], proof: Proof) -> Html:
    method = f"{session.method.partition('+')[0]}+totp"
    cookie = await open_session(context, session.member, method=method, proof=proof)
    answer = _codes(context, codes)
    answer.set_cookie(cookie)
    return answer


def _codes(context: Context, codes: list[str]) -> Html:
    return context.sheet("fragments/recovery_codes.html", title="Recovery codes", codes=codes)


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
    """Return `text` as a QR code: an SVG without styles of its own, dark on light whatever the colours of the page."""
    image = io.BytesIO()
    segno.make(text, error="m", micro=False).save(
        image, kind="svg", xmldecl=False, svgns=True, omitsize=True, nl=False, svgclass="qr", lineclass=None, border=3
    )
    return Markup(image.getvalue().decode())  # noqa: S704 - consists of modules; contains none of the text
