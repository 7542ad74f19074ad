"""Speed of the engine as it serves: one request, many requests, mixed lengths, and a saturated engine."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from itertools import count
from pathlib import Path
from statistics import mean, median
from typing import Any

from bench.gpu import traffic
from bench.gpu.context import Context
from bench.gpu.graph_use import count_graph_use
from bench.gpu.idle import StepSpan
from bench.gpu.models import model_directory, random_engine
from bench.gpu.planner import Planner
from bench.gpu.rows import Row
from bench.gpu.serve_chunks import measure_chunk
from bench.gpu.serve_idle import idle_row, progress
from bench.gpu.step_parts import REST, WAIT, step_parts
from bench.gpu.targets import CHUNK_SIZES, CONVERSATIONS, chunk_row
from bench.gpu.traffic import BenchRequest, Window
from engine.loop import Engine
from engine.protocol import KernelChoice

MIXED_TEMPERATURE = 0.6  # as in nano-vllm's bench
SEATS = 256
MODEL_LEN = 4096
GB = 1_000_000_000
MANY_SEATS = 512
KV_FILLED = 0.95
"""Share of the cache that a closed loop may fill on average, because the number of its requests' tokens fluctuates."""
TURNOVER = "host critical path, a request replaced every second step, batch 256"
JUDGED_LAST_S = 20.0
"""Time reserved for the last rows of `llama_8b`, which are judged. On an H200 they took 13 s."""
SLOTS_USED = "KV slots used at saturation"
FEW_SEATS, FORMATS_LEN = 8, 8448
FEW_KV_BYTES = 6 * GB
"""Cache for one request at a time, small enough that what the process's engines leave allocated fits together."""


def llama_8b(context: Context) -> None:
    """All rows that one engine over Llama-3.1-8B in 16 bits gives."""
    name = "llama-3.1-8b"
    with _folder() as folder:
        started_s = time.perf_counter()
        with random_engine(context, folder, name, max_num_seqs=SEATS, max_model_len=MODEL_LEN) as engine:
            start = Row(name="start of Llama-3.1-8B beyond reading weights, warm cache", value=time.perf_counter() - started_s)
            start.note = f"{engine.info.kernels}; random weights are made meanwhile; cache of kernels filled by the warm-up"
            context.emit(start)
            directory = model_directory(folder, name)
            context.guard("planner: KV blocks", lambda: _planned_blocks(context, engine))
            row = "Llama-3.1-8B bf16, batch 1"
            context.guard(
                [row, "planner: batch 1"], lambda: _batch_one(context, engine, directory, row, planned="planner: batch 1")
            )
            context.guard("sizes", lambda: warm_sizes(context, engine))
            steady = [f"Llama-3.1-8B bf16, batch {size}, 1k context" for size in (64, 256)]
            context.guard(steady[0], lambda: _steady(context, engine, directory, 64, steady[0]))
            row_mixed = "Llama-3.1-8B, 256 requests of 100–1024 in and out"
            context.guard(
                [row_mixed, "planner: 256 mixed"],
                lambda: _mixed(context, engine, directory, row_mixed, planned="planner: 256 mixed"),
            )
            context.guard(CONVERSATIONS, lambda: _chats(context, engine))
            _measure_unjudged(context, engine)
            profiled = ["GPU idle in steady decode, batch 256", "host critical path per step, batch 256"]
            context.guard(  # last: the profiler may slow down what follows, or crash the process
                [steady[1], *profiled], lambda: _steady(context, engine, directory, 256, steady[1], profiled=profiled)
            )


def _measure_unjudged(context: Context, engine: Engine) -> None:
    """Rows without a goal, left out if there is not enough time for them and the judged rows that follow."""
    unjudged: dict[str, Callable[[], None]] = {TURNOVER: lambda: _turnover(context, engine, TURNOVER)}
    unjudged |= {chunk_row(size): partial(measure_chunk, context, engine, size) for size in CHUNK_SIZES}
    for name, measure in unjudged.items():
        if context.left_s >= JUDGED_LAST_S:
            context.guard(name, measure)
        else:
            left_out = f"left out: {context.left_s:.0f} s were left, and the judged rows after it take up to {JUDGED_LAST_S:g}"
            context.emit(Row(name=name, error=left_out))


