"""The GPU benchmark on an emulated GPU: its code with graphs, streams and events runs to its end.

`bench/gpu.sh --rehearse` runs the same parts on the CPU without these, and checks the results of the kernels. Here most
kernels are launched but compute nothing, and engines use torch's operations. Peers are omitted.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from bench.gpu import calibration, check_rows, models, same_tokens, serve, serve_chunks, serve_idle, traffic
from bench.gpu.context import Context
from bench.gpu.device_lost import DeviceLost
from bench.gpu.idle import Idle
from bench.gpu.inputs import FP8, make_pages, make_queries
from bench.gpu.models import random_engine
from bench.gpu.plan import PARTS, Part
from bench.gpu.processes import Outcome
from bench.gpu.report import document
from bench.gpu.rows import Row
from bench.gpu.targets import (
    CHUNKS_ONE_BY_ONE,
    DIFFERING_PERCENT_MAX,
    SAME_TOKENS,
    TARGETS,
    TOKEN_FORMATS,
    same_tokens_row,
)
from bench.gpu.traffic import BenchRequest
from engine.layers.forward_inputs import ForwardInputs
from engine.loop import Engine
from engine.protocol import GenerationRequest
from engine.runner.chunk_step import ChunkShape, ChunkStep, SamplingInputs
from engine.runner.cuda_graphs import CudaGraphs
from engine.runner.kernel_trials import KernelFault
from engine.runner.paged_decoder import PagedDecoder
from engine.runner.slot_runner import SlotRunner
from engine.runner.slots import SlotState
from engine.runner.token_spans import TokenSpan
from engine.switches import EARLY_LAUNCH
from kernels.alternatives import CHOICES, oldest_alternatives, put_in_force
from kernels.attention_rows import AttentionShape
from kernels.reference.attention import paged_decode as exact_decode
from kernels.variants import CompilationFailed
from tests.support.rehearsal import DEVICE, H100, H200, Kind, Schedule, quantised, rehearsal
from tests.support.rehearsal.table import replace_triton_operations

FACTS = {"bandwidth": 4e12, "flops": 8e14, "flops_fp8": 1.6e15, "gap_s": 1e-6}
NUMBERS_ELSEWHERE = ("check attention", "check prefill", "check rows", "check products", "check fused products")
"""Checks whose kernels take long in the interpreter: they are launched here and computed by the rehearsal on the CPU."""
WARM_UP = ("warm small", "warm in turn")


def without_a_trace(run: Callable[[], object], device: torch.device) -> Idle:
    """Run without a profiler: that of a torch without CUDA sees no GPU."""
    run()
    torch.cuda.synchronize()
    assert device == DEVICE
    return Idle(0.0, 0.0, 1.0, 1, 0.0, {})


def together() -> list[tuple[Part, ...]]:
    """Parts by whose rows a target is complete, others alone. Of what warms up only what no part that measures does as well."""
    kept = [part for part in PARTS if part.name != "peers" and (part.target != "warm-up" or part.name in WARM_UP)]
    kernels = tuple(part for part in kept if part.target == "kernels")
    return [*((part,) for part in kept if part not in kernels), kernels]


@pytest.mark.parametrize("parts", together(), ids=lambda parts: parts[0].name)
def test_every_part_runs_to_its_end_on_a_gpu(parts: tuple[Part, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    part = parts[0]
    monkeypatch.setattr("bench.gpu.serve_idle.measure_idle", without_a_trace)
    monkeypatch.setattr("bench.gpu.speed_attention._flex", lambda *_: {"flex_attention": 1.0})  # its masks want a real device
    lines: list[dict[str, Any]] = []
    has_kernels = part.family in ("calibrate", "kernels") or part.module.startswith("bench.gpu.check_")
    with ExitStack() as stack:
        runs = part.family not in ("kernels", "choices") and part.name not in NUMBERS_ELSEWHERE
        card = stack.enter_context(rehearsal(Schedule.EARLY, total_bytes=8 << 30, runs_kernels=runs))
        if not has_kernels:
            stack.enter_context(replace_triton_operations())
        torch.manual_seed(0)
        for each in parts:
            measure = getattr(importlib.import_module(each.module), each.function)
            measure(Context(DEVICE, True, dict(FACTS), lines.append, time.monotonic() + 600))
    rows = {line["row"]["name"]: line["row"] for line in lines if "row" in line}
    assert {name: row["note"] for name, row in rows.items() if row["error"]} == {}
    assert not card.computed_early
    assert card.broken is None
    mine = {target.name for target in TARGETS if target.part == part.target}
    if part.target == "checks":
        assert rows
        assert rows.keys() <= mine, "a check that is no target is judged by nobody"
    else:
        assert mine == rows.keys(), "a row that is no target is missed by nobody"


@pytest.mark.parametrize(("kind", "judged"), [(H200, "below"), (H100, "other card")])
def test_the_result_names_the_gpu_and_that_of_the_goals(kind: Kind, judged: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.gpu.driver.state", lambda: "driver_version, clocks | 580.95.05, 1980 MHz")
    lines: list[dict[str, Any]] = []
    with rehearsal(Schedule.EARLY, kind=kind, total_bytes=1 << 30):
        calibration.calibrate(Context(DEVICE, True, {}, lines.append, time.monotonic() + 600))
    facts = {name: fact for line in lines for name, fact in line.get("facts", {}).items()}
    report = document([Row(name="Llama-3.1-8B bf16, batch 1", value=180.0)], Outcome(facts=facts), rehearsal=False, taken_s=1.0)
    assert report["card"] == {
        "name": kind.name, "memory_bytes": 1 << 30, "multiprocessors": 4, "l2_bytes": kind.l2_bytes, "capability": "9.0",
        "driver": "580.95.05",
    }  # fmt: skip
    assert [row["verdict"] for row in report["rows"]] == [judged]


def with_blocks(num_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give engines of a rehearsal `num_blocks` KV blocks."""
    rehearsed = models._rehearsal_options
    monkeypatch.setattr(models, "_rehearsal_options", lambda options: {**rehearsed(options), "num_kv_blocks": num_blocks})


