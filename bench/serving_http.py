"""uvicorn against granian with our own stream frames: how many frames per second one gateway process can send.

Both serve the same Litestar application, which sends prepared chat chunks through `Stream` without waiting between them: the
figure is an upper bound for the HTTP side alone. The client is another process on the same machine, with raw sockets.

    python -m bench.serving_http            prints a row per number of streams and adds it to bench/results/
"""

from __future__ import annotations

import asyncio
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version

from litestar import Litestar, get
from litestar.response import Stream

from appliance.api.chat_responses import ChunkFramer
from appliance.api.sse import EventStream
from appliance.serving.chunks import Chunk
from bench.ports import free_port
from bench.rows import TREE, argument_parser, publish, row_header

FRAMES_PER_STREAM = 400
ROUNDS = 7
STREAM_COUNTS = (1, 32, 100)
SERVERS = {
    "uvicorn": ["-m", "uvicorn", "--http", "httptools", "--loop", "uvloop", "--no-access-log", "--log-level", "warning"],
    "granian": ["-m", "granian", "--interface", "asgi", "--loop", "uvloop", "--no-access-log", "--log-level", "warning"],
}


async def _frames() -> AsyncIterator[bytes]:
    framer = ChunkFramer(
        request_id="req_01m7ygaeef350weynbn0hmzy5x",
        created=1,
        model="gatehouse-demo",
        prompt_tokens=20,
        num_answers=1,
        logprobs=False,
        include_usage=False,
        continuous_usage=False,
    )
    for number in range(FRAMES_PER_STREAM):
        yield framer.text(Chunk(text=" token", completion_tokens=number, cached_tokens=0))


@get("/stream")
async def stream() -> Stream:
    """Send FRAMES_PER_STREAM chat chunks."""
    return EventStream(_frames())


app = Litestar(route_handlers=[stream], openapi_config=None, logging_config=None)


async def read_stream(port: int) -> int:
    """Return the number of frames that one stream delivered."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /stream HTTP/1.1\r\nhost: bench\r\nconnection: close\r\n\r\n")
    count = 0
    while part := await reader.read(1 << 18):
        count += part.count(b"data: {")
    writer.close()
    return count


async def frames_per_second(port: int, streams: int) -> float:
    """Return frames per second with `streams` at once."""
    began_s = time.perf_counter()
    counts = await asyncio.gather(*(read_stream(port) for _ in range(streams)))
    assert counts == [FRAMES_PER_STREAM] * streams, counts
    return sum(counts) / (time.perf_counter() - began_s)


def compare(streams: int, ports: Mapping[str, int]) -> dict[str, object]:
    """Measure the servers back to back, ROUNDS times: other work on the machine slows both, so the ratio stays valid."""
    rounds = [{name: asyncio.run(frames_per_second(port, streams)) for name, port in ports.items()} for _ in range(ROUNDS)]
    ratios = [one["granian"] / one["uvicorn"] for one in rounds]
    return {
        **row_header("serving_http"),
        "versions": {name: version(name) for name in ("litestar", "uvloop", *ports)},
        "streams": streams,
        "frames_per_stream": FRAMES_PER_STREAM,
        "frames_per_second_median": {name: round(statistics.median(one[name] for one in rounds)) for name in ports},
        "granian_to_uvicorn_median": round(statistics.median(ratios), 2),
        "granian_to_uvicorn": [round(ratio, 2) for ratio in ratios],
    }


@contextmanager
def running(name: str) -> Iterator[int]:
    """Start a server and yield its port once it answers."""
    port = free_port()
    command = [sys.executable, *SERVERS[name], "--host", "127.0.0.1", "--port", str(port), "bench.serving_http:app"]
    server = subprocess.Popen(command, cwd=TREE)
    try:
        _wait_for(port)
        asyncio.run(frames_per_second(port, 1))
        yield port
    finally:
        server.terminate()
        server.wait(20)


def _wait_for(port: int) -> None:
    deadline_s = time.monotonic() + 30
    while time.monotonic() < deadline_s:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise TimeoutError("the server did not start")


def main() -> None:
    """Measure, print the rows and save them."""
    options = argument_parser(__doc__).parse_args()
    with running("uvicorn") as uvicorn, running("granian") as granian:
        for streams in STREAM_COUNTS:
            publish(compare(streams, {"uvicorn": uvicorn, "granian": granian}), options)


if __name__ == "__main__":
    main()
