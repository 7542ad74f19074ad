"""Steps with prompt chunks on an emulated GPU: one graph per step, with the tokens of the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.loop import Engine
from engine.runner.chunk_step import ChunkShape, ChunkStep
from engine.runner.cuda_graphs import CudaGraphs
from engine.speculation.options import SpeculativeOptions
from engine.step_sizes import CHUNKS_MANY, chunk_shapes, sampled_shapes
from engine.switches import GRAPHS
from tests.support.engines import generation_request, run_to_end, small_engine, tokens
from tests.support.rehearsal import Schedule, rehearsal
from tests.support.rehearsal.card import Card
from tests.support.rehearsal.graphs import Graph
from tests.support.rehearsal.table import replace_triton_operations
from tests.support.tiny_models import saved_first_layer, saved_model

ROOM: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": 128, "num_kv_blocks": 64, "max_num_batched_tokens": 64}
SIZES = {"num_hidden_layers": 3, "head_dim": 16}


@pytest.fixture
def model() -> Path:
    return saved_model("llama", **SIZES).directory


@pytest.fixture
def shallow() -> Path:
    return saved_first_layer("llama", **SIZES)


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of operations of each replayed graph."""
    sizes: list[int] = []
    replay = Graph.replay

    def counted(graph: Graph) -> None:
        sizes.append(len(graph.works))
        replay(graph)

    monkeypatch.setattr(Graph, "replay", counted)
    return sizes


def launched_beside_a_decode(card: Card, engine: Engine, replayed: list[int], prompt: list[int]) -> int:
    """Return the number of operations that the host launches outside graphs for a step with a whole prompt and a decode."""
    engine.submit(generation_request("decodes", [5, 6, 7], max_tokens=30))
    for _ in range(4):
        engine.step()
    for number in range(2):  # the first one of its shape is captured
        engine.submit(generation_request(f"prompt {number}", prompt, max_tokens=1))
        before, num_replayed = card.stream.launched, len(replayed)
        engine.step()
        found = card.stream.launched - before - sum(replayed[num_replayed:])
        assert len(replayed) - num_replayed == 2, "one graph up to hidden states, and one up to tokens"
    run_to_end(engine, [])
    return found


def test_the_number_of_host_launches_does_not_depend_on_the_layers(model: Path, shallow: Path, replayed: list[int]) -> None:
    found = []
    for folder in (shallow, model):
        with rehearsal() as card, replace_triton_operations():
            engine = small_engine(folder, device="cuda", dtype="float32", **ROOM)
            found.append(launched_beside_a_decode(card, engine, replayed, list(range(3, 33))))
    assert found[0] == found[1] == 1, "the copy of its inputs"


@pytest.mark.parametrize(
    ("options", "schedule"),
    [
        ({}, Schedule.RANDOM),
        ({"kv_cache_dtype": "fp8"}, Schedule.EARLY),
        ({"speculative": True}, Schedule.LATE),
    ],
    ids=str,
)
def test_captured_steps_with_chunks_give_the_tokens_of_the_plain_runner(
    options: dict[str, Any], schedule: Schedule, model: Path, shallow: Path, replayed: list[int]
) -> None:
    """Prompts of one step and of several, beside decodes, of lengths on both sides of a size."""
    given = {**ROOM, "device": "cuda", "dtype": "float32", **options}
    if given.pop("speculative", False):
        given["speculative_config"] = SpeculativeOptions(method="draft_model", model=shallow, num_speculative_tokens=2)
    requests = [
        generation_request(str(length), [3 + (7 * place + length) % 100 for place in range(length)], max_tokens=3 + length % 4)
        for length in (1, 2, 15, 16, 17, 33, 64, 65, 100)
    ]
    with rehearsal(), replace_triton_operations():
        eager = {name: value for name, value in given.items() if name != "speculative_config"}
        expected = run_to_end(small_engine(model, enforce_eager=True, **eager), requests)
    with rehearsal(schedule) as card, replace_triton_operations():
        engine = small_engine(model, **given)
        card.syncs.clear()
        found = run_to_end(engine, requests)
    assert {name: tokens(each) for name, each in found.items()} == {name: tokens(each) for name, each in expected.items()}
    assert {sync.kind for sync in card.syncs} <= {"event"}, "nobody waits for a value"
    assert engine.fallbacks.count == 0


