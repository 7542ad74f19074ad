"""Our engine compared with its peers on the CPU: vLLM's CPU build, transformers' continuous batching, llama.cpp. Optional.

    bench/peers/set_up.sh                              once: their environments, about 10 minutes
    python -m bench.engine_peers                       everything
    python -m bench.engine_peers --models 8M --peers vllm --requests 16 --rounds 1 --no-save

All engines get the same random-weight Llama models, the same prompts of token ids and the same numbers of tokens; float32,
greedy, two threads each, prefill and decode together in every figure. Each engine runs in a process of its own, which is
paused by a signal (SIGSTOP) while another runs. First both answer once, to compile and warm up, and the tokens are compared;
then they are measured alternately in rounds of four runs, ABBA and BAAB. A round is discarded and repeated if, during
any of its runs, other processes and the host together took more than --noise cores. A row has the medians, the median of the
ratios of neighbouring runs, and every raw sample, including those of discarded rounds; rows are added to
bench/results/engine_peers.jsonl. The exit status is 0 if no row is missing.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import psutil

from bench.gpu.rows import Row, Target, verdict
from bench.peers import served
from bench.peers.disturbance import CORES_MAX
from bench.peers.models import SHAPES, make_model
from bench.peers.plan import OURS, PEERS, VLLM_SERVED, Comparison, comparisons, slower_vllm_settings
from bench.peers.request_sets import request_set
from bench.peers.rounds import equal_tokens, make_row, measure
from bench.peers.workers import PEERS_FOLDER, EngineSetup, PeerFailed, Worker, running_worker
from bench.rows import argument_parser, row_header, save_row, table_line

EQUAL_MIN = 0.2
"""Minimum share of tokens before the first difference. A smaller share is not rounding: the engines ran different models."""
HEADER = ("row", "ours", "peer", "unit", "ratio", "must show", "verdict")
WIDTHS = (58, 9, 9, 9, 6, 20, 0)
COUNTS = [1, 16, 48]


@dataclass(frozen=True, slots=True)
class RunFolders:
    """Directories of one run: the model's, and the one for the workers' output."""

    model: Path
    logs: Path


def compare(ours: Worker, peer: Worker, comparison: Comparison, model: str, options: argparse.Namespace) -> Row:
    """Measure one row: compare the tokens first, then the times. Raises PeerFailed."""
    requests = request_set(comparison.count, SHAPES[model]["vocab_size"])
    rounds = max(1, round(options.rounds * comparison.rounds))
    log(f"  {comparison.name(model)}: {rounds} rounds")
    tokens, answers = equal_tokens(ours.run(requests)[0], peer.run(requests)[0])
    measured = measure(ours, peer, requests, rounds, options.noise)
    row = make_row(comparison.name(model), comparison.peer.name, requests, measured, rounds)
    row.note += f"; equal tokens {tokens:.1%}" if tokens < 1 else ""
    row.facts |= {"ours": ours.facts, "peer": peer.facts, "equal_tokens": round(tokens, 4), "equal_answers": round(answers, 4)}
    if tokens < EQUAL_MIN:
        row.error = f"only {tokens:.0%} of the tokens are equal before an answer's first difference: not the same model"
    speeds = "" if row.ratio is None else f"{row.value:.0f} against {row.peer:.0f} tokens/s, {row.ratio:.2f} times, "
    log(f"    {speeds}{row.error or row.note}")
    return row


def compare_with_peer(
    ours: Worker, peer: EngineSetup, planned: Sequence[Comparison], model: str, folders: RunFolders, options: argparse.Namespace
) -> Iterator[Row]:
    """The rows of one peer. If it fails, its remaining rows contain the error, and the run continues with the next peer."""
    done = 0
    try:
        with running_worker(peer, options.folder, folders.model, options.threads, folders.logs) as worker:
            log(f"{model}: {peer.name} loaded in {worker.facts['load_s']} s")
            for comparison in planned:
                yield compare(ours, worker, comparison, model, options)
                done += 1
    except PeerFailed as error:
        log(f"  {error}")
        yield from (Row(name=each.name(model), peer_name=peer.name, error=str(error)) for each in planned[done:])


def select_comparisons(model: str, options: argparse.Namespace) -> list[Comparison]:
    names = {name for peer in options.peers for name in PEERS[peer]}
    return [each for each in comparisons(model) if each.count in options.requests and each.peer.name in names]


def compare_with_peers(model: str, folders: RunFolders, options: argparse.Namespace) -> list[tuple[Row, Target]]:
    """Create the model, then compare our engine with one peer after another."""
    planned = select_comparisons(model, options)
    if not planned:
        return []
    log(f"{model}: making the model")
    make_model(SHAPES[model], folders.model)
    rows: list[Row] = []
    with running_worker(OURS, options.folder, folders.model, options.threads, folders.logs) as ours:
        for peer, group in groupby(planned, key=lambda each: each.peer):
            rows += compare_with_peer(ours, peer, list(group), model, folders, options)
    slower_settings = slower_vllm_settings({each: row.ratio for each, row in zip(planned, rows, strict=True)})
    return [(row, each.target(model, judged=each not in slower_settings)) for each, row in zip(planned, rows, strict=True)]


def document(model: str, rows: Sequence[tuple[Row, Target]], options: argparse.Namespace, taken_s: float) -> dict[str, Any]:
    """The result row of one model, as saved."""
    return {
        **row_header("engine_peers"),
        "model": model,
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "threads": options.threads,
        "noise_cores": options.noise,
        "taken_s": round(taken_s, 1),
        "rows": [
            {**row.as_dict(), "unit": target.unit, "must_show": target.text, "verdict": verdict(row, target, card="")}
            for row, target in rows
        ],
    }


def table(reports: Sequence[dict[str, Any]]) -> str:
    """The rows as text for people to read."""
    lines = [table_line(HEADER, WIDTHS)]
    for report in reports:
        for row in report["rows"]:
            ours, peer, ratio = (
                "-" if row[key] is None else f"{row[key]:.{digits}f}"
                for key, digits in (("value", 0), ("peer", 0), ("ratio", 2))
            )
            cells = (row["name"], ours, peer, row["unit"], ratio, row["must_show"], row["verdict"])
            lines.append(table_line(cells, WIDTHS))
            if row["error"] or row["note"]:
                lines.append(f"      {row['error'] or row['note']}")
    return "\n".join(lines)


def log(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def comma_separated(kind: type, allowed: Sequence[Any]) -> Callable[[str], list[Any]]:
    """An argparse type that parses `a,b,c` and rejects values that are not allowed."""

    def read(text: str) -> list[Any]:
        try:
            values = [kind(part) for part in text.split(",")]
        except ValueError:
            values = [text]
        if wrong := [value for value in values if value not in allowed]:
            raise argparse.ArgumentTypeError(f"{wrong[0]} is not one of {', '.join(map(str, allowed))}")
        return values

    return read


def at_least_one(text: str) -> int:
    """An argparse type for whole numbers of at least one."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


