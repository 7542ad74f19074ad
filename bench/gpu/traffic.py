"""Requests for engines, and their results: every token with its time, counted by the caller and by the engine."""

from __future__ import annotations

import random
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from bench.gpu.context import Context
from bench.gpu.graph_use import GraphUse, graph_use
from bench.gpu.waiting import waited
from engine.loop import Engine
from engine.protocol import GenerationRequest, SamplingParams, TokenEvent

# Percentiles of a ShareGPT sample, in tokens: those of bench/engine_cpu.py, not divided.
PERCENTILES = (0, 10, 25, 50, 75, 90, 97)
PROMPT_LENS = (4, 9, 15, 36, 163, 842, 1800)
OUTPUT_LENS = (8, 39, 134, 281, 450, 685, 860)
CHAT_LEN_MAX = 512
"""Longer prompts and answers are cut: a peer that takes 40 ms a step is done in half a minute."""
CONVERSATIONS = 128
"""As many as a peer's continuous batching has done by then."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: prompt tokens and how many to generate."""

    prompt: tuple[int, ...]
    num_outputs: int


@dataclass(slots=True)
class Came:
    """The result of a run. `returned`: tokens that events carried; `counted`: tokens by the engine's totals."""

    wall_s: float = 0.0
    returned: int = 0
    counted: int = 0
    wrong: list[str] = field(default_factory=list)
    graphs: GraphUse = field(default_factory=GraphUse)

    @property
    def rate(self) -> float:
        return self.returned / self.wall_s


def prompt(numbers: random.Random, length: int, vocab: int) -> tuple[int, ...]:
    return tuple(numbers.choices(range(3, vocab), k=length))


def uniform(count: int, low: int, high: int, vocab: int, *, seed: int = 0) -> list[Asked]:
    """Requests with uniformly drawn lengths in and out, as in nano-vllm's bench (256, 100 to 1024)."""
    numbers = random.Random(seed)
    prompts = [prompt(numbers, numbers.randint(low, high), vocab) for _ in range(count)]
    return [Asked(each, numbers.randint(low, high)) for each in prompts]


def chats(count: int, longest: int, vocab: int) -> list[Asked]:
    """Requests with the lengths of conversations, by the percentiles above; none longer than `longest`, in or out."""
    numbers = random.Random(5)

    def length(values: Sequence[int]) -> int:
        at = numbers.uniform(0, PERCENTILES[-1])
        upper = next(i for i, percentile in enumerate(PERCENTILES) if at <= percentile and i)
        share = (at - PERCENTILES[upper - 1]) / (PERCENTILES[upper] - PERCENTILES[upper - 1])
        return max(2, min(longest, round(values[upper - 1] + (values[upper] - values[upper - 1]) * share)))

    return [Asked(prompt(numbers, length(PROMPT_LENS), vocab), length(OUTPUT_LENS)) for _ in range(count)]


def conversations(context: Context, vocab: int) -> list[Asked]:
    """The requests on which we and the peers are compared: the same prompts and lengths for each, all at once."""
    return chats(context.size(CONVERSATIONS, 6), context.size(CHAT_LEN_MAX, 10), vocab)


def submit(engine: Engine, name: str, asked: Asked, *, temperature: float = 0.0) -> None:
    sampling = SamplingParams(
        temperature=temperature, max_tokens=asked.num_outputs, ignore_eos=True, seed=zlib.crc32(name.encode())
    )
    check(
        engine.submit(
            GenerationRequest(request_id=name, tenant_id="bench", prompt_token_ids=list(asked.prompt), sampling=sampling)
        )
    )


def check(events: Iterable[TokenEvent]) -> None:
    """Raise RuntimeError if a request was refused or has failed."""
    for event in events:
        if event.error is not None:
            raise RuntimeError(f"request {event.request_id} failed: {event.error}")


