"""Resource growth under load: memory, open files and threads of gateway and engine, over hours of mixed traffic.

Clients of four tenants send every kind of request that takes a different path through the code: whole and streamed answers,
several answers, new schemas and regular expressions each time, log-probabilities, prompts with and without a common prefix,
requests that are refused, clients that disconnect, administrators that end a request. Meanwhile a user has the console open,
keys are created, rotated and revoked, and metrics are scraped. At the end the ledger is compared with the usage reported to
clients.

Memory means anonymous memory (`Anonymous` of smaps_rollup; Linux only): pages of libraries switch between private and shared
as other processes come and go. Its growth is the slope over the second half, per thousand requests: by then fixed-size caches
are full.

    python -m bench.soak --minutes 60            prints one row and adds it to bench/results/
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from bench.appliance_streams import MODEL, appliance, ledger_mismatches, make_key
from bench.rows import argument_parser, publish, row_header

TENANTS, CLIENTS = 4, 8
SAMPLE_S = 10.0
MIB = 2**20
WORDS = (
    "list", "loop", "class", "string", "module", "value", "return", "import", "yield", "async", "tuple", "lambda", "decorator",
    "file", "error", "test",
)  # fmt: skip
EMAIL, PASSWORD = "soak@example.com", "what a soak signs in with"
PRICE = {"prompt": 1_000_000, "cached_prompt": 100_000, "completion": 4_000_000}
CSRF = re.compile(r'name="csrf_token" value="([^"]+)"')
PAGES = ("/", "/requests", "/usage", "/tenants", "/keys", "/audit", "/invoices", "/prices", "/alerts", "/settings")
LISTS = ("/tenants", "/requests?limit=50", "/ledger?limit=100", "/audit?limit=50", "/system")


@dataclass(slots=True)
class ClientResults:
    """Results seen by clients: answers by kind of request and status, and the reported tokens of those read to the end."""

    answers: Counter[str] = field(default_factory=Counter)
    completion_tokens: dict[str, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Sample:
    """Resources of one process at one time. `at_s`: seconds since the start; `anonymous`: bytes."""

    at_s: float
    num_answers: int
    anonymous: int
    num_fds: int
    num_threads: int


class Client:
    """One client program with a key: sends one random kind of request after another."""

    def __init__(self, url: str, key: str, admin: httpx.AsyncClient, results: ClientResults, rng: random.Random) -> None:
        self._http = httpx.AsyncClient(base_url=f"{url}/v1", headers={"authorization": f"Bearer {key}"}, timeout=120)
        self._admin = admin
        self._results = results
        self._rng = rng
        self._common_prefix = self._words(120)

    async def run(self) -> None:
        """Send requests until cancelled."""
        senders: dict[str, Callable[[], Awaitable[int]]] = {
            "whole": lambda: self._whole({}),
            "streamed": lambda: self._streamed({}),
            "long": lambda: self._streamed({"max_tokens": self._rng.randint(200, 400), "ignore_eos": True}),
            "leaves": lambda: self._streamed(
                {"max_tokens": 300, "ignore_eos": True}, disconnect_after=self._rng.randint(0, 40)
            ),
            "is ended": lambda: self._streamed({"max_tokens": 300, "ignore_eos": True}, abort_after=self._rng.randint(1, 20)),
            "several": lambda: self._whole({"n": 3, "temperature": 1.0}),
            "scored": lambda: self._streamed({"logprobs": True, "top_logprobs": 5}),
            "schema": lambda: self._whole({"response_format": self._schema()}),
            "expression": lambda: self._whole({"guided_regex": f"({self._words(3)}|[a-z]{{{self._rng.randint(2, 30)}}})"}),
            "sampled": lambda: self._streamed(self._sampling()),
            "common beginning": lambda: self._whole({"messages": self._messages(self._common_prefix)}),
            "refused": lambda: self._whole(self._rng.choice(REFUSED)),
        }
        try:
            while True:
                kind = self._rng.choice(list(senders))
                try:
                    status = await senders[kind]()
                except httpx.TransportError as error:
                    self._results.faults.append(f"{kind}: {error!r}")
                    continue
                self._results.answers[f"{kind} {status}"] += 1
        finally:
            await self._http.aclose()

    def _words(self, count: int) -> str:
        return " ".join(self._rng.choices(WORDS, k=count))

    def _messages(self, prefix: str = "") -> list[dict[str, str]]:
        return [{"role": "user", "content": f"{prefix} {self._words(self._rng.randint(1, 40))}"}]

    def _body(self, fields: dict[str, Any]) -> dict[str, Any]:
        return {"model": MODEL, "messages": self._messages(), "max_tokens": self._rng.randint(1, 40), **fields}

    def _schema(self) -> dict[str, Any]:
        names = self._rng.sample(WORDS, 3)
        properties = {
            f"{name}{self._rng.randrange(10**6)}": {"type": self._rng.choice(("integer", "boolean"))} for name in names
        }
        schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
        return {"type": "json_schema", "json_schema": {"name": "soak", "schema": schema, "strict": True}}

    def _sampling(self) -> dict[str, Any]:
        return {
            "temperature": 0.9, "top_p": 0.9, "top_k": 40, "seed": self._rng.randrange(2**31), "frequency_penalty": 0.5,
            "stop": [self._rng.choice(WORDS)], "logit_bias": {str(self._rng.randrange(1000)): 5},
        }  # fmt: skip

    async def _whole(self, fields: dict[str, Any]) -> int:
        answer = await self._http.post("/chat/completions", json=self._body(fields))
        if answer.status_code == 200:
            usage = answer.json()["usage"]
            self._results.completion_tokens[answer.headers["x-request-id"]] = usage["completion_tokens"]
        elif answer.status_code >= 500:
            self._results.faults.append(answer.text[:300])
        return answer.status_code

    async def _streamed(self, fields: dict[str, Any], *, disconnect_after: int = -1, abort_after: int = -1) -> int:
        body = self._body({**fields, "stream": True, "stream_options": {"include_usage": True}})
        async with self._http.stream("POST", "/chat/completions", json=body) as answer:
            if answer.status_code != 200:
                await answer.aread()
                self._results.faults.extend([answer.text[:300]] if answer.status_code >= 500 else [])
                return answer.status_code
            request_id, num_frames = answer.headers["x-request-id"], 0
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                if num_frames == disconnect_after:
                    break
                if num_frames == abort_after:
                    await self._admin.delete(f"/requests/{request_id}")
                num_frames += 1
                if (usage := json.loads(line[6:]).get("usage")) is not None:
                    self._results.completion_tokens[request_id] = usage["completion_tokens"]
        return 200


REFUSED: tuple[dict[str, Any], ...] = (
    {"model": "nobody's"},
    {"temperature": 9},
    {"no_such_field": 1},
    {"messages": []},
    {"max_tokens": 10**6},
    {"guided_regex": "(unclosed"},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#/nowhere"}}}},
)


async def watch_console(url: str) -> None:
    """Act as a signed-in user: keep the live stream open, read pages, and sign in again from time to time."""
    while True:
        async with httpx.AsyncClient(base_url=url, timeout=60, follow_redirects=True) as browser:
            form = CSRF.findall((await browser.get("/login")).text)
            fields = {"email": EMAIL, "password": PASSWORD, **({"csrf_token": form[0]} if form else {})}
            (await browser.post("/login", data=fields, headers={"origin": url})).raise_for_status()
            for _ in range(20):
                async with browser.stream("GET", "/console/events") as live:
                    lines = live.aiter_lines()
                    for page in PAGES:
                        (await browser.get(page)).raise_for_status()
                        await anext(lines)
                        await asyncio.sleep(0.5)


async def administer(admin: httpx.AsyncClient, url: str, rng: random.Random) -> None:
    """Create, rotate and revoke keys; read lists; scrape metrics."""
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        while True:
            tenant = (await admin.post("/tenants", json={"name": f"guest {rng.getrandbits(48):x}"})).raise_for_status().json()
            key = (await admin.post(f"/tenants/{tenant['id']}/keys", json={"name": "guest"})).raise_for_status().json()
            await client.get("/v1/models", headers={"authorization": f"Bearer {key['key']}"})
            (await admin.post(f"/keys/{key['id']}/rotate")).raise_for_status()
            (await admin.delete(f"/tenants/{tenant['id']}")).raise_for_status()
            for path in LISTS:
                (await admin.get(path)).raise_for_status()
            for path in ("/metrics", "/health/ready"):
                (await client.get(path)).raise_for_status()
            await asyncio.sleep(1)


async def sample(processes: dict[str, psutil.Process], results: ClientResults, samples: dict[str, list[Sample]]) -> None:
    """Record every process every SAMPLE_S seconds."""
    began_s = time.monotonic()
    while True:
        await asyncio.sleep(SAMPLE_S)
        for role, process in processes.items():
            anonymous = anonymous_bytes(process.pid)
            now = time.monotonic() - began_s, results.answers.total()
            samples[role].append(Sample(*now, anonymous, process.num_fds(), process.num_threads()))
        latest = {role: f"{series[-1].anonymous / MIB:.0f} MiB, {series[-1].num_fds} files" for role, series in samples.items()}
        print(f"{time.monotonic() - began_s:6.0f} s {results.answers.total():8} answers  {latest}", file=sys.stderr, flush=True)


def anonymous_bytes(pid: int) -> int:
    """Bytes of anonymous memory, which no file backs."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text("ascii").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))


