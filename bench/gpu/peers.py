"""transformers compared with our engine in the same run: same model, same weights, its continuous batching and `generate`.

Ratios compare the same conversations: those that the part `llama 8b` served all at once, after a warm-up, greedy. Continuous
batching also gets all of them at once, after a warm-up of its own, with the workload hints that it accepts.

`generate` gets padded batches of 16 in order of arrival, as the goal of 15 defines this peer: a batch runs until its longest
answer is done, and its caller waits for the whole batch. A batch takes about ten seconds, so `generate` gets the first
conversations that fit its share of the time, and at least one batch. If time allows, one batch of all conversations is also
reported but not judged: more rows per step make `generate` several times as fast. The row of a peer that is not installed, or
did not finish in time, contains the error and never passes.
"""

from __future__ import annotations

import copy
import importlib.util
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from bench.gpu import traffic
from bench.gpu.context import Context
from bench.gpu.models import config_of, fill
from bench.gpu.rows import PEER_MISSING, Row
from bench.gpu.timing import synchronize
from bench.gpu.traffic import BenchRequest

CONTINUOUS = "against transformers continuous batching"
STATIC_BATCH = 16
STATIC = f"against transformers static generate, batches of {STATIC_BATCH}"
NAMES = (CONTINUOUS, STATIC)
STATIC_SHARE = 0.25
"""Share of the part's remaining time that `generate` may use, its first batch aside. The rest is for continuous batching, which
on an H200 had done three quarters of its work in 40 s."""
SINGLE_BATCH_COST_MAX = 2.0
"""Upper bound: time of a batch of all conversations over that of a batch of 16. Both have as many steps, bound by the host."""
WARM_OUTPUTS = 2
LIBRARIES = (
    "transformers",
    "transformers.models.llama.modeling_llama",
    "transformers.generation.continuous_batching",
)
"""Imported before the part's time begins."""


END_S = 3.0
"""Reserved for the end of the part, when its rows have been emitted."""


@dataclass(frozen=True, slots=True)
class PeerResult:
    """Tokens requested and returned, the number of conversations, and how they were run. `longest_s`: the slowest batch."""

    num_requested: int
    returned: int
    requests: int
    wall_s: float
    how: str
    longest_s: float = 0.0


Run = Callable[[Context, Any, list[BenchRequest]], PeerResult]


def against_transformers(context: Context) -> None:
    if importlib.util.find_spec("transformers") is None:
        for name in NAMES:
            context.emit(Row(name=name, error=PEER_MISSING))
        return
    if "chats_rate" not in context.facts and not context.rehearsal:
        for name in NAMES:
            context.emit(Row(name=name, error="our own rate is missing: the part `llama 8b` did not measure it"))
        return
    models: list[Any] = []
    context.guard(NAMES, lambda: models.append(_model(context)))
    if not models:
        return
    emitted: dict[str, tuple[Row, PeerResult]] = {}
    for name, run in ((STATIC, _run_static), (CONTINUOUS, _run_continuous)):
        context.guard(name, partial(_row, context, name, run, models[0], emitted))
    if STATIC in emitted:
        _single_batch(context, models[0], *emitted[STATIC])


def _model(context: Context) -> Any:
    """Build the model on the device, then fill in our weights by name."""
    import transformers

    transformers.logging.set_verbosity_error()
    config = config_of(context, "llama-3.1-8b")
    kind = transformers.LlamaConfig(**{name: value for name, value in config.items() if name not in ("architectures", "dtype")})
    dtype = torch.float32 if context.rehearsal else torch.bfloat16
    with torch.device(context.device):
        model = transformers.AutoModelForCausalLM.from_config(kind, dtype=dtype).eval()
    with torch.inference_mode():
        for name, parameter in model.named_parameters():
            fill(name, parameter)
    return model