def kv_tokens(engine: Engine) -> int:
    """The number of tokens whose keys and values fit into the cache."""
    return engine.info.num_kv_blocks * engine.info.block_size


def check_room(engine: Engine, num_requests: int, num_tokens: int) -> None:
    """Raise RuntimeError if `num_requests` requests of `num_tokens` tokens do not fit into the cache at the same time."""
    if num_requests * (num_tokens + engine.info.block_size) > kv_tokens(engine):
        wanted = f"{num_requests} requests of {num_tokens} tokens at a time"
        raise RuntimeError(f"this card has no room for {wanted}: its KV cache holds {kv_tokens(engine)}")


@contextmanager
def watched(engine: Engine) -> Iterator[tuple[Callable[[], None], GraphUse]]:
    """Watch an engine that is timed. Yields a function to call after every step, which raises if the step fell back to the
    plain path, whose time is different, and the use of graphs. If the block raises, none of its requests stays live."""
    fallbacks, before = engine.fallbacks, engine.fallbacks.count

    def look() -> None:
        if fallbacks.count != before:
            raise RuntimeError(f"{fallbacks.count - before} steps fell back to the plain way: {fallbacks.reason}")

    try:
        with graph_use() as use:
            yield look, use
    except BaseException:
        engine.abort_all()
        raise


def run(engine: Engine, requests: Sequence[Asked], *, temperature: float = 0.0, label: str = "r") -> Came:
    """Submit all requests at once and step until they end."""
    came, before = Came(), engine.status().generation_tokens_total
    started_s = time.perf_counter()
    lengths: dict[str, int] = {}
    with watched(engine) as (look, came.graphs):
        for number, asked in enumerate(requests):
            submit(engine, f"{label}{number}", asked, temperature=temperature)
        while engine.has_requests:
            events = engine.step()
            check(events)
            for event in events:
                came.returned += len(event.token_ids)
                lengths[event.request_id] = lengths.get(event.request_id, 0) + len(event.token_ids)
            look()
    came.wall_s = time.perf_counter() - started_s
    came.counted = engine.status().generation_tokens_total - before
    came.wrong = [f"{label}{n}" for n, asked in enumerate(requests) if lengths.get(f"{label}{n}") != asked.num_outputs]
    if came.wrong:
        raise RuntimeError(f"{len(came.wrong)} requests did not give as many tokens as were asked for: {came.wrong[:4]}")
    return came


def each_size(engine: Engine, seats: int, *, temperature: float) -> None:
    """Run every size of a decode step: requests end eight at a time, the first ones once all prompts are done."""
    numbers = random.Random(1)
    requests = [Asked(prompt(numbers, 8, engine.info.vocab_size), 5 + place // 8) for place in range(seats)]
    run(engine, requests, temperature=temperature, label="w")


@dataclass(slots=True)
class Window:
    """Steps of an engine that is kept busy: wall time of each, thread CPU time without waits for tokens, and tokens of each
    step."""

    step_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    graphs: GraphUse = field(default_factory=GraphUse)

    @property
    def rate(self) -> float:
        return sum(self.tokens) / sum(self.step_s)


def steps(engine: Engine, until: Callable[[Window], bool], *, ended: Callable[[str], None] | None = None) -> Window:
    """Step until told to stop; `ended` is called for every request that finishes."""
    window = Window()
    with watched(engine) as (look, window.graphs), waited() as waits:
        while engine.has_requests and not until(window):
            waited_s, cpu_s, started_s = waits.cpu_s, time.thread_time(), time.perf_counter()
            happened = engine.step_in_columns()
            window.cpu_s.append(time.thread_time() - cpu_s - (waits.cpu_s - waited_s))
            window.step_s.append(time.perf_counter() - started_s)
            window.tokens.append(len(happened.token_ids) + sum(len(event.token_ids) for event in happened.others))
            check(happened.others)
            for event in happened.others:
                if event.finish_reason is not None and ended is not None:
                    ended(event.request_id)
            look()
    return window