def small_models(context: Context) -> None:
    with _folder() as folder:
        for name, title in (("qwen3-0.6b", "Qwen3-0.6B"), ("llama-3.2-1b", "Llama-3.2-1B")):
            rows = [f"{title} bf16, batch 1"]
            if name == "qwen3-0.6b":
                rows.append("Qwen3-0.6B, 256 requests of 100–1024 in and out")
            context.guard(rows, partial(_small, context, folder, name, rows))


def _small(context: Context, folder: Path, name: str, rows: list[str]) -> None:
    options: dict[str, Any] = {
        "max_num_seqs": SEATS,
        "max_model_len": MODEL_LEN,
        "kv_cache_bytes": 62 * GB if len(rows) > 1 else FEW_KV_BYTES,
    }
    with random_engine(context, folder, name, **options) as engine:
        directory = model_directory(folder, name)
        _batch_one(context, engine, directory, rows[0])
        for row in rows[1:]:
            warm_sizes(context, engine)
            context.guard(row, partial(_mixed, context, engine, directory, row))


def formats(context: Context) -> None:
    """One request at a time, and one long prompt, for another model and for weights in 8 and 4 bits."""
    cases: list[tuple[str, str, dict[str, Any]]] = [
        ("Llama-3.1-8B fp8", "llama-3.1-8b", {"quantization": "fp8"}),
        ("Llama-3.1-8B int4", "llama-3.1-8b", {"int4": True}),
        ("Llama-3.1-8B int8", "llama-3.1-8b", {"quantization": "int8"}),
        ("Qwen3-8B bf16", "qwen3-8b", {}),
    ]
    with _folder() as folder:
        for title, name, options in cases:
            decode, prefill = f"{title}, batch 1", f"{title}, prefill of 8k tokens"
            context.guard([decode, prefill], partial(_format, context, folder, decode, name, options, prefill=prefill))


def head_in_8_bits(context: Context, row: str) -> None:
    """Measure an operator's option: a 4-bit checkpoint with its head quantised to 8 bits."""
    with _folder() as folder:
        _format(context, folder, row, "llama-3.1-8b", {"int4": True, "head_quantization": "int8"})


def _format(
    context: Context, folder: Path, row: str, name: str, options: dict[str, Any], *, prefill: str | None = None
) -> None:
    options |= {"max_num_seqs": FEW_SEATS, "max_model_len": FORMATS_LEN, "kv_cache_bytes": FEW_KV_BYTES}
    with random_engine(context, folder, name, **options) as engine:
        directory = model_directory(folder, name, int4=options.get("int4", False))
        _batch_one(context, engine, directory, row)
        if prefill is not None:
            context.guard(prefill, lambda: _prefill(context, engine, directory, prefill))


def _prefill(context: Context, engine: Engine, directory: Path, name: str) -> None:
    """One prompt at a time to its first token; the limit counts each product at the matmul rate of its operands' format."""
    in_len, rates = context.size(8192, 24), []
    for sample in range(context.size(4, 2)):
        request = BenchRequest(traffic.random_prompt(random.Random(100 + sample), in_len, engine.info.vocab_size), 1)
        traffic.submit(engine, f"prefill{sample}", request)
        window = traffic.steps(engine, lambda _: False)
        rates.append(in_len / sum(window.step_s))
    del rates[0]  # the warm-up
    row = Row(name=name, value=median(rates), samples=rates)
    planner = Planner(context, directory, engine.info, expected=False)
    context.limit(row, lambda: in_len / planner.prefill_s(in_len))
    row.facts = {"quantization": engine.info.quantization, "kernels": engine.info.kernels}
    context.emit(row)


def saturated(context: Context) -> None:
    """1000 tokens in, 1000 out; each request that ends is replaced. Counted over a window of the steady state."""
    row = "Llama-3.1-8B, 1000/1000 saturated"
    options: dict[str, Any] = {"max_num_seqs": MANY_SEATS, "max_model_len": 2048}
    with _folder() as folder, random_engine(context, folder, "llama-3.1-8b", **options) as engine:
        directory = model_directory(folder, "llama-3.1-8b")
        context.guard([row, SLOTS_USED], lambda: _saturated(context, engine, directory, row))