def test_a_small_gpu_runs_what_its_cache_holds_and_refuses_larger_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    with_blocks(6, monkeypatch)
    row = emitted_rows(serve.saturated)["Llama-3.1-8B, 1000/1000 saturated"]
    assert row["error"] == ""
    assert row["note"].startswith("3 seats, as many as the cache of 96 tokens holds")
    assert row["facts"]["preemptions"] == 0
    rows = emitted_rows(serve.llama_8b)
    assert "this card has no room for 3 requests of" in rows["Llama-3.1-8B bf16, batch 256, 1k context"]["error"]
    assert rows["Llama-3.1-8B bf16, batch 1"]["error"] == ""


def emitted_rows(measure: Callable[[Context], None]) -> dict[str, dict[str, Any]]:
    """Run a part on an emulated GPU with engines that use torch's operations; return its rows."""
    lines: list[dict[str, Any]] = []
    with rehearsal(Schedule.EARLY, total_bytes=8 << 30), replace_triton_operations():
        measure(Context(DEVICE, True, dict(FACTS), lines.append, time.monotonic() + 600))
    return {line["row"]["name"]: line["row"] for line in lines if "row" in line}


def test_tokens_of_graphs_equal_those_of_an_eager_engine_with_as_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: set[int] = set()
    prepare = PagedDecoder.prepare

    def noted(decoder: PagedDecoder, rows: Sequence[TokenSpan]) -> ForwardInputs:
        if all(len(row.token_ids) == 1 for row in rows):
            sizes.add(len(rows))
        return prepare(decoder, rows)

    at_a_time: list[int] = []
    tokens = same_tokens._tokens

    def counted(engine: Engine, requests: Sequence[GenerationRequest]) -> list[list[int]]:
        at_a_time.append(len(requests))
        return tokens(engine, requests)

    monkeypatch.setattr(PagedDecoder, "prepare", noted)
    monkeypatch.setattr(same_tokens, "_tokens", counted)
    rows = emitted_rows(same_tokens.check_16_bits)
    row = rows[SAME_TOKENS]
    assert (row["value"], row["error"]) == (0.0, "")
    assert row["note"] == "of 18 requests; 0 more by a tie of less than 0.1 of a logit"
    assert (rows[CHUNKS_ONE_BY_ONE]["value"], rows[CHUNKS_ONE_BY_ONE]["error"], rows[CHUNKS_ONE_BY_ONE]["note"]) == (
        0.0,
        "",
        "",
    )
    assert at_a_time == 3 * [1, 1, 3, 3, 4, 4, 1, 1], "the twin's, then those of the graphs, twice; the last two are alone"
    assert 4 in sizes
    assert 3 not in sizes, "a step of three rows is one of four"


