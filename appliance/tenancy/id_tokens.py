"""ID tokens of an OpenID Connect provider: whether one is from the provider, for us, valid now, and for this very sign-in.

The checks are those of OpenID Connect Core 1.0, section 3.1.3.7. Pure: keys, time and token come in, an identity goes out.
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

LEEWAY_S = 60  # for clocks that differ between the two machines
TOKEN_CHARS_MAX = 32 * 1024
SUBJECT_CHARS_MAX = 255
# Only signatures that a public key verifies: `none` and those with a shared secret are never accepted.
ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA", "Ed25519")
_KEY_TYPES = ("RSA", "EC", "OKP")

Jwk = Mapping[str, Any]


class TokenRefused(Exception):
    """The token signs nobody in. The message says why, for the log, and contains no secret."""


class UnknownKey(TokenRefused):
    """No known key could have signed it: the provider may have new ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who somebody is at a provider. `email` is set only when the provider says that it has verified it."""

    issuer: str
    subject: str
    email: str | None


def read_id_token(
    token: object, keys: Sequence[Jwk], *, issuer: str, client_id: str, nonce: str, now: datetime
) -> tuple[str, Mapping[str, Any]]:
    """Return (subject, claims) of a token that passes every check. Raises TokenRefused, UnknownKey among them."""
    if not isinstance(token, str) or len(token) > TOKEN_CHARS_MAX:
        raise TokenRefused("there is no ID token in the answer")
    claims = _signed_claims(token, keys)
    if claims.get("iss") != issuer:
        raise TokenRefused("it is from another issuer")
    _check_audience(claims, client_id)
    _check_times(claims, now)
    given = claims.get("nonce")
    if not isinstance(given, str) or not hmac.compare_digest(given.encode(), nonce.encode()):
        raise TokenRefused("it belongs to another sign-in: the nonce differs")
    subject = claims.get("sub")
    if not isinstance(subject, str) or not 0 < len(subject) <= SUBJECT_CHARS_MAX or not subject.isprintable():
        raise TokenRefused("it has no subject")
    return subject, claims


def verified_email(claims: Mapping[str, Any]) -> str | None:
    """Return the address in `claims` if the provider says that it is verified. Some send the string "true" for true."""
    email, verified = claims.get("email"), claims.get("email_verified")
    return email if isinstance(email, str) and (verified is True or verified == "true") else None


def _signed_claims(token: str, keys: Sequence[Jwk]) -> dict[str, Any]:
    try:
        header = jws.extract_compact(token.encode()).headers()
    except (JoseError, ValueError) as error:
        raise TokenRefused("it is not a signed token") from error
    algorithm, key_id = header.get("alg"), header.get("kid")
    if algorithm not in ALGORITHMS:
        raise TokenRefused("its signature is of a kind that is not accepted")
    candidates = [key for key in keys if _may_have_signed(key, key_id)]
    for candidate in candidates:
        try:
            return jwt.decode(token, jwk.import_key(dict(candidate)), algorithms=[algorithm]).claims
        except (JoseError, ValueError, TypeError, KeyError):
            continue  # this key did not sign the token, is of another type than the signature, or is not a key at all
    raise UnknownKey("no key of the provider fits its signature")


def _may_have_signed(key: Jwk, key_id: object) -> bool:
    if key.get("kty") not in _KEY_TYPES or key.get("use", "sig") != "sig":
        return False
    return key_id is None or key.get("kid") == key_id


def _check_audience(claims: Mapping[str, Any], client_id: str) -> None:
    audience = claims.get("aud")
    audiences = audience if isinstance(audience, list) else [audience]
    if client_id not in audiences:
        raise TokenRefused("it is for another client: the audience differs")
    party = claims.get("azp")
    if party is None and len(audiences) > 1:
        raise TokenRefused("it is for several, and does not say who asked for it")
    if party is not None and party != client_id:
        raise TokenRefused("another client asked for it: the authorized party differs")


def _check_times(claims: Mapping[str, Any], now: datetime) -> None:
    current = now.timestamp()
    expires, issued, begins = _moment(claims, "exp"), _moment(claims, "iat"), _moment(claims, "nbf")
    if expires is None or issued is None:
        raise TokenRefused("it does not say when it was issued and when it expires")
    if expires <= current - LEEWAY_S:
        raise TokenRefused("it has expired")
    if max(issued, issued if begins is None else begins) > current + LEEWAY_S:
        raise TokenRefused("it is from the future: is the clock of this machine right?")


def _moment(claims: Mapping[str, Any], name: str) -> int | float | None:
    """Return a time in seconds, None unless it is a finite number: NaN would compare as neither too early nor too late."""
    value = claims.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return None if isinstance(value, float) and not math.isfinite(value) else value
