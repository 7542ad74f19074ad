"""A process that has imported everything and forks an appliance for each life: a start costs a fraction of an import.

It has one thread and no event loop, so that forking is safe. An order comes as JSON with one descriptor, to which the child
says where it listens and how it ended; its end of file is the child's death. Also the caller's side of that: `Nursery`.
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
from tests.crash.points import Notes, Plan, Reaper, arm, watch_lag

ORDER_BYTES_MAX = 65_536
REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Birth:
    """How a life begins. `settings` are those of the appliance; files of witnesses go into `truths`."""

    settings: dict[str, Any]
    plan: Plan | None
    truths: str
    notes: str
    log: str
    step_s: float
    checkpoint_interval_s: float
    recovered_per_transaction: int


class Gateway:
    """An appliance that was born. `told` is what it said when it listened; `exit_status` is set when it ended by itself."""

    def __init__(self, pid: int, reader: asyncio.StreamReader) -> None:
        self.pid = pid
        self.told: dict[str, Any] | None = None
        self.exit_status: int | None = None
        self._reader = reader
        self._listened = asyncio.Event()
        self.dead = asyncio.create_task(self._hear())

    async def listening(self) -> bool:
        """Return whether it came to listen, as soon as that is known."""
        listened = asyncio.create_task(self._listened.wait())
        await asyncio.wait({self.dead, listened}, return_when=asyncio.FIRST_COMPLETED)
        listened.cancel()
        return self.told is not None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, unless it is dead already."""
        if not self.dead.done():
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    async def _hear(self) -> None:
        """Read until the descriptor is closed, which the end of the process does."""
        while line := await self._reader.readline():
            said = json.loads(line)
            if "exit" in said:
                self.exit_status = said["exit"]
            else:
                self.told = said
                self._listened.set()


class Nursery:
    """The process from the outside; a context manager."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket = ours
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.nursery", str(theirs.fileno())],
            cwd=REPOSITORY,
            env={name: value for name, value in os.environ.items() if not name.startswith("GATEHOUSE_")},
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        self._socket.close()
        self._process.wait(10)

    async def bear(self, birth: Birth) -> Gateway:
        """Return a new appliance, which has not begun to listen."""
        end, their_end = os.pipe()
        socket.send_fds(self._socket, [json.dumps(asdict(birth)).encode()], [their_end])
        os.close(their_end)
        answer = await asyncio.to_thread(self._socket.recv, ORDER_BYTES_MAX)
        assert answer, "the nursery has ended"
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, os.fdopen(end, "rb", buffering=0))
        return Gateway(int(answer), reader)


def _attend(orders: socket.socket) -> None:
    """Fork an appliance for each order until nobody orders any more."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries children; death is told by the descriptor
    gc.collect()
    gc.freeze()
    while True:
        message, descriptors, _, _ = socket.recv_fds(orders, ORDER_BYTES_MAX, 1)
        if not message:
            return
        pid = os.fork()
        if pid == 0:
            orders.close()
            _live(json.loads(message), descriptors[0])
        os.close(descriptors[0])
        orders.send(str(pid).encode())


def _live(order: dict[str, Any], descriptor: int) -> None:
    """Be an appliance until the end of the process."""
    status = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.set_inheritable(descriptor, False)
        plan = Plan(**order["plan"]) if order["plan"] else None
        birth = Birth(**{**order, "plan": plan})
        log = os.open(birth.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        _serve(birth, descriptor)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os.write(descriptor, json.dumps({"exit": status}).encode() + b"\n")
        os._exit(status)


def _serve(birth: Birth, descriptor: int) -> None:
    notes = Notes(Path(birth.notes))
    arm(Reaper(birth.plan, notes))
    generations.CHECKPOINT_INTERVAL_S = birth.checkpoint_interval_s
    defaults = Ledger.__init__.__kwdefaults__
    assert defaults is not None
    defaults["checkpoint_interval_s"] = birth.checkpoint_interval_s / 2
    recovery.EVENTS_PER_TRANSACTION = birth.recovered_per_transaction

    def engine_command(folder: ModelFolder, settings: Settings, fd: int) -> list[str]:
        options = ["--fd", str(fd), "--step-s", str(birth.step_s), "--truths", birth.truths]
        return [sys.executable, "-m", "tests.crash.witness_engine", *options]

    model_builder.engine_command = engine_command

    def tell(started: Started) -> None:
        first = started.first_start
        told = {"url": f"http://{started.host}:{started.port}", "port": started.port, "first": first is not None}
        os.write(descriptor, json.dumps(told).encode() + b"\n")
        watch_lag(notes)

    configure_logging("warning", json=False)
    asyncio.run(serve(load_settings(options=birth.settings, environ={}), on_listening=tell))


if __name__ == "__main__":
    _attend(socket.socket(fileno=int(sys.argv[1])))
