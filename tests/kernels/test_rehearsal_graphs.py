"""Graphs on an emulated GPU: failing captures, eviction, memory, and engines without graphs, with unchanged tokens."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import EngineConfigError
from engine.loop import Engine
from engine.protocol import MemoryPart
from engine.runner.cuda_graphs import CaptureFailed, CudaGraphs
from engine.switches import BUSY_WAIT, EARLY_LAUNCH, GRAPHS, OVERLAPPED_PREFILL
from tests.support.engines import generation_request, run_to_end, small_engine, tokens
from tests.support.rehearsal import DEVICE, Schedule, rehearsal
from tests.support.rehearsal.card import SEGMENT_BYTES
from tests.support.rehearsal.graphs import Graph
from tests.support.rehearsal.table import replace_triton_operations

SEATS = 16
PROMPTS = {str(number): [5, 6, 7 + number] for number in range(9)}
"""More than the sizes that are captured before the first request."""


def engine_of(model: Path, **options: Any) -> Engine:
    return small_engine(model, dtype="float32", max_num_seqs=SEATS, max_model_len=32, num_kv_blocks=32, **options)


def answers(engine: Engine) -> dict[str, list[int]]:
    events = run_to_end(engine, [generation_request(name, prompt, max_tokens=6) for name, prompt in PROMPTS.items()])
    return {name: tokens(each) for name, each in events.items()}


def test_a_step_that_cannot_be_captured_at_all_takes_the_slow_path_from_then_on(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answers(engine_of(llama))
    begun: list[Graph] = []

    def refuse(graph: Graph, **_: Any) -> None:
        begun.append(graph)
        raise torch.cuda.OutOfMemoryError("no room for a graph")

    with rehearsal(), replace_triton_operations():
        engine = engine_of(llama, device="cuda")
        monkeypatch.setattr(Graph, "capture_begin", refuse)
        assert answers(engine) == expected
        assert len(begun) == 2
        status = engine.status()
    assert status.fallback_steps_total == 5, "of 9 rows each"
    assert status.fallback_reason is not None
    assert "the graph of DecodeShape(name='decode', size=16, kind=None" in status.fallback_reason
    assert status.fallback_reason.endswith("OutOfMemoryError: no room for a graph")


def test_a_step_that_cannot_be_captured_whole_is_captured_up_to_its_logits(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answers(engine_of(llama))
    right, refused = Graph.capture_begin, iter([True])

    def refuse_once(graph: Graph, **options: Any) -> None:
        if next(refused, False):
            raise torch.cuda.OutOfMemoryError("no room for a graph")
        right(graph, **options)

    with rehearsal(), replace_triton_operations():
        engine = engine_of(llama, device="cuda")
        monkeypatch.setattr(Graph, "capture_begin", refuse_once)
        assert answers(engine) == expected
        assert engine.status().fallback_steps_total == 1


def test_an_error_within_a_capture_is_reported_instead_of_the_invalid_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    def end_badly(graph: Graph) -> None:
        graph.card.capture = None
        raise RuntimeError("operation failed due to a previous error during capture")

    calls: list[int] = []

    def function() -> None:
        calls.append(1)
        if len(calls) == 2:
            raise ValueError("the culprit")

    with rehearsal() as card:
        graphs = CudaGraphs(DEVICE, max_graphs=1)
        monkeypatch.setattr(Graph, "capture_end", end_badly)
        with pytest.raises(CaptureFailed, match="ValueError: the culprit"):
            graphs.make_ready((1, None), function)
        assert card.capture is None
        assert not graphs.is_ready((1, None))
        with pytest.raises(CaptureFailed, match="ValueError: the culprit"):
            graphs.make_ready((1, None), function)
    assert len(calls) == 2, "not even called again"


def test_an_invalidated_capture_does_not_affect_others() -> None:
    """Only one kind of step needs what cannot be captured: others keep their graphs, and later sizes are captured."""
    kept: list[torch.Tensor] = []

    def waits() -> None:
        kept[0].add_(1.0)
        kept[0].tolist()

    with rehearsal():
        graphs = CudaGraphs(DEVICE, max_graphs=3)
        kept.append(torch.zeros(1, device=DEVICE))
        graphs.make_ready(1, lambda: kept[0].add_(1.0))  # type: ignore[arg-type]
        with pytest.raises(CaptureFailed, match="not permitted when stream is capturing"):
            graphs.make_ready(2, waits)
        graphs.make_ready(3, lambda: kept[0].add_(1.0))  # type: ignore[arg-type]
        kept[0].zero_()
        for key in (1, 3):
            graphs.run(key, lambda: None)
        assert kept[0].tolist() == [2.0]


class Dropped:
    """A dropped engine: a reference cycle that only Python's garbage collector frees."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.itself = graph, self


