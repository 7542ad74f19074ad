"""Runs alongside the checks: compiles every kernel of the engines into the disk cache, and checks the batch-invariant engine.

Models keep their widths but have fewer layers: kernels do not depend on depth.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.gpu import traffic
from bench.gpu.context import Context
from bench.gpu.layer import launched_serially
from bench.gpu.models import random_engine
from bench.gpu.rows import Row
from bench.gpu.serve import FEW_SEATS, FORMATS_LEN, MIXED_TEMPERATURE, MODEL_LEN, SEATS, warm_sizes
from bench.gpu.targets import invariance_row
from bench.gpu.traffic import BenchRequest
from engine.loop import Engine
from engine.protocol import GenerationRequest, SamplingParams

KV_BYTES = 3 << 30
"""Small enough for all processes of this stage to fit on the card."""
FORMATS: dict[str, Any] = {"max_num_seqs": FEW_SEATS, "max_model_len": FORMATS_LEN}


def warm_llama(context: Context) -> None:
    _warm(context, "llama-3.1-8b", max_num_seqs=SEATS, max_model_len=MODEL_LEN, interpreted=True)
    _warm(context, "llama-3.1-8b", max_num_seqs=72, max_model_len=34_816)
    _warm(context, "llama-3.1-8b", max_num_seqs=512, max_model_len=2048)


def warm_small(context: Context) -> None:
    _warm(context, "qwen3-0.6b", max_num_seqs=SEATS, max_model_len=MODEL_LEN)
    _warm(context, "llama-3.2-1b", max_num_seqs=SEATS, max_model_len=MODEL_LEN)


def warm_8_bits(context: Context) -> None:
    for quantization in ("fp8", "int8"):
        _warm(context, "llama-3.1-8b", **FORMATS, quantization=quantization)


def warm_4_bits(context: Context) -> None:
    """Also warms up the other model of the part `formats`."""
    _warm(context, "llama-3.1-8b", **FORMATS, int4=True)
    _warm(context, "qwen3-8b", **FORMATS)


def warm_serially(context: Context) -> None:
    """Compile the kernel variants without early launches: for decodes with all seats, and with one row."""
    with launched_serially():
        _warm(context, "llama-3.1-8b", run_engine=_run_one_and_all, max_num_seqs=SEATS, max_model_len=MODEL_LEN)
        _warm(context, "qwen3-0.6b", run_engine=_run_one_and_all, max_num_seqs=FEW_SEATS, max_model_len=MODEL_LEN)


def _warm(context: Context, name: str, *, run_engine: Callable[[Context, Engine], None] | None = None, **options: Any) -> None:
    if not context.rehearsal:
        options = {**options, "kv_cache_bytes": KV_BYTES}
        options.pop("interpreted", None)

    def run() -> None:
        with tempfile.TemporaryDirectory() as folder, random_engine(context, Path(folder), name, layers=1, **options) as engine:
            if options.get("interpreted"):
                _few_tokens(engine)  # in the interpreter, a model with every Triton kernel takes seconds per token
            else:
                (run_engine or _run_sizes)(context, engine)

    context.guard(f"warm-up of {name} {options}", run)


def _few_tokens(engine: Engine) -> None:
    requests = [BenchRequest((3, 4, 5, 6, 7), 2), BenchRequest((8,), 2)]
    traffic.run(engine, requests, temperature=MIXED_TEMPERATURE, label="i")


def _run_sizes(context: Context, engine: Engine) -> None:
    rng, vocab = random.Random(0), engine.info.vocab_size
    traffic.run(engine, [BenchRequest(traffic.random_prompt(rng, context.size(128, 5), vocab), 4)], label="a")
    warm_sizes(context, engine)


def _run_one_and_all(_: Context, engine: Engine) -> None:
    rng, vocab = random.Random(0), engine.info.vocab_size
    for count in (1, engine.info.max_num_seqs):
        requests = [BenchRequest(traffic.random_prompt(rng, 8, vocab), 4) for _ in range(count)]
        traffic.run(engine, requests, temperature=MIXED_TEMPERATURE, label=f"o{count}-")


def invariant(context: Context) -> None:
    """Check that a request gives the same tokens and bit-identical log-probabilities alone and in a batch."""
    name = invariance_row("engine, batch_invariant")
    context.guard(name, lambda: _invariant(context, name))


def _invariant(context: Context, name: str) -> None:
    options: dict[str, Any] = {"max_num_seqs": 16, "max_model_len": 1024, "batch_invariant": True, "layers": context.size(4, 2)}
    if not context.rehearsal:
        options["kv_cache_bytes"] = KV_BYTES
    with tempfile.TemporaryDirectory() as folder, random_engine(context, Path(folder), "llama-3.2-1b", **options) as engine:
        rng, vocab = random.Random(5), engine.info.vocab_size
        lens = [5, 3, 9] if context.rehearsal else [100, 17, 300, 1, 64, 33, 128, 511, 15, 16, 31, 200]
        prompts = [traffic.random_prompt(rng, length, vocab) for length in lens]
        together = _scored_tokens(context, engine, prompts)
        alone = _scored_tokens(context, engine, prompts[:1])
        kernels = engine.info.kernels
    differing = sum(one != other for one, other in zip(alone[0], together[0], strict=True))
    context.emit(Row(name=name, value=float(differing), note=f"{len(alone[0])} tokens and their log-probabilities, {kernels}"))


def _scored_tokens(context: Context, engine: Engine, prompts: list[tuple[int, ...]]) -> list[list[tuple[int, float]]]:
    """(token, log-probability) of each token of each request."""
    scored_tokens: dict[str, list[tuple[int, float]]] = {str(number): [] for number in range(len(prompts))}
    for number, prompt in enumerate(prompts):
        sampling = SamplingParams(temperature=0.0, max_tokens=context.size(32, 3), ignore_eos=True, seed=1, logprobs=1)
        refused = engine.submit(
            GenerationRequest(request_id=str(number), tenant_id="bench", prompt_token_ids=list(prompt), sampling=sampling)
        )
        assert not refused, f"a request was refused: {refused}"
    # The plain path gives the same bits, so a fallback to it would hide a failure of the fast path.
    with traffic.watched(engine) as (check_fallbacks, _):
        while engine.has_requests:
            events = engine.step()
            traffic.check_events(events)
            for event in events:
                scores = event.logprobs or []
                scored_tokens[event.request_id] += [
                    (token, each.logprob) for token, each in zip(event.token_ids, scores, strict=True)
                ]
            check_fallbacks()
    return list(scored_tokens.values())
