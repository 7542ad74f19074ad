"""Sign-in through an OpenID Connect provider: the redirect to it and the callback. `OidcProvider` verifies the response.

State, nonce and PKCE verifier are sealed in a single-use cookie of the browser that started. A sign-in starts with a link, not
a form, because our content security policy forbids forms that lead to another site.
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
from appliance.console.sign_in import continue_sign_in, fitting_target, record_refusal, wait_message, with_retry_after
from appliance.tenancy.id_tokens import TokenRefused
from appliance.tenancy.oidc import OidcProvider, ProviderUnavailable

if TYPE_CHECKING:
    from appliance.serving.services import Services

log = structlog.get_logger()

OIDC_STEP = "oidc"
RANDOM_BYTES = 32
CODE_CHARS_MAX = 4000
PROVIDER_UNAVAILABLE = "{name} does not respond. Sign in with your password, or try again later."
SIGN_IN_EXPIRED = "This sign-in was started in another browser, was already used, or has expired. Start again."
REFUSED = "{name} signed you in, but this appliance does not accept that sign-in. The log has the reason."
DENIED = "{name} did not sign you in."


@get("/login/oidc", opt={"public": True})
async def begin_oidc(context: ContextDependency) -> Html:
    """Redirect to the provider and store the values that the callback must match."""
    provider, target = _get_provider(context.services), safe_next(context.query.get("next"))
    home = provider.client.external_url
    if context.request.headers.get("host") != urlsplit(home).netloc and "moved" not in context.query:
        # The provider redirects to the external URL, so the cookie must be set there. Only once, as a proxy may change Host.
        return context.redirect(f"{home}/login/oidc?moved=1&next={quote(target, safe='')}")
    payload = {name: secrets.token_urlsafe(RANDOM_BYTES) for name in ("state", "nonce", "verifier")}
    try:
        context.attempts.count_address(address=context.address)
        address = await provider.authorization_url(**payload)
    except RateLimitExceeded as error:
        return with_retry_after(login_form(context, target=target, error=wait_message(error), status=429), error)
    except ProviderUnavailable as error:
        return _provider_unavailable(context, provider, error, target)
    tickets = context.services.oidc_tickets
    answer = context.redirect(address)
    ticket = tickets.issue({**payload, "next": fitting_target(target)})
    answer.set_cookie(step_cookie(context.request, context.services, OIDC_STEP, ticket, life_s=tickets.life_s))
    return answer


@get("/login/oidc/callback", opt={"public": True})
async def end_oidc(context: ContextDependency) -> Html:
    """The callback: identify the member, then redirect to the requested page or to the second factor."""
    provider, services = _get_provider(context.services), context.services
    ticket = step_ticket(context.request, services, OIDC_STEP)
    payload = services.oidc_tickets.read(ticket)
    state = context.query.get("state", "")
    if ticket is None or payload is None or not hmac.compare_digest(state.encode(), payload["state"].encode()):
        return _remove_step_cookie(context, login_form(context, target="/", error=SIGN_IN_EXPIRED, status=400))
    services.oidc_tickets.mark_used(ticket)
    return _remove_step_cookie(context, await _sign_in(context, provider, payload))


async def _sign_in(context: Context, provider: OidcProvider, payload: dict[str, str]) -> Html:
    target, name = safe_next(payload["next"]), provider.client.label
    code = context.query.get("code", "")
    try:
        if not 0 < len(code) <= CODE_CHARS_MAX:
            log.info("the sign-in provider sent no code", error=context.query.get("error", "")[:100])
            return login_form(context, target=target, error=DENIED.format(name=name), status=403)
        response_issuer = context.query.get("iss")
        identity = await provider.identify(
            code=code, nonce=payload["nonce"], verifier=payload["verifier"], response_issuer=response_issuer
        )
    except ProviderUnavailable as error:
        return _provider_unavailable(context, provider, error, target)
    except TokenRefused as error:
        log.warning("sign-in through the provider refused", reason=str(error), address=context.address)
        await record_refusal(context, email="", reason=f"provider: {error}")
        return login_form(context, target=target, error=REFUSED.format(name=name), status=403)
    try:
        member = await context.services.identities.member_of(identity)
    except InvalidCredentials as error:
        await record_refusal(context, email=identity.email or "", reason=f"provider: {error.message}")
        return login_form(context, target=target, error=error.message, status=403)
    return await continue_sign_in(context, member, method="oidc", target=target)


def _get_provider(services: Services) -> OidcProvider:
    if services.oidc is None:
        raise NotFound("no sign-in provider is set up")
    return services.oidc


def _remove_step_cookie(context: Context, answer: Html) -> Html:
    """Return `answer` with a header that removes the cookie of this step."""
    answer.set_cookie(step_cookie(context.request, context.services, OIDC_STEP, ""))
    return answer


def _provider_unavailable(context: Context, provider: OidcProvider, error: ProviderUnavailable, target: str) -> Html:
    log.warning("the sign-in provider is not available", reason=str(error))
    message = PROVIDER_UNAVAILABLE.format(name=provider.client.label)
    return login_form(context, target=target, error=message, status=503)