@pytest.mark.parametrize("switch", ["1", "0"])
def test_a_prompt_read_alone_is_launched_at_most_one_step_ahead(
    switch: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its steps have no tokens to wait for; requests that arrive meanwhile would wait for all launched steps."""
    monkeypatch.setenv(GRAPHS, switch)
    with rehearsal() as card, replace_triton_operations():
        engine = small_engine(model, device="cuda", dtype="float32", **{**ROOM, "max_num_batched_tokens": 16})
        engine.submit(generation_request("long", [3 + place % 100 for place in range(120)], max_tokens=1))
        ends: list[int] = []
        for _ in range(7):
            engine.step()
            ends.append(card.stream.launched)
            if len(ends) > 1:
                assert card.stream.done >= ends[-2], "the step before the last one is over"


def test_all_shapes_are_captured_before_the_first_request(model: Path, replayed: list[int]) -> None:
    with rehearsal() as card, replace_triton_operations():
        engine = small_engine(model, device="cuda", dtype="float32", **ROOM)
        captures = card.num_captures
        for length in (2, 10, 20, 40, 60):
            run_to_end(engine, [generation_request(str(length), [3 + length] * length, max_tokens=1)])
        assert card.num_captures == captures
    assert len(replayed) == 2 * 5


def test_more_chunks_than_any_graph_supports_are_launched_without_a_graph(model: Path, replayed: list[int]) -> None:
    number = CHUNKS_MANY + 1
    room = {**ROOM, "max_num_seqs": number, "max_num_batched_tokens": 2 * number}
    requests = [generation_request(str(place), [5, 6 + place], max_tokens=1) for place in range(number)]
    with rehearsal(), replace_triton_operations():
        found = run_to_end(small_engine(model, device="cuda", dtype="float32", **room), requests)
    assert not replayed
    assert [len(tokens(events)) for events in found.values()] == [1] * number


@pytest.mark.parametrize("fails_at", [64, 32])
def test_after_a_failed_capture_later_shapes_are_launched_without_a_graph(
    fails_at: int, model: Path, replayed: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    captured = CudaGraphs._capture

    def fails(graphs: CudaGraphs, graph: torch.cuda.CUDAGraph, function: Any) -> None:
        shape = getattr(function, "args", (None,))[0]
        if isinstance(shape, ChunkShape) and shape.num_tokens == fails_at:
            raise RuntimeError("no more graphs")
        captured(graphs, graph, function)

    requests = [generation_request(str(length), list(range(3, 3 + length)), max_tokens=1) for length in (20, 60)]
    with rehearsal(), replace_triton_operations():
        expected = run_to_end(small_engine(model, device="cuda", dtype="float32", enforce_eager=True, **ROOM), requests)
    monkeypatch.setattr(CudaGraphs, "_capture", fails)
    with rehearsal(), replace_triton_operations():
        engine = small_engine(model, device="cuda", dtype="float32", **ROOM)
        found: dict[str, Any] = {}
        for request in requests:
            found |= run_to_end(engine, [request])
    assert {name: tokens(each) for name, each in found.items()} == {name: tokens(each) for name, each in expected.items()}
    assert len(replayed) == (2 if fails_at == 32 else 0), "shapes of 64 tokens serve fewer as well"
    assert engine.fallbacks.count == 0
    num_ready = sum(rows > fails_at for rows, _ in chunk_shapes(64))
    assert f"have {num_ready} of {len(chunk_shapes(64)) + len(sampled_shapes(ROOM['max_num_seqs']))} graphs" in caplog.text
    assert "no more graphs" in caplog.text


def test_tokens_of_a_top_p_without_a_top_k_are_chosen_by_a_graph(model: Path, replayed: list[int]) -> None:
    requests = [
        generation_request(str(seed), [3 + seed] * 20, max_tokens=1, top_p=0.7, temperature=1.0, seed=seed) for seed in range(4)
    ]
    with rehearsal(), replace_triton_operations():
        expected = run_to_end(small_engine(model, device="cuda", dtype="float32", enforce_eager=True, **ROOM), requests)
    with rehearsal(), replace_triton_operations():
        found = run_to_end(small_engine(model, device="cuda", dtype="float32", **ROOM), requests)
    assert {name: tokens(each) for name, each in found.items()} == {name: tokens(each) for name, each in expected.items()}
    assert replayed
    assert len(replayed) % 2 == 0, "up to hidden states, and up to tokens"


@pytest.mark.parametrize("options", [{}, {"frequency_penalty": 0.5}], ids=["no capture", "another kind"])
def test_tokens_without_a_graph_are_chosen_one_kernel_after_another(
    options: dict[str, Any], model: Path, replayed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("no more graphs")

    requests = [generation_request("0", list(range(3, 23)), max_tokens=1, **options)]
    with rehearsal(), replace_triton_operations():
        expected = run_to_end(small_engine(model, device="cuda", dtype="float32", enforce_eager=True, **ROOM), requests)
    if not options:
        monkeypatch.setattr(ChunkStep, "sample", fails)
    with rehearsal(), replace_triton_operations():
        engine = small_engine(model, device="cuda", dtype="float32", **ROOM)
        found = run_to_end(engine, requests)
    assert tokens(found["0"]) == tokens(expected["0"])
    assert len(replayed) == 1, "up to hidden states"
    assert engine.fallbacks.count == 0