def test_tiles_of_products_are_compiled_together_before_any_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    choices = importlib.import_module("bench.gpu.choices")
    launched: dict[str, set[Any]] = {"compiled": set(), "timed": set()}
    launch, stage = choices.fused_linear._launch, ["other"]

    def noted(x: torch.Tensor, weight: Any, epilogue: Any, tiles: Any) -> None:
        launched.setdefault(stage[0], set()).add((len(x), x.shape[1], epilogue.gate, tiles))
        launch(x, weight, epilogue, tiles)

    @contextmanager
    def compiling(_: str) -> Iterator[None]:
        stage[0] = "compiled"
        yield
        stage[0] = "timed"

    def seconds(calls: Sequence[Callable[[], object]], *_: object, **__: object) -> list[float]:
        calls[0]()
        return [1.0]

    monkeypatch.setattr(choices.fused_linear, "_launch", noted)
    monkeypatch.setattr(choices, "compiling", compiling)
    monkeypatch.setattr(choices, "seconds", seconds)
    with rehearsal(Schedule.EARLY, total_bytes=8 << 30, runs_kernels=False):
        choices._products(Context(DEVICE, True, dict(FACTS), lambda _: None, time.monotonic() + 600), "int8")
    assert launched["timed"]
    assert launched["timed"] <= launched["compiled"]


def test_tiles_that_cannot_be_compiled_or_run_leave_the_others_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    choices = importlib.import_module("bench.gpu.choices")
    launch, failing, lines = choices.fused_linear._launch, choices.ROW_TILES[-1], list[dict[str, Any]]()

    def fails(x: torch.Tensor, weight: Any, epilogue: Any, tiles: Any) -> None:
        if tiles == failing:
            raise RuntimeError("out of resources")
        launch(x, weight, epilogue, tiles)

    @contextmanager
    def compiling(_: str) -> Iterator[None]:
        yield
        raise CompilationFailed("one of them")

    def seconds(calls: Sequence[Callable[[], object]], *_: object, **__: object) -> list[float]:
        calls[0]()
        return [1.0]

    monkeypatch.setattr(choices, "_launch_candidates", lambda *_: None)
    monkeypatch.setattr(choices.fused_linear, "_launch", fails)
    monkeypatch.setattr(choices, "compiling", compiling)
    monkeypatch.setattr(choices, "seconds", seconds)
    monkeypatch.setattr(choices, "TILE_CHOICES", {"int8": (1,)})
    with rehearsal(Schedule.EARLY, total_bytes=8 << 30, runs_kernels=False):
        choices._products(Context(DEVICE, True, dict(FACTS), lines.append, time.monotonic() + 600), "int8")
    [row] = [line["row"] for line in lines]
    assert set(row["facts"]["failed"].values()) == {"RuntimeError: out of resources"}
    assert all(len(us) == len(choices.ROW_TILES) for us in row["facts"]["us"].values())


def test_compared_tokens_are_those_of_the_default_kernels_without_timing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with rehearsal(Schedule.EARLY, total_bytes=8 << 30, times_kernels=True), replace_triton_operations():
        context = Context(DEVICE, True, dict(FACTS), lambda _: None, time.monotonic() + 600)
        put_in_force(oldest_alternatives())  # by an earlier engine
        with same_tokens._engine(context, tmp_path) as ahead:
            serving = {choice.serving(*choice.alternatives) for choice in CHOICES}
    assert ahead.info.kernel_choices == []
    assert serving == {choice.alternatives[0] for choice in CHOICES}


