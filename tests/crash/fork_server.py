"""A process that has imported everything and forks an appliance for each life, which is much faster than a new interpreter.

It has one thread and no event loop, so that forking is safe. It receives StartOptions as JSON with a file descriptor, to
which the child writes its address and its exit status; end of file means that the child has exited. `ForkServer` is the client.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from appliance.app import Started, serve
from appliance.base.logging import configure_logging
from appliance.base.settings import Settings, load_settings
from appliance.metering.ledger import recovery
from appliance.metering.ledger.writer import Ledger
from appliance.serving import generations, model_builder
from appliance.serving.model_folder import ModelFolder
from tests.crash.points import Killer, Notes, Plan, arm, watch_lag

MESSAGE_BYTES_MAX = 65_536
REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOptions:
    """Options of one life. `settings` are those of the appliance; engines write their records into the folder `records`."""

    settings: dict[str, Any]
    plan: Plan | None
    records: str
    notes: str
    log: str
    step_s: float
    checkpoint_interval_s: float
    recovered_per_transaction: int


class Gateway:
    """A forked appliance. `announcement` is what it wrote when it listened; `exit_status` is set if it exited by itself."""

    def __init__(self, pid: int, reader: asyncio.StreamReader) -> None:
        self.pid = pid
        self.announcement: dict[str, Any] | None = None
        self.exit_status: int | None = None
        self._reader = reader
        self._listened = asyncio.Event()
        self.exited = asyncio.create_task(self._read_messages())

    async def listening(self) -> bool:
        """Wait until it listens or exits; return whether it listens."""
        listened = asyncio.create_task(self._listened.wait())
        await asyncio.wait({self.exited, listened}, return_when=asyncio.FIRST_COMPLETED)
        listened.cancel()
        return self.announcement is not None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, unless it has exited."""
        if not self.exited.done():
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    async def _read_messages(self) -> None:
        """Read until the descriptor is closed, which happens when the process exits."""
        while line := await self._reader.readline():
            message = json.loads(line)
            if "exit" in message:
                self.exit_status = message["exit"]
            else:
                self.announcement = message
                self._listened.set()


class ForkServer:
    """Client of the forking process; a context manager."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket = ours
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.fork_server", str(theirs.fileno())],
            cwd=REPOSITORY,
            env={name: value for name, value in os.environ.items() if not name.startswith("GATEHOUSE_")},
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        self._socket.close()
        self._process.wait(10)

    async def start(self, options: StartOptions) -> Gateway:
        """Fork a new appliance and return it before it listens."""
        end, their_end = os.pipe()
        socket.send_fds(self._socket, [json.dumps(asdict(options)).encode()], [their_end])
        os.close(their_end)
        answer = await asyncio.to_thread(self._socket.recv, MESSAGE_BYTES_MAX)
        assert answer, "the forking process has exited"
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, os.fdopen(end, "rb", buffering=0))
        return Gateway(int(answer), reader)


def _serve_forks(server: socket.socket) -> None:
    """Fork an appliance for each message until the socket is closed."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps children; their exit is seen by the descriptor
    gc.collect()
    gc.freeze()
    while True:
        message, descriptors, _, _ = socket.recv_fds(server, MESSAGE_BYTES_MAX, 1)
        if not message:
            return
        pid = os.fork()
        if pid == 0:
            server.close()
            _live(json.loads(message), descriptors[0])
        os.close(descriptors[0])
        server.send(str(pid).encode())


def _live(message: dict[str, Any], descriptor: int) -> None:
    """Run an appliance until the process exits."""
    status = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.set_inheritable(descriptor, False)
        plan = Plan(**message["plan"]) if message["plan"] else None
        options = StartOptions(**{**message, "plan": plan})
        log = os.open(options.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        _serve(options, descriptor)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os.write(descriptor, json.dumps({"exit": status}).encode() + b"\n")
        os._exit(status)


def _serve(options: StartOptions, descriptor: int) -> None:
    notes = Notes(Path(options.notes))
    arm(Killer(options.plan, notes))
    generations.CHECKPOINT_INTERVAL_S = options.checkpoint_interval_s
    defaults = Ledger.__init__.__kwdefaults__
    assert defaults is not None
    defaults["checkpoint_interval_s"] = options.checkpoint_interval_s / 2
    recovery.EVENTS_PER_TRANSACTION = options.recovered_per_transaction

    def engine_command(folder: ModelFolder, settings: Settings, fd: int, *, on_gpu: bool = False) -> list[str]:
        engine_options = ["--fd", str(fd), "--step-s", str(options.step_s), "--records", options.records]
        return [sys.executable, "-m", "tests.support.recording_engine", *engine_options]

    model_builder.engine_command = engine_command

    def announce(started: Started) -> None:
        first = started.first_start
        announcement = {"url": f"http://{started.host}:{started.port}", "port": started.port, "first": first is not None}
        os.write(descriptor, json.dumps(announcement).encode() + b"\n")
        watch_lag(notes)

    configure_logging("warning", json=False)
    asyncio.run(serve(load_settings(options=options.settings, environ={}), on_listening=announce))


if __name__ == "__main__":
    _serve_forks(socket.socket(fileno=int(sys.argv[1])))