def captured(function: Callable[[], None]) -> Graph:
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        graph = Graph()
        graph.capture_begin()
        function()
        graph.capture_end()
    return graph


def test_garbage_collection_frees_no_graph_during_a_capture() -> None:
    limits = gc.get_threshold()
    with rehearsal() as card:
        graphs = CudaGraphs(DEVICE, max_graphs=1)
        dropped = [Dropped(captured(lambda: None))]
        kept: list[list[int]] = []

        def drops() -> None:
            if card.capture is not None:
                dropped.clear()
                kept.extend([] for _ in range(100))  # more than a collection waits for

        gc.set_threshold(10, 1, 1)
        try:
            graphs.make_ready(1, drops)
        finally:
            gc.set_threshold(*limits)
        assert graphs.is_ready(1)
        assert gc.isenabled()


def test_garbage_collection_is_enabled_again_after_a_failed_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(graph: Graph, **_: Any) -> None:
        assert not gc.isenabled()
        raise RuntimeError("no capture here")

    with rehearsal():
        monkeypatch.setattr(Graph, "capture_begin", refuse)
        with pytest.raises(CaptureFailed):
            CudaGraphs(DEVICE, max_graphs=1).make_ready(1, lambda: None)
        assert gc.isenabled()


@pytest.mark.parametrize("how", ["reset", "dropped"])
def test_an_emulated_capture_fails_if_another_graph_is_destroyed_meanwhile(how: str) -> None:
    with rehearsal():
        graphs, held = CudaGraphs(DEVICE, max_graphs=1), [captured(lambda: None)]
        calls: list[int] = []

        def destroys() -> None:
            calls.append(1)
            if len(calls) == 2:
                if how == "reset":
                    held[0].reset()
                held.clear()

        with pytest.raises(CaptureFailed, match="another graph was destroyed meanwhile"):
            graphs.make_ready(1, destroys)


def test_graphs_set_aside_are_captured_again_and_restored_afterwards() -> None:
    with rehearsal() as card:
        graphs, kept = CudaGraphs(DEVICE, max_graphs=1), torch.zeros(1, device=DEVICE)

        def use(added: float) -> None:
            if not graphs.is_ready(1):
                graphs.make_ready(1, lambda: kept.fill_(added))  # type: ignore[arg-type]
            graphs.run(1, lambda: None)

        use(1.0)
        with graphs.fresh_graphs():
            use(2.0)
            assert kept.tolist() == [2.0]
        use(3.0)
        assert kept.tolist() == [1.0]
        assert card.num_captures == 2


def test_the_run_before_a_capture_allocates_on_the_stream_of_the_steps() -> None:
    with rehearsal() as card:
        graphs, streams = CudaGraphs(DEVICE, max_graphs=1), []
        graphs.make_ready(1, lambda: streams.append(card.stream))
        assert streams[0] is card.stream
        assert streams[1] is not card.stream, "no capture on the default stream"


def test_work_after_a_failed_capture_waits_for_the_run_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(graph: Graph, **_: Any) -> None:
        raise RuntimeError("no capture here")

    with rehearsal():
        graphs = CudaGraphs(DEVICE, max_graphs=1)
        monkeypatch.setattr(Graph, "capture_begin", refuse)
        kept = torch.zeros(4, device=DEVICE)

        def function() -> None:
            kept.add_(1.0)

        with pytest.raises(CaptureFailed):
            graphs.make_ready(4, function)
        assert (kept * 2).tolist() == [2.0] * 4


def test_the_least_recently_used_graph_is_evicted() -> None:
    with rehearsal() as card:
        graphs = CudaGraphs(DEVICE, max_graphs=2)
        kept = torch.zeros(3, device=DEVICE)

        def use(key: int) -> None:
            def count() -> None:
                kept[key].add_(1.0)

            if not graphs.is_ready(key):
                graphs.make_ready(key, count)
                kept.zero_()
            graphs.run(key, lambda: None)

        for key in (0, 1, 0, 2):
            use(key)
        assert [graphs.is_ready(key) for key in range(3)] == [True, False, True]
        assert card.num_captures == 3
        use(1)
        assert [graphs.is_ready(key) for key in range(3)] == [False, True, True]
        assert kept.tolist() == [0.0, 1.0, 0.0]


MIXED: list[dict[str, Any]] = [{"top_p": 0.9}, {"presence_penalty": 1.0}, {"logprobs": 1}, {"logprobs": 5}]


