"""Steps launched ahead, with a fake runner: order of launches, bookkeeping, failures of pending steps, drafts, step sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest

from engine.errors import EngineBroken
from engine.loop import FAILED_STEPS_MAX, Engine
from engine.overlap import Fallbacks
from engine.protocol import FinishReason, PlainReason
from engine.scheduling.drafting import Draft
from engine.scheduling.request import Request
from engine.scheduling.scheduled_batch import BlockMoves, RowResult, ScheduledBatch, ScheduledRequest, StepOutput
from engine.scheduling.token_events import StepEvents, token_event
from engine.speculation import adaptive_drafter
from engine.speculation.adaptive_drafter import AdaptiveDrafter
from engine.speculation.options import SpeculativeOptions
from engine.step_sizes import draft_graphs_kept, graphs_kept, step_size, verify_size
from tests.support.engines import FREE_ROWS, generation_request, run_to_end, tokens
from tests.support.fake_runner import engine_over
from tests.support.scheduling import make_request

STOP = 7


def token_of(request_id: str, position: int) -> int:
    """The token that every runner here generates: STOP at each eleventh position, a smaller one elsewhere."""
    return STOP if position % 11 == 10 else (len(request_id) + 3 * position) % STOP


@dataclass
class FakePendingStep:
    runner: FakeAheadRunner
    found: list[RowResult]
    culprits: frozenset[str]
    is_complete: bool = False

    def complete(self) -> None:
        if self.culprits & self.runner.waits and not self.is_complete:
            self.is_complete = True
            self.runner.log.append("complete")
            if self.culprits & self.runner.fails_at_completion:
                raise RuntimeError("it cannot be completed")

    def outputs(self) -> list[RowResult]:
        assert self.is_complete or not self.culprits & self.runner.waits
        self.runner.log.append("collect")
        self.runner.now_s += 1.0
        if self.culprits & self.runner.fails_in_flight:
            raise RuntimeError("the device failed")
        return self.found

    @property
    def lacks_tokens(self) -> bool:
        return None in self.found


class FakeAheadRunner:
    """Generates `token_of`. Steps with a request in one of the sets fail: at launch, completion, in flight, by yielding no
    token, or on the slow path. A request in `waits` must be completed; one in `not_launched` runs on the slow path."""

    def __init__(self, *, is_synchronous: bool = False) -> None:
        self.stage = "run"
        self.is_synchronous = is_synchronous
        self.now_s = 0.0
        """The clock; each collected step takes a second."""
        self.log: list[str] = []
        self.fails_at_launch: set[str] = set()
        self.waits: set[str] = set()
        self.fails_at_completion: set[str] = set()
        self.fails_in_flight: set[str] = set()
        self.yields_nothing: set[str] = set()
        self.fails_plainly: set[str] = set()
        self.not_launched: set[str] = set()
        self.moves: list[BlockMoves] = []

    def move(self, moves: BlockMoves) -> None:
        self.moves.append(moves)

    def run(self, items: Sequence[ScheduledRequest]) -> list[StepOutput]:
        assert all(-1 not in item.request.token_ids for item in items), "the slow path needs every token"
        self.log.append(f"run {len(items)}")
        if self.fails_plainly & {item.request.request_id for item in items}:
            raise RuntimeError("boom")
        return [
            StepOutput([output]) if isinstance(output, int) else output for output in self._answer(items) if output is not None
        ]

    def plain_reason(self, batch: ScheduledBatch) -> PlainReason | None:
        is_plain = self.not_launched & {item.request.request_id for item in batch.items}
        return PlainReason.LOGIT_BIAS if is_plain else None

    def launch(self, batch: ScheduledBatch) -> FakePendingStep:
        items, depths = batch.items, [item.num_draft_tokens for item in batch.items]
        self.log.append(f"verify {depths}" if any(depths) else f"launch {len(items)}")
        names = frozenset(item.request.request_id for item in items)
        if names & self.fails_at_launch:
            raise RuntimeError("it cannot be launched")
        found = [None if item.request.request_id in self.yields_nothing else out for item, out in
                 zip(items, self._answer(items), strict=True)]  # fmt: skip
        return FakePendingStep(self, found, names)

    def invalidate_slots(self) -> None:
        self.log.append("forget")

    def _answer(self, items: Sequence[ScheduledRequest]) -> list[RowResult]:
        return [self._answer_to(item) for item in items]

    def _answer_to(self, item: ScheduledRequest) -> RowResult:
        if not item.samples:
            return StepOutput()
        end = item.start + item.num_tokens
        token_ids = [token_of(item.request.request_id, position) for position in range(end - item.num_draft_tokens, end + 1)]
        return StepOutput(token_ids) if item.num_draft_tokens else token_ids[0]


class OracleDrafter:
    """Drafts the correct tokens: for each request as many as the next entry of its `depths`, none without an entry."""

    def __init__(self, depths: dict[str, list[int]], *, pays: bool = True) -> None:
        self.depths = depths
        self._pays = pays
        self.looked = 0

    def pays(self, num_running: int) -> bool:
        return self._pays

    def draft(self, request: Request, *, limit: int, num_running: int) -> Draft:
        self.looked += 1
        depths, first = self.depths.get(request.request_id, []), request.num_tokens
        depth = min(depths.pop(0), limit) if depths else 0
        return Draft(depth, [token_of(request.request_id, position) for position in range(first, first + depth)])

    def read(self, num_running: int) -> None:
        """It has no text to read."""

    def observe(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        """Its drafts do not depend on acceptance."""


def make_engine(runner: FakeAheadRunner, **options: Any) -> Engine:
    """An engine that measures steps by the clock of `runner`; `options` are those of `engine_over`."""
    return engine_over(runner, clock=lambda: runner.now_s, **options)


def expected_tokens(request_id: str, num_prompt: int, max_tokens: int, *, stops: bool = True) -> list[int]:
    found: list[int] = []
    while len(found) < max_tokens and not (stops and found and found[-1] == STOP):
        found.append(token_of(request_id, num_prompt + len(found)))
    return found


def test_the_next_step_is_launched_before_the_previous_one_is_collected() -> None:
    runner = FakeAheadRunner()
    run_to_end(make_engine(runner), [generation_request("a", [1, 2], max_tokens=3)])
    assert runner.log == ["launch 1", "launch 1", "collect", "launch 1", "collect", "collect"]


class SlowHostRunner(FakeAheadRunner):
    """Takes half a second to launch a step."""

    def launch(self, batch: ScheduledBatch) -> FakePendingStep:
        self.now_s += 0.5
        return super().launch(batch)


@pytest.mark.parametrize("is_synchronous", [False, True])
def test_launch_time_counts_as_step_time_only_where_launching_computes_the_step(is_synchronous: bool) -> None:
    """Otherwise the step budget would shrink chunks beside decodes without making their steps shorter."""
    engine, budget = make_engine(SlowHostRunner(is_synchronous=is_synchronous)), mock.Mock()
    budget.model.batch_s.return_value = 0.25
    engine._step_budget = budget
    run_to_end(engine, [generation_request("a", [1, 2], max_tokens=3)])
    assert {call.args[0] for call in budget.observe.call_args_list} == {0.25 if is_synchronous else 0.5}


@pytest.mark.parametrize("is_synchronous", [False, True])
def test_the_step_budget_observes_the_duration_of_each_step_and_whether_it_had_a_chunk(is_synchronous: bool) -> None:
    engine, budget = make_engine(FakeAheadRunner(is_synchronous=is_synchronous)), mock.Mock()
    budget.model.batch_s.return_value = 0.25
    engine._step_budget = budget
    run_to_end(engine, [generation_request("a", [1, 2], max_tokens=3)])
    assert budget.observe.call_args_list == [mock.call(0.25, 1.0, has_chunk=has_chunk) for has_chunk in (True, False, False)]


def test_a_synchronous_step_is_collected_before_the_next_launch() -> None:
    runner = FakeAheadRunner(is_synchronous=True)
    runner.waits = {"a"}
    events = run_to_end(make_engine(runner), [generation_request("a", [1, 2], max_tokens=3)])
    assert runner.log == ["launch 1", "complete", "collect"] * 3
    assert tokens(events["a"]) == expected_tokens("a", 2, 3)


def test_a_step_that_waits_for_a_mask_is_completed_after_the_previous_step_and_before_its_own_tokens() -> None:
    runner = FakeAheadRunner()
    runner.waits = {"a"}
    run_to_end(make_engine(runner), [generation_request("a", [1, 2], max_tokens=3)])
    assert runner.log == ["launch 1", "complete", *["launch 1", "collect", "complete"] * 2, "collect"]


def test_a_step_without_starts_and_ends_has_decoded_tokens_instead_of_events() -> None:
    engine = make_engine(FakeAheadRunner())
    engine.submit(generation_request("a", [1, 2], max_tokens=4))
    engine.submit(generation_request("b", [1, 2], max_tokens=4))
    steps = [engine.step_in_columns() for _ in range(5)]
    assert [[event.num_output_tokens for event in step.others] for step in steps] == [[], [1, 1], [], [], [4, 4]]
    assert [step.decoded for step in steps[2:4]] == [[(name, 0, token_of(name, n)) for name in "ab"] for n in (3, 4)]


def test_step_events_of_two_steps_are_merged_in_order() -> None:
    request = make_request("a", 2, max_tokens=4)
    request.token_ids += [7, 8, 9]
    events = StepEvents([], [request], [2], [8])
    events.extend(StepEvents())
    assert events.decoded == [("a", 0, 8)]
    request.finish(FinishReason.STOP)
    events.extend(StepEvents([token_event(request, [9])]))
    assert not events.decoded
    merged = [(event.token_ids, event.num_output_tokens, event.finish_reason) for event in events.as_events()]
    assert merged == [([8], 2, None), ([9], 3, FinishReason.STOP)]


def test_a_surplus_step_is_completed_before_its_tokens_are_discarded() -> None:
    runner = FakeAheadRunner()
    runner.waits = {"a"}
    engine = make_engine(runner)
    run_to_end(engine, [generation_request("a", [1, 2], max_tokens=9, stop_token_ids=[token_of("a", 2)])])
    assert runner.log == ["launch 1", "complete", "launch 1", "collect", "complete", "collect"]
    assert engine.fallbacks.count == 0


def test_tokens_of_a_step_whose_requests_have_ended_are_discarded() -> None:
    runner = FakeAheadRunner()
    runner.waits = {"a"}
    engine = make_engine(runner)
    engine.submit(generation_request("a", [1, 2], max_tokens=9))
    engine.step()
    engine.step()
    engine.abort("a")
    runner.log.clear()
    assert engine.step() == []
    assert runner.log == ["collect"]
    engine.check_when_idle()


def test_a_step_that_fails_to_complete_is_computed_on_the_slow_path() -> None:
    runner = FakeAheadRunner()
    runner.waits = runner.fails_at_completion = {"bb"}
    events = run_to_end(
        make_engine(runner), [generation_request("a", [1, 2], max_tokens=6), generation_request("bb", [1, 2, 3], max_tokens=4)]
    )
    assert [tokens(events["a"]), tokens(events["bb"])] == [
        expected_tokens("a", 2, 6, stops=False),
        expected_tokens("bb", 3, 4, stops=False),
    ]
    assert {"forget", "run 2"} < set(runner.log)


def test_a_pending_chunk_of_a_preempted_start_registers_no_blocks_of_the_next_start() -> None:
    engine = make_engine(FakeAheadRunner(), caches=True, max_num_batched_tokens=8)
    engine.submit(generation_request("a", list(range(8)) * 2, max_tokens=2))
    engine.step()
    (request,) = engine._scheduler.running
    engine._scheduler.preempt(request)
    engine.step()  # starts the request again, and settles the chunk of its first start
    assert request.block_table
    assert (request.num_in_flight_tokens, request.num_settled_tokens) == (8, 0)
    assert all(engine._scheduler.pool.lookup(name) is None for name in request.block_hashes), "nothing of it is computed yet"
    assert tokens(run_to_end(engine, [])["a"]) == expected_tokens("a", 16, 2, stops=False)


@pytest.mark.parametrize("samples", [False, True])
def test_a_pending_chunk_of_a_preempted_start_that_fails_leaves_the_next_start_unchanged(samples: bool) -> None:
    runner = FakeAheadRunner()
    engine = make_engine(runner, max_num_batched_tokens=8)
    if samples:  # beside another prompt there is room for half of the request's own, and then for all of it
        engine.submit(generation_request("b", [1, 2, 3, 4], max_tokens=1))
    engine.submit(generation_request("a", list(range(7)) if samples else list(range(8)) * 2, max_tokens=2))
    engine.step()
    request = next(each for each in engine._scheduler.running if each.request_id == "a")
    assert request.num_in_flight_tokens
    engine._scheduler.preempt(request)
    runner.fails_in_flight = {"a"}
    engine.step()  # starts the request again, and computes the failed chunk on the slow path
    runner.fails_in_flight = set()
    assert request.num_settled_tokens <= request.num_computed_tokens
    run_to_end(engine, [])
    assert request.token_ids[request.num_prompt_tokens :] == expected_tokens("a", request.num_prompt_tokens, 2, stops=False)


def test_tokens_equal_those_of_the_plain_loop_and_all_blocks_are_freed() -> None:
    requests = {"a": (2, 9), "bb": (7, 1), "ccc": (23, 20), "dddd": (1, 30), "e": (5, 4), "f" * 9: (16, 12)}
    for caches in (False, True):
        engine = make_engine(FakeAheadRunner(), num_blocks=20, caches=caches)
        events = run_to_end(
            engine, [generation_request(n, [1] * p, max_tokens=m, stop_token_ids=[STOP]) for n, (p, m) in requests.items()]
        )
        assert {n: tokens(events[n]) for n in requests} == {n: expected_tokens(n, *lens) for n, lens in requests.items()}
        assert engine.status().kv_blocks_used == 0
        engine.check_when_idle()


@pytest.mark.parametrize("is_synchronous", [False, True])
@pytest.mark.parametrize("failure", ["fails_at_launch", "fails_in_flight", "yields_nothing"])
def test_a_failed_step_is_computed_on_the_slow_path_and_ends_only_the_request_at_fault(
    failure: str, is_synchronous: bool
) -> None:
    runner = FakeAheadRunner(is_synchronous=is_synchronous)
    getattr(runner, failure).add("bad")
    runner.fails_plainly.add("bad")
    engine = make_engine(runner)
    names = {"a": 9, "bad": 9, "b": 12}
    events = run_to_end(engine, [generation_request(n, [1, 2, 3], max_tokens=m) for n, m in names.items()])
    assert {n: tokens(events[n]) for n in ("a", "b")} == {n: expected_tokens(n, 3, names[n], stops=False) for n in ("a", "b")}
    assert [event.finish_reason for event in events["bad"]] == [FinishReason.ERROR]
    assert events["bad"][0].error == "the engine failed while computing this request: RuntimeError: boom"
    assert engine.status().kv_blocks_used == 0


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        ("fails_at_launch", "a step could not be launched: RuntimeError: it cannot be launched"),
        ("fails_at_completion", "a step could not be launched to its end: RuntimeError: it cannot be completed"),
        ("fails_in_flight", "a step in flight failed: RuntimeError: the device failed"),
        ("yields_nothing", "a step gave no token where the plain way has one"),
    ],
)
def test_status_counts_steps_on_the_slow_path_and_has_the_last_reason(failure: str, reason: str) -> None:
    runner = FakeAheadRunner()
    runner.waits = {"bad"}
    engine = make_engine(runner)
    run_to_end(engine, [generation_request("a", [1, 2], max_tokens=3)])
    assert (engine.status().fallback_steps_total, engine.status().fallback_reason) == (0, None)
    getattr(runner, failure).add("bad")
    run_to_end(engine, [generation_request("bad", [1, 2], max_tokens=1)])
    assert (engine.status().fallback_steps_total, engine.status().fallback_reason) == (1, reason)
    assert engine.fallbacks.count == 1


def test_requests_without_a_slot_and_requests_that_fail_on_both_paths_are_not_counted_as_fallbacks() -> None:
    runner = FakeAheadRunner()
    runner.not_launched = {"guided"}
    runner.yields_nothing = runner.fails_plainly = {"bad"}
    engine = make_engine(runner)
    for name in ("guided", "bad"):
        run_to_end(engine, [generation_request(name, [1, 2], max_tokens=2)])
    assert engine.status().fallback_steps_total == 0


def test_a_step_is_counted_as_fallback_if_the_slow_path_has_a_token_for_any_of_its_rows() -> None:
    runner = FakeAheadRunner()
    runner.yields_nothing = {"a", "bad"}
    runner.fails_plainly = {"bad"}
    engine = make_engine(runner)
    run_to_end(engine, [generation_request(name, [1, 2], max_tokens=1) for name in ("a", "bad")])
    assert engine.status().fallback_steps_total == 1


def test_the_reason_of_a_fallback_has_a_bounded_length() -> None:
    fallbacks = Fallbacks()
    fallbacks.record("a step failed", RuntimeError("boom" * 1000))
    assert fallbacks.reason == ("a step failed: RuntimeError: " + "boom" * 1000)[:500]


def test_steps_that_cannot_be_launched_are_counted_by_reason() -> None:
    runner = FakeAheadRunner()
    runner.not_launched = {"a"}
    engine = make_engine(runner)
    assert engine.status().plain_steps_total == dict.fromkeys(("prompt_logprobs", "logit_bias"), 0)
    run_to_end(engine, [generation_request("a", [1, 2], max_tokens=2), generation_request("b", [1, 2], max_tokens=5)])
    assert engine.status().plain_steps_total == {"prompt_logprobs": 0, "logit_bias": 2}


def test_a_repeated_failure_is_logged_with_its_traceback_only_once(caplog: pytest.LogCaptureFixture) -> None:
    runner = FakeAheadRunner()
    runner.fails_at_launch = {"a"}
    engine = make_engine(runner)
    run_to_end(engine, [generation_request("a", [1, 2], max_tokens=7)])
    records = [record for record in caplog.records if record.name == "gatehouse.engine"]
    assert [bool(record.exc_info) for record in records] == [True, False, False]
    assert [record.getMessage().split("; ")[-1] for record in records] == [
        f"{count} steps so far, on the slow path" for count in (1, 2, 4)
    ]
    assert engine.fallbacks.count == 7


def test_different_failures_are_logged_separately_and_at_most_ten_times_each(caplog: pytest.LogCaptureFixture) -> None:
    fallbacks = Fallbacks()
    for number in range(1000):
        fallbacks.record("a step failed", RuntimeError(f"{number} bytes are missing"))
        fallbacks.record("a step failed", ValueError("boom"))
        fallbacks.record("a step could not be launched", ValueError("boom"))
        fallbacks.record("a step gave no token")
    assert fallbacks.count == 4000
    assert len(caplog.records) == 4 * 10
    assert sum(bool(record.exc_info) for record in caplog.records) == 3


def test_a_step_launched_after_a_failed_one_is_computed_again_too() -> None:
    runner = FakeAheadRunner()
    engine = make_engine(runner)
    for name in ("a", "b"):
        engine.submit(generation_request(name, [1, 2, 3], max_tokens=6))
    events = engine.step() + engine.step()
    runner.fails_in_flight = {"a"}
    runner.log.clear()
    events += engine.step()
    assert runner.log == ["launch 2", "collect", "forget", "forget", "run 2", "run 2"]
    runner.fails_in_flight = set()
    for name, rest in run_to_end(engine, []).items():
        events += rest
        found = [token for event in events if event.request_id == name for token in event.token_ids]
        assert found == expected_tokens(name, 3, 6, stops=False)


def test_a_step_launched_after_one_without_a_usable_token_is_computed_again_too() -> None:
    runner = FakeAheadRunner()
    engine = make_engine(runner)
    for name in ("a", "b"):
        engine.submit(generation_request(name, [1, 2, 3], max_tokens=6))
    engine.step()
    runner.yields_nothing = {"a"}
    engine.step()
    runner.log.clear()
    engine.step()
    assert runner.log == ["launch 2", "collect", "run 1", "forget", "run 2"]


def test_block_copies_are_made_once_although_their_step_is_computed_again() -> None:
    """By then the source blocks may belong to another request."""
    runner = FakeAheadRunner()
    engine = make_engine(runner)
    engine.submit(generation_request("a", [1, 2, 3], max_tokens=6, n=2))
    engine.step()
    runner.not_launched = {"a"}
    engine.step()
    engine.step()
    assert "run 2" in runner.log
    assert [len(moves.copies) for moves in runner.moves] == [1]


def test_a_batch_that_cannot_be_launched_waits_for_the_pending_step_and_runs_on_the_slow_path() -> None:
    runner = FakeAheadRunner()
    runner.not_launched = {"guided"}
    events = run_to_end(
        make_engine(runner), [generation_request(n, [1, 2], max_tokens=m) for n, m in (("a", 6), ("guided", 2))]
    )
    assert tokens(events["a"]) == expected_tokens("a", 2, 6, stops=False)
    assert tokens(events["guided"]) == expected_tokens("guided", 2, 2, stops=False)
    assert runner.log == [*["run 2"] * 2, "launch 1", *["launch 1", "collect"] * 3, "collect"]


def test_an_engine_whose_steps_all_fail_raises_engine_broken() -> None:
    runner = FakeAheadRunner()
    runner.fails_in_flight = runner.fails_plainly = {"a", "b", "c", "d", "e", "probe"}
    with pytest.raises(EngineBroken):
        run_to_end(make_engine(runner, max_num_seqs=1), [generation_request(name, [1, 2], max_tokens=3) for name in "abcde"])


def test_a_step_with_tokens_resets_the_count_of_failed_steps() -> None:
    runner = FakeAheadRunner()
    engine = make_engine(runner, max_num_seqs=1)
    for name in "ab":
        failing = [f"{name}{number}" for number in range(FAILED_STEPS_MAX)]
        runner.fails_in_flight = runner.fails_plainly = {*failing, "probe"}
        run_to_end(engine, [generation_request(each, [1, 2], max_tokens=2) for each in failing])
        assert run_to_end(engine, [generation_request(name, [1, 2], max_tokens=2)])[name][-1].error is None


def test_an_abort_during_a_pending_step_frees_all_blocks_and_keeps_other_tokens() -> None:
    for steps in range(5):
        engine = make_engine(FakeAheadRunner(), caches=True)
        for name in ("a", "b"):
            engine.submit(generation_request(name, [1] * 9, max_tokens=9))
        events = [event for _ in range(steps) for event in engine.step()]
        (aborted,) = engine.abort("a")
        had = [token for event in events if event.request_id == "a" for token in event.token_ids]
        assert aborted.num_output_tokens == len(had)
        engine.check_invariants()
        events += [event for each in run_to_end(engine, []).values() for event in each]
        assert [t for e in events if e.request_id == "b" for t in e.token_ids] == expected_tokens("b", 9, 9, stops=False)
        assert engine.status().kv_blocks_used == 0


@pytest.mark.parametrize("method", ["launch", "outputs"])
def test_abort_all_after_an_interrupted_step_leaves_no_pending_step(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> Any:
        raise KeyboardInterrupt

    runner = FakeAheadRunner()
    engine = make_engine(runner, drafter=OracleDrafter({"b": [2, 2]}))
    engine.submit(generation_request("a", [1, 2], max_tokens=30))
    for _ in range(4):
        engine.step()
    with monkeypatch.context() as patched:
        patched.setattr(FakeAheadRunner if method == "launch" else FakePendingStep, method, interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    engine.abort_all()
    engine.check_invariants()
    assert runner.log[-1] == "forget", "after an interrupt the slots are in an unknown state"
    runner.log.clear()
    events = run_to_end(engine, [generation_request("b", [1, 2], max_tokens=8)])
    assert tokens(events["b"]) == expected_tokens("b", 2, 8, stops=False)
    assert any(entry.startswith("verify") for entry in runner.log)
    assert sum(entry[0] in "lv" for entry in runner.log) == runner.log.count("collect"), "and not the step from before"


def test_without_drafts_the_interval_between_attempts_to_draft_grows() -> None:
    runner = FakeAheadRunner()
    run_to_end(make_engine(runner, drafter=OracleDrafter({})), [generation_request("a", [1, 2], max_tokens=12)])
    attempted, ahead = ["collect", "launch 1"], ["launch 1", "collect"]
    assert runner.log == ["launch 1", *attempted, *ahead, *attempted, *ahead * 3, *attempted, *ahead * 4, "collect"]


def test_prompt_lookup_indexes_a_long_prompt_during_steps_without_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight tokens per step: the prompt of 44 is indexed by the third attempt, in the tenth step."""
    monkeypatch.setattr(adaptive_drafter, "INDEX_TOKENS_PER_STEP", 8)
    options = SpeculativeOptions(method="ngram", num_speculative_tokens=2)
    runner, prompt = FakeAheadRunner(), [token_of("a", position) for position in range(44)]
    run_to_end(
        make_engine(runner, drafter=AdaptiveDrafter(options, FREE_ROWS)), [generation_request("a", prompt, max_tokens=20)]
    )
    launched = [entry for entry in runner.log if entry != "collect"]
    assert launched[:10] == ["launch 1"] * 9 + ["verify [2]"]


