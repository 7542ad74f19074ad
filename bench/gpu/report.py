"""The result of a run as one JSON document and as a table."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import groupby
from typing import Any

from bench.gpu.processes import NOT_BEGUN, Outcome
from bench.gpu.rows import CARD_SHORT, GOALS_CARD, PEER_MISSING, Row, fill_ratios, invalid_reason, verdict
from bench.gpu.targets import TARGETS
from bench.rows import revision, table_line
from engine.switches import SWITCHES

PACKAGES = ("torch", "triton", "numpy", "transformers", "safetensors", "llguidance")
HEADER = ("row", "value", "unit", "limit", "frac", "peer", "ratio", "must show", "verdict")
VARIABLES = (*SWITCHES, "CUDA_LAUNCH_BLOCKING", "PYTORCH_ALLOC_CONF", "OMP_NUM_THREADS")
"""Environment variables that change what is measured."""
CALIBRATED = {"bandwidth": (1e9, "GB/s"), "flops": (1e12, "TFLOP/s bf16"), "flops_fp8": (1e12, "TFLOP/s fp8")}
"""Calibrated facts, with divisor and unit."""
LAST_LINES = 12
WENT_WRONG = "what went wrong (docs/benchmarks.md, Debugging a run)"
WIDTHS = (67, 10, 16, 10, 5, 10, 7, 32, 0)


def complete_rows(outcome: Outcome, parts: set[str]) -> list[Row]:
    """One row per target of these parts, in target order, then rows without a target. The error of a row that was not measured
    says why."""
    found = {row.name: row for row in outcome.rows}
    reasons: dict[str, list[str]] = {}
    for part in outcome.parts:
        if "error" in part:
            for name in part["targets"]:
                reasons.setdefault(name, []).append(f"{part['part']}: {part['error']}")
    begun = {name for part in outcome.parts for name in part["targets"]}
    rows = []
    for target in TARGETS:
        if target.part not in parts and target.name not in found:
            continue
        why = "; ".join(reasons.get(target.part, [])) or (
            "no part gave this row" if target.part in begun else "its part was not begun"
        )
        row = found.pop(target.name, None) or Row(name=target.name, error=why)
        rows.append(fill_ratios(row, higher=target.higher))
    return rows + list(found.values())


def document(rows: Sequence[Row], outcome: Outcome, *, rehearsal: bool, taken_s: float) -> dict[str, Any]:
    targets = {target.name: target for target in TARGETS}
    facts = dict(outcome.facts)
    card = facts.pop("card", {})
    row_records = []
    for row in rows:
        target = targets.get(row.name)
        record = row.as_dict()
        if target is not None:
            record |= {"unit": target.unit, "part": target.part, "must_show": target.text}
        if rehearsal:
            record["verdict"] = "REHEARSAL"
        elif target is None:
            record["verdict"] = "told"
        else:
            record["verdict"] = verdict(row, target, card=card.get("name", ""))
        record["invalid"] = invalid_reason(row, has_figures=not rehearsal)
        row_records.append(record)
    return {
        "bench": "gpu",
        "rehearsal": rehearsal,
        "card": card,
        "goals_of": GOALS_CARD,
        "goals_are_judged": card.get("name") == GOALS_CARD and not rehearsal,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        **revision(),
        "taken_s": round(taken_s, 1),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "cpu_cores": os.cpu_count(),
        "switches": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "facts": facts,
        "parts": outcome.parts,
        "rows": row_records,
    }


def status(report: dict[str, Any]) -> int:
    """Exit status: 0 if every row was measured and no part failed, whatever the figures; 3 if only rows of peers that are not
    installed are missing; else 1. (A failed warm-up counts, because engines then compile while they are timed.)"""
    wrong = {row["error"] or row["invalid"] for row in report["rows"]} - {""}
    if wrong - {PEER_MISSING} or any("error" in part for part in report["parts"]):
        return 1
    return 3 if wrong else 0


def measured_nothing(report: dict[str, Any]) -> bool:
    """Whether the run ended before anything was known about the card."""
    return not report["card"] and all(row["value"] is None for row in report["rows"])


def table(report: dict[str, Any]) -> str:
    """The rows as a text table. A rehearsal shows which rows were measured, without figures. A run that measured nothing shows
    only the parts that failed."""
    facts, rehearsal = report["facts"], report["rehearsal"]
    if measured_nothing(report):
        begun = [part for part in report["parts"] if not part.get("error", "").startswith(NOT_BEGUN)]
        report = {**report, "rows": [], "parts": begun}
    title = "REHEARSAL on the CPU: shapes are tiny and no figure means anything" if rehearsal else _card(report["card"])
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items() if version)
    lines = [f"{title} · {report['revision']}{' +changes' if report['changed'] else ''} · {versions}"]
    if not rehearsal and facts.keys() & CALIBRATED.keys():
        found = [f"{facts[name] / unit:.0f} {words}" for name, (unit, words) in CALIBRATED.items() if name in facts]
        lines.append(f"calibrated: {', '.join(found)}")
    if not rehearsal and report["card"]:
        lines.append(_goals(report))
    if report["switches"]:
        lines.append("with " + ", ".join(f"{name}={value}" for name, value in report["switches"].items()))
    for part, rows in groupby(report["rows"], key=lambda row: row.get("part", "others")):
        lines += ["", part, table_line(HEADER, WIDTHS)]
        for row in rows:
            lines.append(table_line(_cells(row, rehearsal), WIDTHS))
            remark = row["error"] or row["invalid"] or ("" if rehearsal else row["note"])
            if remark:
                lines.append(f"    {remark}"[:240])
    lines += _failures(report)
    if report["rows"]:
        lines += ["", f"{count_verdicts(report['rows'])}; {report['taken_s']} s"]
    return "\n".join(lines)


def count_verdicts(rows: Sequence[dict[str, Any]]) -> str:
    """`2 below, 31 pass`; empty without rows."""
    counts = Counter(row["verdict"] for row in rows)
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))


def _card(card: dict[str, Any]) -> str:
    """`NVIDIA H200, 139.8 GiB, 132 multiprocessors, 60 MiB of second-level cache, capability 9.0, driver 580.95.05`"""
    if not card:
        return "no GPU"
    sizes = f"{card['memory_bytes'] / (1 << 30):.1f} GiB, {card['multiprocessors']} multiprocessors"
    cache = f"{card['l2_bytes'] / (1 << 20):.0f} MiB of second-level cache"
    return f"{card['name']}, {sizes}, {cache}, capability {card['capability']}, driver {card['driver'] or 'unknown'}"


def _goals(report: dict[str, Any]) -> str:
    """The card that the goals are for, in one line."""
    marked = f"goals marked ({CARD_SHORT}) are for an {GOALS_CARD}"
    if report["goals_are_judged"]:
        return f"{marked}, which this is"
    return f"{marked} and not judged on this card: `frac` is of this card's own limit; all other goals are judged as always"


def _failures(report: dict[str, Any]) -> list[str]:
    """The failures, listed after the rows; one line for all rows with the same reason."""
    names_of: dict[str, list[str]] = {}
    for row in report["rows"]:
        names_of.setdefault(row["error"] or row["invalid"], []).append(row["name"])
    names_of.pop("", None)
    lines = [
        f"  {first}{f' and {len(others)} more' if others else ''}: {reason}"[:400]
        for reason, (first, *others) in names_of.items()
    ]
    for broken in (each for each in report["parts"] if "error" in each):
        lines.append(f"  part {broken['part']}: {broken['error']}")
        lines += [f"    | {line[:200]}" for line in broken.get("log", "").splitlines()[-LAST_LINES:]]
    return ["", WENT_WRONG, *lines] if lines else []


def _cells(row: dict[str, Any], rehearsal: bool) -> tuple[str, ...]:
    numbers = [format_figure(row[key]) for key in ("value", "limit", "fraction", "peer", "ratio")]
    if rehearsal:
        numbers = ["" if number == "-" else "·" for number in numbers]
    value, limit, fraction, peer, ratio = numbers
    row_verdict = ("failed" if row["error"] else "came") if rehearsal else row["verdict"]
    return row["name"], value, row.get("unit", ""), limit, fraction, peer, ratio, row.get("must_show", "-"), row_verdict


def format_figure(value: float | None) -> str:
    """Three significant digits, or all digits of a large number."""
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
