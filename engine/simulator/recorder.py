"""The measurements of a simulation: per tenant, per window and per step. Knows no torch.

Work per token is a few operations on plain numbers; sorting is left to the report.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

WINDOW_S = 10.0
GAP_SAMPLE_S = 0.5
PAIRS_TENANTS_MAX = 32
NEVER = math.inf

GAP_MIN_S = 1e-4
GAP_RATIO = 1.01
NUM_GAP_BUCKETS = 1600  # to 800 s
_LOG_RATIO = math.log(GAP_RATIO)

Histogram = defaultdict[int, int]
"""Counts by bucket of a duration."""


def new_histogram() -> Histogram:
    return defaultdict(int)


def gap_bucket(gap_s: float) -> int:
    """Index of the histogram bucket of a gap; each bucket is one per cent wider than the one before."""
    if gap_s <= GAP_MIN_S:
        return 0
    return min(NUM_GAP_BUCKETS - 1, math.ceil(math.log(gap_s / GAP_MIN_S) / _LOG_RATIO - 1e-9))


def gap_of_bucket(index: int) -> float:
    """Upper edge of a bucket, in seconds."""
    return GAP_MIN_S * GAP_RATIO**index


@dataclass(slots=True, eq=False)
class TenantRecord:
    """One tenant. `service_ns` is predicted device time, `service_tokens` counts prompt tokens once and output tokens twice."""

    name: str
    weight: int = 1
    num_requests: int = 0
    num_refused: int = 0
    num_queued: int = 0
    backlogged_since_s: float = NEVER
    service_ns: float = 0.0
    service_tokens: int = 0
    window_start_ns: float = 0.0
    window_start_tokens: int = 0
    gap_max_s: float = 0.0
    gaps: Histogram = field(default_factory=new_histogram)
    outcomes: list[tuple[float, float | None]] = field(default_factory=list)

    def queue(self, now_s: float) -> None:
        if not self.num_queued:
            self.backlogged_since_s = now_s
        self.num_queued += 1

    def unqueue(self) -> None:
        self.num_queued -= 1
        if not self.num_queued:
            self.backlogged_since_s = NEVER


@dataclass(slots=True)
class Window:
    """Service per weight of each tenant that was backlogged throughout one window: in device seconds and in tokens."""

    services_s: list[float]
    services_tokens: list[float]


@dataclass(slots=True)
class Recorder:
    """The record of one replay."""

    tenants: dict[str, TenantRecord] = field(default_factory=dict)
    windows: list[Window] = field(default_factory=list)
    num_steps: int = 0
    num_tokens: int = 0
    busy_s: float = 0.0
    step_max_s: float = 0.0
    steps_s: Histogram = field(default_factory=new_histogram)
    kv_block_seconds: float = 0.0
    kv_blocks_max: int = 0
    wasted_slots: int = 0
    sampled_slots: int = 0
    running_seconds: float = 0.0
    running_max: int = 0
    service_gap_ns: float = 0.0
    _window_start_s: float = 0.0
    _next_gap_sample_s: float = 0.0
    _pairs: dict[tuple[str, str], list[float]] = field(default_factory=dict)

    def tenant(self, name: str, weight: int) -> TenantRecord:
        record = self.tenants.get(name)
        if record is None:
            record = self.tenants[name] = TenantRecord(name, weight)
        return record

    def backlogged(self) -> Iterator[TenantRecord]:
        return (tenant for tenant in self.tenants.values() if tenant.num_queued)

    def advance_to(self, now_s: float) -> None:
        """Close the windows and record the samples that are due at `now_s`."""
        if now_s >= self._next_gap_sample_s:
            self._sample_gaps()
            self._next_gap_sample_s = now_s + GAP_SAMPLE_S
        while now_s >= self._window_start_s + WINDOW_S:
            self._close_window()

    @property
    def next_due_s(self) -> float:
        return min(self._next_gap_sample_s, self._window_start_s + WINDOW_S)

    def _close_window(self) -> None:
        backlogged = [t for t in self.backlogged() if t.backlogged_since_s <= self._window_start_s]
        if len(backlogged) > 1:
            self.windows.append(
                Window(
                    [(t.service_ns - t.window_start_ns) / 1e9 / t.weight for t in backlogged],
                    [(t.service_tokens - t.window_start_tokens) / t.weight for t in backlogged],
                )
            )
        for tenant in self.tenants.values():
            tenant.window_start_ns, tenant.window_start_tokens = tenant.service_ns, tenant.service_tokens
        self._window_start_s += WINDOW_S

    def _sample_gaps(self) -> None:
        """Largest difference in service per weight between two tenants over a time in which both were always backlogged."""
        tenants = sorted(self.backlogged(), key=lambda t: t.backlogged_since_s)[:PAIRS_TENANTS_MAX]
        pairs: dict[tuple[str, str], list[float]] = {}
        for index, one in enumerate(tenants):
            one_ns = one.service_ns / one.weight
            for other in tenants[:index]:
                since_s = max(one.backlogged_since_s, other.backlogged_since_s)
                difference_ns = one_ns - other.service_ns / other.weight
                key = (one.name, other.name) if one.name < other.name else (other.name, one.name)
                if one.name > other.name:
                    difference_ns = -difference_ns
                extremes = self._pairs.get(key)
                if extremes is None or extremes[0] != since_s:
                    extremes = [since_s, difference_ns, difference_ns]
                elif difference_ns < extremes[1]:
                    extremes[1] = difference_ns
                elif difference_ns > extremes[2]:
                    extremes[2] = difference_ns
                pairs[key] = extremes
                self.service_gap_ns = max(self.service_gap_ns, extremes[2] - extremes[1])
        self._pairs = pairs
