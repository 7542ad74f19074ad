"""Inputs of a step with prompt chunks in its buffers: tokens, positions and lengths of decodes, chunks and padding."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.protocol import SamplingParams
from engine.runner.chunk_step import PADDING_ONLY, ChunkRows, ChunkShape, ChunkStep, ChunkSteps
from engine.runner.cuda_graphs import DirectCalls
from engine.runner.slot_runner import SlotRunner
from engine.runner.slots import SlotWrites
from engine.scheduling.request import UNKNOWN_TOKEN, Request, table_of
from engine.scheduling.scheduled_batch import ScheduledRequest
from kernels.paged_plan import PagedPlan
from tests.support.engines import overlapped_engine
from tests.support.slots import slot_state
from tests.support.tiny_models import make_model

CPU = torch.device("cpu")
BLOCK, SEATS, BLOCKS = 4, 3, 8
SHAPE = ChunkShape("chunks", 16, SEATS, 4)


def item(start: int, num_tokens: int, *, samples: bool, blocks: Sequence[int], last: int | None = None) -> ScheduledRequest:
    token_ids = [10 * blocks[0] + place for place in range(start + num_tokens)]
    if last is not None:
        token_ids[-1] = last
    made = Request(
        request_id=str(blocks[0]),
        tenant_id="alice",
        sampling=SamplingParams(seed=1, max_tokens=100),
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        max_total_tokens=100,
        stop_ids=frozenset(),
        arrived_s=0.0,
        block_table=table_of(blocks),
    )
    return ScheduledRequest(made, start, num_tokens, samples)


DECODE = item(5, 1, samples=True, blocks=[1, 2], last=UNKNOWN_TOKEN)
READ_ON = item(4, 1, samples=False, blocks=[3, 4])  # one token of a prompt that goes on
READ_TO_END = item(2, 5, samples=True, blocks=[5, 6])
LAST_ONE = item(6, 1, samples=True, blocks=[0, 7])  # the last token of a prompt whose others were cached


class Decoder:
    """In the place of a model: its hidden states are the tokens of the rows that sample."""

    dtype = torch.float32

    def __init__(self) -> None:
        self.given: list[torch.Tensor] = []
        self.plan: PagedPlan | None = None

    def device_inputs(self, *given: Any, sampled_rows: torch.Tensor) -> torch.Tensor:
        *self.given, plan = given
        self.plan = plan(shape=None)
        return self.given[0].index_select(0, sampled_rows)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs[:, None].float()


class Kept(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The names of all operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def decoder() -> Decoder:
    return Decoder()


@pytest.fixture
def step(decoder: Decoder) -> ChunkStep:
    state = slot_state(SEATS, BLOCKS)
    state.write(SlotWrites([2, 0], [99, 76], [6, 7], [(2, 0, [1, 2]), (0, 0, [0, 7])]))
    return ChunkStep([decoder], state, max_tokens=32, block_size=BLOCK)  # type: ignore[list-item]


def rows_of(
    prefills: Sequence[ScheduledRequest], slots: Sequence[int], *, decodes: Sequence[ScheduledRequest] = ()
) -> ChunkRows:
    """slots: of all that sample"""
    positions = [each.start + each.num_tokens for each in [*decodes, *prefills] if each.samples]
    return ChunkRows.of(prefills, np.array(slots), np.array(positions))


def test_rows_that_sample_are_found_whatever_the_order_of_the_step() -> None:
    rows = rows_of([READ_TO_END, DECODE, READ_ON, LAST_ONE], [1, 2, 0])
    assert rows.slots.tolist() == [2, 0], "of single tokens that sample: they come from their slots"
    assert [row.token_ids for row in rows.chunks] == [READ_TO_END.request.token_ids[2:], READ_ON.request.token_ids[4:]]
    assert rows.sampled_rows.tolist() == [6, 0, 1]
    assert rows.num_tokens == 8


def test_decodes_come_from_their_slots_and_what_is_left_is_padding(step: ChunkStep, decoder: Decoder) -> None:
    step.write(rows_of([LAST_ONE, READ_ON, READ_TO_END], [2, 0, 1], decodes=[DECODE]), SHAPE)
    step(SHAPE)
    padding = 16 - 8
    tokens, positions, places = (each.tolist() for each in decoder.given)
    assert tokens == [99, 76, 34, 52, 53, 54, 55, 56] + [0] * padding
    assert positions == [5, 6, 4, 2, 3, 4, 5, 6] + [0] * padding
    assert places == [9, 30, 16, 22, 23, 24, 25, 26] + [-1] * padding
    plan = decoder.plan
    assert plan is not None
    assert plan.query_starts is not None
    assert (plan.num_decodes, plan.counts_all) == (SEATS, True)
    assert plan.query_starts.tolist() == [2, 3, 8, 8, 16]
    assert plan.context_lens.tolist() == [6, 7, 0, 5, 7, 0, padding]
    assert [plan.block_tables[row, :2].tolist() for row in (0, 1, 3, 4)] == [[1, 2], [0, 7], [3, 4], [5, 6]]
    chosen = step.sampling_inputs(3, SHAPE)
    assert chosen.hidden.flatten().tolist() == [99, 76, 56]
    assert (chosen.slots.tolist(), chosen.positions.tolist()) == ([2, 0, 1], [6, 7, 7])
    assert (chosen.slots.dtype, chosen.positions.dtype) == (torch.int32, torch.int64)


def test_a_full_step_has_no_padding_and_an_empty_one_nothing_else(step: ChunkStep, decoder: Decoder) -> None:
    step.write(rows_of([item(0, 16, samples=True, blocks=[1, 2, 3, 4])], [1]), SHAPE)
    step(SHAPE)
    assert decoder.plan is not None
    assert decoder.plan.query_starts is not None
    assert decoder.plan.query_starts.tolist() == [0, 16, 16, 16, 16]
    assert decoder.plan.context_lens.tolist() == [0] * SEATS + [16, 0, 0, 0]
    step.write(PADDING_ONLY, SHAPE)
    step(SHAPE)
    assert decoder.plan.query_starts.tolist() == [0, 0, 0, 0, 16]
    assert decoder.given[2].tolist() == [-1] * 16


def test_nothing_before_the_layers_is_a_copy(step: ChunkStep) -> None:
    """A kernel that is launched early may follow a kernel; behind a copy a graph has no such edge."""
    step.write(PADDING_ONLY, SHAPE)
    step(SHAPE)
    with Kept() as kept:
        step(SHAPE)
    before = kept.names[: kept.names.index("index_select")]
    assert before, "the step is computed by torch's operations"
    assert not {"clone", "copy_"} & set(before)


def test_shapes_are_computed_in_inference_mode_as_serving_does(step: ChunkStep, monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[bool] = []
    monkeypatch.setattr(DirectCalls, "is_ready", lambda *_: False)
    monkeypatch.setattr(DirectCalls, "make_ready", lambda *_, **__: modes.append(torch.is_inference_mode_enabled()))
    ChunkSteps(step, DirectCalls()).warm_up()
    assert modes == [True] * len(step.shapes)


@pytest.mark.parametrize(("family", "waits"), [("llama", False), ("mixtral", True)])
def test_where_the_host_chooses_experts_no_step_is_padded_for_a_graph(family: str, waits: bool, tmp_path: Path) -> None:
    make_model(family, tmp_path)
    runner = overlapped_engine(tmp_path).runner
    assert isinstance(runner, SlotRunner)
    assert (runner.steps.chunks is None) == waits
