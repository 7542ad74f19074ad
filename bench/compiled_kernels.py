"""What each kernel compiles to on each card: registers, spills, shared memory, matrix instructions, concurrent programs.

Usage: python -m bench.compiled_kernels [--all] [--modules attention.decode …] [--processes 2] [--no-save]

Needs no GPU. Every version of Triton in the environment is used (the installer's test environment has the oldest and the
newest that we allow). Writes bench/results/compiled_kernels.jsonl, the record that tells CI what need not be compiled again
(kernels/triton/gate/record.py): sm (capability), regs and spill (bytes) per thread, shared (bytes) and tmem (columns of tensor
memory) per program, mma (matrix instructions), programs that fit on one multiprocessor. Recorded configurations are compiled
again only with `--all`, except one of each kernel on every second card.
"""

from __future__ import annotations

import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from itertools import groupby
from pathlib import Path
from typing import Any

from bench.rows import argument_parser, table_line
from kernels.triton.gate.compilation import Compiled
from kernels.triton.gate.declared import module_names
from kernels.triton.gate.record import Record, Recorded, read, write
from tests.support.triton_versions import RECORD, TritonVersion, installed

COLUMNS = ("capability", "triton", "registers", "spill_bytes", "shared_bytes", "programs", "tensor_instructions", "faults")
LABELS = ("sm", "triton", "regs", "spill", "shared", "programs", "matrix instructions", "faults")
WIDTHS = (4, 7, 5, 6, 7, 9, 30, 0)
Row = dict[str, Any]


def compile_all(versions: list[TritonVersion], modules: list[str], processes: int, record: Path | None) -> list[Row]:
    """The rows of every module under every version, ordered by module, configuration, capability and version."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(processes) as pool:
        jobs = [pool.submit(version.compile_modules, modules, Path(folder, version.version), record) for version in versions]
        rows = [row for job in jobs for row in job.result()]
    order = {configuration: index for index, configuration in enumerate(dict.fromkeys(map(_configuration, rows)))}
    return sorted(rows, key=lambda row: (order[_configuration(row)], row["capability"], row["triton"]))


def _configuration(row: Row) -> tuple[str, str]:
    return row["module"], row["name"]


def table(rows: list[Row]) -> str:
    """The rows as text, with a heading for each configuration."""
    lines = [table_line(LABELS, WIDTHS)]
    for (module, name), rows_of_configuration in groupby(rows, key=_configuration):
        cards = list(rows_of_configuration)
        lines.append(f"{module}: {name}  ({cards[0].get('num_warps')} warps, {cards[0].get('num_stages')} stages)")
        lines += [table_line([_cell(row.get(column, "-")) for column in COLUMNS], WIDTHS) for row in cards]
    return "\n".join(lines)


def _cell(value: object) -> str:
    return "; ".join(str(part) for part in value) if isinstance(value, list) else str(value)


def save_rows(rows: list[Row]) -> None:
    """Replace the rows of the compiled modules, and remove those of modules that no longer exist."""
    compiled, names = {row["module"] for row in rows}, module_names()
    record: Record = {key: recorded for key, recorded in read(RECORD).items() if key[0] in set(names) - compiled}
    for row in rows:
        if "registers" in row:  # it could be compiled
            values = {field.name: row[field.name] for field in fields(Compiled)}
            values["tensor_instructions"] = tuple(values["tensor_instructions"])
            recorded = Recorded(row["key"], Compiled(**values))
            record[row["module"], row["name"], row["capability"], row["triton"]] = recorded
    write(RECORD, dict(sorted(record.items(), key=lambda item: names.index(item[0][0]))))


def main() -> None:
    """Compile, print the table, write the rows unless `--no-save`."""
    parser = argument_parser(__doc__)
    parser.add_argument("--all", action="store_true", help="compile recorded configurations too")
    parser.add_argument("--modules", nargs="*", help="such as rows.norm, for kernels/triton/gate/rows/norm.py (default: all)")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    rows = compile_all(installed(), options.modules or module_names(), options.processes, None if options.all else RECORD)
    if not options.no_save:
        save_rows(rows)
    print(table(rows))
    changed, broken = sum(not row["is_recorded"] for row in rows), sum(bool(row["faults"]) for row in rows)
    print(f"{len(rows)} configurations, {changed} new or changed, {broken} with faults")


if __name__ == "__main__":
    main()