def options_parser() -> argparse.ArgumentParser:
    parser = argument_parser(__doc__)
    parser.add_argument("--models", type=comma_separated(str, list(SHAPES)), default=list(SHAPES), help="8M,100M")
    parser.add_argument("--peers", type=comma_separated(str, list(PEERS)), default=list(PEERS), help="vllm,transformers,llama")
    parser.add_argument("--requests", type=comma_separated(int, COUNTS), default=COUNTS, help="1,16,48: concurrent requests")
    parser.add_argument(
        "--rounds", type=at_least_one, default=3, help="rounds of a judged row; costly ones get fewer (default 3)"
    )
    parser.add_argument("--served", action="store_true", help="also 16 streaming clients of both servers, 8M")
    parser.add_argument("--noise", type=float, default=CORES_MAX, help=f"cores that others may use (default {CORES_MAX})")
    parser.add_argument("--threads", type=at_least_one, default=2, help="threads of each engine (default 2)")
    parser.add_argument(
        "--folder", type=Path, default=os.environ.get("GATEHOUSE_PEERS", PEERS_FOLDER), help="of the peers' environments"
    )
    parser.add_argument("--logs", type=Path, help="directory for the engines' output (default: a new temporary one)")
    return parser


def missing(options: argparse.Namespace) -> list[str]:
    """Missing prerequisites, as the commands that create them."""
    found = []
    kinds = [each.peer for model in options.models for each in select_comparisons(model, options)]
    for kind in [*kinds, VLLM_SERVED] if options.served else kinds:
        try:
            kind.interpreter(options.folder)
        except PeerFailed as error:
            found.append(str(error))
    return list(dict.fromkeys(found))


def main() -> None:
    options = options_parser().parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that ending the bench also ends its engines
    options.folder = Path(options.folder).resolve()
    if problems := missing(options):
        sys.exit("\n".join(problems))
    logs = options.logs or Path(tempfile.mkdtemp(prefix="engine-peers-"))
    logs.mkdir(parents=True, exist_ok=True)
    log(f"output of the engines: {logs}")
    reports = []
    for model in options.models:
        started_s = time.perf_counter()
        # Always the same path: vLLM caches compiled code under the model's path, so a second run starts sooner.
        folders = RunFolders(options.folder / "models" / model, logs)
        rows = compare_with_peers(model, folders, options)
        if options.served and model == served.MODEL:
            rows.append(served.row(folders.model, logs, options.folder, options.threads, options.rounds, options.noise))
        if not rows:
            continue
        reports.append(document(model, rows, options, time.perf_counter() - started_s))
        save_row(reports[-1], options)
    print(table(reports))
    sys.exit(any(row["error"] for report in reports for row in report["rows"]))


if __name__ == "__main__":
    main()
