"""What a browser must send for its session to count: the cookie under the right name, and with each change something that no
other site can make it send. Used by the API and the console. Knows no framework: header names come in lower case.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from urllib.parse import urlsplit

from appliance.base.settings import Settings
from appliance.tenancy.sessions import Session

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
CSRF_HEADER = "x-csrf-token"
# The prefix makes the browser refuse the cookie unless it is Secure, host-only and for the whole site; it needs HTTPS.
SECURE_COOKIE, PLAIN_COOKIE = "__Host-gatehouse", "gatehouse_session"
OWN_SITE = ("same-origin", "none")  # `none`: the user's own action, such as a typed address or a bookmark


def is_secure(scheme: str, settings: Settings) -> bool:
    """Return whether cookies of a connection travel over HTTPS: by its scheme, or because the settings say so."""
    return settings.secure_cookies or scheme == "https"


def session_cookie_name(*, secure: bool) -> str:
    """Return the name of the only cookie that is set and read; over HTTPS the unprotected one never counts."""
    return SECURE_COOKIE if secure else PLAIN_COOKIE


def is_from_own_site(headers: Mapping[str, str]) -> bool:
    """Return whether the request did not begin on another site, as far as browsers tell.

    `Sec-Fetch-Site` decides if it is sent; otherwise the host of `Origin` does (its scheme may differ behind a proxy that ends
    TLS). A client that sends neither is not a browser, and no site can make a browser send neither.
    """
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site is not None:
        return site in OWN_SITE
    return origin is None or _host_of(origin) == headers.get("host")


def is_token_of(session: Session, sent: str) -> bool:
    """Return whether `sent` is the CSRF token that pages of this session send with every change."""
    return hmac.compare_digest(sent.encode(), session.csrf_token.encode())


def _host_of(origin: str) -> str | None:
    """Return host and port of an `Origin`, None if it is not an address."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None