@pytest.mark.parametrize("is_synchronous", [False, True])
def test_no_step_is_pending_before_or_after_a_step_with_drafts(is_synchronous: bool) -> None:
    runner = FakeAheadRunner(is_synchronous=is_synchronous)
    requests = [generation_request("a", [1, 2], max_tokens=9), generation_request("b", [1, 2], max_tokens=3)]
    events = run_to_end(make_engine(runner, drafter=OracleDrafter({"a": [3, 2]})), requests)
    assert [tokens(events["a"]), tokens(events["b"])] == [expected_tokens("a", 2, 9, stops=False), expected_tokens("b", 2, 3)]
    assert runner.log[:5] == ["launch 2", "collect", "verify [3, 0]", "collect", "verify [2, 0]"]
    assert runner.log[5:] == ["collect", "launch 1", "collect"], "a has one token left, of which none is drafted"


def test_drafts_of_a_request_that_cannot_be_launched_are_verified_on_the_slow_path() -> None:
    runner = FakeAheadRunner()
    runner.not_launched = {"a"}
    events = run_to_end(
        make_engine(runner, drafter=OracleDrafter({"a": [2, 2]})), [generation_request("a", [1, 2], max_tokens=8)]
    )
    assert tokens(events["a"]) == expected_tokens("a", 2, 8, stops=False)
    assert set(runner.log) == {"run 1"}


