"""Steps with chunks of prompts on a rehearsed card: one graph each, whatever the model's depth, with the tokens of the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.loop import Engine
from engine.runner.cuda_graphs import CudaGraphs
from engine.speculation.options import SpeculativeOptions
from engine.step_sizes import CHUNK_GRAPHS, CHUNK_USES_BEFORE, CHUNKS_MAX
from tests.support.engines import run_to_end, small_engine, tokens, wanted
from tests.support.rehearsal import Schedule, rehearsal
from tests.support.rehearsal.card import Card
from tests.support.rehearsal.graphs import Graph
from tests.support.rehearsal.table import in_place_of_triton
from tests.support.tiny_models import make_first_layers, make_model

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU nothing is rehearsed")

ROOM: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": 128, "num_kv_blocks": 64, "max_num_batched_tokens": 64}
LAYERS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    made = make_model("llama", folder / "deep", num_hidden_layers=LAYERS, head_dim=16)
    make_first_layers(made, folder / "shallow", 1)
    return folder


@pytest.fixture
def model(folder: Path) -> Path:
    return folder / "deep"


@pytest.fixture
def shallow(folder: Path) -> Path:
    return folder / "shallow"


@pytest.fixture
def at_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of a shape are captured when they are met."""
    monkeypatch.setattr("engine.runner.cuda_graphs.CHUNK_USES_BEFORE", 0)


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many operations each graph has that was replayed."""
    sizes: list[int] = []
    replay = Graph.replay

    def counted(graph: Graph) -> None:
        sizes.append(len(graph.works))
        replay(graph)

    monkeypatch.setattr(Graph, "replay", counted)
    return sizes


def launched_beside_a_decode(card: Card, engine: Engine, replayed: list[int], prompt: list[int]) -> int:
    """Operations that the host launches one by one for a step with a whole prompt beside a decode."""
    engine.submit(wanted("decodes", [5, 6, 7], max_tokens=30))
    for _ in range(4):
        engine.step()
    for number in range(2):  # the first one of its shape is captured
        engine.submit(wanted(f"prompt {number}", prompt, max_tokens=1))
        before, num_replayed = card.stream.launched, len(replayed)
        engine.step()
        found = card.stream.launched - before - sum(replayed[num_replayed:])
        assert len(replayed) - num_replayed == 1, "the step is one graph"
    run_to_end(engine, [])
    return found


@pytest.mark.usefixtures("at_first_use")
def test_the_host_launches_as_much_for_many_layers_as_for_one(model: Path, shallow: Path, replayed: list[int]) -> None:
    found = []
    for folder in (shallow, model):
        with rehearsal() as card, in_place_of_triton():
            engine = small_engine(folder, device="cuda", dtype="float32", **ROOM)
            found.append(launched_beside_a_decode(card, engine, replayed, list(range(3, 33))))
    assert found[0] == found[1] < 40


@pytest.mark.usefixtures("at_first_use")
@pytest.mark.parametrize("schedule", Schedule)
@pytest.mark.parametrize("options", [{}, {"kv_cache_dtype": "fp8"}, {"speculative": True}], ids=["plain", "fp8 cache", "draft"])
def test_captured_steps_with_chunks_give_the_tokens_of_the_plain_runner(
    schedule: Schedule, options: dict[str, Any], model: Path, shallow: Path, replayed: list[int]
) -> None:
    """Prompts of one step and of several, beside decodes, of lengths on both sides of a size."""
    given = {**ROOM, "device": "cuda", "dtype": "float32", **options}
    if given.pop("speculative", False):
        given["speculative_config"] = SpeculativeOptions(method="draft_model", model=shallow, num_speculative_tokens=2)
    requests = [
        wanted(str(length), [3 + (7 * place + length) % 100 for place in range(length)], max_tokens=3 + length % 4)
        for length in (1, 2, 15, 16, 17, 33, 64, 65, 100)
    ]
    with rehearsal(), in_place_of_triton():
        eager = {name: value for name, value in given.items() if name != "speculative_config"}
        expected = run_to_end(small_engine(model, enforce_eager=True, **eager), requests)
    with rehearsal(schedule) as card, in_place_of_triton():
        engine = small_engine(model, **given)
        card.syncs.clear()
        found = run_to_end(engine, requests)
    assert {name: tokens(each) for name, each in found.items()} == {name: tokens(each) for name, each in expected.items()}
    assert {sync.kind for sync in card.syncs} <= {"event"}, "nobody waits for a value"
    assert engine.fallbacks.count == 0


def test_a_shape_is_captured_when_it_was_met_before(model: Path, replayed: list[int]) -> None:
    with rehearsal() as card, in_place_of_triton():
        engine = small_engine(model, device="cuda", dtype="float32", **ROOM)
        captures: list[int] = []
        for number in range(CHUNK_USES_BEFORE + 2):
            captures.append(card.num_captures)
            run_to_end(engine, [wanted(str(number), [3 + number] * 20, max_tokens=1)])
        captured = card.num_captures - captures[0]
    assert captured == 1
    assert captures[-1] == captures[0] + 1, "by the step after so many"
    assert len(replayed) == 2


@pytest.mark.usefixtures("at_first_use")
def test_more_chunks_than_any_graph_has_are_launched_one_by_one(model: Path, replayed: list[int]) -> None:
    number = CHUNKS_MAX[-1] + 1
    room = {**ROOM, "max_num_seqs": number, "max_num_batched_tokens": 2 * number}
    requests = [wanted(str(place), [5, 6 + place], max_tokens=1) for place in range(number)]
    with rehearsal(), in_place_of_triton():
        found = run_to_end(small_engine(model, device="cuda", dtype="float32", **room), requests)
    assert not replayed
    assert [len(tokens(events)) for events in found.values()] == [1] * number


@pytest.mark.usefixtures("at_first_use")
def test_a_step_whose_capture_fails_is_launched_one_by_one(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    captured = CudaGraphs._capture

    def fails(graphs: CudaGraphs, graph: torch.cuda.CUDAGraph, function: Any) -> None:
        if getattr(function, "args", ((),))[0][:1] == (CHUNK_GRAPHS,) and function.args[0].num_tokens == 32:
            raise RuntimeError("no more graphs")
        captured(graphs, graph, function)

    requests = [wanted(str(number), list(range(3, 23 + number)), max_tokens=3) for number in range(2)]
    with rehearsal(), in_place_of_triton():
        expected = run_to_end(small_engine(model, device="cuda", dtype="float32", enforce_eager=True, **ROOM), requests[:1])
    monkeypatch.setattr(CudaGraphs, "_capture", fails)
    with rehearsal(), in_place_of_triton():
        engine = small_engine(model, device="cuda", dtype="float32", **ROOM)
        first = run_to_end(engine, requests[:1])
        run_to_end(engine, requests[1:])
    assert tokens(first["0"]) == tokens(expected["0"])
    assert engine.fallbacks.count == 1, "the step that found out"
    assert "no more graphs" in caplog.text
