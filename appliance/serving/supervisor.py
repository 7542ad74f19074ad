"""Keeps one engine process running: starts, watches and restarts it. Knows nothing of what requests contain.

       ┌─────────┐ ready  ┌───────┐
start ►│ loading ├───────►│ ready │
       └──┬───┬──┘        └───┬───┘
     said │   │ died          │ died
      why │   ▼               ▼
          │  ┌────────────┐ ready again ──► ready
          │  │ restarting │◄── backoff 0.5 s doubling to 30 s
          ▼  └─────┬──────┘
       failed ◄────┘ five attempts in a row, or two with the same bug: the next one every FAILED_PAUSE_S, until one is ready
                               stop from anywhere ──► stopped

A reason that the engine gives before it has ever served is final, unless the engine says that it may pass: model or settings
must be changed. Later the same words may have a cause that passes, such as a GPU that is lost or that another program uses.
An error in Python that ends two starts alike, before the engine has ever served, would most likely end the next ones too.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
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
from appliance.serving.event_route import EventReceiver
from engine.protocol import EngineFrame, EngineInfo, EngineStatus, GenerationRequest

BACKOFF_FIRST_S = 0.5
BACKOFF_MAX_S = 30.0
STEADY_S = 60.0  # an engine that crashes later than this after its start is restarted with the first backoff
CRASHES_BEFORE_READY_MAX = 5
FAILED_PAUSE_S = 300.0  # rarely enough that loading a model in vain does not disturb the others
EXIT_GRACE_S = 5.0
KILLED_GRACE_S = 10.0  # a killed process has ended within milliseconds, unless it waits in the kernel
SILENCE_MAX_S = 120.0  # an engine sends a frame per step, and two per second when idle; the longest step takes far less
LOADING_STALL_MAX_S = 600.0  # without progress; reading one part of a large model from a slow disk, or compiling, takes minutes
SILENCE_POLL_S = 1.0
RETRY_AFTER_LOADING_S = 2.0

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class _End:
    """How a process ended: whether it was ever ready, whether every start would end for its reason, and whether the reason is
    an error in Python that may be one for every start."""

    was_ready: bool
    is_final: bool
    is_bug: bool


class Supervisor:
    """One engine process and its restarts. `state` is loading, ready, restarting, failed or stopped."""

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
        """`command` returns the engine's command line for the descriptor of its socket. `switched_off`: those of
        `settings.ENGINE_SWITCHES` that are off."""
        self.name = name
        self.state = "stopped"
        self.error: str | None = None
        self.pid: int | None = None
        self.started_at: datetime | None = None
        self.restarts = 0
        self.has_served_on_gpu = False
        self.stats = EngineStats()
        self.last_token_monotonic_s: float | None = None
        self.ready_monotonic_s: float | None = None
        self._last_frame_monotonic_s = 0.0
        self._progress_monotonic_s = 0.0
        self._load_fraction: float | None = None
        self._starts_monotonic_s = 0.0  # when the last process was started, or the next one will be
        self._start_s: float | None = None  # duration of the last successful start
        self._backoff_s = BACKOFF_FIRST_S
        self._command = command
        self._clock = clock
        self._on_frame = on_frame
        self._on_restart = on_restart
        self._switched_off = switched_off
        self._client: EngineClient | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._supervision = Background(f"engine supervisor {name}", self._keep_running)
        self._state_changed = asyncio.Event()

    @property
    def info(self) -> EngineInfo | None:
        """Return what the engine reports about the loaded model, or None before it is ready."""
        return self._client.info if self._client is not None else None

    @property
    def status(self) -> EngineStatus | None:
        """Return the last status of the running process, or None before the first."""
        return self._client.status if self._client is not None else None

    @property
    def load_fraction(self) -> float | None:
        """Return how much of the model is loaded, 0 to 1, while it is being loaded."""
        return self._client.load_fraction if self._client is not None and self.state != "ready" else None

    def start(self) -> None:
        """Start the engine in the background; `state` shows its progress."""
        self._set_state("loading")
        self._supervision.start()

    async def stop(self) -> None:
        """Ask the engine to exit, and kill it if it has not done so after EXIT_GRACE_S. One that cannot be ended is left."""
        self._set_state("stopped")
        if self._client is not None:
            self._client.shut_down()
        if self._process is not None:
            await _wait_or_kill(self._process, grace_s=EXIT_GRACE_S)
        await self._supervision.stop()

    def check_ready(self) -> None:
        """Raise ModelLoading or EngineUnavailable unless a request can be submitted now."""
        if self.state == "ready":
            return
        if self.state == "loading":
            raise ModelLoading(f"model {self.name} is being loaded", retry_after_s=RETRY_AFTER_LOADING_S)
        reason = f": {self.error}" if self.error else ""
        ready_in_s = self._ready_in_s(self._starts_monotonic_s)
        retry_after_s = ready_in_s if self.state == "restarting" else max(ready_in_s, BACKOFF_MAX_S)
        raise EngineUnavailable(f"the engine of {self.name} is {self.state}{reason}", retry_after_s=retry_after_s)

    def _restart_eta_s(self) -> float | None:
        """Return the estimated seconds until the successor of a process that has just ended is ready; None if there is none."""
        if self.state == "stopped":
            return None
        return self._ready_in_s(self._clock.monotonic_s() + self._pause_s())

    def _ready_in_s(self, starts_monotonic_s: float) -> float:
        """Return the estimated seconds until an engine started at that time is ready, from the duration of its last start."""
        return max(starts_monotonic_s + (self._start_s or 0.0) - self._clock.monotonic_s(), RETRY_AFTER_LOADING_S)

    def _pause_s(self) -> float:
        """Return the backoff between the end of this process and the start of the next one."""
        was_steady = self._clock.monotonic_s() - self._starts_monotonic_s >= STEADY_S
        return BACKOFF_FIRST_S if was_steady else self._backoff_s

    def submit(self, request: GenerationRequest, receiver: EventReceiver) -> None:
        """Submit `request` to the engine; its events go to `receiver`. Raises as `check_ready`."""
        self.check_ready()
        assert self._client is not None
        self._client.submit(request, receiver)

    def abort(self, request_id: str) -> None:
        """Ask the engine to end a request; unknown ids are ignored."""
        if self._client is not None:
            self._client.abort(request_id)

    def abort_answer(self, request_id: str, index: int) -> None:
        """Ask the engine to end one answer of a request; unknown ids are ignored."""
        if self._client is not None:
            self._client.abort_answer(request_id, index)

    async def wait_for_state(self, *states: str) -> None:
        """Return as soon as the state is one of `states`."""
        while self.state not in states:
            await self._state_changed.wait()

    def _set_state(self, state: str) -> None:
        self.state = state
        self._state_changed.set()
        self._state_changed = asyncio.Event()

    async def _keep_running(self) -> None:
        has_served, crashes_before_ready, bug = False, 0, None
        while True:
            end = await self._run_process()
            if self.state == "stopped":
                return
            has_served |= end.was_ready
            crashes_before_ready = 0 if end.was_ready else crashes_before_ready + 1
            if end.is_final and not has_served:
                self._set_state("failed")
                log.error("engine failed", role="engine", model=self.name, reason=self.error)
                return
            is_same_bug = end.is_bug and self.error == bug and not has_served
            bug = self.error if end.is_bug else None
            await self._pause(has_failed=is_same_bug or crashes_before_ready >= CRASHES_BEFORE_READY_MAX)
            self.restarts += 1
            self._on_restart()

    async def _pause(self, *, has_failed: bool) -> None:
        """Log why the process ended, and wait until the next one is to be started."""
        pause_s = FAILED_PAUSE_S if has_failed else self._pause_s()
        if has_failed:
            log.error("engine failed; trying again later", role="engine", model=self.name, reason=self.error, wait_s=pause_s)
        else:
            log.warning("engine ended; restarting", role="engine", model=self.name, reason=self.error, wait_s=pause_s)
        self._starts_monotonic_s = self._clock.monotonic_s() + pause_s
        self._set_state("failed" if has_failed else "restarting")
        await asyncio.sleep(pause_s)
        self._backoff_s = min(BACKOFF_MAX_S, pause_s * 2)

    async def _run_process(self) -> _End:
        """Run one engine process to its end."""
        self._starts_monotonic_s = self._clock.monotonic_s()
        try:
            process, ours = await self._start_process()
        except OSError as error:  # no process, file or memory is left for it, which may pass
            self.error = f"the process could not be started: {error.strerror}"
            return _End(was_ready=False, is_final=False, is_bug=False)
        client = EngineClient(
            ours,
            on_frame=self._on_engine_frame,
            on_discarded=self.stats.reconciliation.note_discarded,
            restart_eta_s=self._restart_eta_s,
        )
        self._process, self._client = process, client
        self._progress_monotonic_s, self._load_fraction = self._clock.monotonic_s(), None
        self.pid, self.started_at = process.pid, self._clock.now()
        assert process.stdout is not None
        logging_task = asyncio.create_task(forward_log(process.stdout, model=self.name, pid=process.pid))
        watchdog = asyncio.create_task(self._kill_when_silent(process, client))
        try:
            await self._follow(client)
            exit_status = await self._wait_for_exit(process)
        finally:
            watchdog.cancel()
            if process.returncode is None:
                process.kill()
            await _end_log(process, logging_task)
            self.pid = None
        self.error = client.fatal or f"the process ended with {_describe_exit(exit_status)}"
        return _End(
            was_ready=client.info is not None,
            is_final=client.fatal is not None and not client.may_pass,
            is_bug=client.is_bug,
        )

    async def _wait_for_exit(self, process: asyncio.subprocess.Process) -> int:
        """Return the exit status of a process that has closed its socket. One that cannot be ended is waited for: as long as it
        holds the GPU and its memory, a new one could not start."""
        exit_status = await _wait_or_kill(process, grace_s=EXIT_GRACE_S)
        if exit_status is not None:
            return exit_status
        if self.state != "stopped":
            why = "it waits in the kernel, for a GPU driver or a disk that does not answer: restart the machine"
            self.error = f"the process {process.pid} cannot be ended; {why}"
            self._set_state("failed")
            log.error("engine cannot be ended", role="engine", model=self.name, reason=self.error)
        return await process.wait()

    async def _follow(self, client: EngineClient) -> None:
        """Process what the engine sends until its socket is closed."""
        try:
            await client.run()
        except Exception:  # owned task: a bug here must not leave the model without an engine
            log.exception("what an engine sent could not be processed", role="engine", model=self.name)

    async def _kill_when_silent(self, process: asyncio.subprocess.Process, client: EngineClient) -> None:
        """Kill an engine that hangs, because its requests would otherwise wait for ever.

        A ready engine hangs if it sends nothing for SILENCE_MAX_S, a loading one if it makes no progress for
        LOADING_STALL_MAX_S. Silence must be seen in two polls: after a pause of the gateway, pending frames are read first.
        """
        was_silent = False
        while True:
            await asyncio.sleep(SILENCE_POLL_S)
            is_ready, is_loading = self.state == "ready", self.state in ("loading", "restarting", "failed")
            silent_s = self._clock.monotonic_s() - (self._last_frame_monotonic_s if is_ready else self._progress_monotonic_s)
            is_silent = (is_ready and silent_s > SILENCE_MAX_S) or (is_loading and silent_s > LOADING_STALL_MAX_S)
            if is_silent and was_silent:
                log.error("engine hangs; killing it", role="engine", model=self.name, silent_s=round(silent_s))
                process.kill()
                await asyncio.sleep(EXIT_GRACE_S)  # its end closes the socket and cancels this
                client.hang_up()
                return
            was_silent = is_silent

    async def _start_process(self) -> tuple[asyncio.subprocess.Process, socket.socket]:
        """Start a process and return it with our end of its socket. Raises OSError."""
        ours, theirs = socket.socketpair()
        try:
            return await self._spawn(theirs), ours
        except BaseException:
            ours.close()  # if the process was started already, it sees its socket close and exits
            raise
        finally:
            theirs.close()

    async def _spawn(self, theirs: socket.socket) -> asyncio.subprocess.Process:
        """Start the process in its own session, so that Ctrl-C in a terminal reaches only the gateway."""
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

    def _on_engine_frame(self, frame: EngineFrame) -> None:
        now_s = self._clock.monotonic_s()
        self._last_frame_monotonic_s = now_s
        if frame.load_fraction is not None and frame.load_fraction != self._load_fraction:
            self._load_fraction, self._progress_monotonic_s = frame.load_fraction, now_s
        if frame.ready is not None:
            self.stats.reconciliation.note_process_ready()
        self.stats.note_tokens(frame)
        if frame.status is not None:
            self.stats.note_status(frame.status, now_s)
        if frame.decoded or any(event.token_ids for event in frame.events):
            self.last_token_monotonic_s = now_s
        if frame.ready is not None and self.state != "stopped":
            self.error = None
            self.has_served_on_gpu |= frame.ready.device == "cuda"
            self.ready_monotonic_s, self._start_s = now_s, now_s - self._starts_monotonic_s
            self._set_state("ready")
            log.info("engine ready", role="engine", model=self.name, device=frame.ready.device, load_s=frame.ready.load_s)
        self._on_frame(frame)


def engine_environment(switched_off: Iterable[str] = ()) -> dict[str, str]:
    """Return the environment of an engine process: the gateway's, with the folder of our packages on PYTHONPATH and without
    Gatehouse settings, which may be secret; an engine gets its options as arguments. Only switches that are off are set,
    because kernels read them from the environment."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(ENVIRONMENT_PREFIX)}
    inherited |= {f"{ENVIRONMENT_PREFIX}{switch.upper()}": "0" for switch in switched_off}
    root = str(Path(appliance.__file__).resolve().parent.parent)
    path = inherited.get("PYTHONPATH")
    return {**inherited, "PYTHONPATH": f"{root}{os.pathsep}{path}" if path else root}


def _describe_exit(exit_status: int) -> str:
    return f"signal {-exit_status}" if exit_status < 0 else f"exit status {exit_status}"


async def _end_log(process: asyncio.subprocess.Process, logging_task: asyncio.Task[None]) -> None:
    """Log the rest of the output of a process that has ended, but not that of a child that outlives it."""
    try:
        await asyncio.wait({logging_task}, timeout=EXIT_GRACE_S)
    finally:
        process._transport.close()  # type: ignore[attr-defined]  # no public way to close the pipe, which ends the task


async def _wait_or_kill(process: asyncio.subprocess.Process, *, grace_s: float) -> int | None:
    """Wait for `process` to exit, kill it after `grace_s`, and return its exit status; None if it does not end even then."""
    for timeout_s in (grace_s, KILLED_GRACE_S):
        try:
            async with asyncio.timeout(timeout_s):
                return await process.wait()
        except TimeoutError:
            with suppress(ProcessLookupError):
                process.kill()
    return None