def test_a_step_with_drafts_is_completed_for_its_rows_that_wait_for_a_mask() -> None:
    runner = FakeAheadRunner()
    runner.waits = {"b"}
    engine = make_engine(runner, drafter=OracleDrafter({"a": [3]}))
    run_to_end(engine, [generation_request(name, [1, 2], max_tokens=9) for name in ("a", "b")])
    assert engine.fallbacks.count == 0


def test_correct_drafts_beyond_the_end_of_an_answer_are_not_counted_as_accepted() -> None:
    runner = FakeAheadRunner()
    engine = make_engine(runner, drafter=OracleDrafter({"a": [5]}))
    events = run_to_end(engine, [generation_request("a", [1] * 6, max_tokens=20, stop_token_ids=[STOP])])
    assert tokens(events["a"]) == expected_tokens("a", 6, 20)
    assert [len(event.token_ids) for event in events["a"]] == [1, 4], "and one more draft, which was right"
    assert (engine.status().draft_tokens_total, engine.status().accepted_draft_tokens_total) == (5, 4)


def test_the_time_of_a_step_with_drafts_begins_at_the_end_of_the_step_before() -> None:
    runner = FakeAheadRunner()
    engine = make_engine(runner, drafter=OracleDrafter({"a": [3]}))
    engine.submit(generation_request("a", [1, 2], max_tokens=9))
    engine.step()
    engine.step()
    assert runner.log == ["launch 1", "collect", "verify [3]", "collect"]
    assert engine.status().step_ms == 1000