def growth(series: list[Sample]) -> float:
    """Growth of memory in bytes per thousand answers: the slope of a least-squares line through the second half."""
    half = series[len(series) // 2 :]
    mean_x = sum(each.num_answers for each in half) / len(half)
    mean_y = sum(each.anonymous for each in half) / len(half)
    spread = sum((each.num_answers - mean_x) ** 2 for each in half)
    return 1000 * sum((each.num_answers - mean_x) * (each.anonymous - mean_y) for each in half) / spread if spread else 0.0


async def soak(url: str, token: str, minutes: float) -> dict[str, Any]:
    """Generate the traffic; return the row's figures."""
    rng, results = random.Random(0), ClientResults()
    async with httpx.AsyncClient(base_url=f"{url}/admin/v1", headers={"authorization": f"Bearer {token}"}, timeout=60) as admin:
        (await admin.post("/prices", json={"model": MODEL, **PRICE})).raise_for_status()
        keys = [make_key(url, token) for _ in range(TENANTS)]
        system = (await admin.get("/system")).raise_for_status().json()
        processes = {each["role"]: psutil.Process(each["pid"]) for each in system["processes"]}
        samples: dict[str, list[Sample]] = {role: [] for role in processes}
        work = [Client(url, keys[n % TENANTS], admin, results, random.Random(rng.random())).run() for n in range(CLIENTS)]
        others = [watch_console(url), administer(admin, url, rng), sample(processes, results, samples)]
        tasks = [asyncio.ensure_future(each) for each in [*work, *others]]
        done, _ = await asyncio.wait(tasks, timeout=60 * minutes, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()  # raises the error that ended it
        await asyncio.sleep(5)
    wrong = ledger_mismatches(url, token, results.completion_tokens)
    return {
        "answers": results.answers.total(),
        "answers_by_manner": dict(sorted(results.answers.items())),
        "faults": results.faults[:20],
        "ledger_wrong": wrong[:20],
        "held_against_ledger": len(results.completion_tokens),
        "grown": {role: growth_figures(series) for role, series in samples.items()},
    }


def growth_figures(series: list[Sample]) -> dict[str, Any]:
    """Memory at the first sample, in the middle and at the last; open files and threads as [first, maximum, last]."""
    files, threads = [each.num_fds for each in series], [each.num_threads for each in series]
    return {
        "anonymous_mib_first": round(series[0].anonymous / MIB, 1),
        "anonymous_mib_half": round(series[len(series) // 2].anonymous / MIB, 1),
        "anonymous_mib_last": round(series[-1].anonymous / MIB, 1),
        "kib_per_1000_answers": round(growth(series) / 1024, 1),
        "files": [files[0], max(files), files[-1]],
        "threads": [threads[0], max(threads), threads[-1]],
        "samples": [[round(each.at_s), each.num_answers, round(each.anonymous / MIB, 1)] for each in series],
    }


def main() -> None:
    """Measure, print the row, and add it to the results."""
    parser = argument_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="minutes of traffic")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data_dir = Path(folder)
        with appliance(data_dir, admin_email=EMAIL, admin_password=PASSWORD) as (url, token, _):
            figures = asyncio.run(soak(url, token, options.minutes))
        files = {path.name: path.stat().st_size for path in data_dir.iterdir() if path.is_file()}
        check = [sys.executable, "-m", "appliance.cli.main", "db", "check", "--data-dir", folder]
        is_sound = subprocess.run(check, check=False, stdout=sys.stderr).returncode == 0
    row = {
        **row_header("soak"),
        "minutes": options.minutes,
        "clients": CLIENTS,
        **figures,
        "files": files,
        "db_check": is_sound,
    }
    publish(row, options)


if __name__ == "__main__":
    main()
