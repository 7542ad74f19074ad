"""Failing captures on an emulated GPU: the engine starts nevertheless, and later captures succeed."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.loop import Engine
from engine.runner.cuda_graphs import CaptureFailed, CudaGraphs
from engine.runner.slot_runner import SlotRunner
from engine.runner.slot_timing import SlotTiming
from tests.support.engines import generation_request, run_to_end, small_engine, tokens
from tests.support.rehearsal import DEVICE, rehearsal
from tests.support.rehearsal.graphs import Graph
from tests.support.rehearsal.table import replace_triton_operations

SMALL: dict[str, Any] = {"max_num_seqs": 16, "max_model_len": 32, "num_kv_blocks": 32}


def answers(engine: Engine) -> list[list[int]]:
    events = run_to_end(engine, [generation_request(str(number), [5, 6, 7 + number], max_tokens=6) for number in range(3)])
    return [tokens(each) for each in events.values()]


def test_an_engine_whose_steps_cannot_be_captured_starts_and_logs_it(
    llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As with a capture that fails later: steps are slower but served."""
    expected = answers(small_engine(llama, dtype="float32", **SMALL))

    def refuse(graph: Graph, **_: Any) -> None:
        raise torch.cuda.OutOfMemoryError("no room for a graph")

    with rehearsal(), replace_triton_operations():
        monkeypatch.setattr(Graph, "capture_begin", refuse)
        engine = small_engine(llama, device="cuda", dtype="float32", **SMALL)
        assert isinstance(engine.runner, SlotRunner)
        SlotTiming(engine.runner.steps).decode(1)
        assert answers(engine) == expected
        assert engine.status().fallback_steps_total > 0
    told = [record.getMessage() for record in caplog.records if "no room for a graph: such steps" in record.getMessage()]
    assert len(told) == 1 + 2 * len((1, 2, 4, 8))


@pytest.mark.parametrize("is_renewed", [False, True])
def test_captures_succeed_after_a_pool_lost_its_last_graph(*, is_renewed: bool) -> None:
    """torch's allocator accepts no graph into such a pool, which remains after a first capture that raised, and after the
    first one that follows an invalidated capture."""
    calls: list[int] = []

    def raises_in_capture() -> None:
        calls.append(1)
        if len(calls) == 2:
            raise torch.cuda.OutOfMemoryError("no room for this step")

    with rehearsal():
        graphs, kept = CudaGraphs(DEVICE, max_graphs=4), torch.zeros(1, device=DEVICE)
        if is_renewed:
            with pytest.raises(CaptureFailed, match="not permitted when stream is capturing"):
                graphs.make_ready("spoilt", kept.tolist)  # type: ignore[arg-type]
        with pytest.raises(CaptureFailed, match="no room for this step"):
            graphs.make_ready("raises", raises_in_capture)
        gc.collect()
        for key in ("one", "another"):
            graphs.make_ready(key, lambda: kept.add_(1.0))  # type: ignore[arg-type]
        kept.zero_()
        graphs.run("one", lambda: None)
        assert kept.tolist() == [1.0]
