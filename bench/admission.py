"""The cost of admission: the same request through the whole HTTP application with and without key, limits and pending event.

One gateway process serves both kinds: a request with the bench's key is admitted like any other; one with PLAIN as its key gets
a principal made beforehand, a reservation that reserves nothing and a ledger that writes nothing. The engine is a stand-in in
its own process that answers after a fixed mean time, the clients are in a third process; all share the cores.

    latency     CLIENTS requests are always open. Blocks of BLOCK_S seconds with and without admission run in pairs of random
                order, so that other work on the machine affects both. The figures are the time from sending a request to its
                response headers, sent once the pending event is durable, and to its end, which waits for the settlement.
    sustained   the engine answers at once, and clients send the next request at once: admissions per second, and answers per
                second of the same gateway without admission.

Pairs of blocks and of rounds are repeated until enough of them were undisturbed (`bench.host_speed`), or TRIES_MAX times as
many as requested. SQLite with synchronous=FULL, on the disk of --folder. The row contains every counted sample.

    python -m bench.admission            prints one row and adds it to bench/results/
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil
import uvloop

from appliance.base.interpreter import prepare_to_serve
from bench.gateway_streams import ADMIN_TOKEN, MODEL, cpu_s, started_gateway
from bench.host_speed import HostSpeed, host_speed
from bench.rows import TREE, argument_parser, row_header, save_row
from tests.support.raw_http import RawHttpClient
from tests.support.served_model import make_hollow_model

PLAIN = "gh_plainplain_without_admission"
CLIENTS = 64
BLOCK_S = 1.0
SETTLE_S = 0.4  # start of each block, not counted: requests of the previous block end then
ANSWER_S = 0.25
TRIES_MAX = 3
GOALS = {"added_ms_p50": 2.0, "added_ms_p99": 5.0, "admissions_per_s": 1000}
BODY = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "the quick brown fox jumps over the lazy dog"}],
    "max_tokens": 4,
    "stream": True,
    "ignore_eos": True,
}
LIMITS = {"tokens_per_minute": 10**9, "requests_per_minute": 10**7, "concurrent_requests": 10**4, "tokens_per_day": 10**12}
Rates = dict[str, list[float]]
Host = dict[str, Any]
KINDS = ("with", "without")
T = TypeVar("T")


@dataclass(slots=True)
class Samples:
    """Milliseconds to the response headers and to the end of each response, in order of completion."""

    head_ms: list[float] = field(default_factory=list)
    end_ms: list[float] = field(default_factory=list)


def make_clients(port: int, key: str) -> list[RawHttpClient]:
    return [RawHttpClient(port, key) for _ in range(CLIENTS)]


async def send_request(client: RawHttpClient, body: bytes) -> tuple[float, float, float]:
    """Send one request; return the times when it was sent, when its headers arrived and when its response ended."""
    sent_s = time.perf_counter()
    head = await client.send("POST", "/v1/chat/completions", body)
    head_s = time.perf_counter()
    if head.status != 200:
        raise RuntimeError(f"{head.status}: {await client.content(head)!r}")
    last = b""
    async for data in client.events():
        last = data
    if last != b"[DONE]":
        raise RuntimeError(f"the stream ended with {last!r}")
    return sent_s, head_s, time.perf_counter()


async def run_block(
    clients: Sequence[RawHttpClient], seconds: float, *, pause_s: float, rng: random.Random
) -> tuple[Samples, float]:
    """Keep every client busy for `seconds`; return the samples after SETTLE_S and their answers per second."""
    began_s = time.perf_counter()
    counted_from_s, end_s = began_s + SETTLE_S, began_s + seconds
    samples, body = Samples(), json.dumps(BODY).encode()
    count = 0

    async def run_client(client: RawHttpClient) -> None:
        nonlocal count
        await asyncio.sleep(rng.uniform(0.0, pause_s))
        while (now_s := time.perf_counter()) < end_s:
            sent_s, head_s, done_s = await send_request(client, body)
            if now_s >= counted_from_s:
                samples.head_ms.append((head_s - sent_s) * 1000)
                samples.end_ms.append((done_s - sent_s) * 1000)
            count += counted_from_s <= done_s < end_s

    await asyncio.gather(*(run_client(client) for client in clients))
    return samples, count / (end_s - counted_from_s)


async def measure_latency(
    port: int, key: str, speed_of_host: HostSpeed, blocks: int, rng: random.Random
) -> tuple[dict[str, list[Samples]], Host]:
    """Return the samples of each block of both kinds, and the host's speed meanwhile."""
    clients = {"with": make_clients(port, key), "without": make_clients(port, PLAIN)}

    async def run_pair() -> dict[str, Samples]:
        results: dict[str, Samples] = {}
        for kind in rng.sample(KINDS, len(KINDS)):
            results[kind], _ = await run_block(clients[kind], BLOCK_S + SETTLE_S, pause_s=ANSWER_S, rng=rng)
        return results

    await run_pair()  # the warm-up
    pairs, host = await until_undisturbed(speed_of_host, blocks, run_pair)
    for client in (*clients["with"], *clients["without"]):
        client.abort()
    return {kind: [results[kind] for results in pairs] for kind in KINDS}, host