def num_seats(kv_tokens: int, in_len: int, out_len: int, block_size: int, seats_max: int) -> int:
    """How many requests fit into the cache when their ages are spread evenly, at most `seats_max`: every seat on an H200, about
    270 on a card with 80 GB. With more, requests would be preempted and recomputed."""
    return min(seats_max, int(KV_FILLED * kv_tokens / (in_len + out_len / 2 + block_size)))


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def warm_sizes(context: Context, engine: Engine) -> None:
    """Run every size of a decode step with sampling, and prompts of many lengths, so that no timed run captures or compiles."""
    traffic.run_every_size(engine, context.size(SEATS, 4), temperature=MIXED_TEMPERATURE)
    mixed = traffic.uniform_requests(context.size(24, 2), 3, context.size(1024, 8), engine.info.vocab_size, seed=9)
    traffic.run(engine, [BenchRequest(request.prompt, 3) for request in mixed], temperature=MIXED_TEMPERATURE, label="v")


def _batch_one(context: Context, engine: Engine, directory: Path, name: str, *, planned: str | None = None) -> None:
    """One request of 128 tokens; the rate between its first token and its last."""
    in_len, out_len = context.size(128, 5), context.size(257, 4)

    def run_once(sample: int) -> tuple[int, float]:
        request = BenchRequest(traffic.random_prompt(random.Random(sample), in_len, engine.info.vocab_size), out_len)
        traffic.submit(engine, f"one{sample}", request)
        first = traffic.steps(engine, lambda window: sum(window.tokens) > 0)
        rest = traffic.steps(engine, lambda _: False)
        return sum(first.tokens) + sum(rest.tokens), rest.rate

    run_once(0)  # the warm-up
    before = engine.status().generation_tokens_total
    with count_graph_use() as use:
        runs = [run_once(sample) for sample in range(1, context.size(4, 2))]
    samples = [rate for _, rate in runs]
    limit = Planner(context, directory, engine.info, expected=False)
    row = Row(name=name, value=median(samples), samples=samples, returned=sum(returned for returned, _ in runs))
    row.counted, row.note = engine.status().generation_tokens_total - before, _served_by(engine.info.kernel_choices)
    context.limit(row, lambda: limit.decode_rate(1, in_len + out_len / 2))
    row.facts = {"bytes_per_step": limit.read_bytes, "quantization": engine.info.quantization, "kernels": engine.info.kernels}
    row.facts["kernel_choices"] = [asdict(choice) for choice in engine.info.kernel_choices]
    context.emit(use.annotate(row, whole=True))
    if planned is not None:
        planner = Planner(context, directory, engine.info, expected=True)
        _emit_prediction_error(context, planned, lambda: planner.decode_rate(1, in_len + out_len / 2), median(samples))


def _served_by(choices: Sequence[KernelChoice]) -> str:
    """Which kernels serve, behind those that must not and why: `GEMV refused for 8-bit products of one row: wrong results;
    served by tiles (8-bit products of one row), splits and merge (attention of one row)`."""
    refused = [f"{name} refused for {choice.name}: {why}" for choice in choices for name, why in choice.refused.items()]
    served = ", ".join(f"{choice.serves} ({choice.name})" for choice in choices)
    return "; ".join([*refused, *([f"served by {served}"] if served else [])])


def _emit_prediction_error(context: Context, name: str, predict: Callable[[], float], measured: float) -> None:
    """Emit the error of a prediction, guarded separately: a prediction that fails must not cost a measured row."""

    def compare() -> None:
        predicted = predict()
        row = Row(name=name, value=100 * abs(predicted / measured - 1), facts={"predicted": predicted, "measured": measured})
        row.note = f"predicted {predicted:.1f}, measured {measured:.1f} tokens/s"
        context.emit(row)

    context.guard(name, compare)


def _planned_blocks(context: Context, engine: Engine) -> None:
    """The KV memory predicted before loading, compared with what was allocated."""
    part = next(part for part in engine.info.memory if part.name == "kv_cache")
    measured = engine.info.kv_bytes
    row = Row(name="planner: KV blocks", value=100 * abs(part.predicted_bytes / measured - 1))
    row.facts = {each.name: [each.predicted_bytes, each.measured_bytes] for each in engine.info.memory}
    row.note = f"{engine.info.num_kv_blocks} blocks of {engine.info.block_size}"
    context.emit(row)


