"""Signing in through an OpenID Connect provider: the redirect there and the redirect back. `OidcProvider` checks the answer.

The values that the redirect back must match (state, nonce, PKCE verifier) are sealed in a cookie of the browser that began, and
can be used once. A sign-in begins with a link, not a form: our content security policy lets no form lead to another site.
"""

from __future__ import annotations

import hmac
import secrets
from urllib.parse import quote, urlsplit

import structlog
from litestar import get

from appliance.base.errors import InvalidCredentials, NotFound, RateLimitExceeded
from appliance.console.context import Console, ConsoleDependency
from appliance.console.login import login_form
from appliance.console.rendering import Html
from appliance.console.security import ConsoleRequest, safe_next, step_cookie, step_ticket
from appliance.console.sign_in import address_of, first_factor_proven, kept_target, note_refusal, wait_of, with_wait
from appliance.tenancy.id_tokens import TokenRefused
from appliance.tenancy.oidc import OidcProvider, ProviderUnavailable

log = structlog.get_logger()

OIDC_STEP = "oidc"
RANDOM_BYTES = 32
CODE_CHARS_MAX = 4000
AWAY = "{name} does not answer. Sign in with your password, or try again later."
STALE = "The sign-in began in another browser, was already used, or expired. Start again."
REFUSED = "{name} signed you in, but this appliance does not accept that sign-in. The log has the reason."
DENIED = "{name} did not sign you in."


@get("/login/oidc", opt={"public": True})
async def begin_oidc(request: ConsoleRequest, console: ConsoleDependency) -> Html:
    """Send the browser to the provider, with the values that the redirect back must match."""
    provider, target = _provider(console), safe_next(request.query_params.get("next"))
    home = provider.client.external_url
    if request.headers.get("host") != urlsplit(home).netloc and "moved" not in request.query_params:
        # The provider redirects to the external address, so the cookie must be set there. Once: a proxy may change the host.
        return console.pages.redirect(request, f"{home}/login/oidc?moved=1&next={quote(target, safe='')}")
    facts = {name: secrets.token_urlsafe(RANDOM_BYTES) for name in ("state", "nonce", "verifier")}
    try:
        console.attempts.count_address(address=address_of(request))
        address = await provider.authorization_url(**facts)
    except RateLimitExceeded as error:
        return with_wait(login_form(request, console, target=target, error=wait_of(error), status=429), error)
    except ProviderUnavailable as error:
        return _away(request, console, provider, error, target)
    tickets = console.services.oidc_tickets
    answer = console.pages.redirect(request, address)
    ticket = tickets.issue({**facts, "next": kept_target(target)})
    answer.set_cookie(step_cookie(request, console.services, OIDC_STEP, ticket, life_s=tickets.life_s))
    return answer


@get("/login/oidc/callback", opt={"public": True})
async def end_oidc(request: ConsoleRequest, console: ConsoleDependency) -> Html:
    """Take the provider's code, identify the member, and go on to the requested page, or to the second factor."""
    provider, services = _provider(console), console.services
    ticket = step_ticket(request, services, OIDC_STEP)
    facts = services.oidc_tickets.read(ticket)
    state = request.query_params.get("state", "")
    if ticket is None or facts is None or not hmac.compare_digest(state.encode(), facts["state"].encode()):
        return _spent(request, console, login_form(request, console, target="/", error=STALE, status=400))
    services.oidc_tickets.spend(ticket)
    return _spent(request, console, await _identified(request, console, provider, facts))


async def _identified(request: ConsoleRequest, console: Console, provider: OidcProvider, facts: dict[str, str]) -> Html:
    target, name = safe_next(facts["next"]), provider.client.label
    code = request.query_params.get("code", "")
    try:
        if not 0 < len(code) <= CODE_CHARS_MAX:
            log.info("the sign-in provider sent no code", error=request.query_params.get("error", "")[:100])
            return login_form(request, console, target=target, error=DENIED.format(name=name), status=403)
        sent_by = request.query_params.get("iss")
        identity = await provider.identify(code=code, nonce=facts["nonce"], verifier=facts["verifier"], sent_by=sent_by)
    except ProviderUnavailable as error:
        return _away(request, console, provider, error, target)
    except TokenRefused as error:
        log.warning("sign-in through the provider refused", reason=str(error), address=address_of(request))
        await note_refusal(request, console, email="", reason=f"provider: {error}")
        return login_form(request, console, target=target, error=REFUSED.format(name=name), status=403)
    try:
        member = await console.services.identities.member_of(identity)
    except InvalidCredentials as error:
        await note_refusal(request, console, email=identity.email or "", reason=f"provider: {error.message}")
        return login_form(request, console, target=target, error=error.message, status=403)
    return await first_factor_proven(request, console, member, method="oidc", target=target)


def _provider(console: Console) -> OidcProvider:
    if console.services.oidc is None:
        raise NotFound("no sign-in provider is set up")
    return console.services.oidc


def _spent(request: ConsoleRequest, console: Console, answer: Html) -> Html:
    """Return `answer`, made to remove the cookie of this step."""
    answer.set_cookie(step_cookie(request, console.services, OIDC_STEP, ""))
    return answer


def _away(request: ConsoleRequest, console: Console, provider: OidcProvider, error: ProviderUnavailable, target: str) -> Html:
    log.warning("the sign-in provider is not available", reason=str(error))
    message = AWAY.format(name=provider.client.label)
    return login_form(request, console, target=target, error=message, status=503)


HANDLERS = (begin_oidc, end_oidc)
