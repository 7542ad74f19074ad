"""How long one long prompt delays decoding requests, and how much time a cached prefix saves."""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from bench.gpu import traffic
from bench.gpu.context import Context
from bench.gpu.graph_use import GraphUse
from bench.gpu.models import model_directory, random_engine
from bench.gpu.planner import Planner
from bench.gpu.rows import Row
from bench.gpu.traffic import BenchRequest
from engine.loop import Engine

SEATS = 72
TARGET_MS = 18.0
"""`inter_token_target_ms` of the engine: how long a step may keep decoders waiting."""
GAP = "32k prompt among 64 decoders: largest gap"
TTFT = "32k prompt among 64 decoders: its TTFT"
CACHED = "32k cached prefix + 128 new tokens: TTFT against cold"


def latency(context: Context) -> None:
    """Measure two engines: the first without an inter-token target, the second with one, so that decoders do not wait long."""
    with tempfile.TemporaryDirectory() as folder:
        context.guard(CACHED, lambda: _prefix(context, Path(folder)))
        options: dict[str, Any] = {"max_num_seqs": SEATS, "max_model_len": 34_816, "inter_token_target_ms": TARGET_MS}
        with random_engine(context, Path(folder), "llama-3.1-8b", **options) as engine:
            context.guard("warm", lambda: _warm(context, engine))
            context.guard([GAP, TTFT], lambda: _among_decoders(context, engine, model_directory(Path(folder), "llama-3.1-8b")))


def _prefix(context: Context, folder: Path) -> None:
    options: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": 34_816, "kv_cache_bytes": 24_000_000_000}
    with random_engine(context, folder, "llama-3.1-8b", **options) as engine:
        _ttft(engine, "first", _long_prompt(context, 98, engine))
        _ttft(engine, "again", _long_prompt(context, 98, engine, extra=context.size(128, 4)))
        _cached(context, engine)


def _long_prompt(context: Context, seed: int, engine: Engine, extra: int = 0) -> tuple[int, ...]:
    return traffic.random_prompt(random.Random(seed), context.size(32_768, 32) + extra, engine.info.vocab_size)


def _warm(context: Context, engine: Engine) -> None:
    """Run every size of a decode step, and a whole long prompt in chunks alongside decodes, so that nothing is compiled or
    captured later."""
    traffic.run_every_size(engine, context.size(SEATS, 2), temperature=0.0)
    rng, vocab = random.Random(8), engine.info.vocab_size
    for number in range(context.size(64, 2)):
        traffic.submit(
            engine, f"w{number}", BenchRequest(traffic.random_prompt(rng, 8, vocab), context.size(30 + 2 * (number // 8), 4))
        )
    traffic.steps(engine, lambda window: len(window.step_s) >= 4)
    traffic.submit(engine, "warm", BenchRequest(_long_prompt(context, 99, engine), 2))
    traffic.steps(engine, lambda _: False)


def _ttft(engine: Engine, name: str, prompt: tuple[int, ...]) -> float:
    started_s = time.perf_counter()
    traffic.submit(engine, name, BenchRequest(prompt, 2))
    traffic.steps(engine, lambda window: sum(window.tokens) > 0)
    taken_s = time.perf_counter() - started_s
    traffic.steps(engine, lambda _: False)
    return taken_s


def _cached(context: Context, engine: Engine) -> None:
    rng, vocab = random.Random(4), engine.info.vocab_size
    cold, warm = [], []
    for turn in range(context.size(3, 1)):
        prefix = _long_prompt(context, 10 + turn, engine)
        cold.append(_ttft(engine, f"cold{turn}", prefix))
        warm.append(_ttft(engine, f"warm{turn}", prefix + traffic.random_prompt(rng, context.size(128, 4), vocab)))
    ratios = [one / other for one, other in zip(cold, warm, strict=True)]
    row = Row(name=CACHED, value=median(ratios), samples=ratios, facts={"cold_s": cold, "cached_s": warm})
    row.note = f"cold {median(cold) * 1e3:.0f} ms, cached {median(warm) * 1e3:.1f} ms"
    context.emit(row)


def _among_decoders(context: Context, engine: Engine, directory: Path) -> None:
    decoders, rng, vocab = context.size(64, 2), random.Random(6), engine.info.vocab_size
    in_len, out_len = context.size(128, 4), context.size(3000, 24)
    prompt = _long_prompt(context, 55, engine)
    traffic.check_kv_capacity(engine, decoders, in_len + out_len + len(prompt) // decoders)
    for number in range(decoders):
        traffic.submit(engine, f"d{number}", BenchRequest(traffic.random_prompt(rng, in_len, vocab), out_len))
    traffic.steps(engine, lambda window: bool(window.tokens) and window.tokens[-1] == decoders)
    undisturbed = traffic.steps(engine, lambda window: len(window.step_s) >= context.size(40, 3))
    gaps, ttft_s, graphs = _gaps(engine, prompt)
    engine.abort_all()
    traffic.steps(engine, lambda _: False)
    row = Row(name=GAP, value=max(gaps) * 1e3, samples=[gap * 1e3 for gap in sorted(gaps)[-50:]])
    row.facts = {
        "calm_step_ms": median(undisturbed.step_s) * 1e3,
        "p50_ms": median(gaps) * 1e3,
        "target_ms": TARGET_MS,
        "gaps": len(gaps),
    }
    row.note = f"inter_token_target_ms={TARGET_MS:g}; without the prompt a step takes {median(undisturbed.step_s) * 1e3:.1f} ms"
    context.emit(graphs.annotate(row))
    row = Row(name=TTFT, value=ttft_s, samples=[ttft_s], note="the limit is the prompt alone")
    context.limit(row, lambda: Planner(context, directory, engine.info, expected=False).prefill_s(len(prompt)))
    context.emit(row)


def _gaps(engine: Engine, prompt: tuple[int, ...]) -> tuple[list[float], float, GraphUse]:
    """The gaps between tokens of every decoder from the prompt's arrival to its second token, the prompt's TTFT, and the graph
    use of these steps."""
    last: dict[str, float] = {}
    gaps: list[float] = []
    ttft_s: float | None = None
    with traffic.watched(engine) as (check_fallbacks, graphs):
        for event in engine.step():
            last[event.request_id] = time.perf_counter()
        arrived_s = time.perf_counter()
        traffic.submit(engine, "long", BenchRequest(prompt, 2))
        while engine.has_requests:
            events, now_s = engine.step(), time.perf_counter()
            check_fallbacks()
            traffic.check_events(events)
            for event in events:
                if event.request_id == "long":
                    ttft_s = now_s - arrived_s if ttft_s is None and event.token_ids else ttft_s
                    if event.finish_reason is not None:
                        assert ttft_s is not None, "the long prompt ended without a token"
                        return gaps, ttft_s, graphs
                elif event.token_ids:
                    if event.request_id in last:
                        gaps.append(now_s - last[event.request_id])
                    last[event.request_id] = now_s
    raise RuntimeError("everything ended before the long prompt did")