async def measure_rate(
    port: int, key: str, pid: int, speed_of_host: HostSpeed, rounds: int, seconds: float
) -> tuple[Rates, Rates, Host]:
    """Return answers per second with and without admission, in alternating rounds, the gateway's CPU time of each, and the
    host's speed meanwhile."""

    process = psutil.Process(pid)

    async def run_pair() -> dict[str, tuple[float, float]]:
        results: dict[str, tuple[float, float]] = {}
        for kind, secret in (("with", key), ("without", PLAIN)):
            clients = make_clients(port, secret)
            before_s = cpu_s(process)
            samples, rate = await run_block(clients, seconds + SETTLE_S, pause_s=0.0, rng=random.Random(0))
            answers = len(samples.end_ms) * (seconds + SETTLE_S) / seconds
            results[kind] = round(rate, 1), round(1000 * (cpu_s(process) - before_s) / answers, 3)
            for client in clients:
                client.abort()
        return results

    pairs, host = await until_undisturbed(speed_of_host, rounds, run_pair)
    rates: Rates = {kind: [results[kind][0] for results in pairs] for kind in KINDS}
    return rates, {kind: [results[kind][1] for results in pairs] for kind in KINDS}, host


async def until_undisturbed(speed_of_host: HostSpeed, count: int, measure: Callable[[], Awaitable[T]]) -> tuple[list[T], Host]:
    """Return the results of `count` undisturbed calls of `measure`, or fewer if that takes too many tries. Exits with a message
    if there is none."""
    measured: list[tuple[float, T]] = []
    before = await _speed(speed_of_host)
    while len(speed_of_host.undisturbed(measured)) < count and len(measured) < TRIES_MAX * count:
        result = await measure()
        after = await _speed(speed_of_host)
        measured.append((min(before, after), result))
        before = after
    undisturbed = speed_of_host.undisturbed(measured)
    if measured and not undisturbed:
        sys.exit(f"all {len(measured)} pairs were disturbed by other programs: measure again on a quieter machine")
    return undisturbed, {
        "disturbed_pairs": len(measured) - len(undisturbed),
        "pieces_per_s": [round(speed) for speed, _ in measured],
    }


async def _speed(host: HostSpeed) -> float:
    await asyncio.sleep(SETTLE_S)  # lets the last requests finish
    return host.measure()


def make_row(latency: dict[str, list[Samples]], rates: Rates, cpu_ms: Rates) -> dict[str, Any]:
    """Return the figures, the goals, and every sample in hundredths of a millisecond."""
    heads = {kind: [ms for samples in blocks for ms in samples.head_ms] for kind, blocks in latency.items()}
    ends = {kind: [ms for samples in blocks for ms in samples.end_ms] for kind, blocks in latency.items()}
    pairs = zip(latency["with"], latency["without"], strict=True)
    added = [statistics.median(one.head_ms) - statistics.median(other.head_ms) for one, other in pairs]
    return {
        **row_header("admission"),
        "clients": CLIENTS,
        "answer_s": ANSWER_S,
        "requests": {kind: len(samples) for kind, samples in heads.items()},
        "head_ms": {kind: _quantiles(samples) for kind, samples in heads.items()},
        "end_ms": {kind: _quantiles(samples) for kind, samples in ends.items()},
        "added_ms_p50": _added_ms(heads, 0.5),
        "added_ms_p99": _added_ms(heads, 0.99),
        "added_to_end_ms_p50": _added_ms(ends, 0.5),
        "added_to_end_ms_p99": _added_ms(ends, 0.99),
        "added_ms_p50_of_each_pair_of_blocks": [round(ms, 2) for ms in added],
        "answers_per_s": rates,
        "gateway_cpu_ms_per_answer": cpu_ms,
        "admissions_per_s": statistics.median(rates["with"]) if rates["with"] else None,
        "goals": GOALS,
        "samples_head_centims": {kind: [round(ms * 100) for ms in samples] for kind, samples in heads.items()},
    }


