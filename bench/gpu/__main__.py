"""All figures that need a GPU, in one command: `bench/gpu.sh`, or `python -m bench.gpu`. See docs/benchmarks.md."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.gpu import requirements
from bench.gpu.plan import PARTS, TOTAL_S, stages
from bench.gpu.processes import Outcome, Recorder, run_stages
from bench.gpu.report import complete_rows, document, status, table
from bench.gpu.result_files import ResultFiles
from bench.gpu.summary import summary
from bench.rows import RESULTS

REHEARSAL_S = 900.0


def main() -> int:
    """Run, write, print; the exit status is that of `report.status`."""
    known = sorted({part.target for part in PARTS})
    parser = argparse.ArgumentParser(prog="bench/gpu.sh", description=__doc__)
    parser.add_argument("--rehearse", action="store_true", help="on the CPU with tiny shapes; no figures")
    parser.add_argument("--only", default="", help=f"comma-separated parts: {', '.join(known)}")
    parser.add_argument("--out", type=Path, help="path of the JSON (default: in bench/results/; a rehearsal writes none)")
    parser.add_argument("--logs", type=Path, help="directory or FILE.tgz for the whole log of each part")
    parser.add_argument("--total", type=float, help=f"seconds for the whole run (default {TOTAL_S:g})")
    options = parser.parse_args()
    only = {name.strip() for name in options.only.split(",") if name.strip()} or None
    for name in (only or set()) - set(known):
        parser.error(f"--only: unknown part {name!r}; the parts are {', '.join(known)}")
    requirements.check(rehearse=options.rehearse)
    total_s = options.total or (REHEARSAL_S if options.rehearse else TOTAL_S)
    started_s = time.monotonic()
    planned = stages(only, rehearse=options.rehearse)
    path = options.out
    if path is None and not options.rehearse:
        path = RESULTS / f"gpu-{datetime.now(UTC):%Y%m%dT%H%M%SZ}.json"

    outcome = Outcome()

    def make_report(targets: set[str]) -> dict[str, Any]:
        rows = complete_rows(outcome, targets)
        return document(rows, outcome, rehearsal=options.rehearse, taken_s=time.monotonic() - started_s)

    def is_kept() -> bool:  # without a GPU there is no result to write
        return bool(outcome.rows) or options.out is not None

    signal.signal(signal.SIGTERM, _exit_on_signal)
    with ResultFiles(path, options.logs) as files:

        def keep(_: Outcome) -> None:
            if is_kept():
                files.write(make_report({target for part in outcome.parts for target in part["targets"]}))

        recorder = Recorder(outcome, lambda line: print(line, flush=True), files.logs, keep)
        interruption: BaseException | None = None
        try:
            run_stages(planned, rehearse=options.rehearse, total_s=total_s, recorder=recorder)
        except (SystemExit, KeyboardInterrupt) as error:
            interruption = error
        report = make_report({part.target for stage in planned for job in stage for part in job.parts})
        if is_kept():  # before anything is printed, which might fail
            files.write(report)
        print(table(report))
        if is_kept() and path is not None:
            print(f"\nwritten to {path}")
        print(summary(report), flush=True)
        if interruption is not None:
            raise interruption
    return status(report)


def _exit_on_signal(number: int, _: object) -> None:
    """Exit in an orderly way, which writes and prints what there is: a time limit usually sends SIGTERM before SIGKILL."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
