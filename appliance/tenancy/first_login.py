"""The marker file of a first login that was created but not yet shown. Contains ids only: unseen secrets are replaced.

no file ─► written before the first member ─► login shown ─► removed. If a start finds the file, nobody has seen the login.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from appliance.base.data_folder import sync_folder
from appliance.base.settings import UnusableData

PENDING_FILE = "first-login-pending"


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingLogin:
    """The member, key and token whose secrets were never shown. `token_id` is None if the operator chose the token."""

    email: str
    key_id: str
    token_id: str | None


def read_pending(data_dir: Path) -> PendingLogin | None:
    """Return the login that was not shown yet, or None. Raises UnusableData when the file cannot be parsed."""
    path = data_dir / PENDING_FILE
    try:
        return PendingLogin(**json.loads(path.read_text("utf-8")))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise UnusableData(f"{path} is damaged: remove it, then `gatehouse admin reset-password` gives a login") from error


def write_pending(data_dir: Path, pending: PendingLogin) -> None:
    """Write the file atomically and durably, readable only by its owner."""
    path = data_dir / PENDING_FILE
    draft = path.with_name(f"{PENDING_FILE}.draft")
    descriptor = os.open(draft, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(asdict(pending), file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)
    sync_folder(data_dir)


def mark_shown(data_dir: Path) -> None:
    """Remove the file: the login has been shown."""
    (data_dir / PENDING_FILE).unlink(missing_ok=True)
