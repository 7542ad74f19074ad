"""Compares the tokens of steps launched ahead, with slots and graphs, with those of the plain runner: without this check, a
wrong graph would generate nonsense at full speed.

The weights are random, so a row's two best logits sometimes differ by no more than rounding. The twin (the plain runner)
therefore computes as many rows as the graph of a step has: torch's products of 21 and of 24 rows need not have the same bits.
Remaining differences are judged at a request's first differing token: by how much the twin prefers its own, noise included.
Up to `TIE` it is rounding; beyond, the fast path is wrong, and rerunning without early launches and without graphs shows where.

Captured steps with chunks are padded where the twin's are not, so prompts' keys are rounded differently, and about a third of
the greedy requests reach a tie (docs/log/gpu-kernels.md). Tokens after the tie are not compared, so a fault as small as
rounding, for example a key that is read too early, could go unnoticed. Therefore everything is compared once more with chunks
launched one by one, as the twin computes them: then hardly any request differs at all.

Products of up to 16 rows with weights in 8 and 4 bits have kernels of their own, launched early as well. Each format is
compared over a few layers of Llama-3.1-8B, whose kernels `warm_up` compiles meanwhile. All prompts of a case are read in one
step, and launched one by one: both engines then run the same kernels over the same rows, so that a read before the previous
kernel's end cannot pass for rounding.
"""

from __future__ import annotations

import gc
import os
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from bench.gpu import traffic
from bench.gpu.context import Context
from bench.gpu.models import random_engine
from bench.gpu.rows import Row
from bench.gpu.targets import CHUNKS_ONE_BY_ONE, SAME_TOKENS, same_tokens_row
from engine.layers.forward_inputs import ForwardInputs
from engine.loop import Engine
from engine.protocol import GenerationRequest, SamplingParams
from engine.runner.kernel_choices import KernelChoices
from engine.runner.model_runner import ModelRunner
from engine.runner.paged_decoder import PagedDecoder
from engine.runner.token_spans import TokenSpan
from engine.sampling.logits_filters import is_greedy, scale_of
from engine.sampling.randomness import key, signed
from engine.step_sizes import step_size
from engine.switches import GRAPHS
from kernels.ops import plain_sampling

MODEL, LAYERS = "qwen3-0.6b", 4
SIZES, SEATS = (1, 16, 17, 200), 200
"""Concurrent requests. A step of 17 rows is rounded up to 24; requests end at different steps, so many sizes between occur."""
ALONE, ALONE_PROMPT, ALONE_TOKENS = "one after the other", 900, 60
"""Requests that run alone, most with more keys than one program handles: their kernels read some inputs before they wait for
the previous kernel, and no check of a single kernel can detect a fault in that."""
KV_BYTES = 3 << 30
LATE_STEP = 5
"""The step at which the last quarter of the requests is submitted, so that their prompts run among decodes."""
TIE = 0.1
"""In logits: three units of bfloat16 at the size of these models' largest logits."""
FORMATS: dict[str, dict[str, Any]] = {"int8": {"quantization": "int8"}, "int4": {"int4": True}, "fp8": {"quantization": "fp8"}}
"""Options of engines, by the format of the weights."""
FORMATS_MODEL, FORMATS_SIZES, FORMATS_OUTPUTS, FORMATS_REPEATS = "llama-3.1-8b", (1, 4, 16), 40, 4
"""Concurrent requests, the fewest tokens of each, and how often they run: whether a kernel reads too early may be chance."""
FORMATS_PROMPT, FORMATS_LEN = 15, 256
"""Tokens of the longest prompt: fewer than a block, so that a repeated one is not found in the cache; and of the longest step,
which holds all prompts of a case."""
FORMATS_KV_BYTES = 1 << 28
FORMATS_BISECTED_S = 40.0
"""With less time left a wrong format is not compared again with switches, so that the other formats have theirs."""
FP8_TIE = 0.4
"""With fp8 weights, rows of prompts are rounded to e4m3 and those of decodes are not. So the twin, which computes a gap from
one long prompt, does not get the logits from which it chose."""


@dataclass(slots=True)
class CaseResult:
    """Result of one case: the number of requests, how many differ only by a tie, and a description of each wrong one."""

    requests: int = 0
    ties: int = 0
    wrong: list[str] = field(default_factory=list)


