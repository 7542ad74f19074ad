"""Keeps one engine process running. Knows how to start, watch and restart it; not what is asked of it.

       ┌─────────┐ ready  ┌───────┐
start ►│ loading ├───────►│ ready │
       └──┬───┬──┘        └───┬───┘
   fatal, │   │ died          │ died
 or five  │   ▼               ▼
  crashes │  ┌────────────┐ ready again ──► ready
          │  │ restarting │◄── backoff 0.5 s doubling to 30 s
          ▼  └────────────┘
       failed                  stop from anywhere ──► stopped
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import structlog

import appliance
from appliance.base.background import Background
from appliance.base.clock import Clock
from appliance.base.errors import EngineUnavailable, ModelLoading
from appliance.base.settings import ENVIRONMENT_PREFIX
from appliance.serving.engine_client import EngineClient
from appliance.serving.engine_log import LINE_BYTES_MAX, forward_log
from appliance.serving.engine_stats import EngineStats
from appliance.serving.event_queue import EventQueue
from engine.protocol import EngineFrame, EngineInfo, EngineStatus, GenerationRequest

BACKOFF_FIRST_S = 0.5
BACKOFF_MAX_S = 30.0
STEADY_S = 60.0  # ready for this long, an engine starts again with the first backoff
CRASHES_BEFORE_READY_MAX = 5
EXIT_GRACE_S = 5.0
SILENCE_MAX_S = 120.0  # an engine sends a frame per step, and twice a second when idle; the longest step takes far less
LOADING_STALL_MAX_S = 600.0  # without progress; one part of a large model from a slow disk, or compiling, takes minutes
SILENCE_POLL_S = 1.0
RETRY_AFTER_LOADING_S = 2.0

log = structlog.get_logger()


class Supervisor:
    """One engine process and its successors. `state` is loading, ready, restarting, failed or stopped."""

    def __init__(
        self,
        *,
        name: str,
        command: Callable[[int], Sequence[str]],
        clock: Clock,
        on_frame: Callable[[EngineFrame], None] = lambda _frame: None,
        on_restart: Callable[[], None] = lambda: None,
        switched_off: Sequence[str] = (),
    ) -> None:
        """`switched_off`: which of `settings.ENGINE_SWITCHES` are."""
        self.name = name
        self.state = "stopped"
        self.error: str | None = None
        self.pid: int | None = None
        self.started_at: datetime | None = None
        self.restarts = 0
        self.stats = EngineStats()
        self.last_token_monotonic_s: float | None = None
        self.ready_monotonic_s: float | None = None
        self._last_frame_monotonic_s = 0.0
        self._progress_monotonic_s = 0.0
        self._loaded: float | None = None
        self._starts_monotonic_s = 0.0  # when the last process was started, or the next one will be
        self._start_s: float | None = None  # how long the last start took that succeeded
        self._backoff_s = BACKOFF_FIRST_S
        self._command = command
        self._clock = clock
        self._on_frame = on_frame
        self._on_restart = on_restart
        self._switched_off = switched_off
        self._client: EngineClient | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._keeping = Background(f"engine supervisor {name}", self._keep_running)
        self._changed = asyncio.Event()

    @property
    def info(self) -> EngineInfo | None:
        """Return the facts of the loaded model, or None before it is ready."""
        return self._client.info if self._client is not None else None

    @property
    def status(self) -> EngineStatus | None:
        """Return the last status frame of the running process."""
        return self._client.status if self._client is not None else None

    @property
    def load_fraction(self) -> float | None:
        """Return how much of the model is loaded, 0 to 1, while it is being loaded."""
        return self._client.load_fraction if self._client is not None and self.state != "ready" else None

    def start(self) -> None:
        """Start the engine in the background; `state` tells how far it is."""
        self._set_state("loading")
        self._keeping.start()

    async def stop(self) -> None:
        """End the engine in order, then by force after EXIT_GRACE_S."""
        self._set_state("stopped")
        if self._client is not None:
            self._client.shut_down()
        if self._process is not None:
            await _end(self._process, grace_s=EXIT_GRACE_S)
        await self._keeping.stop()

    def check_ready(self) -> None:
        """Raise ModelLoading or EngineUnavailable unless a request can be submitted now."""
        if self.state == "ready":
            return
        if self.state == "loading":
            raise ModelLoading(f"model {self.name} is being loaded", retry_after_s=RETRY_AFTER_LOADING_S)
        reason = f": {self.error}" if self.error else ""
        retry_after_s = self._ready_in_s(self._starts_monotonic_s) if self.state == "restarting" else BACKOFF_MAX_S
        raise EngineUnavailable(f"the engine of {self.name} is {self.state}{reason}", retry_after_s=retry_after_s)

    def _restart_eta_s(self) -> float | None:
        """Return when the successor of a process that has just ended is probably ready; None when there will be none."""
        if self.state == "stopped":
            return None
        return self._ready_in_s(self._clock.monotonic_s() + self._pause_s())

    def _ready_in_s(self, starts_monotonic_s: float) -> float:
        """Return when an engine that starts then is probably ready: its last start tells how long one takes."""
        if self._start_s is None:
            return RETRY_AFTER_LOADING_S
        return max(starts_monotonic_s + self._start_s - self._clock.monotonic_s(), RETRY_AFTER_LOADING_S)

    def _pause_s(self) -> float:
        """Return how long after the end of this process the next one starts."""
        was_steady = self._clock.monotonic_s() - self._starts_monotonic_s >= STEADY_S
        return BACKOFF_FIRST_S if was_steady else self._backoff_s

    def submit(self, request: GenerationRequest) -> EventQueue:
        """Hand `request` to the engine. Raises like `check_ready`."""
        self.check_ready()
        assert self._client is not None
        return self._client.submit(request)

    def abort(self, request_id: str) -> None:
        """Ask the engine to end a request; unknown ids are ignored."""
        if self._client is not None:
            self._client.abort(request_id)

    def abort_answer(self, request_id: str, index: int) -> None:
        """Ask the engine to end one answer of a request; unknown ones are ignored."""
        if self._client is not None:
            self._client.abort_answer(request_id, index)

    async def wait_for_state(self, *states: str) -> None:
        """Return as soon as the state is one of `states`."""
        while self.state not in states:
            await self._changed.wait()

    def _set_state(self, state: str) -> None:
        self.state = state
        self._changed.set()
        self._changed = asyncio.Event()

    async def _keep_running(self) -> None:
        crashes_before_ready = 0
        while True:
            was_ready, fatal = await self._run_process()
            if self.state == "stopped":
                return
            crashes_before_ready = 0 if was_ready else crashes_before_ready + 1
            if (fatal is not None and not was_ready) or crashes_before_ready >= CRASHES_BEFORE_READY_MAX:
                self._set_state("failed")
                log.error("engine failed", role="engine", model=self.name, reason=self.error)
                return
            pause_s = self._pause_s()
            log.warning("engine ended; restarting", role="engine", model=self.name, reason=self.error, wait_s=pause_s)
            self._starts_monotonic_s = self._clock.monotonic_s() + pause_s
            self._set_state("restarting")
            await asyncio.sleep(pause_s)
            self._backoff_s = min(BACKOFF_MAX_S, pause_s * 2)
            self.restarts += 1
            self._on_restart()

    async def _run_process(self) -> tuple[bool, str | None]:
        """Run one engine process to its end; return whether it was ever ready, and its last words."""
        ours, theirs = socket.socketpair()
        self._starts_monotonic_s = self._clock.monotonic_s()
        try:
            process = await self._spawn(theirs)
        except BaseException:
            ours.close()  # a process that has been started already sees the end of its socket and exits
            raise
        finally:
            theirs.close()
        discarded = self.stats.reconciliation.note_discarded
        client = EngineClient(ours, on_frame=self._receive, on_discarded=discarded, restart_eta_s=self._restart_eta_s)
        self._process, self._client = process, client
        self._progress_monotonic_s, self._loaded = self._clock.monotonic_s(), None
        self.pid, self.started_at = process.pid, self._clock.now()
        assert process.stdout is not None
        logging_task = asyncio.create_task(forward_log(process.stdout, model=self.name, pid=process.pid))
        watchdog = asyncio.create_task(self._kill_when_silent(process))
        try:
            await client.run()
            exit_status = await _end(process, grace_s=EXIT_GRACE_S)
        finally:
            watchdog.cancel()
            if process.returncode is None:
                process.kill()
            await logging_task
            self.pid = None
        self.error = client.fatal or f"the process ended with {_exit_name(exit_status)}"
        return client.info is not None, client.fatal

    async def _kill_when_silent(self, process: asyncio.subprocess.Process) -> None:
        """Kill an engine that hangs, or its requests would wait for ever.

        A ready one hangs when it says nothing for SILENCE_MAX_S, a loading one when it gets no further for LOADING_STALL_MAX_S.
        Silence counts when it is seen twice: after a pause of the gateway itself the frames of that time are read first.
        """
        was_silent = False
        while True:
            await asyncio.sleep(SILENCE_POLL_S)
            is_ready, is_loading = self.state == "ready", self.state in ("loading", "restarting")
            silent_s = self._clock.monotonic_s() - (self._last_frame_monotonic_s if is_ready else self._progress_monotonic_s)
            is_silent = (is_ready and silent_s > SILENCE_MAX_S) or (is_loading and silent_s > LOADING_STALL_MAX_S)
            if is_silent and was_silent:
                log.error("engine hangs; killing it", role="engine", model=self.name, silent_s=round(silent_s))
                process.kill()
                return
            was_silent = is_silent

    async def _spawn(self, theirs: socket.socket) -> asyncio.subprocess.Process:
        """Start the process in a session of its own, so that Ctrl-C in a terminal reaches the gateway alone."""
        return await asyncio.create_subprocess_exec(
            *self._command(theirs.fileno()),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            pass_fds=[theirs.fileno()],
            env=engine_environment(self._switched_off),
            limit=LINE_BYTES_MAX,
            start_new_session=True,
        )

    def _receive(self, frame: EngineFrame) -> None:
        now_s = self._clock.monotonic_s()
        self._last_frame_monotonic_s = now_s
        if frame.load_fraction is not None and frame.load_fraction != self._loaded:
            self._loaded, self._progress_monotonic_s = frame.load_fraction, now_s
        if frame.ready is not None:
            self.stats.reconciliation.note_process_ready()
        self.stats.note_tokens(frame)
        if frame.status is not None:
            self.stats.note_status(frame.status, now_s)
        if frame.decoded or any(event.token_ids for event in frame.events):
            self.last_token_monotonic_s = now_s
        if frame.ready is not None and self.state in ("loading", "restarting"):
            self.error = None
            self.ready_monotonic_s, self._start_s = now_s, now_s - self._starts_monotonic_s
            self._set_state("ready")
            log.info("engine ready", role="engine", model=self.name, device=frame.ready.device, load_s=frame.ready.load_s)
        self._on_frame(frame)


def engine_environment(switched_off: Iterable[str] = ()) -> dict[str, str]:
    """Return the environment of a process of the engine: ours with the folder of our packages on the path, and without our
    settings, because an engine gets what it needs as arguments and secrets are not among it. The switches that are off are
    said here, as kernels look for them where they know no arguments."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(ENVIRONMENT_PREFIX)}
    inherited |= {f"{ENVIRONMENT_PREFIX}{switch.upper()}": "0" for switch in switched_off}
    root = str(Path(appliance.__file__).resolve().parent.parent)
    path = inherited.get("PYTHONPATH")
    return {**inherited, "PYTHONPATH": f"{root}{os.pathsep}{path}" if path else root}


def _exit_name(exit_status: int) -> str:
    return f"signal {-exit_status}" if exit_status < 0 else f"exit status {exit_status}"


async def _end(process: asyncio.subprocess.Process, *, grace_s: float) -> int:
    """Wait for `process` to exit by itself, kill it after `grace_s`, and return its exit status."""
    try:
        async with asyncio.timeout(grace_s):
            return await process.wait()
    except TimeoutError:
        with suppress(ProcessLookupError):
            process.kill()
        return await process.wait()