def _row(context: Context, name: str, run: Run, model: Any, emitted: dict[str, tuple[Row, PeerResult]]) -> None:
    """Run a peer and emit its row; store both the row and the result in `emitted`."""
    work = traffic.conversations(context, model.config.vocab_size)
    num_requested = sum(each.num_outputs for each in work)
    num_ours = context.facts.get("chats_tokens", num_requested)
    if num_ours != num_requested:
        raise RuntimeError(
            f"our engine served {num_ours} tokens, but {num_requested} are requested of the peer: not the same conversations"
        )
    on_cpu = _on_cpu(model, STATIC_BATCH if name == STATIC else len(work))
    result = run(context, model, work)
    ours = float(context.facts.get("chats_rate", 1.0))
    row = Row(name=name, value=ours, peer=result.returned / result.wall_s, peer_name="transformers", peer_on_cpu=on_cpu)
    row.counted, row.returned = result.num_requested, result.returned
    row.facts = {"peer_wall_s": result.wall_s, "peer_tokens": result.returned, "requests": result.requests}
    row.facts |= {"peer_tokens_each": result.num_requested / result.requests, "our_tokens_each": num_requested / len(work)}
    row.note = f"peer: {result.how}, {result.wall_s:.1f} s"
    context.emit(row)
    emitted[name] = row, result


def _single_batch(context: Context, model: Any, row: Row, result: PeerResult) -> None:
    """Add `generate`'s rate with all conversations in one batch as a fact of its row, if time and memory allow."""
    work = traffic.conversations(context, model.config.vocab_size)
    fact = f"batch of {len(work)}"
    if context.left_s < SINGLE_BATCH_COST_MAX * result.longest_s + END_S:
        row.facts[fact] = f"not measured: {context.left_s:.0f} s were left"
    else:
        try:
            _generate(model, [BenchRequest(request.prompt, WARM_OUTPUTS) for request in work], context)
            started_s = time.perf_counter()
            returned = _generate(model, work, context)
            row.facts[fact] = returned / (time.perf_counter() - started_s)
            row.note += f"; not judged: {row.facts[fact]:.0f} tokens/s in one batch of {len(work)}"
        except Exception as error:  # noqa: BLE001 - out of memory, for example: the row itself is valid
            row.facts[fact] = f"{type(error).__name__}: {str(error)[:150]}"
    context.emit(row)


@torch.inference_mode()
def _on_cpu(model: Any, num_rows: int) -> float:
    """Upper bound of the peer's decode rate with `num_rows` rows on this machine's CPU, in tokens per second: from the time of
    the first feed-forward block, scaled to all weights, without attention."""
    part = copy.deepcopy(model.model.layers[0].mlp).to("cpu")
    rows = torch.zeros(num_rows, model.config.hidden_size, dtype=next(part.parameters()).dtype)
    part(rows[:1])
    started_s = time.perf_counter()
    part(rows)
    share = sum(each.numel() for each in part.parameters()) / sum(each.numel() for each in model.parameters())
    return float(num_rows * share / (time.perf_counter() - started_s))


def _run_static(context: Context, model: Any, work: list[BenchRequest]) -> PeerResult:
    """`generate` over left-padded batches of 16 in order of arrival: each runs until its longest output is done."""
    until_s, batch = context.left_s * (1 - STATIC_SHARE), STATIC_BATCH
    _generate(model, [BenchRequest(request.prompt, WARM_OUTPUTS) for request in work[:batch]], context)
    batch_times_s: list[float] = []
    returned = 0
    while len(batch_times_s) * batch < len(work) and (not batch_times_s or context.left_s - max(batch_times_s) > until_s):
        first = len(batch_times_s) * batch
        started_s = time.perf_counter()
        returned += _generate(model, work[first : first + batch], context)
        batch_times_s.append(time.perf_counter() - started_s)
    done = work[: len(batch_times_s) * batch]
    how = f"the first {len(done)} of {len(work)} conversations in batches of {batch}"
    return PeerResult(
        sum(request.num_outputs for request in done), returned, len(done), sum(batch_times_s), how, max(batch_times_s)
    )


