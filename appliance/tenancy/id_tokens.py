"""Verifies ID tokens of an OpenID Connect provider: signature, issuer, audience, times and nonce.

Implements OpenID Connect Core 1.0, section 3.1.3.7, as pure functions of token, keys and time.
"""

from __future__ import annotations

import hmac
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from joserfc import jwk, jws, jwt
from joserfc.errors import JoseError

LEEWAY_S = 60  # tolerated clock difference between provider and appliance
TOKEN_CHARS_MAX = 32 * 1024
SUBJECT_CHARS_MAX = 255
# Only public-key signatures: `none` and shared-secret (HMAC) algorithms are never accepted.
ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA", "Ed25519")
_KEY_TYPES = ("RSA", "EC", "OKP")

Jwk = Mapping[str, Any]


class TokenRefused(Exception):
    """The token was rejected. The message is the reason, for the log, and contains no secret."""


class UnknownKey(TokenRefused):
    """None of the known keys verifies the signature; the provider may have rotated its keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """A user account at a provider. `email` is set only if the provider has verified it."""

    issuer: str
    subject: str
    email: str | None


def read_id_token(
    token: object, keys: Sequence[Jwk], *, issuer: str, client_id: str, nonce: str, now: datetime
) -> tuple[str, Mapping[str, Any]]:
    """Return (subject, claims) of a valid token. Raises TokenRefused, or its subclass UnknownKey."""
    if not isinstance(token, str) or len(token) > TOKEN_CHARS_MAX:
        raise TokenRefused("the response contains no ID token")
    claims = _signed_claims(token, keys)
    if claims.get("iss") != issuer:
        raise TokenRefused("the ID token is from another issuer")
    _check_audience(claims, client_id)
    _check_times(claims, now)
    claimed = claims.get("nonce")
    if not isinstance(claimed, str) or not hmac.compare_digest(claimed.encode(), nonce.encode()):
        raise TokenRefused("the ID token belongs to another sign-in: the nonce differs")
    subject = claims.get("sub")
    if not isinstance(subject, str) or not 0 < len(subject) <= SUBJECT_CHARS_MAX or not subject.isprintable():
        raise TokenRefused("the ID token has no valid subject")
    return subject, claims


def verified_email(claims: Mapping[str, Any]) -> str | None:
    """Return the e-mail address in `claims` if it is verified. Some providers send the string "true" for true."""
    email, verified = claims.get("email"), claims.get("email_verified")
    return email if isinstance(email, str) and (verified is True or verified == "true") else None


def _signed_claims(token: str, keys: Sequence[Jwk]) -> dict[str, Any]:
    try:
        header = jws.extract_compact(token.encode()).headers()
    except (JoseError, ValueError) as error:
        raise TokenRefused("the ID token is not a signed JWT") from error
    algorithm, key_id = header.get("alg"), header.get("kid")
    if algorithm not in ALGORITHMS:
        raise TokenRefused("the signature algorithm of the ID token is not accepted")
    candidates = [key for key in keys if _can_have_signed(key, key_id)]
    for candidate in candidates:
        try:
            return jwt.decode(token, jwk.import_key(dict(candidate)), algorithms=[algorithm]).claims
        except (JoseError, ValueError, TypeError, KeyError):
            continue  # another key signed the token, or this one has another type or cannot be parsed
    raise UnknownKey("no key of the provider verifies the signature of the ID token")


def _can_have_signed(key: Jwk, key_id: object) -> bool:
    if key.get("kty") not in _KEY_TYPES or key.get("use", "sig") != "sig":
        return False
    return key_id is None or key.get("kid") == key_id


def _check_audience(claims: Mapping[str, Any], client_id: str) -> None:
    audience = claims.get("aud")
    audiences = audience if isinstance(audience, list) else [audience]
    if client_id not in audiences:
        raise TokenRefused("the ID token is for another client: the audience differs")
    party = claims.get("azp")
    if party is None and len(audiences) > 1:
        raise TokenRefused("the ID token has several audiences and no authorized party")
    if party is not None and party != client_id:
        raise TokenRefused("the ID token was issued to another client: the authorized party differs")


def _check_times(claims: Mapping[str, Any], now: datetime) -> None:
    current = now.timestamp()
    expires, issued, not_before = _read_time(claims, "exp"), _read_time(claims, "iat"), _read_time(claims, "nbf")
    if expires is None or issued is None:
        raise TokenRefused("the ID token has no valid exp or iat")
    if expires <= current - LEEWAY_S:
        raise TokenRefused("the ID token has expired")
    if max(issued, issued if not_before is None else not_before) > current + LEEWAY_S:
        raise TokenRefused("the ID token is from the future: check the clock of this machine")


def _read_time(claims: Mapping[str, Any], name: str) -> int | float | None:
    """Return a time in seconds since the epoch, or None unless it is a finite number: NaN would pass every comparison."""
    value = claims.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return None if isinstance(value, float) and not math.isfinite(value) else value
