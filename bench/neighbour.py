"""How much one tenant's worst requests slow the others: the whole appliance with the demo model, an attacker and a neighbour.

For each attack: the CPU time that one request takes on the gateway's event-loop thread and on the engine's step thread
(the smallest of the tries, measured without other requests), and a neighbour's longest wait for `/health/live` meanwhile (the
smallest of the tries). Linux only.

    python -m bench.neighbour                    prints one row and adds it to bench/results/
    python -m bench.neighbour --tree DIR         measures the code of another checkout
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from bench.appliance_streams import MODEL, appliance, make_key
from bench.rows import argument_parser, publish, revision, row_header

BODY_BYTES = 10 * 1024 * 1024 - 2_000
ANSWERS, STEPS = 128, 40
QUEUE_CLIENTS = 256
PING_S = 0.002

Attack = Callable[[], None]


class AttackedAppliance:
    """A running appliance, as seen by an attacker with one key and by the operator who measures."""

    def __init__(self, url: str, token: str) -> None:
        self.address = (httpx.URL(url).host, httpx.URL(url).port or 80)
        self.admin = httpx.Client(base_url=f"{url}/admin/v1", headers={"authorization": f"Bearer {token}"}, timeout=60)
        self.key = make_key(url, token)
        self.pids = {each["role"]: each["pid"] for each in self.admin.get("/system").json()["processes"]}

    def cpu_ms(self, role: str) -> float:
        """CPU time of the main thread of the gateway or the engine so far."""
        pid = self.pids[role]
        return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e6

    def post(self, body: bytes) -> None:
        """Send a chat completion and read the whole response, whatever its status."""
        connection = http.client.HTTPConnection(*self.address, timeout=300)
        connection.request("POST", "/v1/chat/completions", body, {"authorization": f"Bearer {self.key}"})
        connection.getresponse().read()
        connection.close()

    def longest_wait_ms(self, attack: Attack) -> float:
        """The longest response time seen by a neighbour who only polls `/health/live`."""
        waits, over = [0.0], threading.Event()

        def poll() -> None:
            connection = http.client.HTTPConnection(*self.address, timeout=300)
            while not over.is_set():
                began_s = time.perf_counter()
                connection.request("GET", "/health/live")
                connection.getresponse().read()
                waits.append(time.perf_counter() - began_s)
                time.sleep(PING_S)

        neighbour = threading.Thread(target=poll)
        neighbour.start()
        time.sleep(0.1)
        attack()
        over.set()
        neighbour.join()
        return 1000 * max(waits)


def _chat(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, **fields}).encode()


def _chat_with(field: str, value: bytes) -> bytes:
    return _chat(**{field: "@"}).replace(b'"@"', value)


def _many_members(count: int) -> bytes:
    return b"{" + b",".join(b'"%x":1' % number for number in range(count)) + b"}"


def _short_words() -> list[str]:
    letters = "abcdefghijklmnopqrstuvwxyz"
    return [a + b for a in letters for b in letters] + ["one two three"]


def bodies() -> dict[str, bytes]:
    """The attacks that consist of one request, by name."""
    nest = b"[" * 90 + b"]" * 90
    many = {"n": ANSWERS, "max_tokens": STEPS, "ignore_eos": True}
    return {
        "small": _chat(),
        "one text": _chat(messages=[{"role": "user", "content": "x, [y] {" * (BODY_BYTES // 8)}]),
        "lists": _chat_with("tools", b"[" + b",".join([nest] * (BODY_BYTES // 181)) + b"]"),
        "members": _chat_with("guided_json", _many_members(BODY_BYTES // 11)),
        "numbers": _chat_with("tools", b"[" + b"1," * (BODY_BYTES // 2) + b"1]"),
        "bad words": _chat(bad_words=[f"{number}é世ß{number}界ñ{number:x}"[:16] for number in range(1000)]),
        f"{ANSWERS} answers": _chat(**many),
        f"{ANSWERS} answers, bad words": _chat(**many, bad_words=_short_words()),
        f"{ANSWERS} answers, log-probabilities": _chat(**many, logprobs=True, top_logprobs=20),
    }


def leave_queue(target: AttackedAppliance) -> float:
    """The longest wait while QUEUE_CLIENTS queued clients disconnect at the same time."""
    target.admin.patch("/tiers/standard", json={"admission_wait_ms": 60_000}).raise_for_status()
    limits = {"limits": {"concurrent_requests": 1}}
    tenant = target.admin.post("/tenants", json={"name": "line", "tier": "standard", **limits}).raise_for_status().json()
    key = target.admin.post(f"/tenants/{tenant['id']}/keys", json={"name": "line"}).raise_for_status().json()["key"]
    body = _chat(max_tokens=900, ignore_eos=True)
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    clients = []
    for _ in range(QUEUE_CLIENTS + 1):
        clients.append(socket.create_connection(target.address))
        clients[-1].sendall(head.encode() + body)
    time.sleep(1.0)

    def leave() -> None:
        for client in reversed(clients):
            client.close()
        time.sleep(3.0)

    return target.longest_wait_ms(leave)


def measure(target: AttackedAppliance, tries: int) -> dict[str, dict[str, float]]:
    """Milliseconds measured for each attack, by name."""
    found = {}
    for name, body in bodies().items():
        costs = []
        for _ in range(tries):
            gateway, engine = target.cpu_ms("gateway"), target.cpu_ms("engine")
            target.post(body)
            costs.append((target.cpu_ms("gateway") - gateway, target.cpu_ms("engine") - engine))
        waits = [target.longest_wait_ms(lambda body=body: target.post(body)) for _ in range(tries)]  # type: ignore[misc]
        found[name] = {
            "gateway_cpu_ms": round(min(cost[0] for cost in costs), 1),
            "engine_cpu_ms": round(min(cost[1] for cost in costs), 1),
            "neighbour_ms": round(min(waits), 1),
        }
        sys.stderr.write(f"{name}: {found[name]}\n")
    found[f"{QUEUE_CLIENTS} leave a line"] = {"neighbour_ms": round(leave_queue(target), 1)}
    return found


def main() -> None:
    """Measure, print the row and save it."""
    parser = argument_parser(__doc__)
    parser.add_argument("--tries", type=int, default=5)
    parser.add_argument("--tree", type=Path, default=None, help="checkout whose appliance is measured")
    options = parser.parse_args()
    row = row_header("neighbour")
    if options.tree is not None:
        row |= revision(options.tree)
        os.environ["PYTHONPATH"] = str(options.tree)
        os.chdir(options.tree)
    with tempfile.TemporaryDirectory() as folder, appliance(Path(folder)) as (url, token, _ready_s):
        row["attacks"] = measure(AttackedAppliance(url, token), options.tries)
    publish(row, options)


if __name__ == "__main__":
    main()
