"""What each kernel becomes on each card: registers, spills, shared memory, matrix instructions, programs side by side.

Usage: python -m bench.compiled_kernels [--modules attention_decode …] [--processes 2] [--dry-run]

Needs no GPU. Every version of Triton in the environment is used (the installer's test environment has the oldest and the
newest that we allow). The rows of what was compiled take the place of older ones in bench/results/compiled_kernels.jsonl, one
for each kernel, configuration, compute capability and version, with short names and without zeros: sm (capability), regs and
spill (bytes) of a thread, shared (bytes) and tmem (columns of tensor memory) of a program, mma (matrix instructions), programs
that one multiprocessor holds at a time.
Compile times are left out, so that a row changes only when the machine code does.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kernels.triton.gate.declared import module_names
from tests.support.triton_versions import TritonVersion, installed

RESULTS = Path(__file__).parent / "results" / "compiled_kernels.jsonl"
COLUMNS = ("capability", "triton", "registers", "spill_bytes", "shared_bytes", "programs", "tensor_instructions", "faults")
LABELS = ("sm", "triton", "regs", "spill", "shared", "programs", "matrix instructions", "faults")
STORED = {
    "num_warps": "warps",
    "num_stages": "stages",
    "registers": "regs",
    "spill_bytes": "spill",
    "shared_bytes": "shared",
    "tensor_memory_columns": "tmem",
    "tensor_instructions": "mma",
    "programs": "programs",
    "faults": "faults",
}
Row = dict[str, Any]


def compile_all(versions: list[TritonVersion], modules: list[str], processes: int) -> list[Row]:
    """The rows of every module under every version, in the order of module, configuration, capability and version."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(processes) as pool:
        jobs = [pool.submit(version.compile_modules, modules, Path(folder, version.version)) for version in versions]
        made = [row for job in jobs for row in job.result()]
    order = {row["name"]: index for index, row in reversed(list(enumerate(made)))}
    return sorted(made, key=lambda row: (order[row["name"]], row["capability"], row["triton"]))


def kept(row: Row) -> Row:
    """What is written: short names, and nothing that says nothing."""
    short = {name: row[name] for name in ("module", "name")} | {"sm": row["capability"], "triton": row["triton"]}
    numbers = {label: row[name] for name, label in STORED.items() if row.get(name)}
    return short | numbers


def table(rows: list[Row]) -> str:
    """The rows as text, one heading for each configuration."""
    widths = (4, 7, 5, 6, 7, 9, 30)
    lines = ["  " + " ".join(label.ljust(width) for label, width in zip(LABELS, (*widths, 0), strict=True))]
    heading = None
    for row in rows:
        if heading != (heading := (row["module"], row["name"])):
            lines.append(f"{row['module']}: {row['name']}  ({row.get('num_warps')} warps, {row.get('num_stages')} stages)")
        cells = [_cell(row.get(column, "-")) for column in COLUMNS]
        lines.append("  " + " ".join(cell.ljust(width) for cell, width in zip(cells, (*widths, 0), strict=True)).rstrip())
    return "\n".join(lines)


def _cell(value: object) -> str:
    return "; ".join(str(part) for part in value) if isinstance(value, list) else str(value)


def keep(rows: list[Row]) -> None:
    """Put the rows of the compiled modules in the place of theirs; those of modules that are gone go."""
    compiled, names = {row["module"] for row in rows}, module_names()
    before = [json.loads(line) for line in RESULTS.read_text("utf-8").splitlines()] if RESULTS.exists() else []
    others = [row for row in before if row["module"] in names and row["module"] not in compiled]
    all_rows = sorted(rows + others, key=lambda row: names.index(row["module"]))
    RESULTS.write_text("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in all_rows), "utf-8")


def main() -> None:
    """Compile, print the table, write the rows unless `--dry-run`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--modules", nargs="*", help="names of files in kernels/triton/gate; without it all")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--dry-run", action="store_true", help="print only")
    options = parser.parse_args()
    rows = compile_all(installed(), options.modules or module_names(), options.processes)
    print(table(rows))
    broken = sum(bool(row["faults"]) for row in rows)
    print(f"{len(rows)} compilations, {broken} with faults")
    if not options.dry_run:
        keep([kept(row) for row in rows])


if __name__ == "__main__":
    main()