@pytest.mark.parametrize("fault", ["graphs", "slots", "chunks"])
def test_wrong_tokens_are_counted_and_the_row_names_the_switches_that_avoid_them(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    advance = SlotState.advance

    def cut_off(state: SlotState, rows: torch.Tensor, tokens: torch.Tensor, **out: Any) -> None:
        advance(state, rows, tokens.clamp(max=100), **out)

    if fault == "graphs":
        capture = CudaGraphs._capture

        def capture_another(graphs: CudaGraphs, graph: torch.cuda.CUDAGraph, function: Callable[[], None]) -> None:
            with mock.patch.object(SlotState, "advance", cut_off):
                capture(graphs, graph, function)

        monkeypatch.setattr(CudaGraphs, "_capture", capture_another)
    elif fault == "chunks":
        to_choose = ChunkStep.sampling_inputs

        def negated(*given: Any) -> SamplingInputs:
            rows = to_choose(*given)
            return rows._replace(hidden=rows.hidden * -1.0)

        monkeypatch.setattr(ChunkStep, "sampling_inputs", negated)
    else:
        monkeypatch.setattr(SlotState, "advance", cut_off)
    wrong = "3 drawn" if fault == "graphs" else "3 greedy"
    cases = same_tokens._cases  # of which every wrong one is computed again with each switch
    monkeypatch.setattr(same_tokens, "_cases", lambda *given: {wrong: cases(*given)[wrong]})
    row = emitted_rows(same_tokens.check_16_bits)[SAME_TOKENS]
    assert row["value"] > 0
    assert "of a logit apart" in row["note"]
    both = "GATEHOUSE_GRAPHS=0: 0 wrong, both: 0 wrong"
    assert (both in row["note"]) is (fault == "graphs"), row["note"]
    assert ("chunks one by one: 0 wrong" in row["note"]) is (fault == "chunks"), row["note"]


def test_chunks_that_cannot_be_captured_fail_the_token_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    captured = CudaGraphs._capture

    def fails(graphs: CudaGraphs, graph: torch.cuda.CUDAGraph, function: Any) -> None:
        shape = getattr(function, "args", (None,))[0]
        if isinstance(shape, ChunkShape) and shape.num_tokens:
            raise RuntimeError("no graph here")
        captured(graphs, graph, function)

    monkeypatch.setattr(CudaGraphs, "_capture", fails)
    cases = same_tokens._cases
    monkeypatch.setattr(same_tokens, "_cases", lambda *given: {"3 greedy": cases(*given)["3 greedy"]})
    rows = emitted_rows(same_tokens.check_16_bits)
    assert rows[SAME_TOKENS]["value"] == 0.0
    assert rows[SAME_TOKENS]["error"].startswith("steps with chunks lack graphs: ")
    assert "no graph here" in rows[SAME_TOKENS]["error"]
    assert rows[CHUNKS_ONE_BY_ONE]["error"] == ""


def test_an_error_as_small_as_rounding_is_detected_against_an_equal_chunking(monkeypatch: pytest.MonkeyPatch) -> None:
    advance = SlotState.advance

    def cut_off(state: SlotState, rows: torch.Tensor, tokens: torch.Tensor, **out: Any) -> None:
        advance(state, rows, tokens.clamp(max=100), **out)

    monkeypatch.setattr(SlotState, "advance", cut_off)
    monkeypatch.setattr(same_tokens, "TIE", 1e9)
    cases = same_tokens._cases
    monkeypatch.setattr(same_tokens, "_cases", lambda *given: {"3 greedy": cases(*given)["3 greedy"]})
    rows = emitted_rows(same_tokens.check_16_bits)
    assert rows[SAME_TOKENS]["value"] == 0.0
    assert rows[CHUNKS_ONE_BY_ONE]["value"] > DIFFERING_PERCENT_MAX
    assert rows[CHUNKS_ONE_BY_ONE]["note"].startswith("3 greedy: ")


@pytest.mark.parametrize("kind", TOKEN_FORMATS)
def test_a_product_that_reads_too_early_in_captured_steps_fails_the_row_of_its_format(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bind, capture = getattr(quantised, f"bind_{kind}"), CudaGraphs._capture
    is_capturing = [False]

    def noted(graphs: CudaGraphs, graph: torch.cuda.CUDAGraph, function: Callable[[], None]) -> None:
        is_capturing[0] = True
        capture(graphs, graph, function)
        is_capturing[0] = False

    def bind_early(*weight: Any) -> Callable[..., torch.Tensor]:
        product: Callable[..., torch.Tensor] = bind(*weight)

        def multiply(x: torch.Tensor, **options: Any) -> torch.Tensor:
            if not is_capturing[0]:
                return product(x, **options)
            held = torch.zeros_like(x)
            early = product(held, **options)  # of what x was at the previous replay
            held.copy_(x)
            return early

        return multiply

    monkeypatch.setattr(CudaGraphs, "_capture", noted)
    monkeypatch.setattr(quantised, f"bind_{kind}", bind_early)
    rows = emitted_rows(same_tokens.check_formats)
    assert rows.keys() == {same_tokens_row(each) for each in TOKEN_FORMATS}
    for each in TOKEN_FORMATS:
        row = rows[same_tokens_row(each)]
        if each == kind:
            assert row["error"].startswith(f"wrong tokens with {kind} weights: ")
            assert row["error"].endswith("of a logit apart")
            assert row["value"] > DIFFERING_PERCENT_MAX
            assert "GATEHOUSE_GRAPHS=0: 0 wrong, both: 0 wrong" in row["note"]
        else:
            assert (row["error"], row["value"]) == ("", 0.0)


def test_one_wrong_request_fails_the_row_of_its_format_however_few_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, runs = same_tokens._tokens, [0]

    def last_is_wrong(engine: Engine, requests: Sequence[GenerationRequest], **options: Any) -> list[list[int]]:
        found = tokens(engine, requests, **options)
        if isinstance(engine.runner, SlotRunner):
            runs[0] += 1
            if runs[0] == 1:
                found[-1][-1] = (found[-1][-1] + 1) % engine.info.vocab_size
        return found

    monkeypatch.setattr(same_tokens, "_tokens", last_is_wrong)
    monkeypatch.setattr(same_tokens, "FORMATS", {"int8": same_tokens.FORMATS["int8"]})
    row = emitted_rows(same_tokens.check_formats)[same_tokens_row("int8")]
    assert row["value"] == 10.0 <= DIFFERING_PERCENT_MAX
    assert row["error"].startswith("wrong tokens with int8 weights: 1 at once: request 0 of 2, token 2: ")


@pytest.mark.parametrize("waits", [True, False])
def test_tokens_of_replayed_steps_are_read_after_their_events(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with rehearsal(Schedule.LATE):
        if not waits:
            monkeypatch.setattr(torch.cuda.Event, "synchronize", lambda _: None)
        found, expected = check_rows._host_tokens_of_graph(
            Context(DEVICE, True, dict(FACTS), lambda _: None, time.monotonic() + 600)
        )
        assert isinstance(found, torch.Tensor)
        assert isinstance(expected, torch.Tensor)
        assert torch.equal(found, expected) is waits


def test_a_wrong_captured_chunk_fails_however_fast_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    to_choose = ChunkStep.sampling_inputs
    lines: list[dict[str, Any]] = []

    def negated(*given: Any) -> SamplingInputs:
        rows = to_choose(*given)
        return rows._replace(hidden=rows.hidden * -1.0)

    with rehearsal(Schedule.EARLY, total_bytes=8 << 30), replace_triton_operations():
        context = Context(DEVICE, True, dict(FACTS), lines.append, time.monotonic() + 600)
        with random_engine(context, tmp_path, "qwen3-0.6b", layers=1, max_num_seqs=4) as engine:
            serve_chunks.measure_chunk(context, engine, 64)
            monkeypatch.setattr(ChunkStep, "sampling_inputs", negated)
            serve_chunks.measure_chunk(context, engine, 64)
    right, wrong = (line["row"] for line in lines)
    assert right["error"] == ""
    assert right["facts"]["difference"] <= serve_chunks.DIFFERENCE_MAX
    assert "a captured chunk gives a wrong result" in wrong["error"]
    assert wrong["facts"]["us"], "what was timed is kept"


def test_a_row_whose_steps_fell_back_to_the_slow_path_fails_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("no launch here")

    monkeypatch.setattr(SlotRunner, "launch", refuse)
    rows = emitted_rows(serve.small_models)
    assert rows
    for name, row in rows.items():
        assert "1 steps fell back to the plain path: a step could not be launched: RuntimeError: no lau" in row["error"], name


def test_kernel_times_are_of_serially_captured_graphs_and_waits_of_served_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[dict[str, Any]] = []
    captured: list[str] = []
    capture, name = CudaGraphs._warm_up_and_capture, "GPU idle in steady decode, batch 256"

    def noted(graphs: CudaGraphs, function: Callable[[], None]) -> Any:
        captured.append(os.environ.get(EARLY_LAUNCH, "1"))
        return capture(graphs, function)

    monkeypatch.setattr(CudaGraphs, "_warm_up_and_capture", noted)
    monkeypatch.setattr(serve_idle, "measure_idle", without_a_trace)
    with rehearsal(Schedule.EARLY, total_bytes=8 << 30), replace_triton_operations():
        context = Context(DEVICE, True, dict(FACTS), lines.append, time.monotonic() + 600)
        with random_engine(context, tmp_path, "qwen3-0.6b", layers=1, max_num_seqs=4) as engine:
            for number in range(3):
                traffic.submit(engine, f"s{number}", BenchRequest((3, 4, 5), 40))
            traffic.steps(engine, lambda window: bool(window.tokens) and window.tokens[-1] == 3)
            captured.clear()
            earlier = serve_idle.steps(engine, 3)
            serve_idle.idle_row(context, name, engine, 3, earlier)
            assert captured
            assert set(captured) == {"0"}
            before = len(captured)
            traffic.steps(engine, lambda window: len(window.step_s) >= 3)
            assert len(captured) == before, "those from before are back"
            engine.abort_all()
    first, last = (line["row"] for line in lines)
    assert "the profiler gave no figure" in first["error"]
    assert last["error"] == ""
    assert last["facts"]["gaps_percent"] == 0.0
    assert last["value"] == last["facts"]["waits_percent"], "any two events are as far apart here"


def test_the_attention_reference_synchronises_independently_of_the_heads() -> None:
    """A check that synchronises per head would do so thousands of times on a GPU shared with other processes."""

    def num_waits(num_heads: int) -> int:
        shape = AttentionShape(16, num_heads, 2, 32)
        with rehearsal(Schedule.EARLY) as card:
            pages = make_pages([5, 20], shape, dtype=FP8, device=DEVICE)
            q, scales = make_queries(pages, 2, torch.float16), torch.tensor([0.5, 2.0], device=DEVICE)
            card.syncs.clear()
            exact_decode(q.double(), pages.cache, pages.tables, pages.context_lens, shape, kv_scales=scales)
            return len(card.syncs)

    assert num_waits(8) == num_waits(2)


def test_memory_is_released_after_a_row_unless_it_succeeded_and_its_engine_stays_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise ValueError("no figure")

    given_back: list[int] = []
    with rehearsal(Schedule.EARLY), replace_triton_operations():
        context = Context(DEVICE, True, dict(FACTS), lambda _: None, time.monotonic() + 600)
        with random_engine(context, tmp_path, "qwen3-0.6b", layers=1, max_num_seqs=4) as engine:
            monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given_back.append(1))
            context.guard("a row", lambda: traffic.run(engine, [BenchRequest((3, 4, 5), 4)]))
            assert not given_back
            context.guard("a row", fail)
            assert len(given_back) == 1
        context.guard("a row", lambda: None)
        assert len(given_back) == 2


def test_a_lost_device_ends_its_part_at_the_failing_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore words")

    def breaks() -> None:
        monkeypatch.setattr(torch.cuda, "synchronize", broken)
        raise ValueError("the first to see it")

    lines: list[dict[str, Any]] = []
    with rehearsal():
        context = Context(DEVICE, True, dict(FACTS), lines.append, time.monotonic() + 600)
        with pytest.raises(SystemExit, match="the device is broken since a row: CUDA error: an illegal memory access"):
            context.guard("a row", breaks)
    assert [line["row"]["error"] for line in lines] == ["ValueError: the first to see it"]


def test_a_kernel_that_does_not_end_is_not_waited_for_and_its_rows_are_left_to_another_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def hangs() -> None:
        raise KernelFault("it does not end")

    lines: list[dict[str, Any]] = []
    with rehearsal():
        context = Context(DEVICE, True, dict(FACTS), lines.append, time.monotonic() + 600)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: pytest.fail("it would wait for ever"))
        with pytest.raises(DeviceLost, match="since a row: it does not end"):
            context.guard("a row", hangs)
    assert not lines


def test_rows_of_an_earlier_process_are_not_measured_again() -> None:
    measured: list[str] = []
    context = Context(torch.device("cpu"), True, {}, lambda _: None, 600.0, done=frozenset({"first", "second"}))
    for names in ("first", ["first", "second"], ["second", "third"]):
        context.guard(names, lambda names=names: measured.append(names[-1]))  # type: ignore[misc]
    assert measured == ["third"]