def _quantiles(samples: Sequence[float]) -> dict[str, float]:
    return {f"p{share * 100:g}": round(_quantile(samples, share), 2) for share in (0.5, 0.9, 0.99, 1.0)}


def _quantile(samples: Sequence[float], share: float) -> float:
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _added_ms(samples: dict[str, list[float]], share: float) -> float:
    return round(_quantile(samples["with"], share) - _quantile(samples["without"], share), 2)


@contextmanager
def gateway(folder: Path, answer_s: float, profile: Path | None = None) -> Iterator[tuple[int, str, int]]:
    """Yield port, key and process id of a gateway over an engine that answers after `answer_s`."""
    model = folder / MODEL
    if not model.exists():
        make_hollow_model(model)
    arguments = [str(folder), str(answer_s), *([str(profile)] if profile else [])]
    command = [sys.executable, "-m", "bench.admission_gateway", *arguments]
    log = folder / "gateway.log"
    try:
        with started_gateway(command, TREE, log) as (port, pid):
            yield port, uvloop.run(prepare(port)), pid
            if "[error" in log.read_text():
                raise RuntimeError("the gateway logged errors, so the measurement is invalid")
    except Exception:
        sys.stderr.write(log.read_text()[-3000:])
        raise


async def prepare(port: int) -> str:
    """Wait until the engine is ready, create a price and a tenant with every limit, and return the tenant's key."""
    admin = RawHttpClient(port, ADMIN_TOKEN)
    while (head := await admin.send("GET", "/health/ready")).status != 200:
        await admin.content(head)
        await asyncio.sleep(0.05)
    await admin.content(head)
    price = {"model": MODEL, "prompt": 10, "cached_prompt": 5, "completion": 20, "batch_percent": 50}
    await _create(admin, "prices", price)
    tenant = await _create(
        admin, "tenants", {"name": f"bench {time.time_ns()}", "limits": {**LIMITS, "monthly_budget": 10**12}}
    )
    key = await _create(admin, f"tenants/{tenant['id']}/keys", {"name": "bench", "limits": LIMITS})
    admin.abort()
    return str(key["key"])


async def _create(admin: RawHttpClient, path: str, body: dict[str, Any]) -> Any:
    head = await admin.send("POST", f"/admin/v1/{path}", body)
    answer = json.loads(await admin.content(head))
    if head.status not in (200, 201):
        raise RuntimeError(f"{path}: {answer}")
    return answer


def main() -> None:
    """Measure, print the row without its samples, and append it to the results."""
    parser = argument_parser(__doc__)
    parser.add_argument("--blocks", type=int, default=20, help="pairs of blocks with and without admission")
    parser.add_argument("--rounds", type=int, default=3, help="pairs of rounds at full speed")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of a round at full speed")
    parser.add_argument("--folder", type=Path, help="directory of the database")
    parser.add_argument("--profile", type=Path, help="write cProfile's figures of the gateway at full speed to this file")
    options = parser.parse_args()
    prepare_to_serve()  # so that no garbage collection is measured as the gateway's
    with tempfile.TemporaryDirectory(dir=options.folder) as name, host_speed() as speed_of_host:
        folder = Path(name)
        latency: dict[str, list[Samples]] = {kind: [] for kind in KINDS}
        rates: Rates = {kind: [] for kind in KINDS}
        cpu_ms: Rates = {kind: [] for kind in KINDS}
        host: dict[str, Host] = {}
        if options.blocks:
            with gateway(folder, ANSWER_S) as (port, key, _):
                latency, host["blocks"] = uvloop.run(
                    measure_latency(port, key, speed_of_host, options.blocks, random.Random(1))
                )
        if options.rounds:
            with gateway(folder, 0.0, options.profile) as (port, key, pid):
                rates, cpu_ms, host["rounds"] = uvloop.run(
                    measure_rate(port, key, pid, speed_of_host, options.rounds, options.seconds)
                )
    if not options.blocks:
        print(rates, cpu_ms)
        return
    row = {**make_row(latency, rates, cpu_ms), "host": host}
    save_row(row, options)
    print(json.dumps({name: value for name, value in row.items() if not name.startswith("samples")}, indent=1))


if __name__ == "__main__":
    main()