class PaddedDecoder:
    """The plain runner's decoder, with decodes padded to the sizes of graphs: padding repeats the last row, whose keys are thus
    written more than once with the same values. `last_logits`: those of the last step."""

    def __init__(self, target: PagedDecoder, max_rows: int) -> None:
        self._target = target
        self._max_rows = max_rows
        self._is_decode = False
        self.last_logits = torch.empty(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def prepare(self, rows: Sequence[TokenSpan]) -> ForwardInputs:
        self._is_decode = all(len(row.token_ids) == 1 and len(row.outputs) == 1 for row in rows)
        padding = self._size(len(rows)) - len(rows)
        return self._target.prepare([*rows, *[rows[-1]] * padding])

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [R, hidden] of the rows without padding → [R, V] float32"""
        num_rows = len(hidden)
        padded = torch.cat([hidden, hidden[-1:].expand(self._size(num_rows) - num_rows, -1)])
        self.last_logits = self._target.logits(padded)[:num_rows].clone()
        return self.last_logits.clone()

    def _size(self, num_rows: int) -> int:
        return step_size(num_rows, self._max_rows) if self._is_decode else num_rows


def check(context: Context) -> None:
    check_16_bits(context)
    check_formats(context)


def check_16_bits(context: Context) -> None:
    context.guard(SAME_TOKENS, lambda: _check_16_bits(context))


def check_formats(context: Context) -> None:
    """Those with kernels that have run least come last in their process: a kernel that fails may take the device with it."""
    for kind in FORMATS:
        context.guard(same_tokens_row(kind), partial(_check_format, context, kind))


def _check_16_bits(context: Context) -> None:
    with tempfile.TemporaryDirectory() as folder, _plain_twin(context, Path(folder)) as (twin, decoder):
        cases = _cases(context, twin.info.vocab_size)
        expected = {label: _generate_case(twin, label, requests) for label, requests in cases.items()}

        failures: list[str] = []

        def compare(labels: Sequence[str]) -> dict[str, CaseResult]:
            with _engine(context, Path(folder)) as ahead:
                failures.append(_capture_failure(ahead))
                actual = {label: _generate_case(ahead, label, cases[label]) for label in labels}
                return {label: _compare(twin, decoder, cases[label], expected[label], actual[label], TIE) for label in labels}

        found = compare(list(cases))
        wrong = [label for label, each in found.items() if each.wrong]
        row = Row(name=SAME_TOKENS, value=float(sum(len(each.wrong) for each in found.values())))
        row.facts = _facts(found)
        num_requests, ties = sum(each.requests for each in found.values()), sum(each.ties for each in found.values())
        row.note = f"of {num_requests} requests; {ties} more by a tie of less than {TIE:g} of a logit"
        if wrong:
            row.note = f"{found[wrong[0]].wrong[0]}; {row.note}"
        row.error = failures[0]
        context.emit(row)
        if wrong:  # compare again with switches: this may take longer than the part has left
            row.note = f"{_bisect(context, lambda: compare(wrong))}; {row.note}"
            context.emit(row)
        context.guard(CHUNKS_ONE_BY_ONE, lambda: _check_chunks_one_by_one(context, lambda: compare(list(cases))))


def _check_format(context: Context, kind: str) -> None:
    options = {
        **FORMATS[kind],
        "max_num_seqs": context.size(max(FORMATS_SIZES), 4),
        "max_model_len": FORMATS_LEN,
        "max_num_batched_tokens": FORMATS_LEN,
        "kv_cache_bytes": FORMATS_KV_BYTES,
    }
    tie = FP8_TIE if kind == "fp8" else TIE
    repeats = context.size(FORMATS_REPEATS, 2)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(_chunks_one_by_one())
        twin, decoder = stack.enter_context(_plain_twin(context, folder, FORMATS_MODEL, **options))
        longest, min_outputs = context.size(FORMATS_PROMPT, 7), context.size(FORMATS_OUTPUTS, 3)
        cases = {
            f"{size} at once": _requests(size, 0.0, twin.info.vocab_size, longest, min_outputs)
            for size in FORMATS_SIZES
            if size <= twin.info.max_num_seqs
        }
        expected = {label: _tokens(twin, requests, at_once=True) for label, requests in cases.items()}

        def compare() -> dict[str, CaseResult]:
            with _engine(context, folder, FORMATS_MODEL, **options) as ahead:
                actual = {
                    label: [tokens for _ in range(repeats) for tokens in _tokens(ahead, requests, at_once=True)]
                    for label, requests in cases.items()
                }
                return {
                    label: _compare(twin, decoder, requests * repeats, expected[label] * repeats, actual[label], tie)
                    for label, requests in cases.items()
                }

        found = compare()
        wrong = [f"{label}: {each.wrong[0]}" for label, each in found.items() if each.wrong]
        num_requests = sum(each.requests for each in found.values())
        differing = sum(each.ties + len(each.wrong) for each in found.values())
        row = Row(name=same_tokens_row(kind), value=100 * differing / num_requests, facts=_facts(found))
        row.note = f"{differing} of {num_requests}: {num_requests // repeats} requests, {repeats} times each"
        if wrong:
            row.error = f"wrong tokens with {kind} weights: {wrong[0]}"
        context.emit(row)
        if wrong and context.left_s >= FORMATS_BISECTED_S:
            row.note = f"{_bisect(context, compare, has_chunks=False)}; {row.note}"
            context.emit(row)


def _facts(found: dict[str, CaseResult]) -> dict[str, Any]:
    return {label: {"requests": each.requests, "ties": each.ties, "wrong": each.wrong[:3]} for label, each in found.items()}


def _capture_failure(engine: Engine) -> str:
    """Why steps with chunks were not captured, or empty. The tokens do not show it: uncaptured steps give the right ones."""
    chunks = engine.runner.steps.chunks  # type: ignore[attr-defined]
    return "" if chunks is None or not chunks.failure else f"steps with chunks lack graphs: {chunks.failure}"


def _check_chunks_one_by_one(context: Context, rerun: Callable[[], dict[str, CaseResult]]) -> None:
    with _chunks_one_by_one():
        gc.collect()  # as in `_bisect`
        found = rerun()
    differing = {label: each.ties + len(each.wrong) for label, each in found.items()}
    row = Row(name=CHUNKS_ONE_BY_ONE, value=100 * sum(differing.values()) / sum(each.requests for each in found.values()))
    row.facts = {label: {"requests": found[label].requests, "differing": number} for label, number in differing.items()}
    row.note = ", ".join(f"{label}: {number} of {found[label].requests}" for label, number in differing.items() if number)
    context.emit(row)


def _chunks_one_by_one() -> AbstractContextManager[object]:
    return mock.patch.object(PagedDecoder, "chunk_rows", return_value=0)


def _bisect(context: Context, rerun: Callable[[], dict[str, CaseResult]], *, has_chunks: bool = True) -> str:
    """Compare again with parts of the fast path switched off: if the tokens are right without a part, that part is at fault.
    `has_chunks`: whether steps with chunks are captured."""
    switches: dict[str, tuple[AbstractContextManager[object], ...]] = {
        "GATEHOUSE_EARLY_LAUNCH=0": (_in_turn(context),),
        f"{GRAPHS}=0": (mock.patch.dict(os.environ, {GRAPHS: "0"}),),
        "both": (_in_turn(context), mock.patch.dict(os.environ, {GRAPHS: "0"})),
    }
    if has_chunks:
        switches["chunks one by one"] = (_chunks_one_by_one(),)
    results = []
    for name, patches in switches.items():
        with ExitStack() as stack:
            for patch in patches:
                stack.enter_context(patch)
            gc.collect()  # the previous engine has cycles: its graphs must not be freed while the next one's are captured
            results.append(f"{name}: {sum(len(each.wrong) for each in rerun().values())} wrong")
    return "with " + ", ".join(results)


def _in_turn(context: Context) -> AbstractContextManager[object]:
    if context.device.type != "cuda":
        return nullcontext()
    from bench.gpu.layer import launched_serially

    return launched_serially()


@contextmanager
def _engine(context: Context, folder: Path, name: str = MODEL, **options: Any) -> Iterator[Engine]:
    """Serves by the default kernels, which are the newest: those that were timed would round in another order than the twin,
    which times none."""
    options = {"max_num_seqs": context.size(SEATS, 4), "max_model_len": 1024, "kv_cache_bytes": KV_BYTES, **options}
    with (
        mock.patch("engine.build._kernel_choices", return_value=KernelChoices(None)),
        random_engine(context, folder, name, layers=context.size(LAYERS, 1), **options) as engine,
    ):
        yield engine


@contextmanager
def _plain_twin(context: Context, folder: Path, name: str = MODEL, **options: Any) -> Iterator[tuple[Engine, PaddedDecoder]]:
    with _engine(context, folder, name, enforce_eager=True, **options) as twin:
        runner = twin.runner
        assert isinstance(runner, ModelRunner), "the twin launches nothing ahead"
        decoder = PaddedDecoder(runner.target, twin.info.max_num_seqs)
        runner.target = decoder  # type: ignore[assignment]
        yield twin, decoder


def _cases(context: Context, vocab_size: int) -> dict[str, list[GenerationRequest]]:
    sizes = (1, 3, 4) if context.rehearsal else SIZES
    found = {
        f"{size} {kind}": _requests(size, temperature, vocab_size, context.size(300, 9), context.size(16, 3))
        for size in sizes
        for kind, temperature in (("greedy", 0.0), ("drawn", 0.8))
    }
    longest, min_outputs = context.size(ALONE_PROMPT, 20), context.size(ALONE_TOKENS, 3)
    return {**found, ALONE: _requests(context.size(6, 2), 0.0, vocab_size, longest, min_outputs)}


def _requests(count: int, temperature: float, vocab_size: int, longest: int, min_outputs: int) -> list[GenerationRequest]:
    """Prompts of random lengths up to `longest`; answers of `min_outputs` tokens and up to eight more (fewer in a rehearsal),
    so that rows leave one after another."""
    rng = random.Random(count)
    return [
        GenerationRequest(
            request_id=str(number),
            tenant_id="bench",
            prompt_token_ids=list(traffic.random_prompt(rng, rng.randint(1, longest), vocab_size)),
            sampling=SamplingParams(
                temperature=temperature, seed=number, max_tokens=min_outputs + number % min(9, min_outputs), ignore_eos=True
            ),
        )
        for number in range(count)
    ]


def _generate_case(engine: Engine, label: str, requests: Sequence[GenerationRequest]) -> list[list[int]]:
    """All tokens of each request of a case."""
    if label == ALONE:
        return [tokens for request in requests for tokens in _tokens(engine, [request])]
    return _tokens(engine, requests)


def _tokens(engine: Engine, requests: Sequence[GenerationRequest], *, at_once: bool = False) -> list[list[int]]:
    """All tokens of each request. The last quarter of the requests is submitted later than the others, unless `at_once`."""
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    first = len(requests) if at_once else -(-3 * len(requests) // 4)

    def step() -> None:
        events = engine.step()
        traffic.check_events(events)
        for event in events:
            tokens[event.request_id] += event.token_ids
        check_fallbacks()

    with traffic.watched(engine) as (check_fallbacks, _):
        _submit(engine, requests[:first])
        for _ in range(LATE_STEP):
            step()
        _submit(engine, requests[first:])
        while engine.has_requests:
            step()
    return list(tokens.values())


def _submit(engine: Engine, requests: Sequence[GenerationRequest]) -> None:
    for request in requests:
        traffic.check_events(engine.submit(request))


def _compare(
    twin: Engine,
    decoder: PaddedDecoder,
    requests: Sequence[GenerationRequest],
    expected: Sequence[list[int]],
    actual: Sequence[list[int]],
    tie: float,
) -> CaseResult:
    result = CaseResult(len(requests))
    for request, expected_tokens, actual_tokens in zip(requests, expected, actual, strict=True):
        if actual_tokens == expected_tokens:
            continue
        label = f"request {request.request_id} of {len(requests)}"
        both = zip(expected_tokens, actual_tokens, strict=False)
        index = next((index for index, (expected_token, token) in enumerate(both) if token != expected_token), None)
        if index is None:
            result.wrong.append(f"{label} has {len(actual_tokens)} tokens instead of {len(expected_tokens)}")
            continue
        gap = _gap(twin, decoder, request, expected_tokens[: index + 1], actual_tokens[index])
        if gap <= tie:
            result.ties += 1
        else:
            tokens = f"{actual_tokens[index]} instead of {expected_tokens[index]}"
            result.wrong.append(f"{label}, token {index}: {tokens}, {gap:.2f} of a logit apart")
    return result


def _gap(
    twin: Engine, decoder: PaddedDecoder, request: GenerationRequest, expected_tokens: list[int], actual_token: int
) -> float:
    """How much, in logits, the twin preferred the last of `expected_tokens` to `actual_token` when it chose that token."""
    prompt = [*request.prompt_token_ids, *expected_tokens[:-1]]
    sampling = SamplingParams(
        temperature=request.sampling.temperature, seed=request.sampling.seed, max_tokens=1, ignore_eos=True
    )
    _tokens(twin, [GenerationRequest(request_id="gap", tenant_id="bench", prompt_token_ids=prompt, sampling=sampling)])
    ids = torch.tensor([[expected_tokens[-1]], [actual_token]], device=decoder.last_logits.device)
    values = decoder.last_logits[0][ids]
    if is_greedy(sampling):
        return float(values[0] - values[1])
    assert sampling.seed is not None
    scale = torch.full((2,), scale_of(sampling), device=ids.device)
    keys = torch.full((2,), signed(key(sampling.seed, len(prompt))), dtype=torch.int64, device=ids.device)
    _, scores = plain_sampling.winner(ids, values, torch.ones_like(values, dtype=torch.bool), scale, keys)
    return float((scores[0] - scores[1]) / scale[0])
