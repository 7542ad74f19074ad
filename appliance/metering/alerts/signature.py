"""The signature of messages to a webhook, after the Standard Webhooks specification 1.0: symmetric, version v1.

Signed is `ID.TIMESTAMP.BODY` with HMAC-SHA256; a secret is `whsec_` and base 64. Knows no table, no network and no clock.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from collections.abc import Sequence

SECRET_PREFIX = "whsec_"  # noqa: S105 - the prefix of secrets, not a secret
SECRET_BYTES = 32  # the specification asks for 24 to 64


def new_signing_secret() -> str:
    """Return a new secret as its receiver stores it."""
    return SECRET_PREFIX + base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode()


def signature(secret: str, message_id: str, timestamp_s: int, body: bytes) -> str:
    """Return `v1,` and the signature in base 64."""
    key = base64.b64decode(secret.removeprefix(SECRET_PREFIX))
    signed = f"{message_id}.{timestamp_s}.".encode() + body
    return "v1," + base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()


def signature_headers(signing: Sequence[str], message_id: str, timestamp_s: int, body: bytes) -> dict[str, str]:
    """Return the three headers of a message, signed with each of the secrets; a receiver needs only one of them."""
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp_s),
        "webhook-signature": " ".join(signature(secret, message_id, timestamp_s, body) for secret in signing),
    }
