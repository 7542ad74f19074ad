"""All figures that need a GPU, in one command: `bench/gpu.sh`, or `python -m bench.gpu`. See docs/benchmarks.md."""

from __future__ import annotations

import argparse
import json
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from bench.gpu import requirements
from bench.gpu.conduct import conduct, results_folder
from bench.gpu.plan import PARTS, TOTAL_S, stages
from bench.gpu.report import complete, document, status, table

REHEARSAL_S = 900.0


def main() -> int:
    """Run, write, print; the exit status is that of `report.status`."""
    known = sorted({part.target for part in PARTS})
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rehearse", action="store_true", help="on the CPU with tiny shapes; no figures")
    parser.add_argument("--only", default="", help=f"parts, divided by commas: {', '.join(known)}")
    parser.add_argument("--out", type=Path, help="where the JSON goes; else bench/results/, of a rehearsal nowhere")
    parser.add_argument("--logs", type=Path, help="a folder for the whole log of each part; its end is in the JSON")
    parser.add_argument("--total", type=float, help=f"seconds for everything, {TOTAL_S:g} unless given")
    options = parser.parse_args()
    only = {name.strip() for name in options.only.split(",") if name.strip()} or None
    for name in (only or set()) - set(known):
        parser.error(f"--only: there is no part {name!r}; there are {', '.join(known)}")
    requirements.check(rehearse=options.rehearse)
    total_s = options.total or (REHEARSAL_S if options.rehearse else TOTAL_S)
    started_s = time.monotonic()
    planned = stages(only, rehearse=options.rehearse)
    outcome = conduct(
        planned,
        rehearse=options.rehearse,
        total_s=total_s,
        facts={},
        show=lambda line: print(line, flush=True),
        logs=options.logs,
    )
    rows = complete(outcome, {part.target for stage in planned for job in stage for part in job.parts})
    report = document(rows, outcome, rehearsal=options.rehearse, taken_s=time.monotonic() - started_s)
    path = options.out
    if path is None and outcome.rows and not options.rehearse:  # without a GPU there is nothing to keep
        path = results_folder() / f"gpu-{datetime.now(UTC):%Y%m%dT%H%M%SZ}.json"
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    print(table(report))
    if path is not None:
        print(f"written to {path}")
    return status(report)


if __name__ == "__main__":
    sys.exit(main())
