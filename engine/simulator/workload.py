"""The requests to replay: a trace, scaled, cut, sampled and split over tenants, or a generated scenario. Knows no torch.

All choices depend on the seed alone. A conversation is a set of requests that share prompt blocks beyond a common system prompt
(blocks with which most requests begin). A sample keeps or drops it whole, and a split gives all of it to one tenant.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

from engine.errors import EngineConfigError, TraceError
from engine.simulator.trace import Trace, TracedRequest, read_trace

COMMON_PREFIX_SHARE = 0.05
"""A block id that begins more than this share of all prompts belongs to no conversation."""

# (quantile, prompt tokens, answer tokens) of a sample of ShareGPT conversations; between them both are interpolated.
SHAREGPT_QUANTILES = (
    (0.0, 1, 2), (0.025, 4, 10), (0.05, 6, 19), (0.1, 9, 39), (0.15, 11, 72), (0.2, 13, 104), (0.25, 15, 134),
    (0.3, 18, 165), (0.35, 21, 195), (0.4, 25, 226), (0.45, 29, 255), (0.5, 36, 281), (0.55, 45, 310), (0.6, 58, 340),
    (0.65, 80, 372), (0.7, 110, 408), (0.75, 163, 450), (0.8, 275, 504), (0.85, 467, 577), (0.9, 842, 685),
    (0.925, 1191, 765), (0.95, 1672, 854), (0.96, 1923, 893), (0.97, 2293, 928), (0.98, 2687, 960), (0.985, 3016, 976),
    (0.99, 3440, 999), (0.995, 4075, 1042), (0.999, 8478, 1142), (1.0, 22837, 1853),
)  # fmt: skip

NUM_VICTIMS = 4
VICTIM_RATE = 1.0
SCENARIO_S = 120.0
HOG_RATE, HOG_FROM_S, HOG_TO_S = 50.0, 10.0, 50.0
HOGS = {"noisy-prefill": (2000, 200), "noisy-decode": (512, 1500), "noisy-none": None}
"""Prompt and answer tokens of the neighbour's requests, 50 per second for 40 s; in `noisy-none` there are only the victims."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadOptions:
    """How a trace becomes a workload. Raises `EngineConfigError`, naming the option.

    `speed` divides arrival times; `start_s` and `duration_s` cut afterwards. `rate` makes Poisson arrivals where the trace
    has no times, `sample` is the share of conversations kept, `tenants` splits a trace that names none.
    """

    speed: float = 1.0
    start_s: float = 0.0
    duration_s: float | None = None
    rate: float | None = None
    sample: float = 1.0
    tenants: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for option in ("speed", "duration_s", "rate"):
            value = getattr(self, option)
            if value is not None and not 1e-6 <= value <= 1e9:
                raise EngineConfigError(option.removesuffix("_s"), f"must be a positive number, not {value}")
        if not 0 <= self.start_s <= 1e9:
            raise EngineConfigError("start", f"must be 0 or more seconds, not {self.start_s}")
        if not 0 < self.sample <= 1:
            raise EngineConfigError("sample", f"must be above 0 and at most 1, not {self.sample}")
        if self.tenants is not None and not 1 <= self.tenants <= 1_000_000:
            raise EngineConfigError("tenants", f"must be between 1 and 1000000, not {self.tenants}")


@dataclass(slots=True)
class Workload:
    """Requests by arrival time. `notes` say what was left out or changed; `victims`: tenants that a scenario watches."""

    name: str
    requests: list[TracedRequest]
    notes: dict[str, int | bool] = field(default_factory=dict)
    victims: frozenset[str] = frozenset()

    @property
    def duration_s(self) -> float:
        """Time of the last arrival."""
        return self.requests[-1].arrival_s


def load_workload(path: Path, options: WorkloadOptions) -> Workload:
    """Read a trace and apply `options`. Raises `TraceError`, `EngineConfigError`."""
    trace = read_trace(path)
    if trace.has_times and options.rate is not None:
        raise EngineConfigError("rate", f"is for traces without arrival times; {trace.name} has them, use --speed")
    if trace.has_tenants and options.tenants is not None:
        raise EngineConfigError("tenants", f"is for traces without tenants; {trace.name} names them")
    requests = trace.requests if trace.has_times else _poisson(trace, options)
    rng = random.Random(options.seed)  # noqa: S311 - a simulation, not a secret
    if options.sample < 1 or options.tenants is not None:
        requests = _by_conversation(requests, options, rng)
    requests = [replace(r, arrival_s=r.arrival_s / options.speed - options.start_s) for r in requests]
    end_s = float("inf") if options.duration_s is None else options.duration_s
    requests = [r for r in requests if 0 <= r.arrival_s < end_s]
    if not requests:
        raise TraceError(path, None, None, "has no request within the chosen start, duration and sample")
    notes: dict[str, int | bool] = {"empty_rows": trace.num_empty, "sorted_here": trace.was_unsorted}
    return Workload(trace.name, requests, {name: value for name, value in notes.items() if value})


