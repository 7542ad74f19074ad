"""The rows that benches write to bench/results, one JSON object per line: common fields, files and text tables. Imports no
bench."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

TREE = Path(__file__).resolve().parents[1]
RESULTS = TREE / "bench" / "results"
MEASURED = ("appliance", "bench", "engine", "kernels", ":!bench/results")


def row_header(bench: str) -> dict[str, Any]:
    """The first fields of a row of `bench`: time, revision, machine and its load."""
    return {"bench": bench, "at": datetime.now(UTC).isoformat(timespec="seconds"), **revision(), "machine": machine()}


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the option of all benches, `--no-save`. `description`: the docstring of the bench's module."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-save", action="store_true", help="print only")
    return parser


def publish(row: Mapping[str, Any], options: argparse.Namespace) -> None:
    """Print `row`, and save it."""
    print(json.dumps(row, indent=1))
    save_row(row, options)


def save_row(row: Mapping[str, Any], options: argparse.Namespace) -> None:
    """Append `row` to the file of its bench, unless `--no-save` is given."""
    if not options.no_save:
        append_row(RESULTS / f"{row['bench']}.jsonl", row)


def append_row(path: Path, row: Mapping[str, Any]) -> None:
    """Append `row` to the file at `path`."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def table_line(cells: Sequence[str], widths: Sequence[int]) -> str:
    """A line of a table: each cell padded to its width."""
    return "  " + " ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def machine() -> dict[str, Any]:
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 2),
    }


def cpu_name() -> str:
    """The processor's name on Linux, elsewhere its architecture."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text("utf-8").splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def revision(tree: Path = TREE) -> dict[str, Any]:
    """The commit of `tree` and whether the measured code differs from it (None if unknown). Without git, the commit is that of
    GATEHOUSE_REVISION."""

    def git(*arguments: str) -> str | None:
        try:
            answer = subprocess.run(["git", *arguments], cwd=tree, capture_output=True, text=True, check=False, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return answer.stdout.strip() if answer.returncode == 0 else None

    changed = git("status", "--porcelain", "--untracked-files=no", "--", *MEASURED)
    commit = git("rev-parse", "HEAD") or os.environ.get("GATEHOUSE_REVISION", "unknown")
    return {"revision": commit, "changed": None if changed is None else bool(changed)}
