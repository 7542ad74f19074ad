"""Signs webhook messages as in the Standard Webhooks specification 1.0, symmetric signatures, version v1.

The signature is HMAC-SHA256 over `ID.TIMESTAMP.BODY`; a secret is `whsec_` followed by base64. Pure.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from collections.abc import Sequence

SECRET_PREFIX = "whsec_"  # noqa: S105 - the prefix of secrets, not a secret
SECRET_BYTES = 32  # the specification requires 24 to 64


def new_signing_secret() -> str:
    """Return a new random secret in the format that receivers store."""
    return SECRET_PREFIX + base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode()


def signature(secret: str, message_id: str, timestamp_s: int, body: bytes) -> str:
    """Return the signature in base64, prefixed with `v1,`."""
    key = base64.b64decode(secret.removeprefix(SECRET_PREFIX))
    signed = f"{message_id}.{timestamp_s}.".encode() + body
    return "v1," + base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()


def signature_headers(signing_secrets: Sequence[str], message_id: str, timestamp_s: int, body: bytes) -> dict[str, str]:
    """Return the three signature headers, with one signature per secret; a receiver verifies any one of them."""
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp_s),
        "webhook-signature": " ".join(signature(secret, message_id, timestamp_s, body) for secret in signing_secrets),
    }
