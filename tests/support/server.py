"""A real appliance in a process of its own: started, spoken to over HTTP, stopped or killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import httpx

REPOSITORY = Path(__file__).resolve().parents[2]
ADMIN_TOKEN = "gha_token-of-the-tests"
READY_DEADLINE_S = 300.0
STOP_DEADLINE_S = 120.0
POLL_S = 0.05


@dataclass(slots=True, kw_only=True)
class Server:
    """A running appliance. `api_key` is the first key of the tenant `demo`, known after the first start only."""

    url: str
    process: subprocess.Popen[str]
    data_dir: Path
    api_key: str | None
    tenant_id: str | None
    log_path: Path
    _log: IO[str] = field(repr=False)

    def admin(self, method: str, path: str, **options: Any) -> Any:
        """Call the administrators' API and return the decoded answer; an error fails the test."""
        headers = {"authorization": f"Bearer {ADMIN_TOKEN}"}
        answer = httpx.request(method, f"{self.url}/admin/v1{path}", headers=headers, timeout=30, **options)
        assert answer.is_success, answer.text
        return answer.json()

    def everything(self, path: str) -> list[dict[str, Any]]:
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
        """Make a tenant with these fields and one key with those; return (tenant id, secret)."""
        fields = {"name": f"tenant {time.monotonic_ns()}", **(tenant or {})}
        tenant_id = self.admin("POST", "/tenants", json=fields)["id"]
        made = self.admin("POST", f"/tenants/{tenant_id}/keys", json={"name": "key", **key})
        return tenant_id, made["key"]

    def ready(self) -> httpx.Response:
        """Return the answer of the readiness probe."""
        return httpx.get(f"{self.url}/health/ready", timeout=10)

    def wait_until_ready(self) -> None:
        """Return when a request would be answered; fail with the log when it would not be in time."""
        wait_until(lambda: self._alive() and self.ready().status_code == 200, READY_DEADLINE_S, self.log)

    def engine_pid(self) -> int:
        """Return the process id of the engine as soon as the system page, which is a second old at most, has it."""
        found: list[int] = []

        def look() -> bool:
            processes = self.admin("GET", "/system")["processes"]
            found[:] = [process["pid"] for process in processes if process["role"] == "engine" and process["pid"] is not None]
            return bool(found)

        wait_until(look, READY_DEADLINE_S, self.log)
        return found[0]

    def log(self) -> str:
        """Return the end of what the appliance has logged."""
        return self.log_path.read_text("utf-8", "replace")[-6000:]

    def stop(self) -> int:
        """End in order and return the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_DEADLINE_S)

    def kill(self) -> None:
        """End as a power cut would."""
        self.process.kill()
        self.process.wait(STOP_DEADLINE_S)

    def close(self) -> None:
        """Make sure that nothing is left."""
        if self.process.poll() is None:
            self.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._log.close()

    def _alive(self) -> bool:
        assert self.process.poll() is None, self.log()
        return True


def start_server(
    model: Path, data_dir: Path, *, fake_engine_step_s: float | None = None, truths: Path | None = None, **options: Any
) -> Server:
    """Start an appliance on a free port and return when it listens. A stand-in engine writes its own counts to `truths`."""
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
    fake = [] if fake_engine_step_s is None else ["--fake-engine-step-s", str(fake_engine_step_s)]
    fake += [] if truths is None else ["--truths", str(truths)]
    log_path = data_dir / "server.log"
    log = log_path.open("a", encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.serve_for_tests", "--options", json.dumps(settings), *fake],
        cwd=REPOSITORY,
        env={name: value for name, value in os.environ.items() if not name.startswith("GATEHOUSE_")},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, log_path.read_text("utf-8")
    told = json.loads(line)
    return Server(
        url=told["url"],
        process=process,
        data_dir=data_dir,
        api_key=told["api_key"],
        tenant_id=told["tenant_id"],
        log_path=log_path,
        _log=log,
    )


@contextmanager
def running_server(model: Path, data_dir: Path, **options: Any) -> Iterator[Server]:
    """Yield an appliance that is ready, and leave nothing of it running."""
    server = start_server(model, data_dir, **options)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.close()


def wait_until(condition: Any, deadline_s: float, explain: Any = str) -> None:
    """Return as soon as `condition()` holds; fail with `explain()` when it does not within `deadline_s`."""
    end_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end_s, f"not within {deadline_s} s: {explain()}"
        time.sleep(POLL_S)
