"""Secrets that must be read again (second factors, signing keys of webhooks): sealed with a key that only this machine has.

AES-256-GCM; the key is derived from the pepper by HKDF-SHA256 (RFC 5869) with a purpose of its own, so that a sealed text of
one purpose is worthless for another.
"""

from __future__ import annotations

import base64
import os

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

_NONCE_BYTES = 12


class Unsealable(Exception):
    """The sealed text was made with another key, or was changed: `secret.key` is not the one of this database."""


class Sealer:
    """Seals texts of one `purpose` with the 32 bytes of `pepper`."""

    def __init__(self, pepper: bytes, purpose: str) -> None:
        key = HKDF(algorithm=SHA256(), length=32, salt=None, info=f"gatehouse {purpose}".encode()).derive(pepper)
        self._cipher = AESGCM(key)

    def seal(self, text: str) -> str:
        """Return `text` sealed, in URL-safe base 64."""
        nonce = os.urandom(_NONCE_BYTES)
        return base64.urlsafe_b64encode(nonce + self._cipher.encrypt(nonce, text.encode(), None)).decode()

    def open(self, sealed: str) -> str:
        """Return the text that was sealed. Raises Unsealable, also where it is spelt in another way than `seal` did: base 64 is
        read with signs that say nothing, and what serves once would be found new."""
        try:
            raw = base64.urlsafe_b64decode(sealed)
            if base64.urlsafe_b64encode(raw).decode() != sealed:
                raise ValueError("not as it was spelt")
            return self._cipher.decrypt(raw[:_NONCE_BYTES], raw[_NONCE_BYTES:], None).decode()
        except (InvalidTag, ValueError) as error:
            raise Unsealable("a stored secret cannot be read: secret.key is not the one that it was sealed with") from error
