"""Peers of the GPU benchmark get the same conversations and a comparable warm-up; run without a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.gpu import peers, traffic
from bench.gpu.context import Context
from bench.gpu.processes import Outcome
from bench.gpu.report import document, status
from bench.gpu.rows import PEER_MISSING, Row
from bench.gpu.traffic import BenchRequest

VOCAB = 256


def context_with(lines: list[dict[str, Any]], **facts: Any) -> Context:
    return Context(torch.device("cpu"), True, facts, lines.append, 1000.0, clock=lambda: 0.0)


@dataclass
class FakeManager:
    """Answers whatever is asked, in order."""

    pending: list[tuple[str, list[int], int]] = field(default_factory=list)
    prompts: dict[str, list[int]] = field(default_factory=dict)
    cancelled: list[str] = field(default_factory=list)
    answers: bool = True
    continuous_batching_config: Any = field(default_factory=lambda: SimpleNamespace(use_cuda_graph=(True, True)))

    def add_request(self, prompt: list[int], *, request_id: str, max_new_tokens: int, eos_token_id: int) -> None:
        assert eos_token_id == -1
        self.pending.append((request_id, prompt, max_new_tokens))
        self.prompts[request_id] = prompt

    def cancel_request(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    def get_result(self, timeout: float) -> Any:
        assert timeout
        if not self.answers:
            return None
        name, _, length = self.pending.pop(0)
        return SimpleNamespace(request_id=name, generated_tokens=[1] * length, is_finished=lambda: True)

    def is_running(self) -> bool:
        return True


@dataclass
class Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class FakeModel:
    manager: FakeManager = field(default_factory=FakeManager)
    config: Any = field(default_factory=lambda: SimpleNamespace(vocab_size=VOCAB, _attn_implementation="sdpa"))
    begun: dict[str, Any] = field(default_factory=dict)
    batches: list[tuple[int, int]] = field(default_factory=list)
    fits: int = 1000
    clock: Clock = field(default_factory=Clock)
    each_s: float = 0.0

    refusals: list[Exception] = field(default_factory=list)

    @contextmanager
    def continuous_batching_context_manager(self, **options: Any) -> Iterator[FakeManager]:
        assert self.config._attn_implementation == "sdpa", "as it was before another manager"
        self.begun, self.config._attn_implementation = options, "paged|sdpa"
        if self.refusals:
            raise self.refusals.pop(0)
        yield self.manager

    def set_attn_implementation(self, name: str) -> None:
        self.config._attn_implementation = name

    def generate(self, tokens: torch.Tensor, *, max_new_tokens: int, **_: Any) -> torch.Tensor:
        if self.config._attn_implementation != "sdpa":
            raise ValueError("called without a paged cache")
        if len(tokens) > self.fits:
            raise torch.OutOfMemoryError("no room")
        self.batches.append((len(tokens), max_new_tokens))
        if max_new_tokens > peers.WARM_OUTPUTS:
            self.clock.now_s += self.each_s
        return torch.cat([tokens, torch.ones(len(tokens), max_new_tokens, dtype=tokens.dtype)], dim=1)


def test_peers_get_the_conversations_of_our_engine() -> None:
    context = context_with([])
    ours = traffic.conversations(context, VOCAB)
    model = FakeModel()
    result = peers._run_continuous(context, model, ours)
    assert result.num_requested == result.returned == sum(each.num_outputs for each in ours)
    assert f"{len(ours)} conversations at once" in result.how
    assert "paged|sdpa" in result.how
    assert model.begun["warmup"] is True
    hints = model.begun["workload_hints"]
    assert (hints.num_requests, hints.max_prompt_length) == (len(ours), max(len(each.prompt) for each in ours))
    assert hints.max_generated_length == max(each.num_outputs for each in ours)


def test_the_warm_up_caches_no_prefix_of_a_timed_conversation() -> None:
    """Continuous batching keeps whole pages of prompts that it has read, and ours was warmed up with other prompts too."""
    model = FakeModel()
    peers._run_continuous(context_with([]), model, WORK)
    for number, request in enumerate(WORK):
        warm, timed = (model.manager.prompts[f"{label}{number}"] for label in "wr")
        assert (len(warm), timed) == (len(timed), list(request.prompt))
        assert len(timed) < 2 or warm[:2] != timed[:2]


WORK = traffic.chat_requests(40, 10, VOCAB)


def test_generate_runs_batches_of_sixteen_in_order_each_to_its_longest_output() -> None:
    model = FakeModel()
    result = peers._run_static(context_with([]), model, WORK)
    timed = [batch for batch in model.batches if batch[1] > peers.WARM_OUTPUTS]
    parts = [WORK[:16], WORK[16:32], WORK[32:]]
    assert timed == [(len(part), max(each.num_outputs for each in part)) for part in parts]
    assert (result.requests, result.num_requested) == (40, sum(each.num_outputs for each in WORK))
    assert result.returned == result.num_requested, "what runs on for the longest is not counted"
    assert "batches of 16" in result.how
    assert "batches of 16" in peers.STATIC


def test_generate_gets_as_many_conversations_as_fit_its_time_and_at_least_one_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for each_s, expected in ((5.0, 32), (10.0, 16), (90.0, 16)):
        clock, model = Clock(), FakeModel()
        model.clock, model.each_s = clock, each_s
        monkeypatch.setattr("time.perf_counter", clock)
        context = Context(torch.device("cpu"), True, {}, lambda _: None, 60.0, clock=clock)
        result = peers._run_static(context, model, WORK)
        assert result.requests == expected
        assert result.num_requested == sum(request.num_outputs for request in WORK[:expected])
        assert result.longest_s == each_s


@pytest.mark.parametrize(
    ("left_s", "fits", "expected"),
    [(100.0, 1000, "10"), (100.0, 16, "OutOfMemoryError: no room"), (22.0, 1000, "not measured: 22 s were left")],
)
def test_one_batch_of_all_conversations_is_reported_but_not_judged(
    left_s: float, fits: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[dict[str, Any]] = []
    clock, model = Clock(), FakeModel(fits=fits)
    model.clock, model.each_s = clock, sum(each.num_outputs for each in WORK) / 10
    monkeypatch.setattr("time.perf_counter", clock)
    monkeypatch.setattr(traffic, "conversations", lambda *_: WORK)
    context = Context(torch.device("cpu"), True, {}, lines.append, left_s, clock=clock)
    row = Row(name=peers.STATIC, value=90.0, peer=5.0)
    peers._single_batch(context, model, row, peers.PeerResult(7, 7, 16, 10.0, "", longest_s=10.0))
    (line,) = lines
    assert str(line["row"]["facts"]["batch of 40"]).removesuffix(".0") == expected
    assert (line["row"]["peer"], line["row"]["error"]) == (5.0, "")


def test_a_failing_batch_of_all_conversations_loses_no_row() -> None:
    lines: list[dict[str, Any]] = []
    model = FakeModel()
    model.set_attn_implementation("paged|sdpa")
    static = Row(name=peers.STATIC, value=90.0, peer=5.0)
    peers._single_batch(context_with(lines), model, static, peers.PeerResult(7, 7, 16, 10.0, ""))
    (line,) = lines
    assert "ValueError: called without a paged cache" in str(line["row"]["facts"])
    assert (line["row"]["peer"], line["row"]["error"]) == (5.0, "")


@pytest.mark.parametrize("refusal", [MemoryError("more than available"), RuntimeError("no kernel"), ValueError("no size")])
def test_continuous_batching_that_cannot_start_is_retried_smaller_and_the_model_restored(
    refusal: Exception,
) -> None:
    model = FakeModel(refusals=[refusal])
    context = context_with([])
    context.rehearsal = False
    result = peers._run_continuous(context, model, WORK)
    assert type(refusal).__name__ in result.how
    assert "'num_blocks': 1024" in result.how
    assert model.config._attn_implementation == "sdpa"


def test_different_conversations_give_no_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[dict[str, Any]] = []
    context = context_with(lines, chats_rate=100.0, chats_tokens=7)
    monkeypatch.setattr(peers, "_model", lambda _: FakeModel())
    peers.against_transformers(context)
    assert {line["row"]["name"] for line in lines} == set(peers.NAMES)
    assert all("7 tokens" in line["row"]["error"] for line in lines)


def test_a_peer_without_time_left_is_stopped() -> None:
    model = FakeModel(FakeManager(answers=False))
    context = context_with([])
    context.deadline_s = 1.0
    work = traffic.conversations(context, VOCAB)
    with pytest.raises(TimeoutError, match=f"0 of {len(work)} conversations were done"):
        peers._run_continuous(context, model, work)
    assert len(model.manager.cancelled) == len(work)


def test_an_unfinished_peer_is_reported_with_an_upper_bound_of_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, context = Clock(), context_with([])
    num_tokens = sum(each.num_outputs for each in WORK)

    def serve(_manager: Any, work: list[BenchRequest], label: str, _context: Context) -> int:
        clock.now_s += num_tokens / 10
        if label == "r":
            raise TimeoutError("no time left: 7 of 40 conversations were done")
        return len(work)

    monkeypatch.setattr("time.perf_counter", clock)
    monkeypatch.setattr(peers, "_serve_all", serve)
    with pytest.raises(TimeoutError, match=r"7 of 40 .* below 10 tokens/s"):
        peers._run_continuous(context, FakeModel(), WORK)


RIGHT, WRONG = Row(name="numbers: embedding", value=1.0), Row(name="numbers: embedding", error="RuntimeError: boom")
NO_PEERS = [Row(name=name, error=PEER_MISSING) for name in peers.NAMES]
KILLED = {"part": "warm small", "targets": ["warm-up"], "error": "ended after its limit of 75 s"}


@pytest.mark.parametrize(
    ("rows", "parts", "expected"),
    [
        ([RIGHT], [], 0),
        ([WRONG], [], 1),
        ([Row(name=RIGHT.name, value=1.0, counted=1, returned=2)], [], 1),
        ([RIGHT], [KILLED], 1),
        ([RIGHT, *NO_PEERS], [], 3),
        ([WRONG, *NO_PEERS], [], 1),
        ([RIGHT, *NO_PEERS], [KILLED], 1),
        ([RIGHT, Row(name=peers.STATIC, error="RuntimeError: boom"), NO_PEERS[0]], [], 1),
    ],
)
def test_the_exit_status_distinguishes_missing_peers_from_failures(
    rows: list[Row], parts: list[dict[str, Any]], expected: int
) -> None:
    assert status(document(rows, Outcome(parts=parts), rehearsal=False, taken_s=1.0)) == expected


def test_without_transformers_the_peer_rows_have_the_known_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    lines: list[dict[str, Any]] = []
    peers.against_transformers(context_with(lines))
    assert [line["row"]["error"] for line in lines] == [PEER_MISSING] * 2


def test_the_cpu_time_of_a_peer_is_reported_beside_its_gpu_time(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[dict[str, Any]] = []
    context = context_with(lines)
    model = peers._model(context)
    assert peers._on_cpu(model, 4) > 0
    monkeypatch.setattr(peers, "_on_cpu", lambda *_: 7.0)
    kept: dict[str, Any] = {}
    peers._row(context, peers.STATIC, lambda *_: peers.PeerResult(10, 10, 2, 1.0, ""), model, kept)
    assert kept[peers.STATIC][1].requests == 2
    assert lines[0]["row"]["peer_on_cpu"] == 7.0