@torch.inference_mode()
def _generate(model: Any, requests: list[BenchRequest], context: Context) -> int:
    width, longest = max(len(request.prompt) for request in requests), max(request.num_outputs for request in requests)
    rows = [[0] * (width - len(request.prompt)) + list(request.prompt) for request in requests]
    mask = [[0] * (width - len(request.prompt)) + [1] * len(request.prompt) for request in requests]
    out = model.generate(
        torch.tensor(rows, device=context.device),
        attention_mask=torch.tensor(mask, device=context.device),
        max_new_tokens=longest, do_sample=False, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    synchronize(context.device)
    answers = out[:, width:].tolist()
    return sum(len(answer[: request.num_outputs]) for answer, request in zip(answers, requests, strict=True))


def _run_continuous(context: Context, model: Any, work: list[BenchRequest]) -> PeerResult:
    """Continuous batching with its own choice of sizes or, if those fail, with smaller ones."""
    attempts: list[dict[str, int]] = [{}, {"max_batch_tokens": 4096, "num_blocks": 1024}]
    if context.rehearsal:
        attempts = [{"num_blocks": 16, "max_batch_tokens": 64, "max_requests_per_batch": 4}]
    failed = ""
    for sizes in attempts:
        try:
            returned, wall_s, how = _run_manager(context, model, work, sizes)
        except (RuntimeError, ValueError, MemoryError) as error:  # MemoryError: its own sizes do not fit
            failed = f"{failed}with {sizes or 'its own sizes'}: {type(error).__name__}: {str(error)[:150]}; "
        else:
            note = f"{len(work)} conversations at once, {sizes or 'its own sizes'}, {how}{failed and f'; failed {failed}'}"
            return PeerResult(sum(request.num_outputs for request in work), returned, len(work), wall_s, note)
    raise RuntimeError(f"continuous batching of transformers did not run {failed}")


def _run_manager(context: Context, model: Any, work: list[BenchRequest], sizes: dict[str, int]) -> tuple[int, float, str]:
    """Tokens, seconds, and the configuration used. `warmup` captures any graphs before anything is timed."""
    from transformers import ContinuousBatchingConfig, GenerationConfig
    from transformers.generation.continuous_batching.utils import WorkloadHints

    hints = WorkloadHints(
        max_prompt_length=max(len(request.prompt) for request in work),
        max_generated_length=max(request.num_outputs for request in work),
        num_requests=len(work),
    )
    with (
        _attention_restored(model),
        model.continuous_batching_context_manager(
            generation_config=GenerationConfig(do_sample=False, max_new_tokens=1, eos_token_id=-1, pad_token_id=0),
            continuous_batching_config=ContinuousBatchingConfig(**sizes),
            workload_hints=hints,
            warmup=True,
        ) as manager,
    ):
        how = f"{model.config._attn_implementation}, graphs {manager.continuous_batching_config.use_cuda_graph}"
        # Reversed prompts: the cache must not contain a prefix of a timed conversation.
        _serve_all(manager, [BenchRequest(request.prompt[::-1], WARM_OUTPUTS) for request in work], "w", context)
        started_s = time.perf_counter()
        try:
            returned = _serve_all(manager, work, "r", context)
        except TimeoutError as error:  # an upper bound of the rate says more than that it did not finish
            taken_s = time.perf_counter() - started_s
            most = sum(request.num_outputs for request in work) / taken_s
            raise TimeoutError(f"{error} after {taken_s:.1f} s, so all take longer: below {most:.0f} tokens/s") from error
        return returned, time.perf_counter() - started_s, how


@contextmanager
def _attention_restored(model: Any) -> Iterator[None]:
    """Restore the model's attention afterwards. Continuous batching replaces it and, if it fails to start, does not restore it
    (5.17), after which neither `generate` nor a second attempt runs."""
    before = model.config._attn_implementation
    try:
        yield
    finally:
        if model.config._attn_implementation != before:
            model.set_attn_implementation(before)


def _serve_all(manager: Any, work: list[BenchRequest], label: str, context: Context) -> int:
    names = [f"{label}{number}" for number in range(len(work))]
    answers: dict[str, int] = {}
    for name, request in zip(names, work, strict=True):
        manager.add_request(list(request.prompt), request_id=name, max_new_tokens=request.num_outputs, eos_token_id=-1)
    while len(answers) < len(work):
        if context.left_s < 2:
            for name in names:
                manager.cancel_request(name)  # otherwise leaving the block would wait for all of them
            raise TimeoutError(f"no time left: {len(answers)} of {len(work)} conversations were done")
        result = manager.get_result(timeout=2)
        if result is None and not manager.is_running():
            raise RuntimeError("the peer's generation loop has ended")
        if result is not None and result.is_finished():
            answers[result.request_id] = len(result.generated_tokens)
    return sum(answers.values())
