"""Worker processes of the peer bench, each paused by a signal (SIGSTOP) while another runs."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from bench.peers.disturbance import Disturbance, disturbance_between, read_machine
from bench.peers.protocol import REPOSITORY
from bench.peers.request_sets import RequestSet

ANSWER_TIMEOUT_S = 600.0
SETTLE_S = 0.05
"""Delay between the signal that resumes a worker and its measurement: threads paused in a wait wake up once and sleep again."""

PEERS_FOLDER = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gatehouse" / "peers"


class PeerFailed(Exception):
    """A peer's worker or server ended, reported a failure or did not answer; or its environment is missing."""


@dataclass(frozen=True, slots=True, eq=False)
class EngineSetup:
    """One engine with its settings. `environment` names a directory made by bench/peers/set_up.sh; empty: this interpreter.

    `prepare`: a module that the environment's interpreter runs once on the model's directory before loading.
    """

    name: str
    module: str
    environment: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    prepare: str = ""

    def interpreter(self, folder: Path) -> str:
        """Path of the peer's Python. If it is missing, raises PeerFailed with the command that installs it."""
        if not self.environment:
            return sys.executable
        root = folder / self.environment
        if not (root / ".ready").exists():
            option = "" if folder == PEERS_FOLDER else f" --folder {folder}"
            raise PeerFailed(f"{root} is not ready: make it with bench/peers/set_up.sh --only {self.environment}{option}")
        return str(root / "bin" / "python")


@dataclass(frozen=True, slots=True)
class Sample:
    """One run of a request set."""

    wall_s: float
    cpu_s: float
    disturbance: Disturbance

    def as_row(self) -> dict[str, float]:
        return {
            "wall_s": round(self.wall_s, 4),
            "cpu_s": round(self.cpu_s, 4),
            "others_cores": round(self.disturbance.others_cores, 3),
            "steal_cores": round(self.disturbance.steal_cores, 3),
        }


class Worker:
    """A loaded engine in its own process group, paused between runs so that none of its threads can spin."""

    def __init__(self, kind: EngineSetup, folder: Path, model: Path, threads: int, log: IO[str]) -> None:
        """Start the worker, load the model and pause. Raises PeerFailed."""
        self.kind = kind
        self._log = log
        variables = {
            "OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1",
            "VLLM_CACHE_ROOT": str(folder / "cache"), **kind.variables,
        }  # fmt: skip
        self._process = subprocess.Popen(
            [kind.interpreter(folder), "-m", kind.module],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True,
            env={**os.environ, **variables}, cwd=model,
        )  # fmt: skip
        try:
            loaded = self._send_command({"do": "load", "folder": str(model), "threads": threads, "settings": kind.settings})
        except BaseException:
            self.close()
            raise
        self.facts: dict[str, Any] = {**loaded["facts"], "load_s": round(loaded["load_s"], 1)}
        self._signal(signal.SIGSTOP)

    def run(self, requests: RequestSet) -> tuple[list[list[int]], Sample]:
        """Resume the worker, run the requests, pause it again. Raises PeerFailed."""
        self._signal(signal.SIGCONT)
        time.sleep(SETTLE_S)
        own_s, before = time.process_time(), read_machine()
        answer = self._send_command({"do": "run", **asdict(requests)})
        after, own_s = read_machine(), time.process_time() - own_s
        self._signal(signal.SIGSTOP)
        disturbance = disturbance_between(before, after, answer["process_cpu_s"] + own_s)
        return answer["tokens"], Sample(answer["wall_s"], answer["cpu_s"], disturbance)

    def close(self) -> None:
        """Kill the process and its children."""
        for number in (signal.SIGCONT, signal.SIGKILL):
            self._signal(number)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # if it has ended, the next command reports why
            os.killpg(self._process.pid, number)

    def _send_command(self, command: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._failed("ended") from error
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(ANSWER_TIMEOUT_S):
                raise self._failed(f"gave no answer within {ANSWER_TIMEOUT_S:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise self._failed("ended")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise self._failed(answer["error"])
        return answer

    def _failed(self, what: str) -> PeerFailed:
        return PeerFailed(f"{self.kind.name}: {what}; its output is in {self._log.name}")


@contextmanager
def running_worker(kind: EngineSetup, folder: Path, model: Path, threads: int, logs: Path) -> Iterator[Worker]:
    """Yield a worker that logs to a file in `logs`. Raises PeerFailed."""
    with (logs / f"{kind.name.replace(' ', '-').replace(',', '')}-{model.name}.log").open("a") as log:
        if kind.prepare:
            prepared = subprocess.run(
                [kind.interpreter(folder), "-m", kind.prepare, str(model)],
                stdout=log, stderr=log, check=False, cwd=REPOSITORY,
            )  # fmt: skip
            if prepared.returncode:
                raise PeerFailed(f"{kind.name}: {kind.prepare} failed; its output is in {log.name}")
        worker = Worker(kind, folder, model, threads, log)
        try:
            yield worker
        finally:
            worker.close()
