"""A real appliance in a process of its own: started, used over HTTP, stopped or killed."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import httpx

from tests.support import forked_processes
from tests.support.polling import block_until

ADMIN_TOKEN = "gha_token-of-the-tests"
STOP_DEADLINE_S = 120.0
CHAT_TIMEOUT_S = 120.0


@dataclass(slots=True, kw_only=True)
class Server:
    """A running appliance. `api_key` is the first key of the tenant `demo`, known after the first start only."""

    url: str
    process: BaseProcess
    data_dir: Path
    api_key: str | None
    tenant_id: str | None
    log_path: Path

    def admin(self, method: str, path: str, **options: Any) -> Any:
        """Call the administrators' API and return the decoded answer; an error fails the test."""
        headers = {"authorization": f"Bearer {ADMIN_TOKEN}"}
        answer = httpx.request(method, f"{self.url}/admin/v1{path}", headers=headers, timeout=30, **options)
        assert answer.is_success, answer.text
        return answer.json()

    def list_all(self, path: str) -> list[dict[str, Any]]:
        """Return all rows of a list of the administrators' API."""
        rows: list[dict[str, Any]] = []
        cursor = None
        while True:
            page = self.admin("GET", path, params={"limit": 100, **({"cursor": cursor} if cursor else {})})
            rows += page["data"]
            cursor = page["next_cursor"]
            if not page["has_more"]:
                return rows

    def new_key(self, *, tenant: dict[str, Any] | None = None, **key: Any) -> tuple[str, str]:
        """Create a tenant and one key with these fields; return (tenant id, secret)."""
        fields = {"name": f"tenant {time.monotonic_ns()}", **(tenant or {})}
        tenant_id = self.admin("POST", "/tenants", json=fields)["id"]
        made = self.admin("POST", f"/tenants/{tenant_id}/keys", json={"name": "key", **key})
        return tenant_id, made["key"]

    def chat(self, body: dict[str, Any], *, key: str | None = None) -> httpx.Response:
        """Send a chat request with `key`, by default the first key; return the whole answer."""
        return httpx.post(**self._chat_request(body, key))

    def stream_chat(self, body: dict[str, Any], *, key: str | None = None) -> AbstractContextManager[httpx.Response]:
        """Send a chat request and read its answer as a stream, until the end of the block."""
        return httpx.stream("POST", **self._chat_request({**body, "stream": True}, key))

    def _chat_request(self, body: dict[str, Any], key: str | None) -> dict[str, Any]:
        headers = {"authorization": f"Bearer {key or self.api_key}"}
        return {"url": f"{self.url}/v1/chat/completions", "json": body, "headers": headers, "timeout": CHAT_TIMEOUT_S}

    def ready(self) -> httpx.Response:
        """Return the answer of the readiness probe."""
        return httpx.get(f"{self.url}/health/ready", timeout=10)

    def wait_until_ready(self) -> None:
        """Wait until requests are answered; fail with the log after PROCESS_DEADLINE_S."""
        block_until(lambda: self._alive() and self.ready().status_code == 200, self.log)

    def engine_pid(self) -> int:
        """Return the engine's process id once the system page, which is at most a second old, shows it."""
        found: list[int] = []

        def find_engine() -> bool:
            processes = self.admin("GET", "/system")["processes"]
            found[:] = [process["pid"] for process in processes if process["role"] == "engine" and process["pid"] is not None]
            return bool(found)

        block_until(find_engine, self.log)
        return found[0]

    def log(self) -> str:
        """Return the end of the appliance's log."""
        return self.log_path.read_text("utf-8", "replace")[-6000:]

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        forked_processes.send_signal(self.process, number)

    def wait_for_exit(self) -> int:
        """Wait for the process to end and return its exit status."""
        return forked_processes.wait_for_exit(self.process, STOP_DEADLINE_S)

    def stop(self) -> int:
        """Stop gracefully and return the exit status."""
        self.send_signal(signal.SIGTERM)
        return self.wait_for_exit()

    def kill(self) -> None:
        """Kill it, if it is still running."""
        self.process.kill()
        self.wait_for_exit()

    def _alive(self) -> bool:
        assert self.process.is_alive(), self.log()
        return True


def start_server(
    model: Path, data_dir: Path, *, fake_engine_step_s: float | None = None, engine_records: Path | None = None, **options: Any
) -> Server:
    """Start an appliance on a free port and return once it listens. A fake engine writes its own counts to `engine_records`."""
    data_dir.mkdir(parents=True, exist_ok=True)
    settings = {
        "data_dir": str(data_dir),
        "port": 0,
        "models": [str(model)],
        "device": "cpu",
        "engine_threads": 1,
        "kv_cache_bytes": "16MiB",
        "admin_token": ADMIN_TOKEN,
        "admin_password": "a password of tests",
        **options,
    }
    log_path = data_dir / "server.log"
    ours, theirs = forked_processes.CONTEXT.Pipe(duplex=False)
    with ours:
        with theirs:
            program = ("tests.support.serve_for_tests", "run", theirs, settings, fake_engine_step_s, engine_records)
            process = forked_processes.start(*program, log=log_path)
        try:
            greeting = ours.recv()
        except EOFError:
            raise AssertionError(log_path.read_text("utf-8")) from None
    return Server(**greeting, process=process, data_dir=data_dir, log_path=log_path)


@contextmanager
def running_server(model: Path, data_dir: Path, **options: Any) -> Iterator[Server]:
    """Yield a ready appliance, and kill it afterwards."""
    server = start_server(model, data_dir, **options)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.kill()