def _steady(
    context: Context, engine: Engine, directory: Path, num_requests: int, name: str, *, profiled: list[str] | None = None
) -> None:
    """Steady decode: `num_requests` requests with contexts of about 1k, no arrivals."""
    num_requests = context.size(num_requests, 3)
    in_len, num_steps = context.size(960, 6), context.size(64, 3)
    rng, vocab = random.Random(2), engine.info.vocab_size
    out_len = (5 if profiled else 2) * num_steps + 20 + num_requests // 4
    traffic.check_kv_capacity(engine, num_requests, in_len + out_len)
    for number in range(num_requests):
        request = BenchRequest(traffic.random_prompt(rng, in_len, vocab), out_len)
        traffic.submit(engine, f"s{number}", request, temperature=MIXED_TEMPERATURE)
    traffic.steps(engine, lambda window: bool(window.tokens) and window.tokens[-1] == num_requests)
    at = progress(engine)
    window = traffic.steps(engine, _after_steps(num_steps))
    rates = [tokens / step_s for tokens, step_s in zip(window.tokens, window.step_s, strict=True)]
    row = Row(name=name, value=window.rate, samples=rates)
    planner = Planner(context, directory, engine.info, expected=False)
    context.limit(row, lambda: planner.decode_rate(num_requests, in_len + num_steps))
    row.facts = {"step_ms": median(window.step_s) * 1e3}
    context.emit(window.graphs.annotate(row, whole=True))
    if profiled is not None:
        context.guard(profiled[1], lambda: _host(context, profiled[1], engine, window))
        context.guard(profiled[0], lambda: idle_row(context, profiled[0], engine, num_steps, StepSpan(at, window.step_s)))
    for number in range(num_requests):
        engine.abort(f"s{number}")
    traffic.steps(engine, lambda _: False)


def _after_steps(num_steps: int) -> Callable[[Window], bool]:
    return lambda window: len(window.step_s) >= num_steps


