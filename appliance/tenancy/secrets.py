"""Generates keys, tokens and passwords, computes the digests that are stored, and manages the pepper (`secret.key`)."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from pathlib import Path

from appliance.base.data_folder import PEPPER_FILE, sync_folder
from appliance.base.settings import UnusableData

PEPPER_BYTES = 32
_ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"  # base 32 of RFC 4648, lower case: 5 bits a character
_PREFIX_CHARS = 8
_SECRET_CHARS = 26  # 130 bits
ADMIN_PREFIX = "gha_"
_KEY_PATTERN = re.compile(rf"gh_[{_ALPHABET}]{{{_PREFIX_CHARS}}}_[{_ALPHABET}]{{{_SECRET_CHARS}}}", re.ASCII)


def _random_text(chars: int) -> str:
    return "".join(secrets.choice(_ALPHABET) for _ in range(chars))


def new_api_key() -> tuple[str, str]:
    """Return (public prefix, whole key): `gh_` + 8 random characters, and the same + `_` + 26 random characters."""
    prefix = f"gh_{_random_text(_PREFIX_CHARS)}"
    return prefix, f"{prefix}_{_random_text(_SECRET_CHARS)}"


def new_admin_secret() -> str:
    """Return a new administrator token, `gha_` + 26 random characters."""
    return f"{ADMIN_PREFIX}{_random_text(_SECRET_CHARS)}"


def new_password() -> str:
    """Return a password of 100 random bits, in four groups that are easy to type."""
    return "-".join(_random_text(5) for _ in range(4))


def api_key_prefix(key: str) -> str | None:
    """Return the public prefix of `key`, or None if it does not look like an API key."""
    return key[: len("gh_") + _PREFIX_CHARS] if _KEY_PATTERN.fullmatch(key) else None


def keyed_digest(pepper: bytes, secret: str) -> str:
    """Return the HMAC-SHA256 of `secret` in hexadecimal: fast, and useless without the pepper if the database leaks."""
    return hmac.digest(pepper, secret.encode(), "sha256").hex()


def plain_digest(secret: str) -> str:
    """Return the SHA-256 of `secret` in hexadecimal. Only for long random secrets."""
    return hashlib.sha256(secret.encode(errors="surrogatepass")).hexdigest()


def read_or_create_pepper(data_dir: Path) -> bytes:
    """Return the 32 bytes of `secret.key` in `data_dir`, created durably on first use, readable only by the owner.

    Raises UnusableData if the file has another size: a wrong pepper would silently invalidate every key.
    """
    path = data_dir / PEPPER_FILE
    if not path.exists():
        _write_once(path, secrets.token_bytes(PEPPER_BYTES))
    return read_pepper(data_dir)


def read_pepper(data_dir: Path) -> bytes:
    """Return the 32 bytes of `secret.key` in `data_dir`, which must exist. Raises UnusableData and OSError."""
    path = data_dir / PEPPER_FILE
    pepper = path.read_bytes()
    if len(pepper) != PEPPER_BYTES:
        raise UnusableData(f"{path} must hold {PEPPER_BYTES} bytes, not {len(pepper)}: restore it from a backup")
    return pepper


def _write_once(path: Path, content: bytes) -> None:
    """Create a file atomically and durably, unless it exists."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(draft, path)
    except FileExistsError:
        pass
    finally:
        draft.unlink()
    sync_folder(path.parent)
