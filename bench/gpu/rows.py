"""Rows of the result: what was measured, against which limit and peer, and whether it passes. Does not import torch.

A row's target says whether its value, its fraction of the calibrated limit or its ratio to the peer is judged. An implausibly
good or inconsistent row is marked invalid and never passes. A goal for one card is not judged on another.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Judged = Literal["value", "fraction", "ratio"]
GOALS_CARD, CARD_SHORT = "NVIDIA H200", "H200"
"""The card that goals for rates and times apply to, as its driver names it. An H200 NVL, a slice of an H200 and a GH200 have
other names and other limits."""
PEER_MISSING = "transformers is not installed here: no peer, no comparison"
FRACTION_MAX = 1.10
"""More than a read-only stream can gain over the calibrating copy: above this, bytes or time were counted wrongly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The goals of a row; without `pass_at` it is reported but not judged. `card_specific`: the goal is a time or a rate for
    one card, and does not apply to others. `stretch_value`: what the value must also reach on that card for a stretch."""

    name: str
    part: str
    unit: str
    judged: Judged = "value"
    pass_at: float | None = None
    stretch_at: float | None = None
    higher: bool = True
    card_specific: bool = False
    stretch_value: float | None = None

    def is_reached(self, value: float, limit: float | None) -> bool:
        return limit is not None and (value >= limit if self.higher else value <= limit)

    @property
    def text(self) -> str:
        """`≥ 0.85 / 0.92 of limit`, `≥ 230 / 255 (H200)`"""
        if self.pass_at is None:
            return "-"
        both = f"{self.pass_at:g}" + ("" if self.stretch_at is None else f" / {self.stretch_at:g}")
        of_value = f" ({CARD_SHORT})" if self.card_specific else ""
        of = {"value": of_value, "fraction": " of limit", "ratio": " × peer"}[self.judged]
        also = "" if self.stretch_value is None else f", {self.stretch_value:g} ({CARD_SHORT})"
        return f"{'≥' if self.higher else '≤'} {both}{of}{also}"


@dataclass(slots=True, kw_only=True)
class Row:
    """One line of the result. `limit` is the roofline in the row's unit; `ratio` says how many times better than the peer.

    `counted` and `returned` are the tokens by the engine's count and as received by the caller: they must be equal. `came_s` is
    when the row was emitted, in seconds since its part began. `peer_on_cpu` is an upper bound of the peer's figure on this
    machine's CPU, in the row's unit: if the peer is slower than that on the card, something is wrong with it.
    """

    name: str
    value: float | None = None
    limit: float | None = None
    fraction: float | None = None
    peer: float | None = None
    peer_name: str = ""
    peer_on_cpu: float | None = None
    ratio: float | None = None
    samples: list[float] = field(default_factory=list)
    counted: int | None = None
    returned: int | None = None
    note: str = ""
    error: str = ""
    came_s: float | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def fill_ratios(row: Row, *, higher: bool = True) -> Row:
    """Fill in fraction and ratio from value, limit and peer, unless they are set."""
    if row.value and row.fraction is None and row.limit:
        row.fraction = row.value / row.limit if higher else row.limit / row.value
    if row.value and row.ratio is None and row.peer:
        row.ratio = row.value / row.peer if higher else row.peer / row.value
    return row


def invalid_reason(row: Row, *, has_figures: bool = True) -> str:
    """Why the row cannot be right, or empty. In a rehearsal only token counts are checked, as its figures mean nothing."""
    if has_figures and row.fraction is not None and row.fraction > FRACTION_MAX:
        return f"fraction {row.fraction:.2f} is above {FRACTION_MAX:.2f}: bytes or time are counted wrongly"
    if has_figures and None not in (row.peer, row.peer_on_cpu) and row.peer < row.peer_on_cpu:  # type: ignore[operator]
        return f"the peer reached {row.peer:.3g} on the card and {row.peer_on_cpu:.3g} on the CPU: it did not run properly"
    if row.counted != row.returned:
        return f"{row.counted} tokens were counted, {row.returned} returned"
    return ""


def verdict(row: Row, target: Target, *, card: str) -> str:
    """failed, INVALID, not measured, told, other card, below, pass or stretch. `card`: the name of the measured card."""
    if row.error:
        return "failed"
    if invalid_reason(row):
        return "INVALID"
    value: float | None = getattr(row, target.judged)
    if value is None:
        return "not measured"
    if target.pass_at is None:
        return "told"
    if target.card_specific and card != GOALS_CARD:
        return "other card"
    also = target.stretch_value if card == GOALS_CARD else None
    if target.is_reached(value, target.stretch_at) and (also is None or target.is_reached(row.value or 0.0, also)):
        return "stretch"
    return "pass" if target.is_reached(value, target.pass_at) else "below"
