"""Geometry of the small SVG charts: converts numbers to coordinates. Knows no colours and no markup."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SPARK_WIDTH, SPARK_HEIGHT = 240, 40
_FULL = 100.0


@dataclass(frozen=True, slots=True)
class Segment:
    """One part of a stacked bar, in percent of its length. `name` selects the colour, `label` is displayed."""

    name: str
    label: str
    start: float
    width: float


@dataclass(frozen=True, slots=True)
class Column:
    """One bar of a bar chart, in percent of the drawing; `y` is measured from the top."""

    label: str
    value: int
    x: float
    width: float
    y: float
    height: float


def columns(values: Sequence[tuple[str, int]]) -> list[Column]:
    """Return the bars of (label, value) pairs, scaled to the largest value. A negative value has no height."""
    top = max((value for _, value in values), default=0) or 1
    slot = _FULL / max(len(values), 1)
    bars = []
    for index, (label, value) in enumerate(values):
        height = _FULL * max(value, 0) / top
        shown = max(height, 1.0) if value > 0 else 0.0  # every value above zero stays visible
        bars.append(
            Column(label, value, round(index * slot, 3), round(slot * 0.8, 3), round(_FULL - shown, 3), round(shown, 3))
        )
    return bars


def stack(parts: Sequence[tuple[str, str, float]], total: float) -> list[Segment]:
    """Return (name, label, amount) parts as adjacent segments of a bar of length `total`; empty parts are left out.

    Amounts are clipped to the rest of the bar: readings taken at different times may add up to slightly more.
    """
    segments: list[Segment] = []
    start = 0.0
    for name, label, amount in parts:
        share = _FULL * amount / total if total > 0 else 0.0
        width = min(max(share, 0.0), _FULL - start)
        if width > 0:
            segments.append(Segment(name, label, round(start, 3), round(width, 3)))
            start += width
    return segments


def spark_points(values: Sequence[float], slots: int) -> str:
    """Return the `points` of a sparkline: the last `slots` values, newest at the right, zero at the bottom."""
    recent = list(values)[-slots:]
    top = max(recent, default=0.0) or 1.0
    step = SPARK_WIDTH / max(slots - 1, 1)
    first = slots - len(recent)
    return " ".join(
        f"{(first + index) * step:.1f},{1 + (SPARK_HEIGHT - 2) * (1 - value / top):.1f}" for index, value in enumerate(recent)
    )


def spark_area(values: Sequence[float], slots: int) -> str:
    """Return the `points` of the polygon under the line of `spark_points`."""
    line = spark_points(values, slots)
    if not line:
        return ""
    left = line.split(" ", 1)[0].split(",")[0]
    return f"{left},{SPARK_HEIGHT} {line} {SPARK_WIDTH},{SPARK_HEIGHT}"


def timeline(phases: Sequence[tuple[str, str, float | None]]) -> list[Segment]:
    """Return the phases (name, label, seconds) of a request as segments; phases that were not reached are left out."""
    parts = [(name, label, seconds or 0.0) for name, label, seconds in phases]
    return stack(parts, sum(seconds for _, _, seconds in parts))