def _host(context: Context, name: str, engine: Engine, window: Window) -> None:
    """CPU time of the thread without its waits for tokens: the work between two launches. The breakdown into parts is measured
    over further steps, because the clocks around the parts take time too."""
    samples = [1e6 * cpu_s for cpu_s in window.cpu_s]
    row = Row(name=name, value=median(samples), samples=samples, facts={"p99_us": sorted(samples)[int(0.99 * len(samples))]})
    with step_parts() as total_s_of:
        further = traffic.steps(engine, _after_steps(max(3, len(window.step_s) // 2))).cpu_s
    parts = {label: 1e6 * total_s / len(further) for label, total_s in total_s_of.items()}
    row.facts["wait_us"] = parts.pop(WAIT)
    row.facts["parts_us"] = parts | {REST: 1e6 * mean(further) - sum(parts.values())}
    parts_text = ", ".join(f"{label} {time_us:.0f}" for label, time_us in row.facts["parts_us"].items())
    row.note = "CPU time of a served step, without its thread's waits for tokens; its parts in further "
    row.note += f"steps, mean µs: {parts_text}"
    context.emit(window.graphs.annotate(row, whole=True))


def _turnover(context: Context, engine: Engine, name: str) -> None:
    """As `_host`, while in every second step a request ends and is replaced, so that slots, columns and blocks are sent."""
    seats, rng, vocab, request_ids = context.size(SEATS, 3), random.Random(4), engine.info.vocab_size, count()

    def submit_next(length: int) -> None:
        request = BenchRequest(traffic.random_prompt(rng, 8, vocab), length)
        traffic.submit(engine, f"t{next(request_ids)}", request, temperature=MIXED_TEMPERATURE)

    def replace(_: str) -> None:
        submit_next(2 * seats)

    for seat in range(seats):
        submit_next(2 + 2 * seat)
    traffic.steps(engine, _after_steps(context.size(16, 2)), on_finish=replace)
    window = traffic.steps(engine, _after_steps(context.size(128, 6)), on_finish=replace)
    engine.abort_all()
    samples = [1e6 * cpu_s for cpu_s in window.cpu_s]
    row = Row(name=name, value=mean(samples), samples=samples, facts={"p50_us": median(samples), "max_us": max(samples)})
    row.note = "mean over steps that admit a request of 8 tokens and steps that do not, alternately; without waits for tokens"
    context.emit(window.graphs.annotate(row, whole=True))


def _mixed(context: Context, engine: Engine, directory: Path, name: str, *, planned: str | None = None) -> None:
    """nano-vllm's bench: 256 requests of 100 to 1024 tokens in and out, all at once."""
    vocab = engine.info.vocab_size
    num_requests, low, high = (6, 3, 12) if context.rehearsal else (256, 100, 1024)
    requests = traffic.uniform_requests(num_requests, low, high, vocab)
    result = traffic.run(engine, requests, temperature=MIXED_TEMPERATURE, label="m")
    row = Row(name=name, value=result.rate, samples=[result.rate], counted=result.counted, returned=result.returned)
    seats, budget = context.size(SEATS, 4), context.size(8192, 32)
    planner = Planner(context, directory, engine.info, expected=False)
    context.limit(row, lambda: planner.offline_rate(requests, seats, budget))
    row.facts = {"wall_s": result.wall_s, "preemptions": engine.status().preemptions_total}
    context.emit(result.graphs.annotate(row))
    if planned is not None:
        planner = Planner(context, directory, engine.info, expected=True)
        _emit_prediction_error(context, planned, lambda: planner.offline_rate(requests, seats, budget), result.rate)


def _chats(context: Context, engine: Engine) -> None:
    """Our side of the comparison with the peers, greedy and warmed up like theirs. Greedy steps have graphs of their own."""
    requests = traffic.conversations(context, engine.info.vocab_size)
    traffic.run_every_size(engine, len(requests), temperature=0.0)
    result = traffic.run(engine, requests, label="c")
    row = Row(name=CONVERSATIONS, value=result.rate, counted=result.counted, returned=result.returned)
    row.facts = {"wall_s": result.wall_s, "requests": len(requests)}
    context.emit(result.graphs.annotate(row))
    context.add_facts(chats_rate=result.rate, chats_tokens=result.returned)


def _saturated(context: Context, engine: Engine, directory: Path, name: str) -> None:
    """The first requests have outputs of every length up to the full one, so that they end at different times, as in the steady
    state."""
    in_len, out_len = (8, 12) if context.rehearsal else (1000, 1000)
    seats_max = context.size(MANY_SEATS, 4)
    seats = num_seats(traffic.kv_tokens(engine), in_len, out_len, engine.info.block_size, seats_max)
    window_s = 0.3 if context.rehearsal else 22.0
    rng, vocab, request_ids = random.Random(3), engine.info.vocab_size, count()

    def submit_next(length: int) -> None:
        request = BenchRequest(traffic.random_prompt(rng, in_len, vocab), max(2, length))
        traffic.submit(engine, f"f{next(request_ids)}", request, temperature=MIXED_TEMPERATURE)

    def replace(_: str) -> None:
        submit_next(out_len)

    def is_filled(window: Window) -> bool:
        return bool(window.tokens) and window.tokens[-1] >= 0.9 * seats

    for seat in range(seats):
        submit_next(out_len * (seat + 1) // seats)
    filling = traffic.steps(engine, is_filled, on_finish=replace)
    end_s = time.perf_counter() + min(window_s, max(2.0, context.left_s - 6))
    before, used = engine.status(), [_slots_used(engine)]
    window = traffic.steps(engine, lambda _: time.perf_counter() > end_s, on_finish=replace)
    after, used = engine.status(), [*used, _slots_used(engine)]
    row = Row(name=name, value=window.rate, returned=sum(window.tokens))
    row.counted = after.generation_tokens_total - before.generation_tokens_total
    half = len(window.tokens) // 2
    halves = (slice(None, half), slice(half, None))
    row.samples = [sum(window.tokens[each]) / sum(window.step_s[each]) for each in halves if window.tokens[each]]
    planner = Planner(context, directory, engine.info, expected=False)
    row.facts = {
        "seats": seats, "window_s": sum(window.step_s), "filled_s": sum(filling.step_s),
        "prompt_tokens": after.prompt_tokens_total - before.prompt_tokens_total,
        "preemptions": after.preemptions_total - before.preemptions_total,
        "kv_used_percent": 100 * after.kv_blocks_used / after.kv_blocks_total, "running": after.num_running,
    }  # fmt: skip
    capped = "" if seats == seats_max else f", as many as the cache of {traffic.kv_tokens(engine)} tokens holds"
    row.note = f"{seats} seats{capped}; window of {sum(window.step_s):.0f} s; the limit is serial: prefill, then decode"
    context.limit(row, lambda: planner.saturated_rate(in_len, out_len, seats))
    context.emit(window.graphs.annotate(row))
    context.emit(
        Row(name=SLOTS_USED, value=min(used), samples=used, note="of the blocks that requests hold, at both ends of the window")
    )
    engine.abort_all()


def _slots_used(engine: Engine) -> float:
    """Percentage of slots that contain a key and a value, in the blocks that requests hold."""
    status = engine.status(with_requests=True)
    assert status.requests is not None
    tokens = sum(request.num_computed_tokens for request in status.requests)
    return 100 * tokens / (status.kv_blocks_used * engine.info.block_size)
