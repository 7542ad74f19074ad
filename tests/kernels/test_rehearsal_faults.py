"""Launches that fail at any line, on an emulated GPU: tokens equal those of the plain runner. A step counted by the device
but not fetched, or the reverse, would give tokens of other steps."""

from __future__ import annotations

import linecache
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import pytest
import torch

from engine.errors import EngineBroken
from engine.runner.cuda_graphs import CudaGraphs
from engine.runner.launched_step import LaunchedStep
from engine.runner.paged_decoder import PagedDecoder
from engine.runner.slot_runner import SlotRunner
from engine.speculation.options import SpeculativeOptions
from engine.switches import GRAPHS
from tests.support.engine_histories import MAX_LEN, PlannedRequest, assert_as_alone, run_history, with_grammars
from tests.support.engines import generation_request, run_to_end, small_engine, tokens
from tests.support.rehearsal import Schedule, rehearsal
from tests.support.rehearsal.table import replace_triton_operations
from tests.support.tiny_models import VOCAB_SIZE, saved_first_layer, saved_model

FOLDERS = "/engine/runner/", "/engine/sampling/", "/kernels/device_words.py", "/kernels/transfer.py"
ONE_LINE_OF = 3000
LAUNCHING = ((SlotRunner, "launch"), (LaunchedStep, "complete"), (LaunchedStep, "outputs"))
"""What may raise for any reason: the engine computes the step in the plain way."""
WISHES = ("greedy", "sampled", "stops", "guided", "guided, sampled", "scored", "scored more", "penalised", "two answers")


class Fault(RuntimeError):
    """The injected error."""


@pytest.fixture
def model() -> Path:
    return saved_model("llama").directory


@contextmanager
def failing(numbers: random.Random) -> Iterator[list[str]]:
    """Lines of launches fail, one in so many, but for those of a capture and of the run before it: a graph that failed once is
    never tried again, and each of its steps would be computed in the plain way. The line of a `with` does not fail: Python
    traces it once more before the context ends, which an error there would prevent."""
    failed: list[str] = []
    capturing = 0

    def captured(graphs: CudaGraphs, function: Callable[[], None]) -> torch.cuda.CUDAGraph:
        nonlocal capturing
        capturing += 1
        try:
            return make_graph(graphs, function)
        finally:
            capturing -= 1

    def line(frame: FrameType, event: str, _: object) -> Any:
        if event == "line" and not capturing and numbers.random() * ONE_LINE_OF < 1:
            path, number = frame.f_code.co_filename, frame.f_lineno
            if not linecache.getline(path, number).lstrip().startswith("with "):
                failed.append(f"{path}:{number}")
                raise Fault(failed[-1])
        return line

    def call(frame: FrameType, _: str, __: object) -> Any:
        return line if any(folder in frame.f_code.co_filename for folder in FOLDERS) else None

    def traced(inner: Callable[..., Any]) -> Callable[..., Any]:
        def run_traced(*given: Any) -> Any:
            before = sys.gettrace()
            sys.settrace(call)
            try:
                return inner(*given)
            finally:
                sys.settrace(before)

        return run_traced

    make_graph = CudaGraphs._warm_up_and_capture
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(CudaGraphs, "_warm_up_and_capture", captured))
        for owner, name in LAUNCHING:
            stack.enter_context(mock.patch.object(owner, name, traced(getattr(owner, name))))
        yield failed


@pytest.mark.parametrize("method", [None, "ngram", "draft_model", "without graphs"])
@pytest.mark.parametrize("seed", [0, 1])
def test_tokens_equal_those_of_the_plain_runner_wherever_a_launch_fails(
    model: Path, method: str | None, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers, speculative = random.Random(f"{seed} {method}"), None
    if method == "without graphs":
        monkeypatch.setenv(GRAPHS, "0")
    elif method is not None:
        drafter = saved_first_layer("llama") if method == "draft_model" else None
        speculative = SpeculativeOptions(method=method, model=drafter, num_speculative_tokens=3)
    requests = [
        PlannedRequest(
            prompt=tuple((start + 7 * place) % VOCAB_SIZE for place in range(numbers.randint(1, 30))),
            sampling=numbers.choice(WISHES), max_tokens=numbers.randint(4, 24), seed=number % 4, arrives=number,
            aborted_after=None,
        )
        for number, start in enumerate(numbers.choices((3, 50, 90), k=8))
    ]  # fmt: skip
    with rehearsal(numbers.choice([*Schedule]), seed=seed) as card, replace_triton_operations():
        engine = small_engine(
            model, device="cuda", dtype="float32", max_num_seqs=5, max_num_batched_tokens=32, max_model_len=MAX_LEN,
            block_size=4, num_kv_blocks=200, speculative_config=speculative,
        )  # fmt: skip
        with failing(numbers) as failed:
            found = run_history(with_grammars(engine), requests, preempt_at=None)
    assert 0 < engine.fallbacks.count <= len(failed), "no step but those that failed was computed in the plain way"
    assert card.broken is None
    assert_as_alone(model, requests, found)


def test_a_lost_device_ends_the_engine_and_blames_no_single_request(model: Path) -> None:
    """After an illegal access CUDA refuses every call, so that retries and new requests would fail as well."""

    def access_nothing() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    with rehearsal() as card, replace_triton_operations():
        engine = small_engine(model, device="cuda", dtype="float32", max_num_seqs=4, max_model_len=MAX_LEN)
        for name in ("a", "b", "c"):
            engine.submit(generation_request(name, [5, 6, 7], max_tokens=20))
        events = [event for _ in range(4) for event in engine.step()]
        card.stream.add(access_nothing)
        events += engine.step()  # launches one more behind it, and waits for the step before
        with pytest.raises(EngineBroken, match="the device is lost to this process: RuntimeError: CUDA error"):
            engine.step()
    assert events
    assert all(event.finish_reason is None for event in events)


def test_a_failing_step_on_a_working_device_does_not_end_the_engine(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.cuda.OutOfMemoryError("no room for this step")

    with rehearsal(), replace_triton_operations():
        engine = small_engine(model, device="cuda", dtype="float32", max_num_seqs=4, max_model_len=MAX_LEN)
        engine.submit(generation_request("a", [5, 6, 7], max_tokens=3))
        with monkeypatch.context() as patched:
            patched.setattr(SlotRunner, "launch", full)
            patched.setattr(PagedDecoder, "prepare", full)
            (event,) = [event for _ in range(2) for event in engine.step()]
        assert event.error is not None
        assert "OutOfMemoryError: no room for this step" in event.error
        assert len(tokens(run_to_end(engine, [generation_request("b", [5, 6, 7], max_tokens=3)])["b"])) == 3
