"""Browser security rules of the API and the console: names of session cookies, cross-site checks, the CSRF token.

Knows no framework; header names are in lower case.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from urllib.parse import urlsplit

from appliance.base.settings import Settings
from appliance.tenancy.sessions import Session

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
CSRF_HEADER = "x-csrf-token"
# Browsers accept a `__Host-` cookie only over HTTPS, and only if it is Secure, host-only and has the path `/`.
SECURE_COOKIE, PLAIN_COOKIE = "__Host-gatehouse", "gatehouse_session"
OWN_SITE = ("same-origin", "none")  # `none`: started by the user, such as a typed address or a bookmark


def is_secure(scheme: str, settings: Settings) -> bool:
    """Return whether the connection uses HTTPS, by its scheme or by the setting `secure_cookies` (TLS ends at a proxy)."""
    return settings.secure_cookies or scheme == "https"


def session_cookie_name(*, secure: bool) -> str:
    """Return the name of the session cookie. Over HTTPS the plain cookie is ignored."""
    return SECURE_COOKIE if secure else PLAIN_COOKIE


def is_from_own_site(headers: Mapping[str, str]) -> bool:
    """Return whether the request was started by this site or by the user, according to the browser's headers.

    `Sec-Fetch-Site` decides if present, otherwise the host of `Origin` (its scheme may differ behind a proxy that terminates
    TLS). A client that sends neither is not a browser: no other site can make a browser omit both.
    """
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site is not None:
        return site in OWN_SITE
    return origin is None or _host_of(origin) == headers.get("host")


def is_csrf_token_of(session: Session, sent: str) -> bool:
    """Return whether `sent` is the CSRF token of this session."""
    return hmac.compare_digest(sent.encode(), session.csrf_token.encode())


def _host_of(origin: str) -> str | None:
    """Return host and port of an `Origin` header, None if it is not a URL."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None
