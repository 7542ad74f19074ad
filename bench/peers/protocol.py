"""The worker's side of the peer bench: one JSON command per line in, one JSON answer per line out. Standard library only: every
peer's interpreter runs it, and none of them has our packages.

    {"do": "load", "folder": …, "threads": 2, "settings": {…}}    -> {"facts": {…}, "load_s": …}
    {"do": "run", "prompts": [[id, …], …], "output_lens": [n, …], "at_once": true}
                                                                  -> {"tokens": [[id, …], …], "wall_s": …, "cpu_s": …}

Every request is greedy, ignores end of text and gives exactly its number of tokens. Requests are submitted together, or each
when the previous one is done. `wall_s` and `cpu_s` cover the run alone; every answer also has `process_cpu_s`, all CPU time of
the process since it read the command, so that the bench can tell it from other processes'. After an error the worker answers
{"error": …} and exits. It also exits at the end of its input.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.parent import end_with_parent

REPOSITORY = Path(__file__).resolve().parents[2]

Run = Callable[[list[list[int]], list[int]], list[list[int]]]
"""(prompts, exact number of tokens to generate for each) → generated token ids"""

Load = Callable[[Path, int, dict[str, Any]], tuple[Run, dict[str, Any]]]
"""(model directory, threads, settings) → a function that runs requests, and facts for the row"""


def leave_repository() -> None:
    """Remove our repository from the import path, also for child processes: peers' libraries import another `kernels`."""
    os.environ.pop("PYTHONPATH", None)
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != REPOSITORY]


def serve_commands(load: Load) -> None:
    """Answer commands until the input ends. Redirects what libraries print to stderr, so that answers stay parsable."""
    # A worker that is paused (SIGSTOP) when the bench dies would not see the end of its input.
    end_with_parent()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    run: Run | None = None
    for line in sys.stdin:
        started_cpu_s = time.process_time()
        command = json.loads(line)
        try:
            if command["do"] == "load":
                run, answer = _load(load, command)
            elif run is None:
                raise RuntimeError("received a run command before a model was loaded")
            else:
                answer = _timed(run, command)
        except Exception as error:  # noqa: BLE001 - whatever a peer raises is its answer
            traceback.print_exc()
            answers.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")
            answers.flush()
            sys.exit(1)
        text = json.dumps(answer)[:-1]
        answers.write(f'{text}, "process_cpu_s": {time.process_time() - started_cpu_s}}}\n')
        answers.flush()


def _load(load: Load, command: dict[str, Any]) -> tuple[Run, dict[str, Any]]:
    started_s = time.perf_counter()
    run, facts = load(Path(command["folder"]), command["threads"], command["settings"])
    return run, {"facts": facts, "load_s": time.perf_counter() - started_s}


def _timed(run: Run, command: dict[str, Any]) -> dict[str, Any]:
    prompts, output_lens = command["prompts"], command["output_lens"]
    calls = [(prompts, output_lens)] if command["at_once"] else [([p], [n]) for p, n in zip(prompts, output_lens, strict=True)]
    started_s, started_cpu_s = time.perf_counter(), time.process_time()
    tokens = [answer for call in calls for answer in run(*call)]
    cost = {"wall_s": time.perf_counter() - started_s, "cpu_s": time.process_time() - started_cpu_s}
    if list(map(len, tokens)) != output_lens:
        raise RuntimeError(f"generated {list(map(len, tokens))} tokens instead of {output_lens}")
    return {"tokens": tokens, **cost}