def _poisson(trace: Trace, options: WorkloadOptions) -> list[TracedRequest]:
    if options.rate is None:
        raise EngineConfigError("rate", f"must be given: {trace.name} has lengths and no arrival times")
    rng = random.Random(options.seed + 1)  # noqa: S311 - a simulation, not a secret
    now_s, requests = 0.0, []
    for row in trace.requests:
        requests.append(TracedRequest(now_s, row.tenant, row.input_tokens, row.output_tokens))
        now_s += rng.expovariate(options.rate)
    return requests


def _by_conversation(requests: list[TracedRequest], options: WorkloadOptions, rng: random.Random) -> list[TracedRequest]:
    """Drop whole conversations for the sample, and give each of those kept one tenant."""
    common = _common_blocks(requests)
    choices: dict[int, tuple[bool, int]] = {}
    kept = []
    for index, request in enumerate(requests):
        conversation = next((block for block in request.block_ids if block not in common), -1 - index)
        if conversation not in choices:
            choices[conversation] = (rng.random() < options.sample, rng.randrange(options.tenants or 1))
        keep, tenant = choices[conversation]
        if keep:
            name = f"tenant-{tenant}" if options.tenants is not None else request.tenant
            kept.append(replace(request, tenant=name))
    return kept


def _common_blocks(requests: list[TracedRequest]) -> set[int]:
    counts = Counter(block for request in requests for block in set(request.block_ids))
    threshold = max(2.0, COMMON_PREFIX_SHARE * len(requests))
    return {block for block, count in counts.items() if count > threshold}


def make_scenario(name: str, *, seed: int, lengths: Path | None = None) -> Workload:
    """A noisy-neighbour scenario of two minutes: four tenants with one request per second each and one with many more.

    The victims' lengths are rows of the file `lengths`, or drawn from quantiles of ShareGPT. Raises `EngineConfigError`.
    """
    if name not in HOGS:
        raise EngineConfigError("scenario", f"must be one of {', '.join(HOGS)}, not {name!r}")
    rng = random.Random(seed)  # noqa: S311 - a simulation, not a secret
    rows = None if lengths is None else read_trace(lengths).requests
    requests = []
    for victim in range(NUM_VICTIMS):
        for arrival_s in _arrivals(rng, VICTIM_RATE, 0.0, SCENARIO_S):
            if rows is None:
                sizes = (_draw_length(rng, 1), _draw_length(rng, 2))
            else:
                row = rows[rng.randrange(len(rows))]
                sizes = (row.input_tokens, row.output_tokens)
            requests.append(TracedRequest(arrival_s, f"victim-{victim}", *sizes))
    hog = HOGS[name]
    if hog is not None:
        requests += [TracedRequest(at_s, "hog", *hog) for at_s in _arrivals(rng, HOG_RATE, HOG_FROM_S, HOG_TO_S)]
    requests.sort(key=lambda request: request.arrival_s)
    return Workload(name, requests, victims=frozenset(f"victim-{victim}" for victim in range(NUM_VICTIMS)))


def _arrivals(rng: random.Random, rate: float, from_s: float, to_s: float) -> list[float]:
    times = []
    now_s = from_s + rng.expovariate(rate)
    while now_s < to_s:
        times.append(now_s)
        now_s += rng.expovariate(rate)
    return times


def _draw_length(rng: random.Random, column: int) -> int:
    quantile = rng.random()
    upper = max(1, bisect_left(SHAREGPT_QUANTILES, (quantile,)))
    low, high = SHAREGPT_QUANTILES[upper - 1], SHAREGPT_QUANTILES[upper]
    fraction = (quantile - low[0]) / (high[0] - low[0])
    return max(1, round(low[column] + (high[column] - low[column]) * fraction))
