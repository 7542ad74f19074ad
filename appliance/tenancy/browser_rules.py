"""What a browser must send for its session to count: the cookie by its name, and with a change what no other site can make it
send. The API and the console both ask here. Knows no framework: headers come by their names in lower case.
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
OWN_SITE = ("same-origin", "none")  # `none` is a person's own doing: a typed address, a bookmark


def is_secure(scheme: str, settings: Settings) -> bool:
    """Return whether cookies of a connection travel over HTTPS, by its own scheme or because the settings say so."""
    return settings.secure_cookies or scheme == "https"


def session_cookie_name(*, secure: bool) -> str:
    """Return the name of the one cookie that is set and read; over HTTPS the unprotected one never counts."""
    return SECURE_COOKIE if secure else PLAIN_COOKIE


def is_from_own_site(headers: Mapping[str, str]) -> bool:
    """Return whether no browser says that the request began on another site.

    `Sec-Fetch-Site` decides where the browser sends it; otherwise the host of `Origin`, whose scheme may differ behind a
    proxy that ends TLS. A client that sends neither is no browser, and no browser can be made to send neither.
    """
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site is not None:
        return site in OWN_SITE
    return origin is None or _host_of(origin) == headers.get("host")


def is_token_of(session: Session, sent: str) -> bool:
    """Return whether `sent` is what pages of this session send with every change."""
    return hmac.compare_digest(sent.encode(), session.csrf_token.encode())


def _host_of(origin: str) -> str | None:
    """Return host and port of an `Origin`, None for one that is no address."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None
