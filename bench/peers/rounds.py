"""Two engines run alternately on the same requests: rounds of four runs in the order ABBA, then BAAB, and their evaluation.

A round gives two pairs of neighbouring runs, one in each order, so that neither engine gains by being first. A round with a
disturbed run is discarded whole and repeated, up to `ATTEMPTS` times the requested rounds in all. Imports no engine.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from bench.gpu.rows import Row
from bench.peers.disturbance import CORES_MAX
from bench.peers.request_sets import RequestSet
from bench.peers.workers import Sample

ATTEMPTS = 3
Round = list[tuple[str, Sample]]


class LoadedEngine(Protocol):
    """A loaded engine, in a process of its own or behind a server."""

    def run(self, requests: RequestSet) -> tuple[list[list[int]], Sample]: ...


@dataclass(slots=True)
class Measurement:
    """Counted rounds, in the order of their runs, and discarded rounds, each with its reason."""

    rounds: list[Round] = field(default_factory=list)
    discarded: list[tuple[str, Round]] = field(default_factory=list)

    @property
    def pairs(self) -> list[tuple[Sample, Sample]]:
        """(ours, peer) of neighbouring runs."""
        found = []
        for samples in self.rounds:
            for first, second in (samples[:2], samples[2:]):
                by_name = dict([first, second])
                found.append((by_name["ours"], by_name["peer"]))
        return found

    @property
    def ratios(self) -> list[float]:
        """How many times faster our engine was, per pair, by wall-clock time."""
        return [peer.wall_s / ours.wall_s for ours, peer in self.pairs]


def measure(
    ours: LoadedEngine, peer: LoadedEngine, requests: RequestSet, rounds: int, cores_max: float = CORES_MAX
) -> Measurement:
    """Measure up to `rounds` undisturbed rounds; both engines must have run the requests once before."""
    measured = Measurement()
    for attempt in range(ATTEMPTS * rounds):
        if len(measured.rounds) == rounds:
            break
        order = ("ours", "peer", "peer", "ours") if attempt % 2 == 0 else ("peer", "ours", "ours", "peer")
        samples = [(name, (ours if name == "ours" else peer).run(requests)[1]) for name in order]
        reasons = [f"{name}: {reason}" for name, sample in samples if (reason := sample.disturbance.reason(cores_max))]
        if reasons:
            measured.discarded.append((reasons[0], samples))
            print(f"    discarded, {reasons[0]}", file=sys.stderr)
        else:
            measured.rounds.append(samples)
    return measured


def equal_tokens(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> tuple[float, float]:
    """Share of tokens before an answer's first difference, and share of answers without any. Tokens after a near-tie that was
    decided differently are not comparable: the answer continues from another text."""
    equal_lens = [
        next((position for position, (a, b) in enumerate(zip(our_ids, their_ids, strict=True)) if a != b), len(our_ids))
        for our_ids, their_ids in zip(ours, theirs, strict=True)
    ]
    num_equal = sum(length == len(our_ids) for length, our_ids in zip(equal_lens, ours, strict=True))
    return sum(equal_lens) / sum(map(len, ours)), num_equal / len(equal_lens)


def make_row(name: str, peer_name: str, requests: RequestSet, measured: Measurement, rounds: int) -> Row:
    """The row: medians in tokens per second, the median of the pairs' ratios, every raw sample; an error if every round was
    disturbed."""
    facts: dict[str, Any] = {
        "output_tokens": requests.num_output_tokens,
        "rounds": [_raw(samples) for samples in measured.rounds],
        "discarded": [{"reason": reason, "samples": _raw(samples)} for reason, samples in measured.discarded],
    }
    row = Row(name=name, peer_name=peer_name, facts=facts)
    if not measured.rounds:
        row.error = f"all {len(measured.discarded)} rounds were disturbed, the last: {measured.discarded[-1][0]}"
        return row
    pairs, ratios = measured.pairs, measured.ratios
    row.value, row.peer = (requests.num_output_tokens / statistics.median(pair[i].wall_s for pair in pairs) for i in (0, 1))
    row.ratio, row.samples = statistics.median(ratios), [round(ratio, 4) for ratio in ratios]
    row.note = f"ratios {min(ratios):.2f} to {max(ratios):.2f} in {len(pairs)} pairs"
    if measured.discarded:
        row.note += f", {len(measured.discarded)} disturbed rounds discarded"
    if len(measured.rounds) < rounds:
        row.note += f"; only {len(measured.rounds)} of {rounds} rounds were quiet"
    facts["cpu_ratio_median"] = round(statistics.median(peer.cpu_s / ours.cpu_s for ours, peer in pairs if ours.cpu_s), 3)
    return row


def _raw(samples: Round) -> list[dict[str, Any]]:
    return [{"who": name, **sample.as_row()} for name, sample in samples]