@pytest.mark.parametrize("failure", ["fails_at_launch", "fails_at_completion", "fails_in_flight", "yields_nothing"])
def test_a_failed_step_with_drafts_is_computed_on_the_slow_path_and_counted(failure: str) -> None:
    runner = FakeAheadRunner(is_synchronous=True)
    engine = make_engine(runner, drafter=OracleDrafter({"a": [3]}))
    engine.submit(generation_request("a", [1, 2], max_tokens=9))
    events = engine.step()
    runner.waits = {"a"}
    getattr(runner, failure).add("a")
    events += engine.step()
    assert engine.fallbacks.count == 1
    assert [entry for entry in runner.log if entry[0] in "rv"] == ["verify [3]", "run 1"]
    getattr(runner, failure).clear()
    events += run_to_end(engine, [])["a"]
    assert tokens(events) == expected_tokens("a", 2, 9, stops=False)


@pytest.mark.parametrize("max_tokens", range(9, 16))
def test_an_answer_ends_at_max_tokens_wherever_accepted_drafts_have_brought_it(max_tokens: int) -> None:
    requests = [generation_request(name, [1, 2], max_tokens=max_tokens, ignore_eos=True) for name in ("a", "b")]
    oracle = OracleDrafter({"a": [0, 4], "b": [0, 1]})
    events = run_to_end(make_engine(FakeAheadRunner(), drafter=oracle), requests)
    assert {name: tokens(each) for name, each in events.items()} == {
        name: expected_tokens(name, 2, max_tokens, stops=False) for name in ("a", "b")
    }


