"""Device inputs of a step with prompt chunks: tokens, positions and lengths of decodes, chunks and padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.protocol import SamplingParams
from engine.runner.chunk_step import PADDING_ONLY, WORDS_MAX, ChunkRows, ChunkShape, ChunkStep, ChunkSteps
from engine.runner.cuda_graphs import DirectCalls
from engine.runner.slot_runner import SlotRunner
from engine.runner.slots import NOTHING, SlotWrites
from engine.sampling.columns import Kind, SampledColumns
from engine.scheduling.request import UNKNOWN_TOKEN, Request, table_of
from engine.scheduling.scheduled_batch import ScheduledRequest
from kernels.paged_plan import PagedPlan
from tests.support.engines import overlapped_engine
from tests.support.slots import slot_state
from tests.support.tiny_models import saved_model

CPU = torch.device("cpu")
BLOCK_SIZE, NUM_SLOTS, NUM_BLOCKS = 4, 3, 8
SHAPE = ChunkShape("chunks", 16, NUM_SLOTS, 4)


def scheduled(
    start: int, num_tokens: int, *, samples: bool, blocks: Sequence[int], last: int | None = None
) -> ScheduledRequest:
    token_ids = [10 * blocks[0] + position for position in range(start + num_tokens)]
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


DECODE = scheduled(5, 1, samples=True, blocks=[1, 2], last=UNKNOWN_TOKEN)
CHUNK = scheduled(4, 1, samples=False, blocks=[3, 4])  # one token of a prompt that goes on
LAST_CHUNK = scheduled(2, 5, samples=True, blocks=[5, 6])
LAST_TOKEN = scheduled(6, 1, samples=True, blocks=[0, 7])  # the last token of a prompt whose others were cached


class FakeDecoder:
    """Stands in for a model: keeps its inputs; the hidden state of a row that samples is its token id."""

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

    def logits(self, hidden: torch.Tensor, *, wide: bool) -> torch.Tensor:
        assert not wide
        return hidden


class FakeSampler:
    """Stands in for a sampler: chooses what is 100 above the hidden state."""

    def __init__(self) -> None:
        self.given: list[list[int]] = []

    def choose(self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, kind: Kind) -> SampledColumns:
        assert kind == Kind()
        self.given = [slots.tolist(), positions.tolist()]
        return SampledColumns(logits[:, 0].long() + 100, None)


class OperationNames(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the names of all operations that torch dispatches."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def decoder() -> FakeDecoder:
    return FakeDecoder()


@pytest.fixture
def sampler() -> FakeSampler:
    return FakeSampler()


def chunk_step(decoder: FakeDecoder, sampler: FakeSampler, *, num_slots: int = NUM_SLOTS) -> ChunkStep:
    state = slot_state(num_slots, NUM_BLOCKS)
    state.write(SlotWrites([2, 0], [99, 76], [6, 7], [(2, 0, [1, 2]), (0, 0, [0, 7])]))
    given: Any = ([decoder], state, sampler)
    return ChunkStep(*given, max_tokens=32, block_size=BLOCK_SIZE, host=None)


@pytest.fixture
def step(decoder: FakeDecoder, sampler: FakeSampler) -> ChunkStep:
    return chunk_step(decoder, sampler)


def chunk_rows(
    prefills: Sequence[ScheduledRequest], slots: Sequence[int], *, decodes: Sequence[ScheduledRequest] = ()
) -> ChunkRows:
    """`slots`: those of the rows that sample, decodes first."""
    positions = [each.start + each.num_tokens for each in [*decodes, *prefills] if each.samples]
    return ChunkRows.of(prefills, np.array(slots), np.array(positions))


def test_sampling_rows_are_found_in_any_order_of_the_scheduled_requests() -> None:
    rows = chunk_rows([LAST_CHUNK, DECODE, CHUNK, LAST_TOKEN], [1, 2, 0])
    assert rows.slots.tolist() == [2, 0], "of single tokens that sample: they come from their slots"
    assert [row.token_ids for row in rows.chunks] == [LAST_CHUNK.request.token_ids[2:], CHUNK.request.token_ids[4:]]
    assert rows.sampled_rows.tolist() == [6, 0, 1]
    assert rows.num_tokens == 8


def test_decode_tokens_come_from_slots_and_unused_rows_are_padding(step: ChunkStep, decoder: FakeDecoder) -> None:
    step.write(chunk_rows([LAST_TOKEN, CHUNK, LAST_CHUNK], [2, 0, 1], decodes=[DECODE]), SHAPE)
    step(SHAPE)
    padding = 16 - 8
    tokens, positions, slot_mapping = (each.tolist() for each in decoder.given)
    assert tokens == [99, 76, 34, 52, 53, 54, 55, 56] + [0] * padding
    assert positions == [5, 6, 4, 2, 3, 4, 5, 6] + [0] * padding
    assert slot_mapping == [9, 30, 16, 22, 23, 24, 25, 26] + [-1] * padding
    plan = decoder.plan
    assert plan is not None
    assert plan.query_starts is not None
    assert (plan.num_decodes, plan.counts_all) == (NUM_SLOTS, True)
    assert plan.query_starts.tolist() == [2, 3, 8, 8, 16]
    assert plan.context_lens.tolist() == [6, 7, 0, 5, 7, 0, padding]
    assert [plan.block_tables[row, :2].tolist() for row in (0, 1, 3, 4)] == [[1, 2], [0, 7], [3, 4], [5, 6]]
    chosen = step.sampling_inputs(3)
    assert chosen.hidden.flatten().tolist() == [99, 76, 56]
    assert (chosen.slots.tolist(), chosen.positions.tolist()) == ([2, 0, 1], [6, 7, 7])
    assert (chosen.slots.dtype, chosen.positions.dtype) == (torch.int32, torch.int64)


@pytest.mark.parametrize("is_beyond_the_graph", [False, True])
def test_a_step_changes_slots_before_it_reads_them(step: ChunkStep, decoder: FakeDecoder, *, is_beyond_the_graph: bool) -> None:
    words = step._state.packed(SlotWrites([1], [88], [3], [(1, 0, [6]), (2, 1, [4])]))
    if is_beyond_the_graph:
        words = np.repeat(words[0], WORDS_MAX), np.repeat(words[1], WORDS_MAX)
    step.write(chunk_rows([LAST_TOKEN], [2, 1], decodes=[DECODE])._replace(words=words), SHAPE)
    assert step._state.last_tokens.tolist() == [76, 88 if is_beyond_the_graph else 0, 99]
    step(SHAPE)
    assert decoder.given[0][:2].tolist() == [99, 88]
    assert decoder.given[2][:2].tolist() == [4 * BLOCK_SIZE + 1, 6 * BLOCK_SIZE + 2]
    held = step._state.words.on_host
    assert held is not None
    before = held.tolist()
    step.write(PADDING_ONLY, SHAPE)
    step(SHAPE)
    assert held.tolist() == before


def test_a_full_step_has_no_padding_and_an_empty_step_only_padding(step: ChunkStep, decoder: FakeDecoder) -> None:
    step.write(chunk_rows([scheduled(0, 16, samples=True, blocks=[1, 2, 3, 4])], [1]), SHAPE)
    step(SHAPE)
    assert decoder.plan is not None
    assert decoder.plan.query_starts is not None
    assert decoder.plan.query_starts.tolist() == [0, 16, 16, 16, 16]
    assert decoder.plan.context_lens.tolist() == [0] * NUM_SLOTS + [16, 0, 0, 0]
    step.write(PADDING_ONLY, SHAPE)
    step(SHAPE)
    assert decoder.plan.query_starts.tolist() == [0, 0, 0, 0, 16]
    assert decoder.given[2].tolist() == [-1] * 16


def test_no_copy_precedes_the_layers(step: ChunkStep) -> None:
    """A kernel with programmatic dependent launch may follow a kernel; behind a copy a graph has no such edge."""
    step.write(PADDING_ONLY, SHAPE)
    step(SHAPE)
    with OperationNames() as recorded:
        step(SHAPE)
    before = recorded.names[: recorded.names.index("index_select")]
    assert before, "the step is computed by torch's operations"
    assert not {"clone", "copy_"} & set(before)


def test_shapes_are_warmed_up_in_inference_mode(step: ChunkStep, monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[bool] = []
    monkeypatch.setattr(DirectCalls, "is_ready", lambda *_: False)
    monkeypatch.setattr(DirectCalls, "make_ready", lambda *_, **__: modes.append(torch.is_inference_mode_enabled()))
    ChunkSteps(step, DirectCalls()).warm_up()
    assert modes == [True] * (len(step.shapes) + 2 * 3), "and two for one, two and three rows that sample"


def test_tokens_of_common_kinds_are_chosen_for_rows_of_padding_too(decoder: FakeDecoder, sampler: FakeSampler) -> None:
    step = chunk_step(decoder, sampler, num_slots=4)
    steps = ChunkSteps(step, DirectCalls())
    assert steps.run(chunk_rows([LAST_TOKEN, CHUNK, LAST_CHUNK], [2, 0, 1], decodes=[DECODE]))
    assert steps.sample(3, Kind(counts=True)) is None
    assert steps.sample(3, Kind(num_top=1)) is None
    chosen = steps.sample(3, Kind(greedy=True))
    assert chosen is not None
    assert chosen.tolist() == [199, 176, 156]
    assert sampler.given == [[2, 0, 1, NOTHING], [6, 7, 7, 0]]
    assert step._state.last_tokens.tolist() == [176, 156, 199, 0]


@pytest.mark.parametrize(("family", "selects_on_host"), [("llama", False), ("mixtral", True)])
def test_a_model_whose_host_selects_experts_has_no_padded_chunk_step(family: str, selects_on_host: bool) -> None:
    directory = saved_model(family).directory
    runner = overlapped_engine(directory).runner
    assert isinstance(runner, SlotRunner)
    assert (runner.steps.chunks is None) == selects_on_host
