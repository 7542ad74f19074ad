"""Requests for engines, and their results: every token with its time, counted by the caller and by the engine."""

from __future__ import annotations

import random
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from bench.chat_lengths import OUTPUT_LENS, PROMPT_LENS, draw_length
from bench.gpu.context import Context
from bench.gpu.graph_use import GraphUse, count_graph_use
from bench.gpu.token_waits import time_token_waits
from engine.loop import Engine
from engine.protocol import GenerationRequest, SamplingParams, TokenEvent

CHAT_LEN_MAX = 512
"""Longer prompts and answers are cut, so that a peer that takes 40 ms per step is done in half a minute."""
CONVERSATIONS = 128
"""As many as a peer's continuous batching finishes in that time."""


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request: prompt tokens and how many to generate."""

    prompt: tuple[int, ...]
    num_outputs: int


@dataclass(slots=True)
class RunResult:
    """The result of a run. `returned`: tokens received in events; `counted`: tokens by the engine's own totals."""

    wall_s: float = 0.0
    returned: int = 0
    counted: int = 0
    wrong: list[str] = field(default_factory=list)
    graphs: GraphUse = field(default_factory=GraphUse)

    @property
    def rate(self) -> float:
        return self.returned / self.wall_s


def random_prompt(rng: random.Random, length: int, vocab: int) -> tuple[int, ...]:
    return tuple(rng.choices(range(3, vocab), k=length))


def uniform_requests(count: int, low: int, high: int, vocab: int, *, seed: int = 0) -> list[BenchRequest]:
    """Requests with uniformly drawn lengths in and out, as in nano-vllm's bench (256, 100 to 1024)."""
    rng = random.Random(seed)
    prompts = [random_prompt(rng, rng.randint(low, high), vocab) for _ in range(count)]
    return [BenchRequest(each, rng.randint(low, high)) for each in prompts]


def chat_requests(count: int, longest: int, vocab: int) -> list[BenchRequest]:
    """Requests with the lengths of conversations, at most `longest` tokens in and out."""
    rng = random.Random(5)

    def length(lens: Sequence[int]) -> int:
        return max(2, min(longest, round(draw_length(rng, lens))))

    return [BenchRequest(random_prompt(rng, length(PROMPT_LENS), vocab), length(OUTPUT_LENS)) for _ in range(count)]


def conversations(context: Context, vocab: int) -> list[BenchRequest]:
    """The requests of the comparison with peers: the same prompts and lengths for each engine, submitted all at once."""
    return chat_requests(context.size(CONVERSATIONS, 6), context.size(CHAT_LEN_MAX, 10), vocab)


def submit(engine: Engine, name: str, request: BenchRequest, *, temperature: float = 0.0) -> None:
    sampling = SamplingParams(
        temperature=temperature, max_tokens=request.num_outputs, ignore_eos=True, seed=zlib.crc32(name.encode())
    )
    check_events(
        engine.submit(
            GenerationRequest(request_id=name, tenant_id="bench", prompt_token_ids=list(request.prompt), sampling=sampling)
        )
    )


def check_events(events: Iterable[TokenEvent]) -> None:
    """Raise RuntimeError if a request was refused or has failed."""
    for event in events:
        if event.error is not None:
            raise RuntimeError(f"request {event.request_id} failed: {event.error}")


def kv_tokens(engine: Engine) -> int:
    """The number of tokens whose keys and values fit into the cache."""
    return engine.info.num_kv_blocks * engine.info.block_size


def check_kv_capacity(engine: Engine, num_requests: int, num_tokens: int) -> None:
    """Raise RuntimeError if `num_requests` requests of `num_tokens` tokens do not fit into the cache at the same time."""
    if num_requests * (num_tokens + engine.info.block_size) > kv_tokens(engine):
        wanted = f"{num_requests} requests of {num_tokens} tokens at once"
        raise RuntimeError(f"this card has no room for {wanted}: its KV cache holds {kv_tokens(engine)}")


@contextmanager
def watched(engine: Engine) -> Iterator[tuple[Callable[[], None], GraphUse]]:
    """Watch an engine that is timed. Yields a function to call after every step, which raises if the step fell back to the
    plain path, whose time is different, and the use of graphs. If the block raises, all requests are aborted."""
    fallbacks, before = engine.fallbacks, engine.fallbacks.count

    def check_fallbacks() -> None:
        if fallbacks.count != before:
            raise RuntimeError(f"{fallbacks.count - before} steps fell back to the plain path: {fallbacks.reason}")

    try:
        with count_graph_use() as use:
            yield check_fallbacks, use
    except BaseException:
        engine.abort_all()
        raise


def run(engine: Engine, requests: Sequence[BenchRequest], *, temperature: float = 0.0, label: str = "r") -> RunResult:
    """Submit all requests at once and step until they end."""
    result, before = RunResult(), engine.status().generation_tokens_total
    started_s = time.perf_counter()
    lengths: dict[str, int] = {}
    with watched(engine) as (check_fallbacks, result.graphs):
        for number, request in enumerate(requests):
            submit(engine, f"{label}{number}", request, temperature=temperature)
        while engine.has_requests:
            events = engine.step()
            check_events(events)
            for event in events:
                result.returned += len(event.token_ids)
                lengths[event.request_id] = lengths.get(event.request_id, 0) + len(event.token_ids)
            check_fallbacks()
    result.wall_s = time.perf_counter() - started_s
    result.counted = engine.status().generation_tokens_total - before
    result.wrong = [f"{label}{n}" for n, request in enumerate(requests) if lengths.get(f"{label}{n}") != request.num_outputs]
    if result.wrong:
        raise RuntimeError(f"{len(result.wrong)} requests did not give as many tokens as requested: {result.wrong[:4]}")
    return result


def run_every_size(engine: Engine, seats: int, *, temperature: float) -> None:
    """Run every size of a decode step: requests end eight at a time, the first ones once all prompts are done."""
    rng = random.Random(1)
    requests = [BenchRequest(random_prompt(rng, 8, engine.info.vocab_size), 5 + seat // 8) for seat in range(seats)]
    run(engine, requests, temperature=temperature, label="w")


@dataclass(slots=True)
class Window:
    """Consecutive steps of a busy engine: wall time since the end of the step before, in which the device may have been working
    too; thread CPU time without waits for tokens; and tokens of each."""

    step_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    graphs: GraphUse = field(default_factory=GraphUse)

    @property
    def rate(self) -> float:
        return sum(self.tokens) / sum(self.step_s)


def steps(engine: Engine, until: Callable[[Window], bool], *, on_finish: Callable[[str], None] | None = None) -> Window:
    """Step until `until` returns true or no request is left; `on_finish` is called for every request that finishes."""
    window, ended_s = Window(), time.perf_counter()
    with watched(engine) as (check_fallbacks, window.graphs), time_token_waits() as token_waits:
        while engine.has_requests and not until(window):
            waited_s, cpu_s = token_waits.cpu_s, time.thread_time()
            outputs = engine.step_in_columns()
            window.cpu_s.append(time.thread_time() - cpu_s - (token_waits.cpu_s - waited_s))
            before_s, ended_s = ended_s, time.perf_counter()
            window.step_s.append(ended_s - before_s)
            window.tokens.append(len(outputs.token_ids) + sum(len(event.token_ids) for event in outputs.others))
            check_events(outputs.others)
            for event in outputs.others:
                if event.finish_reason is not None and on_finish is not None:
                    on_finish(event.request_id)
            check_fallbacks()
    return window