@pytest.mark.parametrize("is_synchronous", [False, True])
def test_steps_are_launched_ahead_while_drafting_does_not_pay(is_synchronous: bool) -> None:
    runner = FakeAheadRunner(is_synchronous=is_synchronous)
    run_to_end(make_engine(runner, drafter=OracleDrafter({}, pays=False)), [generation_request("a", [1, 2], max_tokens=4)])
    ahead = ["launch 1", *["launch 1", "collect"] * 3, "collect"]
    assert runner.log == (["launch 1", "collect"] * 4 if is_synchronous else ahead)


@pytest.mark.parametrize("max_rows", [1, 3, 4, 8, 20, 256])
def test_num_rows_is_rounded_up_to_the_next_captured_size(max_rows: int) -> None:
    sizes = sorted({step_size(num_rows, max_rows) for num_rows in range(1, max_rows + 1)})
    assert sizes[-1] == max_rows
    for num_rows in range(1, max_rows + 1):
        assert step_size(num_rows, max_rows) == next(size for size in sizes if size >= num_rows)
    assert max_rows < 256 or sizes[:5] == [1, 2, 4, 8, 16]


def test_graphs_are_kept_for_each_size_with_and_without_drafts() -> None:
    steps = {step_size(num_rows, 64) for num_rows in range(1, 65)}
    verify_sizes = {verify_size(num_rows, 128) for num_rows in range(2, 129)}
    assert verify_sizes == {2, 4, 8, 16, 32, 64, 128}
    assert graphs_kept(64, 0) >= draft_graphs_kept(64) == 2 * len(steps), "greedy or not"
    assert graphs_kept(64, 64) == graphs_kept(64, 0) + 2 * len(verify_sizes)
    assert (graphs_kept(32, 0), graphs_kept(256, 0), graphs_kept(256, 0, chunk_rows=960)) == (28, 91, 111), "as documented"
    assert graphs_kept(64, 64, fewest=100) == 2, "the largest of those that verify, greedy or not"
