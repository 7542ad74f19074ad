"""The whole service against vLLM's server: 16 streaming chat clients in this process, over loopback.

Ours is `gatehouse serve` with everything that it does for a request: key, limits, ledger. vLLM's server is paused (SIGSTOP)
while ours answers, because it uses 0.7 cores when idle; ours keeps running, and its idle load counts as a disturbance of vLLM.
Every run has new prompts, the same for both.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import httpx
import psutil
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from bench.appliance_streams import make_key
from bench.gpu.rows import Row, Target
from bench.peers.disturbance import disturbance_between, read_machine
from bench.peers.models import MAX_MODEL_LEN, SHAPES, make_model
from bench.peers.plan import SEATS, VLLM, VLLM_SERVED
from bench.peers.protocol import REPOSITORY
from bench.peers.request_sets import RequestSet, request_set
from bench.peers.rounds import make_row, measure
from bench.peers.workers import PeerFailed, Sample
from bench.ports import free_port
from tests.support.raw_http import ConnectionLost, RawHttpClient

MODEL = "8M"
CLIENTS = 16
WARM_RUNS = 2
READY_TIMEOUT_S = 300.0
END_TIMEOUT_S = 20.0
SPECIAL = ("<unk>", "<s>", "</s>")
TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
NAME = f"{MODEL}, {CLIENTS} streaming clients, vLLM's server"
TARGET = Target(name=NAME, part=MODEL, unit="tokens/s", judged="ratio", pass_at=1.0, stretch_at=1.5)


class Server:
    """A running server and its clients. With `pauses`, all of its processes are paused (SIGSTOP) between runs."""

    def __init__(self, process: psutil.Process, port: int, model: str, key: str, *, pauses: bool = False) -> None:
        self._process, self._port, self._model, self._key = process, port, model, key
        self._pauses = pauses
        self._rng = random.Random(0)

    def run(self, requests: RequestSet) -> tuple[list[list[int]], Sample]:
        """Send requests of these lengths, all at once, with new texts. Returns no tokens: servers answer with text only. Raises
        PeerFailed."""
        texts = ["".join(self._rng.choices(LETTERS, k=2 * len(prompt))) for prompt in requests.prompts]
        self._signal(signal.SIGCONT)
        own_s, used_s, before = time.process_time(), self._cpu_s(), read_machine()
        asyncio.run(self._all(texts, requests.output_lens))
        after, own_s, used_s = read_machine(), time.process_time() - own_s, self._cpu_s() - used_s
        self._signal(signal.SIGSTOP)
        return [], Sample(after.at_s - before.at_s, used_s, disturbance_between(before, after, used_s + own_s))

    async def _all(self, texts: list[str], output_lens: list[int]) -> None:
        await asyncio.gather(*(self._one(text, length) for text, length in zip(texts, output_lens, strict=True)))

    async def _one(self, text: str, length: int) -> None:
        body = {
            "model": self._model, "messages": [{"role": "user", "content": text}], "max_tokens": length, "ignore_eos": True,
            "temperature": 0.0, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        client, usage = RawHttpClient(self._port, self._key), b""
        try:
            head = await client.send("POST", "/v1/chat/completions", body)
            if head.status != 200:
                raise PeerFailed(f"{self._model} answered {head.status}: {(await client.content(head))[:300]!r}")
            async for event in client.events():
                if b'"usage":{' in event or b'"usage": {' in event:
                    usage = event
        except ConnectionLost as error:
            raise PeerFailed(f"{self._model}: the server closed the connection: {error}") from error
        finally:
            client.abort()
        counted = json.loads(usage)["usage"]["completion_tokens"] if usage else None
        if counted != length:
            raise PeerFailed(f"{self._model} reported {counted} tokens instead of {length}")

    def _signal(self, number: signal.Signals) -> None:
        if self._pauses:
            os.killpg(self._process.pid, number)

    def _cpu_s(self) -> float:
        """CPU seconds that the server and its children have used."""
        times = [each.cpu_times() for each in (self._process, *self._process.children(recursive=True))]
        return float(sum(each.user + each.system for each in times))


def row(folder: Path, logs: Path, peers: Path, threads: int, rounds: int, cores_max: float) -> tuple[Row, Target]:
    """Start and warm up both servers, then measure them alternately. If a server fails, the row contains the error."""
    print(f"  {NAME}: {rounds} rounds", file=sys.stderr)
    requests = request_set(CLIENTS, SHAPES[MODEL]["vocab_size"])
    make_model(SHAPES[MODEL], folder)
    write_tokenizer(folder, SHAPES[MODEL]["vocab_size"])
    try:
        with (
            open_log(logs, "ours-served") as ours_log,
            open_log(logs, "vllm-served") as vllm_log,
            tempfile.TemporaryDirectory() as data,
            gatehouse(folder, Path(data), threads, ours_log) as ours,
            vllm(folder, peers, threads, vllm_log) as peer,
        ):
            for _ in range(WARM_RUNS):
                ours.run(requests), peer.run(requests)
            measured = measure(ours, peer, requests, rounds, cores_max)
        return make_row(NAME, "vLLM's server, compiled", requests, measured, rounds), TARGET
    except PeerFailed as error:
        return Row(name=NAME, error=str(error)), TARGET


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a tokenizer in which every id has a text, so that every token can be streamed: bytes, then pairs of bytes."""
    vocabulary = {token: index for index, token in enumerate(SPECIAL)}
    # Letters first, so that the prompts' letters merge in pairs.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=lambda byte: (byte not in LETTERS, byte))
    vocabulary |= {byte: len(SPECIAL) + index for index, byte in enumerate(alphabet)}
    pairs = [(first, second) for first in alphabet for second in alphabet][: vocab_size - len(vocabulary)]
    vocabulary |= {first + second: len(vocabulary) + index for index, (first, second) in enumerate(pairs)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")


@contextmanager
def gatehouse(folder: Path, data: Path, threads: int, log: IO[str]) -> Iterator[Server]:
    """Run our service, with a tenant and a key."""
    port, token = free_port(), f"gha_{secrets.token_hex(16)}"
    variables = {
        "GATEHOUSE_ADMIN_TOKEN": token, "GATEHOUSE_ENGINE_THREADS": str(threads), "GATEHOUSE_MAX_NUM_SEQS": str(SEATS),
    }  # fmt: skip
    command = [sys.executable, "-m", "appliance.cli.main", "serve", "--data-dir", str(data), "--model", str(folder)]
    with serving([*command, "--port", str(port)], variables, f"http://127.0.0.1:{port}/health/ready", log) as process:
        yield Server(process, port, folder.name, make_key(f"http://127.0.0.1:{port}", token))


@contextmanager
def vllm(folder: Path, peers: Path, threads: int, log: IO[str]) -> Iterator[Server]:
    """Run vLLM's OpenAI server in its compiled mode; its engine is a second process, as by default."""
    port = free_port()
    command = [
        VLLM_SERVED.interpreter(peers), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--port", str(port),
        "--served-model-name", folder.name, "--dtype", "float32", "--max-model-len", str(MAX_MODEL_LEN), "--host", "127.0.0.1",
        "--max-num-seqs", str(SEATS), "--no-enable-prefix-caching", "--disable-log-stats", "--disable-uvicorn-access-log",
    ]  # fmt: skip
    variables = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "VLLM_CACHE_ROOT": str(peers / "cache"), **VLLM}
    with serving(command, variables, f"http://127.0.0.1:{port}/health", log) as process:
        yield Server(process, port, folder.name, "none", pauses=True)


@contextmanager
def serving(command: list[str], variables: dict[str, str], health: str, log: IO[str]) -> Iterator[psutil.Process]:
    """Start a server in its own process group, yield it once it is healthy, then end it. Raises PeerFailed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True, cwd=REPOSITORY)
    try:
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        while not healthy(health):
            if process.poll() is not None:
                raise PeerFailed(f"the server ended with status {process.returncode}; its output is in {log.name}")
            if time.monotonic() > deadline_s:
                raise PeerFailed(f"the server was not ready within {READY_TIMEOUT_S:.0f} s; its output is in {log.name}")
            time.sleep(0.2)
        yield psutil.Process(process.pid)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGCONT)  # a stopped process receives no other signal
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_TIMEOUT_S)
        with suppress(ProcessLookupError):  # end members of the group that outlived the first process
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def healthy(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False


def open_log(logs: Path, name: str) -> Any:
    return (logs / f"{name}.log").open("a")
