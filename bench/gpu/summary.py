"""A summary of the judged rows, short enough for a reader who sees only the end of the output."""

from __future__ import annotations

from typing import Any

from bench.gpu.report import count_verdicts, format_figure, measured_nothing

CHARS_MAX = 6000
COUNTED_PARTS = ("checks", "invariant")
"""Parts whose rows are only counted, and listed if they do not pass."""
NAMED_MAX = 12
PASSING = ("pass", "stretch")
JUDGED_BY = {"of limit": "fraction", "× peer": "ratio"}


def summary(report: dict[str, Any]) -> str:
    """One line for every row with a goal: verdict, name, figure, goal. Checks are only counted, unless they fail. If nothing
    was measured, the reason."""
    if measured_nothing(report):
        reason = next((part["error"] for part in report["parts"] if "error" in part), "no part was run")
        return f"\nnothing was measured: {reason}; {report['taken_s']} s"
    judged = [row for row in report["rows"] if row.get("must_show", "-") != "-"]
    lines = ["", "judged"]
    for part in COUNTED_PARTS:
        lines += _counted(part, [row for row in judged if row["part"] == part])
    lines += [_line(row) for row in judged if row["part"] not in COUNTED_PARTS]
    last = f"{count_verdicts(judged) or 'no row has a goal'}; {report['taken_s']} s"
    return "\n".join([*_truncated(lines, CHARS_MAX - len(last) - 1), last])


def _counted(part: str, rows: list[dict[str, Any]]) -> list[str]:
    if not rows:
        return []
    wrong = [row for row in rows if row["verdict"] not in (*PASSING, "REHEARSAL")]
    lines = [f"{part}: {count_verdicts(rows)}"]
    lines += [_line(row) for row in wrong[:NAMED_MAX]]
    return lines + ([f"and {len(wrong) - NAMED_MAX} more of {part}"] if len(wrong) > NAMED_MAX else [])


def _line(row: dict[str, Any]) -> str:
    goal = row["must_show"]
    value = row[next((field for unit, field in JUDGED_BY.items() if unit in goal), "value")]
    figure = format_figure(None if row["verdict"] == "REHEARSAL" else value)
    return f"{row['verdict']:<10} {row['name']}:  {figure}  ({goal})"


def _truncated(lines: list[str], chars_max: int) -> list[str]:
    """As many lines as fit, and the number of those that do not."""
    kept: list[str] = []
    left = chars_max - 40
    for number, line in enumerate(lines):
        left -= len(line) + 1
        if left < 0:
            return [*kept, f"and {len(lines) - number} lines more, in the table"]
        kept.append(line)
    return kept
