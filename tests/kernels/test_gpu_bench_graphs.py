"""Timed steps of the GPU benchmark are replays of whole captured graphs; run over engines without a device."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from bench.gpu import serve, serve_idle, serve_latency, traffic
from bench.gpu.context import Context
from bench.gpu.graph_use import GraphUse
from bench.gpu.idle import Idle
from bench.gpu.rows import Row
from bench.host_step import make_engine
from engine.loop import Engine
from engine.runner.cuda_graphs import CudaGraphs
from engine.runner.kernel_choices import KernelChoices
from engine.runner.slot_warm_up import warm_up
from engine.step_sizes import decode_graphs_kept

STEADY = [f"Llama-3.1-8B bf16, batch {size}, 1k context" for size in (64, 256)]
WHOLE = (
    "Llama-3.1-8B bf16, batch 1", *STEADY, "GPU idle in steady decode, batch 256",
    "host critical path per step, batch 256", "host critical path, a request replaced every second step, batch 256",
)  # fmt: skip


class UncapturedGraphs(CudaGraphs):
    """Chooses what is captured and kept, and captures nothing."""

    def _warm_up_and_capture(self, function: Callable[[], None]) -> Any:
        return SimpleNamespace(replay=lambda: None)

    def _counting_driver_bytes(self) -> Any:
        return nullcontext()


def graphs_of(num_places: int) -> CudaGraphs:
    with mock.patch.object(torch.cuda, "graph_pool_handle"), mock.patch.object(torch.cuda, "Stream"):
        return UncapturedGraphs(torch.device("cuda"), max_graphs=num_places)


def rows_of(
    measure: Callable[[Context], None], monkeypatch: pytest.MonkeyPatch, *, num_places: int | None = None, budget: int = 8192
) -> dict[str, dict[str, Any]]:
    """Of a part whose engines have all their seats and as many places for graphs as on a card, or `num_places`. `budget`: of
    a step, in tokens."""

    @contextmanager
    def engine_of(*_: object, max_num_seqs: int, max_model_len: int, **__: object) -> Iterator[Engine]:
        places = decode_graphs_kept(max_num_seqs, 0) if num_places is None else num_places
        engine, _parts = make_engine(max_num_seqs, calls=graphs_of(places), max_model_len=max_model_len, budget=budget)
        runner: Any = engine._overlapped._runner  # type: ignore[union-attr]
        monkeypatch.setattr(runner.steps.decodes.step, "sample", lambda *_: None)
        warm_up(runner.steps, KernelChoices(None))
        yield engine

    nothing = SimpleNamespace(read_bytes=1, decode_rate=lambda *_: 1e9, offline_rate=lambda *_: 1e9, prefill_s=lambda _: 1e-9)
    for module in (serve, serve_latency):
        monkeypatch.setattr(module, "random_engine", engine_of)
        monkeypatch.setattr(module, "Planner", lambda *_, **__: nothing)

    def without_a_trace(run: Callable[[], object], _: torch.device) -> Idle:
        run()
        return Idle(0.0, 0.0, 1.0, 1, 0.0, {})

    monkeypatch.setattr(serve_idle, "measure_idle", without_a_trace)
    told: list[dict[str, Any]] = []
    measure(Context(torch.device("cpu"), False, {}, told.append, 600.0, clock=lambda: 0.0))
    return {line["row"]["name"]: line["row"] for line in told if "row" in line}


def test_every_timed_step_is_one_replayed_graph_and_none_is_captured_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = rows_of(serve.llama_8b, monkeypatch)
    del rows["planner: KV blocks"]  # there is no cache whose memory was measured
    assert {name: row["error"] for name, row in rows.items() if row["error"]} == {}
    used = {name: row["facts"]["graphs"] for name, row in rows.items() if "graphs" in row["facts"]}
    assert used.keys() >= {*WHOLE, "Llama-3.1-8B, 256 requests of 100–1024 in and out", "Llama-3.1-8B, conversations"}
    assert {name: use for name, use in used.items() if use["captured"] or use["without_choice"]} == {}
    assert all(use["steps"] > 0 for use in used.values())


def test_a_row_about_captured_steps_fails_if_a_step_had_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of(serve.llama_8b, monkeypatch, num_places=8)
    for name in WHOLE[1:]:
        assert "steps chose their tokens outside of a graph" in rows[name]["error"], name
        assert rows[name]["value"] is not None
    mixed = rows["Llama-3.1-8B, 256 requests of 100–1024 in and out"]
    assert mixed["error"] == ""
    assert "steps chose their tokens outside of a graph" in mixed["note"]


def test_no_decode_waits_for_a_capture_after_a_long_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of(serve_latency.latency, monkeypatch, budget=400)  # a step of so many tokens takes its target of time
    use = rows[serve_latency.GAP]["facts"]["graphs"]
    assert (use["captured"], use["without_choice"]) == (0, 0)
    assert use["steps"] > 0


@pytest.mark.parametrize(
    ("use", "words"),
    [
        (GraphUse(steps=64), ""),
        (GraphUse(steps=64, captured=2), "2 graphs were captured within the time"),
        (GraphUse(steps=64, without_choice=3), "3 of 64 steps chose their tokens outside of a graph"),
    ],
)
def test_a_row_reports_missing_graphs_of_its_steps(use: GraphUse, words: str) -> None:
    told, whole = use.annotate(Row(name="x", note="n")), use.annotate(Row(name="x"), whole=True)
    assert told.note == (f"{words}; n" if words else "n")
    assert (told.error, whole.error) == ("", words)
    assert told.facts["graphs"]["steps"] == 64


def test_graph_use_counts_only_the_steps_of_its_run() -> None:
    taken: Hashable = CudaGraphs.make_ready
    engine, _ = make_engine(4, calls=graphs_of(2))
    asked = [traffic.BenchRequest((3, 4, 5), 6)]
    first, second = (traffic.run(engine, asked, temperature=0.6, label=label) for label in "ab")
    assert (first.graphs.captured, second.graphs.captured) == (2, 0), "of the prompt and of the decodes"
    assert first.graphs.steps == second.graphs.steps == 5
    assert CudaGraphs.make_ready is taken
