"""The result of checking one invariant of the ledger."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LISTED_MAX = 3


@dataclass(frozen=True, slots=True)
class Finding:
    """The result for the invariant `name`. `state`: holds, broken, or note (holds, with a remark)."""

    name: str
    state: str
    text: str


def list_ids(ids: Sequence[str], what: str) -> str:
    """Return `what` and the first LISTED_MAX of the ids, and how many more there are."""
    more = f" and {len(ids) - LISTED_MAX} more" if len(ids) > LISTED_MAX else ""
    return f"{what}: {', '.join(ids[:LISTED_MAX])}{more}"