def mixed_history(engine: Engine) -> None:
    """Up to 240 decodes, eight fewer after each three steps, and beside them one with other wishes for two of these."""
    for number in range(240):
        engine.submit(generation_request(f"{number}", [5], max_tokens=4 + 3 * (number // 8)))
    for number in range(32):
        engine.submit(generation_request(f"mixed {number}", [6], max_tokens=3, temperature=1.0, **MIXED[number % len(MIXED)]))
        for _ in range(3):
            engine.step()
    run_to_end(engine, [])


def test_alternating_kinds_of_steps_do_not_keep_evicting_each_other(llama: Path) -> None:
    with rehearsal(Schedule.EARLY) as card, replace_triton_operations():
        engine = small_engine(llama, device="cuda", dtype="float32", max_num_seqs=256, max_model_len=128, num_kv_blocks=2048)
        mixed_history(engine)
        captures = card.num_captures
        mixed_history(engine)
        assert card.num_captures <= captures + 4, "the same steps once more: sizes have a graph that serves all of their kinds"
        assert engine.status().fallback_steps_total == 0


def test_without_room_for_a_whole_graph_the_graph_up_to_logits_is_used(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.runner.graph_eviction.WORTH", 3)
    monkeypatch.setattr("engine.runner.runner_choice.decode_graphs_kept", lambda *_, **__: 9)
    requests = [generation_request(name, prompt, max_tokens=9, temperature=1.0, top_p=0.9) for name, prompt in PROMPTS.items()]
    expected = run_to_end(engine_of(llama), requests)
    with rehearsal() as card, replace_triton_operations():
        engine = engine_of(llama, device="cuda")
        found = run_to_end(engine, requests)
    assert {name: tokens(each) for name, each in found.items()} == {name: tokens(each) for name, each in expected.items()}
    assert card.num_captures == 9 + 4 + 2 * 5 + 2, "of 16 rows: as far as the logits, and from the third step on of this kind"
    assert card.num_replays == 10, "one for each token, two for the first one, which is after chunks"


@pytest.mark.parametrize("says", ["0", "1"])
def test_without_graphs_steps_are_launched_ahead_with_the_same_tokens(
    llama: Path, says: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = answers(engine_of(llama))
    monkeypatch.setenv(GRAPHS, says)
    with rehearsal() as card, replace_triton_operations():
        engine = engine_of(llama, device="cuda")
        assert answers(engine) == expected
        assert engine.status().fallback_steps_total == 0
    assert bool(card.num_captures) is bool(card.num_replays) is (says == "1")
    assert any(f"{GRAPHS}=0" in record.getMessage() for record in caplog.records) is (says == "0")


@pytest.mark.parametrize("switch", [GRAPHS, EARLY_LAUNCH, OVERLAPPED_PREFILL, BUSY_WAIT])
@pytest.mark.parametrize("says", ["no", "false", ""])
def test_an_invalid_switch_stops_the_start(switch: str, says: str, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(switch, says)
    with pytest.raises(EngineConfigError, match=f"{switch} is '{says}', and can be 0 or 1"):
        engine_of(llama)


def graphs_part(engine: Engine) -> MemoryPart:
    return next(part for part in engine.info.memory if part.name == "graphs")


def test_driver_memory_of_captured_graphs_is_measured_with_their_number(llama: Path) -> None:
    with rehearsal() as card, replace_triton_operations():
        part = graphs_part(engine_of(llama, device="cuda"))
        assert part.measured_bytes is not None
        assert part.num_measured == card.num_captures < (part.num_predicted or 0)
        assert part.measured_bytes >= card.graph_bytes > 0
        assert (part.measured_bytes - card.graph_bytes) % SEGMENT_BYTES == 0, "beside it there is what torch reserved"


def test_without_graphs_the_count_is_zero(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GRAPHS, "0")
    with rehearsal(), replace_triton_operations():
        assert graphs_part(engine_of(llama, device="cuda")).num_measured == 0


@pytest.mark.parametrize("given_back", [1 << 30, -(1 << 30)])
def test_other_processes_disturb_only_the_measurement_of_graphs(
    given_back: int, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, changes = Graph.capture_end, iter([given_back])

    def beside_others(graph: Graph) -> None:
        right(graph)
        graph.card.others_bytes -= next(changes, 0)

    with rehearsal(total_bytes=8 << 30) as card, replace_triton_operations():
        card.others_bytes = 2 << 30
        monkeypatch.setattr(Graph, "capture_end", beside_others)
        part = graphs_part(engine_of(llama, device="cuda"))
        assert part.measured_bytes is not None
        if given_back > 0:
            assert part.measured_bytes % SEGMENT_BYTES == 0, "what torch reserved, and nothing below that"
        else:
            assert part.measured_bytes >= (1 << 30) + card.graph_bytes
