"""The emulated GPU itself: operations complete as late as on a GPU, and what CUDA and torch refuse is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest
import torch

from engine.runner import device_waits, token_return
from engine.runner.slots import SlotWrites
from engine.runner.staging import DEPTH, STAGED_NUMBERS, Staging
from engine.runner.token_return import CudaFetch, Fetch, TokenReturn
from engine.switches import BUSY_WAIT
from tests.support.rehearsal import DEVICE, Card, rehearsal
from tests.support.slots import slot_state


@pytest.fixture
def card() -> Iterator[Card]:
    with rehearsal() as card:
        yield card


REFUSED, SPOILT = "not permitted when stream is capturing", "failed due to a previous error during capture"


def numbers(*values: int) -> torch.Tensor:
    return torch.tensor(values, device="cuda")


@contextmanager
def captured() -> Iterator[torch.cuda.CUDAGraph]:
    """Capture what is launched within the block as a graph."""
    graph, beside = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(beside):
        graph.capture_begin()
        yield graph
        graph.capture_end()


def kinds(card: Card) -> list[str]:
    found = [sync.kind for sync in card.syncs]
    card.syncs.clear()
    return found


def test_tensors_report_the_gpu_as_device_and_are_computed_at_a_wait(card: Card) -> None:
    x = numbers(1, 2, 3)
    kinds(card)
    y = (x * 2 + 1).view(3, 1)[1:]
    assert (y.device, y.is_cuda, y.shape) == (DEVICE, True, (2, 1))
    assert kinds(card) == []
    assert y.flatten().tolist() == [5, 7]
    assert kinds(card) == ["copy to the host"]


@pytest.mark.parametrize(
    "look",
    [
        lambda x: x[0].item(), lambda x: int(x[0]), lambda x: x.cpu(), lambda x: x.nonzero(), lambda x: x[x > 1],
        lambda x: bool((x > 1).any()), lambda x: torch.equal(x, x), lambda x: f"{x[0]}", torch.unique,
        lambda _: torch.cuda.synchronize(), lambda x: x.to("cpu", torch.float32), lambda x: torch.empty(3).copy_(x),
        lambda x: x.repeat_interleave(x), lambda x: x.masked_select(x > 1), lambda x: 2 in x, lambda x: x.__setitem__(0, 7),
    ],
)  # fmt: skip
def test_reading_a_value_on_the_host_waits_and_is_refused_in_a_capture(card: Card, look: object) -> None:
    assert callable(look)
    x = numbers(1, 2, 3)
    kinds(card)
    look(x)
    assert kinds(card)
    with pytest.raises(RuntimeError, match=SPOILT), captured(), pytest.raises(RuntimeError, match=REFUSED):
        look(x)


def test_page_locked_memory_is_read_when_the_stream_reaches_the_copy(card: Card) -> None:
    kept = torch.tensor([1, 2, 3], pin_memory=True)
    assert kept.is_pinned()
    kinds(card)
    sent = kept.to(DEVICE, non_blocking=True)
    kept[0] = 9
    assert kinds(card) == []
    assert sent.tolist() == [9, 2, 3]


@pytest.mark.parametrize(
    "source",
    [
        lambda: torch.tensor([1, 2, 3, 4]),
        lambda: torch.tensor([1, 2, 3, 4], dtype=torch.int32, pin_memory=True).to(torch.int64),
        lambda: torch.tensor([1, 2, 3, 4, 5, 6, 7, 8], pin_memory=True).view(4, 2).t(),
    ],
)
def test_a_copy_from_pageable_memory_waits_and_reads_immediately(card: Card, source: object) -> None:
    assert callable(source)
    kept = source()
    expected = kept.tolist()
    sent = kept.to(DEVICE, non_blocking=True)
    kept.zero_()
    assert kinds(card) == ["copy from pageable memory"]
    assert sent.tolist() == expected


def test_a_copy_to_page_locked_memory_is_complete_after_its_event(card: Card) -> None:
    kept = torch.empty(3, dtype=torch.int64, pin_memory=True)
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    kept.copy_(numbers(1, 2, 3), non_blocking=True)
    done.record()
    assert kept.tolist() != [1, 2, 3]
    done.synchronize()
    assert kept.tolist() == [1, 2, 3]
    assert torch.empty(3, dtype=torch.int64).copy_(numbers(4, 5, 6), non_blocking=True).tolist() == [4, 5, 6]


def test_a_stream_waits_for_another_only_on_request(card: Card) -> None:
    beside, x, seen = torch.cuda.Stream(), numbers(0, 0, 0), torch.empty(3, dtype=torch.int64, pin_memory=True)  # type: ignore[no-untyped-call]
    x.add_(1)
    for waits, expected in ((False, [0, 0, 0]), (True, [1, 1, 1])):
        if waits:
            beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            seen.copy_(x, non_blocking=True)
        beside.synchronize()
        assert seen.tolist() == expected


def test_a_replay_uses_the_memory_and_the_host_values_of_the_capture(card: Card) -> None:
    x, out, factor = numbers(1, 2, 3), numbers(0, 0, 0), 2
    with captured() as graph:
        out.copy_(x * factor + torch.arange(3, device="cuda"))
    factor = 10
    x.copy_(numbers(4, 5, 6))
    assert out.tolist() == [0, 0, 0], "a capture computes nothing"
    graph.replay()
    assert out.tolist() == [8, 11, 14]
    x = numbers(0, 0, 0)
    graph.replay()
    assert out.tolist() != [8, 11, 14], "what a graph reads was let go of, and belongs to somebody else"
    assert factor == 10


def test_freed_memory_is_garbage_to_another_stream_unless_recorded(card: Card) -> None:
    beside, out = torch.cuda.Stream(), torch.zeros(3, device="cuda")  # type: ignore[no-untyped-call]
    for kept, expected in ((False, False), (True, True)):
        x = torch.ones(3, device="cuda")
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            out.copy_(x)
        if kept:
            x.record_stream(beside)
        del x
        torch.cuda.current_stream().synchronize()
        assert (out.tolist() == [1.0, 1.0, 1.0]) is expected


def test_uninitialised_memory_is_garbage(card: Card) -> None:
    assert torch.empty(2, device="cuda").isnan().all().item()
    assert torch.empty(2, dtype=torch.int32, device="cuda").tolist() != [0, 0]
    assert torch.empty(2, pin_memory=True).isnan().all()


def test_operations_that_cuda_refuses_are_refused(card: Card) -> None:
    x, here = numbers(1, 2, 3), torch.tensor([0, 1, 2])
    with pytest.raises(RuntimeError, match="same device"):
        x + here
    with pytest.raises(RuntimeError, match="same device"):
        x.index_select(0, here)
    with pytest.raises(TypeError, match="numpy"):
        x.numpy()
    with pytest.raises(RuntimeError, match="Can't pin tensor constructed from numpy"):
        torch.tensor(np.arange(3), pin_memory=True)
    assert (x + torch.tensor(1)).tolist() == [2, 3, 4], "a number may come from the host"
    assert x[here].tolist() == [1, 2, 3], "torch copies indices"
    with pytest.raises(RuntimeError, match="non-default stream"):
        torch.cuda.CUDAGraph().capture_begin()
    forbidden: list[Callable[[], object]] = [lambda: torch.empty(3, pin_memory=True), lambda: x.copy_(here), lambda: numbers(1)]
    for refused in forbidden:
        with pytest.raises(RuntimeError, match=SPOILT), captured(), pytest.raises(RuntimeError, match=REFUSED):
            refused()
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 30, device="cuda")


@pytest.mark.parametrize(
    ("kernel", "dtype", "compute"),
    [
        ("addmm_cuda", torch.int32, lambda x: x @ x), ("addmm_cuda", torch.int64, lambda x: torch.nn.functional.linear(x, x)),
        ("addmm_cuda", torch.float8_e4m3fn, lambda x: x.mm(x)), ("baddbmm_cuda", torch.int8, lambda x: x[None].bmm(x[None])),
        ("mul_cuda", torch.float8_e4m3fn, lambda x: x * x), ("mul_cuda", torch.uint32, lambda x: x.mul_(x)),
        ("abs_cuda", torch.float8_e5m2, lambda x: x.abs()), ("or_cuda", torch.float8_e4m3fn, lambda x: x.any()),
        ("index_cuda", torch.uint32, lambda x: x[[1, 0]]), ("where_cuda", torch.uint16, lambda x: torch.where(x > 0, x, x)),
        ("sortKeyValueInplace", torch.uint16, lambda x: x.sort()),
    ],
)  # fmt: skip
def test_operations_without_a_cuda_implementation_are_refused(
    card: Card, kernel: str, dtype: torch.dtype, compute: Callable[..., object]
) -> None:
    x = torch.zeros(2, 2 * dtype.itemsize, dtype=torch.uint8, device=DEVICE).view(dtype)
    with pytest.raises(RuntimeError, match=f'"{kernel}" not implemented for {dtype}'):
        compute(x)


def test_8_bit_floats_can_be_moved_and_converted(card: Card) -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=DEVICE).to(torch.float8_e4m3fn)
    moved = torch.cat((x[numbers(1)], x.clone(), torch.zeros_like(x)))
    assert moved.float().tolist() == [[3.0, 4.0], [1.0, 2.0], [3.0, 4.0], [0.0, 0.0], [0.0, 0.0]]


def test_a_device_error_is_raised_at_the_next_wait_and_persists(card: Card) -> None:
    found = numbers(1, 2, 3).index_select(0, numbers(7))
    with pytest.raises(IndexError):
        found.tolist()
    with pytest.raises(RuntimeError, match="the device is lost"):
        torch.cuda.synchronize()


def test_writing_different_values_to_one_element_is_refused(card: Card) -> None:
    found = numbers(0, 0, 0)
    found.index_copy_(0, numbers(2, 0, 2), numbers(7, 8, 7))
    assert found.tolist() == [8, 0, 7]
    found.index_copy_(0, numbers(2, 0, 2), numbers(7, 8, 9))
    with pytest.raises(RuntimeError, match="different values to one place"):
        found.tolist()


def test_indexing_equals_that_of_torch(card: Card) -> None:
    here = torch.arange(24).view(2, 3, 4)
    there = here.to(DEVICE)
    rows, mask = torch.tensor([1, 0]), torch.tensor([[True, False, True], [False, True, True]])
    keys = (1, (0, 2), (slice(None), 1), (..., 0), (None, 1), (slice(0, 1), slice(1, None, 2)), rows, (rows, 2), mask,
            (slice(None), torch.tensor([0, 2]), slice(1, 3)), (..., rows), [1, 0], (1, ..., None))  # fmt: skip
    for key in keys:
        wanted = here[key]
        moved = (
            tuple(each.to(DEVICE) if isinstance(each, torch.Tensor) else each for each in key)
            if isinstance(key, tuple)
            else key
        )
        assert there[moved].cpu().equal(wanted), key
        for value in (7, torch.zeros_like(wanted)):
            one, other = here.clone(), there.clone()
            one[key] = value
            other[moved] = value.to(DEVICE) if isinstance(value, torch.Tensor) else value
            assert other.cpu().equal(one), key


@pytest.mark.parametrize("size", [1, STAGED_NUMBERS])  # one is too few
def test_reusing_a_staging_buffer_too_early_is_detected(card: Card, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    def sent(depth: int) -> list[list[int]]:
        staging = Staging(DEVICE, size)
        arrived = [staging.send([number, number]) for number in range(depth)]
        return [each.tolist() for each in arrived]

    expected = [[number, number] for number in range(9)]
    kinds(card)
    assert sent(9) == expected
    assert kinds(card) == 5 * ["event"] + ["copy to the host"] * 9, "each of the last five waits for the one four before it"
    monkeypatch.setattr(torch.cuda.Event, "synchronize", lambda _: None)
    assert sent(4) == expected[:4]
    assert sent(9) != expected


def test_numbers_are_sent_in_the_width_of_their_target(card: Card) -> None:
    staging, target = Staging(DEVICE), torch.zeros(3, dtype=torch.int32, device=DEVICE)
    for _ in range(DEPTH):
        staging.send([1, 2, 3], into=target)
    assert target.tolist() == [1, 2, 3]
    narrow = np.array([4, 5, 6], dtype=np.int32)
    assert [staging.send(narrow).tolist() for _ in range(DEPTH)] == [[4, 5, 6]] * DEPTH, "by the same buffers"


def test_waits_for_staging_buffers_have_the_limit_of_steps(card: Card) -> None:
    staging = Staging(DEVICE)
    with mock.patch.object(device_waits.STEP_WAITS, "wait_for", side_effect=device_waits.STEP_WAITS.wait_for) as waited:
        for number in range(5):
            staging.send([number])
    assert waited.call_count == 5


class Steps:
    """Steps that only advance the slots, as a graph or launched one by one."""

    def __init__(self, *, is_captured: bool) -> None:
        self.back = TokenReturn(3, 3, device=DEVICE)
        self.state = slot_state(3, 1, DEVICE)
        self.slots, self.tokens, self.sampled = numbers(0, 2, -1).int(), numbers(10, 20, 0), numbers(0, 0, 0)
        self.graph: torch.cuda.CUDAGraph | None = None
        if is_captured:
            self.slots.copy_(numbers(-1, -1, -1))
            self._step()
            with captured() as self.graph:
                self._step()
            self.slots.copy_(numbers(0, 2, -1))

    def _step(self) -> None:
        self.tokens.add_(1)
        self.state.advance(self.slots, self.tokens, out=self.sampled, host=self.back.host)

    def launch(self) -> None:
        self.back.begin_step()
        if self.graph is None:
            self._step()
        else:
            self.graph.replay()

    def fetch(self) -> Fetch:
        return self.back.fetch(self.sampled[:2])


@pytest.mark.parametrize("is_captured", [False, True])
def test_tokens_belong_to_their_step_and_are_complete_after_its_event(
    card: Card, monkeypatch: pytest.MonkeyPatch, *, is_captured: bool
) -> None:
    def returned(count: int) -> list[list[int]]:
        steps = Steps(is_captured=is_captured)
        under_way, found = [], []
        for _ in range(count):
            steps.launch()
            under_way.append(steps.fetch())
            if len(under_way) == 2:
                found.append(under_way.pop(0).tokens())
        return found

    first = 12 if is_captured else 11  # what ran before the capture counted as no step
    assert returned(9) == [[first + number, first + 10 + number] for number in range(8)]
    monkeypatch.setattr(torch.cuda.Event, "synchronize", lambda _: None)
    with pytest.raises(RuntimeError, match="step 1 left no tokens: its buffer has those of step 0"):
        returned(2)


def test_steps_marked_as_unfetched_are_not_counted(card: Card) -> None:
    steps = Steps(is_captured=False)
    for number in range(6):
        steps.launch()
        steps.launch()
        steps.back.mark_unfetched()
        steps.launch()
        assert steps.fetch().tokens() == [13 + 3 * number, 23 + 3 * number]


def test_fetching_a_step_without_tokens_is_an_error(card: Card) -> None:
    steps = Steps(is_captured=False)
    for _ in range(5):
        steps.launch()
        steps.fetch()
    for number, fetch in ((6, steps.fetch()), (7, steps.back.fetch(steps.sampled, numbers(1, 2, 3)[:, None]))):
        with pytest.raises(RuntimeError, match=f"step {number} left no tokens: its buffer has those of step {number - 4}"):
            fetch.tokens()


def test_host_memory_is_kept_until_the_device_has_written_to_it(card: Card) -> None:
    steps = Steps(is_captured=False)
    steps.launch()
    steps.fetch()
    kinds(card)
    del steps.back
    assert kinds(card) == ["event"]


def test_inputs_and_scores_of_a_step_are_returned_with_its_tokens(card: Card) -> None:
    steps = Steps(is_captured=True)
    inputs, scores = numbers(6, 7), numbers(1, 2, 3, 4).view(2, 2)
    steps.launch()
    both = steps.back.fetch(steps.sampled[:2], scores, inputs=inputs)
    steps.launch()
    alone = steps.back.fetch(steps.sampled[:2], scores)
    for each in (inputs, scores):
        each.zero_()
    steps.launch()
    plain = steps.fetch()
    assert (both.tokens(), both.inputs(), both.scores().tolist()) == ([12, 22], [6, 7], [[1, 2], [3, 4]])
    assert (alone.tokens(), alone.scores().tolist()) == ([13, 23], [[1, 2], [3, 4]])
    assert plain.tokens() == [14, 24]


def test_the_largest_table_of_inputs_and_scores_is_returned_without_waiting_for_its_copy(card: Card) -> None:
    steps = Steps(is_captured=True)
    inputs, scores = numbers(6, 7, 8), numbers(*range(9)).view(3, 3)
    steps.launch()
    kinds(card)
    fetch = steps.back.fetch(steps.sampled, scores, inputs=inputs)
    assert kinds(card) == []
    fetch.tokens()
    assert (fetch.inputs(), fetch.scores().tolist()) == ([6, 7, 8], [[0, 1, 2], [3, 4, 5], [6, 7, 8]])


def test_a_step_that_samples_nothing_returns_its_end_and_counts_as_none(card: Card) -> None:
    steps = Steps(is_captured=False)
    kinds(card)
    for number in range(9):
        steps.back.begin_step()
        steps.tokens.add_(100)
        assert steps.back.fetch_end().tokens() == []
        assert kinds(card) == ["event"]
        steps.launch()
        assert steps.fetch().tokens() == [111 + 101 * number, 121 + 101 * number]
        kinds(card)


def test_fetching_tokens_launches_no_copy(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, staging = Steps(is_captured=True), Staging(DEVICE)
    monkeypatch.setattr(torch.cuda, "Event", None)  # all were made
    for number in range(9):
        assert staging.send([[number, 1], [2, 3]]).tolist() == [[number, 1], [2, 3]]
        steps.launch()
        replayed = card.stream.launched
        fetch = steps.fetch()
        assert card.stream.launched == replayed
        assert fetch.tokens() == [12 + number, 22 + number]


@pytest.mark.parametrize("tokens", [[7, 8, 9], [-1, 8, -1], [-1, -1, -1]])
def test_slot_writes_are_sent_in_one_copy_to_both_integer_widths(card: Card, tokens: list[int]) -> None:
    with mock.patch.object(Staging, "send", autospec=True, side_effect=Staging.send) as sent:
        state = slot_state(4, 3, DEVICE)
        state.write(SlotWrites([2, 0, 3], tokens, [10, 11, 12], [(2, 1, [5, 6]), (0, 0, [9])]))
    assert sent.call_count == 1
    assert state.last_tokens.tolist() == [max(0, token) for token in (tokens[1], 0, tokens[0], tokens[2])]
    assert state.num_tokens.tolist() == [11, 0, 10, 12]
    assert state.tables.tolist() == [[9, 0, 0], [0, 0, 0], [0, 5, 6], [0, 0, 0]]


@pytest.mark.parametrize(
    ("cores", "says", "is_blocking"), [(16, "1", False), (4, "1", False), (3, "1", True), (1, "1", True), (16, "0", True)]
)
def test_waiting_for_tokens_spins_if_there_are_enough_cores(
    card: Card, cores: int, says: str, *, is_blocking: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_return, "num_cores", lambda: cores)
    monkeypatch.setenv(BUSY_WAIT, says)
    waited: list[bool] = []
    monkeypatch.setattr(torch.cuda.Event, "synchronize", lambda event: waited.append(event.is_blocking))
    steps = Steps(is_captured=False)
    steps.launch()
    for fetch in (steps.fetch(), steps.back.fetch(steps.sampled, inputs=steps.tokens), steps.back.fetch_end()):
        assert isinstance(fetch, CudaFetch)
        fetch.wait()
    assert waited == [is_blocking] * 3
