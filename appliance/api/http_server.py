"""Runs the application as a service: a lock on the data folder, a listening socket, signals and a graceful shutdown.
first SIGINT or SIGTERM ─► new requests get 503 `draining`, running ones finish within `drain_timeout_s` ─► stop
second one              ─► stop at once; requests still running are ended and settled
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import ipaddress
import json
import os
import signal
import socket
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog
import uvicorn
from litestar.types import ASGIApp

from appliance.api.http_connection import LimitedConnection, raise_open_files_limit
from appliance.base.data_folder import CONTROL_FILE, LOCK_FILE
from appliance.base.setting_values import Network
from appliance.base.settings import Settings, local_url
from appliance.serving.generations import Generations
from appliance.tenancy.access import WHOLE_APPLIANCE

BACKLOG = 2048
CLOSE_TIMEOUT_S = 2
IPV4_MAPPED_BITS = 96  # length of the prefix of IPv4-mapped IPv6 addresses
KEEP_ALIVE_S = 75  # longer than clients keep idle connections: else we might close one just as a client sends on it

log = structlog.get_logger()


class CannotStart(Exception):
    """Something on this machine prevents the start. The message says what it is and how to fix it."""


class HttpServer:
    """uvicorn on a socket that is already bound. It drains before it closes."""

    def __init__(self, app: ASGIApp, listener: socket.socket, trusted_proxies: Sequence[Network] = ()) -> None:
        self._server = _Server(server_config(app, trusted_proxies))
        self._listener = listener

    async def run(self, generations: Generations, *, drain_timeout_s: float) -> None:
        """Serve until the first signal, drain, and return."""
        raise_open_files_limit()
        serving = asyncio.create_task(self._server.serve(sockets=[self._listener]), name="http server")
        signals = _handle_signals()
        first_signal = asyncio.ensure_future(signals.first.wait())
        await asyncio.wait({serving, first_signal}, return_when=asyncio.FIRST_COMPLETED)
        first_signal.cancel()
        if not serving.done():
            await _drain(generations, signals, drain_timeout_s)
        self._server.should_exit = True
        self._server.force_exit = signals.second.is_set()
        await serving

    def stop(self) -> None:
        """Stop without a signal and without draining, for a server that has nothing left to serve."""
        self._server.should_exit = True


async def _drain(generations: Generations, signals: _StopSignals, timeout_s: float) -> None:
    log.info("draining", requests=len(generations.live(access=WHOLE_APPLIANCE)), timeout_s=timeout_s)
    draining = asyncio.ensure_future(generations.drain(timeout_s))
    second_signal = asyncio.ensure_future(signals.second.wait())
    await asyncio.wait({draining, second_signal}, return_when=asyncio.FIRST_COMPLETED)
    for task in (draining, second_signal):
        task.cancel()
    generations.end_all()


@dataclass(slots=True)
class _StopSignals:
    first: asyncio.Event
    second: asyncio.Event

    def on_signal(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


def _handle_signals() -> _StopSignals:
    signals = _StopSignals(asyncio.Event(), asyncio.Event())
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, signals.on_signal)
    return signals


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers: draining comes before closing."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture nothing."""
        yield


def server_config(app: ASGIApp, trusted_proxies: Sequence[Network]) -> uvicorn.Config:
    """Return uvicorn's configuration for `app`. Only `trusted_proxies` may set the client address and scheme of a request.

    X-Forwarded-For is read from the right, where each proxy adds its peer, up to the first address that is not a trusted proxy.
    """
    return uvicorn.Config(
        app,
        loop="none",
        http=LimitedConnection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=bool(trusted_proxies),
        forwarded_allow_ips=[notation for network in trusted_proxies for notation in _notations(network)],
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=CLOSE_TIMEOUT_S,
    )


def _notations(network: Network) -> list[str]:
    """Return `network` in each notation that sockets use: IPv6 sockets report IPv4 peers as IPv4-mapped addresses."""
    if isinstance(network, ipaddress.IPv6Network):
        return [str(network)]
    return [str(network), f"::ffff:{network.network_address}/{IPV4_MAPPED_BITS + network.prefixlen}"]


@contextlib.contextmanager
def data_dir_lock(data_dir: Path) -> Iterator[None]:
    """Hold the lock of the data folder. It is released however this process ends. Raises CannotStart."""
    with open(data_dir / LOCK_FILE, "a", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise CannotStart(
                f"another Gatehouse already runs with the data folder {data_dir}; stop it or choose another --data-dir"
            ) from error
        yield


@contextlib.contextmanager
def listening_socket(settings: Settings) -> Iterator[socket.socket]:
    """Listen on the configured host and port, before anything else starts. Raises CannotStart."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise CannotStart(f"--host {settings.host} is not an address of this machine: {error.strerror}") from error
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            raise CannotStart(_bind_failure(settings, error)) from error
        listener.listen(BACKLOG)
        listener.setblocking(False)
        yield listener


def _bind_failure(settings: Settings, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {settings.port} on {settings.host} is in use; choose another with --port"
    if error.errno == errno.EACCES:
        return f"port {settings.port} needs more rights than this user has; choose one above 1023 with --port"
    return f"cannot listen on {settings.host} port {settings.port}: {error.strerror}; choose others with --host and --port"


@contextlib.contextmanager
def control_file(data_dir: Path, host: str, port: int, token: str) -> Iterator[None]:
    """Write the URL and the token that local commands need to a file, which is removed at a graceful shutdown."""
    path = data_dir / CONTROL_FILE
    content = {"url": local_url(host, port), "pid": os.getpid(), "token": token}
    descriptor, temporary = tempfile.mkstemp(dir=data_dir, prefix=CONTROL_FILE)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(content, file)
    os.replace(temporary, path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
