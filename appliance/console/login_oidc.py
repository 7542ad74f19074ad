"""Signing in through an OpenID Connect provider: the redirect there and the redirect back. `OidcProvider` checks the answer.

The values that the redirect back must match (state, nonce, PKCE verifier) are sealed in a cookie of the browser that began, and
can be used once. A sign-in begins with a link, not a form: our content security policy lets no form lead to another site.
"""

from __future__ import annotations

import hmac
import secrets
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

import structlog
from litestar import get

from appliance.base.errors import InvalidCredentials, NotFound, RateLimitExceeded
from appliance.console.context import Context, ContextDependency
from appliance.console.login import login_form
from appliance.console.rendering import Html
from appliance.console.security import safe_next, step_cookie, step_ticket
from appliance.console.sign_in import first_factor_proven, kept_target, record_refusal, wait_of, with_wait
from appliance.tenancy.id_tokens import TokenRefused
from appliance.tenancy.oidc import OidcProvider, ProviderUnavailable

if TYPE_CHECKING:
    from appliance.serving.services import Services

log = structlog.get_logger()

OIDC_STEP = "oidc"
RANDOM_BYTES = 32
CODE_CHARS_MAX = 4000
AWAY = "{name} does not answer. Sign in with your password, or try again later."
STALE = "The sign-in began in another browser, was already used, or expired. Start again."
REFUSED = "{name} signed you in, but this appliance does not accept that sign-in. The log has the reason."
DENIED = "{name} did not sign you in."


@get("/login/oidc", opt={"public": True})
async def begin_oidc(context: ContextDependency) -> Html:
    """Send the browser to the provider, with the values that the redirect back must match."""
    provider, target = _provider(context.services), safe_next(context.query.get("next"))
    home = provider.client.external_url
    if context.request.headers.get("host") != urlsplit(home).netloc and "moved" not in context.query:
        # The provider redirects to the external address, so the cookie must be set there. Once: a proxy may change the host.
        return context.redirect(f"{home}/login/oidc?moved=1&next={quote(target, safe='')}")
    facts = {name: secrets.token_urlsafe(RANDOM_BYTES) for name in ("state", "nonce", "verifier")}
    try:
        context.attempts.count_address(address=context.address)
        address = await provider.authorization_url(**facts)
    except RateLimitExceeded as error:
        return with_wait(login_form(context, target=target, error=wait_of(error), status=429), error)
    except ProviderUnavailable as error:
        return _away(context, provider, error, target)
    tickets = context.services.oidc_tickets
    answer = context.redirect(address)
    ticket = tickets.issue({**facts, "next": kept_target(target)})
    answer.set_cookie(step_cookie(context.request, context.services, OIDC_STEP, ticket, life_s=tickets.life_s))
    return answer


@get("/login/oidc/callback", opt={"public": True})
async def end_oidc(context: ContextDependency) -> Html:
    """Take the provider's code, identify the member, and go on to the requested page, or to the second factor."""
    provider, services = _provider(context.services), context.services
    ticket = step_ticket(context.request, services, OIDC_STEP)
    facts = services.oidc_tickets.read(ticket)
    state = context.query.get("state", "")
    if ticket is None or facts is None or not hmac.compare_digest(state.encode(), facts["state"].encode()):
        return _spent(context, login_form(context, target="/", error=STALE, status=400))
    services.oidc_tickets.mark_used(ticket)
    return _spent(context, await _identified(context, provider, facts))


async def _identified(context: Context, provider: OidcProvider, facts: dict[str, str]) -> Html:
    target, name = safe_next(facts["next"]), provider.client.label
    code = context.query.get("code", "")
    try:
        if not 0 < len(code) <= CODE_CHARS_MAX:
            log.info("the sign-in provider sent no code", error=context.query.get("error", "")[:100])
            return login_form(context, target=target, error=DENIED.format(name=name), status=403)
        response_issuer = context.query.get("iss")
        identity = await provider.identify(
            code=code, nonce=facts["nonce"], verifier=facts["verifier"], response_issuer=response_issuer
        )
    except ProviderUnavailable as error:
        return _away(context, provider, error, target)
    except TokenRefused as error:
        log.warning("sign-in through the provider refused", reason=str(error), address=context.address)
        await record_refusal(context, email="", reason=f"provider: {error}")
        return login_form(context, target=target, error=REFUSED.format(name=name), status=403)
    try:
        member = await context.services.identities.member_of(identity)
    except InvalidCredentials as error:
        await record_refusal(context, email=identity.email or "", reason=f"provider: {error.message}")
        return login_form(context, target=target, error=error.message, status=403)
    return await first_factor_proven(context, member, method="oidc", target=target)


def _provider(services: Services) -> OidcProvider:
    if services.oidc is None:
        raise NotFound("no sign-in provider is set up")
    return services.oidc


def _spent(context: Context, answer: Html) -> Html:
    """Return `answer`, made to remove the cookie of this step."""
    answer.set_cookie(step_cookie(context.request, context.services, OIDC_STEP, ""))
    return answer


def _away(context: Context, provider: OidcProvider, error: ProviderUnavailable, target: str) -> Html:
    log.warning("the sign-in provider is not available", reason=str(error))
    message = AWAY.format(name=provider.client.label)
    return login_form(context, target=target, error=message, status=503)
