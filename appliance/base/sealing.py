"""Encryption of stored secrets that must be readable again (second factors, webhook signing keys).

AES-256-GCM; the key is derived from the pepper by HKDF-SHA256 (RFC 5869) with a separate purpose string, so that a text sealed
for one purpose cannot be opened for another.
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
    """The text was sealed with another key, or was modified: `secret.key` does not belong to this database."""


class Sealer:
    """Seals texts for one `purpose` with a key derived from the 32-byte `pepper`."""

    def __init__(self, pepper: bytes, purpose: str) -> None:
        key = HKDF(algorithm=SHA256(), length=32, salt=None, info=f"gatehouse {purpose}".encode()).derive(pepper)
        self._cipher = AESGCM(key)

    def seal(self, text: str) -> str:
        """Return `text` encrypted, in URL-safe base64."""
        nonce = os.urandom(_NONCE_BYTES)
        return base64.urlsafe_b64encode(nonce + self._cipher.encrypt(nonce, text.encode(), None)).decode()

    def open(self, sealed: str) -> str:
        """Return the decrypted text. Raises Unsealable, also for non-canonical base64: decoders ignore some characters, so a
        one-time token could be respelt and used again."""
        try:
            raw = base64.urlsafe_b64decode(sealed)
            if base64.urlsafe_b64encode(raw).decode() != sealed:
                raise ValueError("not canonical base64")
            return self._cipher.decrypt(raw[:_NONCE_BYTES], raw[_NONCE_BYTES:], None).decode()
        except (InvalidTag, ValueError) as error:
            raise Unsealable("a stored secret cannot be decrypted: secret.key is not the key that sealed it") from error

    def can_open(self, sealed: str) -> bool:
        """Return whether `open` would succeed."""
        try:
            self.open(sealed)
        except Unsealable:
            return False
        return True
