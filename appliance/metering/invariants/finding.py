"""One promise of the ledger, and the result of checking it. A value only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

NAMED_MAX = 3


@dataclass(frozen=True, slots=True)
class Finding:
    """One promise: `state` is holds, broken, or note (nothing is wrong, but somebody may want to know)."""

    name: str
    state: str
    text: str


def named(ids: Sequence[str], what: str) -> str:
    """Return how many `ids` there are, and the first of them by name."""
    more = f" and {len(ids) - NAMED_MAX} more" if len(ids) > NAMED_MAX else ""
    return f"{len(ids)} {what}: {', '.join(ids[:NAMED_MAX])}{more}"
