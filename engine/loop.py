"""The engine: requests in, one step at a time, events out. Only this module knows both scheduler and runner.

    expire → schedule → move blocks → run → accept grammars → apply

One bad request must not hurt another. A step that raises is repeated in halves until the culprit is alone
(`engine.fault_isolation`); it ends with an error, the others go on. After a step that failed for every request, one harmless
token is computed. If that fails too, several times in a row, the device is considered broken, and `EngineBroken` has the
process replaced. So a bad request cannot cause that, however often it is sent. A GPU that refuses every call, as CUDA
does after an illegal access, is not probed: the engine ends at once (`runner.model_runner`). When a step
never ends there, nothing can be repeated, and the process ends (`runner.device_waits`).

Where the runner can, the next step is launched before this one's tokens are known (`engine.overlap`):

    expire → schedule → move blocks → launch ── wait for the step before → accept grammars → settle → complete the launch

Speculative decoding overlaps less: drafting needs the preceding tokens, and how many draft tokens are accepted is not known
beforehand. So a step that looks for draft tokens is planned after its predecessor is settled, and a step that verifies them is
computed and applied at once.

Block moves belong to no single request. If they raise they are repeated once, which is harmless. If they raise again, the
content of the blocks is unknown, and `EngineBroken` follows.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from itertools import chain

from engine.engine_status import StepFigures, make_status
from engine.errors import EngineBroken, EngineOverloaded, PromptError
from engine.fault_isolation import run_isolated
from engine.grammar.queue import GrammarQueue
from engine.grammar.spec import grammar_spec
from engine.overlap import Fallbacks, InFlightStep, OverlappedSteps
from engine.protocol import EngineInfo, EngineStatus, FinishReason, GenerationRequest, InvalidOption, TokenEvent
from engine.scheduling.request import Request
from engine.scheduling.scheduled_batch import BlockMoves, RowResult, ScheduledBatch, StepOutput
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.token_events import StepEvents, end_unscheduled
from engine.step_runner import AheadRunner, Runner
from engine.submission import PROMPT_PARAM, check_request, make_answers, refusal_events

FAILED_STEPS_MAX = 3
PARKED_WAIT_S = 0.005
"""How long a step without work waits for a grammar. A request that arrives meanwhile waits no longer than that."""

log = logging.getLogger("gatehouse.engine")


class Engine:
    """One loaded model with its live requests. Single-threaded."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        info: EngineInfo,
        grammars: GrammarQueue,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_failure: Callable[[Exception], None] = lambda _error: None,
    ) -> None:
        """Steps overlap if `runner` can launch them ahead. `on_failure` is called with an error that a step raises."""
        self.info = info
        self.fallbacks = Fallbacks()
        self._scheduler = scheduler
        self._runner = runner
        self._clock = clock
        self._on_failure = on_failure
        self._grammars = grammars
        self._step_budget = scheduler.step_budget
        self._live: dict[str, list[Request]] = {}
        self._figures = StepFigures()
        self._failed_steps = 0
        self._is_idle_checked = True
        self._overlapped: OverlappedSteps | None = None
        if isinstance(runner, AheadRunner):
            self._overlapped = OverlappedSteps(runner, scheduler.advance, self.fallbacks)
        self._in_flight_step: InFlightStep | None = None
        self._collected_s = 0.0

    @property
    def runner(self) -> Runner:
        """The device half, for work beside the steps."""
        return self._runner

    @property
    def has_requests(self) -> bool:
        return bool(self._live)

    def submit(self, submitted: GenerationRequest) -> list[TokenEvent]:
        """Queue a request. One that cannot be run ends at once: the final event of each of its answers says why."""
        if submitted.request_id in self._live:
            return refusal_events(submitted, f"request id {submitted.request_id} is already live", "request_id")
        try:
            check_request(submitted, self.info)
            spec = grammar_spec(submitted.sampling)
        except PromptError as error:
            return refusal_events(submitted, str(error), PROMPT_PARAM)
        except InvalidOption as error:
            return refusal_events(submitted, str(error), error.param)
        self._is_idle_checked = False
        answers = make_answers(submitted, self.info, now_s=self._clock())
        self._live[submitted.request_id] = list(answers)
        if spec is None:
            self._enqueue(answers)
        else:
            self._grammars.park(answers, spec)
        return []

    def abort(self, request_id: str) -> list[TokenEvent]:
        """End all live answers of a request; their blocks are free at once. Nothing for an id that is not live."""
        return [self._end(request, FinishReason.ABORTED) for request in self._live.pop(request_id, [])]

    def abort_answer(self, request_id: str, index: int) -> list[TokenEvent]:
        """End one answer of a request and leave the others running."""
        request = self._pop_live(request_id, index)
        return [] if request is None else [self._end(request, FinishReason.ABORTED)]

    def abort_all(self) -> list[TokenEvent]:
        """End all live requests, also after an interrupt within a step: results of steps in flight are dropped."""
        self._scheduler.abandon_steps()
        if self._overlapped is not None:
            self._in_flight_step = None
            self._overlapped.drop_steps()
        return [event for request_id in list(self._live) for event in self.abort(request_id)]

    def close(self) -> None:
        """End all requests and the processes that compile grammars, these even if the engine is broken."""
        try:
            self.abort_all()
        finally:
            self._grammars.close()

    def step(self) -> list[TokenEvent]:
        """Schedule, run, apply. Does next to nothing when no request is live."""
        return self.step_in_columns().as_events()

    def step_in_columns(self) -> StepEvents:
        """As `step`, without an object for each token."""
        try:
            return self._step()
        except Exception as error:
            self._on_failure(error)
            raise

    def _step(self) -> StepEvents:
        started_s = self._clock()
        step_events = StepEvents(self._admit_parked() + self._expire_parked() + self._scheduler.expire())
        if self._in_flight_step is not None and self._scheduler.should_settle_first():
            step_events.extend(self._collect())
        batch = self._scheduler.schedule()
        if batch.moves:
            self._move(batch.moves)
        if batch.is_empty and self._in_flight_step is None:
            if self._grammars:
                self._grammars.wait(PARKED_WAIT_S)
        elif self._overlapped is None or batch.num_draft_tokens:
            step_events.extend(self._run_at_once(batch, started_s))
        else:
            step_events.extend(self._run_overlapped(self._overlapped, batch, started_s))
        for event in step_events.others:
            if event.finish_reason is not None:
                self._pop_live(event.request_id, event.index)
        if self._in_flight_step is not None and not self._live:
            self._collect()  # surplus rows of requests that have ended
        return step_events

    def note_failure(self, error: Exception) -> None:
        """For an error that no step raises, because the step does not end: call this from another thread."""
        self._on_failure(error)

    def check_when_idle(self) -> None:
        """Check, once after work, when nothing is live, that all blocks came back. Raises `EngineBroken` otherwise: a leaked
        block may have been shared wrongly, and a new process starts clean."""
        if self._live or self._is_idle_checked:
            return
        self._is_idle_checked = True
        try:
            self.check_invariants()
        except AssertionError as error:
            raise EngineBroken(f"the idle engine is not in order: {error}") from error

    def check_invariants(self) -> None:
        """Raise `AssertionError` unless scheduler, pool and live requests agree."""
        self._scheduler.check_invariants()
        known = set(chain(self._scheduler.live(), self._grammars.requests()))
        assert known == set(chain.from_iterable(self._live.values())), "live requests and scheduler disagree"

    def status(self, *, with_requests: bool = False) -> EngineStatus:
        """Gauges and totals now; `with_requests` adds every live answer, at a cost proportional to their number."""
        return make_status(self._scheduler, self._grammars, self._figures, self.fallbacks, with_requests=with_requests)

    def _run_at_once(self, batch: ScheduledBatch, started_s: float) -> StepEvents:
        """Run a step and apply its results: in the plain way, or with drafts to verify."""
        items = batch.items
        outputs = run_isolated(self._runner, items) if self._overlapped is None else self._overlapped.verify(batch)
        self._advance_grammars([item.request for item in items], outputs)
        predicted_s = self._predict(batch)
        step_events = StepEvents(self._scheduler.apply(batch, outputs))
        self._observe(batch, predicted_s, self._clock() - max(started_s, self._collected_s))
        self._count_failure(outputs)
        return step_events

    def _predict(self, batch: ScheduledBatch) -> float:
        return self._step_budget.model.batch_s(batch) if self._step_budget is not None else 0.0

    def _observe(self, batch: ScheduledBatch, predicted_s: float, step_s: float) -> None:
        self._figures.record(batch, step_s)
        if self._step_budget is not None:
            self._step_budget.observe(predicted_s, step_s, has_chunk=bool(batch.prefills))

    def _run_overlapped(self, overlapped: OverlappedSteps, batch: ScheduledBatch, started_s: float) -> StepEvents:
        """Launch a step, then collect the one before it; a step that cannot be launched is computed after that."""
        launched = None
        if not batch.is_empty:
            launch_started_s = self._clock()
            launched = overlapped.launch(batch, predicted_s=self._predict(batch), now_s=started_s)
            if not overlapped.is_synchronous:
                launched.host_s = self._clock() - launch_started_s
        step_events = StepEvents() if self._in_flight_step is None else self._collect(launched)
        if launched is not None:
            overlapped.complete(launched)
        self._in_flight_step = launched
        if launched is not None and (launched.pending is None or overlapped.is_synchronous):
            step_events.extend(self._collect())
        return step_events

    def _collect(self, successor: InFlightStep | None = None) -> StepEvents:
        """Apply the results of the step in flight; `successor` was launched after it."""
        step, self._in_flight_step = self._in_flight_step, None
        assert self._overlapped is not None, "steps are launched"
        assert step is not None, "no step is in flight"
        outputs = self._overlapped.collect(step, successor)
        self._advance_grammars(step.in_flight.requests, outputs)
        step_events = self._scheduler.settle(step.in_flight, outputs)
        now_s = self._clock()
        # Where the host takes longer to launch a step than the device to compute it, the time says nothing about the device.
        expected_s = max(step.predicted_s, step.host_s)
        self._observe(step.batch, expected_s, now_s - max(step.launched_s, self._collected_s))
        self._collected_s = now_s
        if any(isinstance(output, int) for output in outputs):
            self._failed_steps = 0
        elif computed := [output for output in outputs if isinstance(output, StepOutput)]:
            self._count_failure(computed)
        return step_events

    def _move(self, moves: BlockMoves) -> None:
        """Move blocks, with a second attempt for each kind of move. Repeating one kind is harmless, repeating all is not: a
        block that was swapped out may have been overwritten by one that was swapped in."""
        for kind in moves.kinds():
            try:
                self._runner.move(kind)
            except Exception:
                log.exception("moving blocks failed: trying again")
                self._move_again(kind)

    def _move_again(self, moves: BlockMoves) -> None:
        try:
            self._runner.move(moves)
        except Exception as error:
            raise EngineBroken(f"blocks cannot be moved: {type(error).__name__}: {error}") from error

    def _advance_grammars(self, requests: Sequence[Request], outputs: list[RowResult] | list[StepOutput]) -> None:
        """Advance grammars by the tokens of this step; the output of an answer whose grammar cannot follow becomes an error."""
        if not self._grammars.has_guided_answers:
            return
        for index, (request, output) in enumerate(zip(requests, outputs, strict=True)):
            if output is None or not request.sampling.is_guided or request.is_finished:
                continue
            token_ids = [output] if isinstance(output, int) else output.token_ids
            if token_ids:
                error = self._grammars.accept(request, token_ids)
                if error is not None:
                    outputs[index] = StepOutput(error=str(error), error_param=error.param)

    def _count_failure(self, outputs: Sequence[StepOutput]) -> None:
        """Count a step that failed for every request, unless the probe shows that the requests were to blame."""
        failed = all(output.error for output in outputs) and not self._is_device_working()
        self._failed_steps = self._failed_steps + 1 if failed else 0
        if self._failed_steps > FAILED_STEPS_MAX:
            raise EngineBroken(f"{self._failed_steps} steps in a row failed for every request, and for a probe")

    def _is_device_working(self) -> bool:
        """Whether one harmless token can be computed. It needs a free block: the failed requests gave theirs back. If others
        hold them all, the device counts as working, because their own steps will tell."""
        with self._scheduler.probe() as item:
            return item is None or run_isolated(self._runner, [item])[0].error is None

    def _admit_parked(self) -> list[TokenEvent]:
        """Queue the answers whose grammar is ready, and end those whose grammar was refused."""
        if not self._grammars:
            return []
        events = []
        for answers, error in self._grammars.pop_ready():
            if error is None:
                self._enqueue(answers)
            elif isinstance(error, EngineOverloaded):
                events += [end_unscheduled(request, FinishReason.OVERLOADED, str(error)) for request in answers]
            else:
                param = error.param if isinstance(error, InvalidOption) else None
                events += [end_unscheduled(request, FinishReason.ERROR, str(error), param) for request in answers]
        return events

    def _expire_parked(self) -> list[TokenEvent]:
        expired = self._grammars.pop_expired(self._clock()) if self._grammars else []
        return [end_unscheduled(request, FinishReason.DEADLINE) for request in expired]

    def _enqueue(self, answers: Sequence[Request]) -> None:
        """Queue the answers of a request: the first computes the prompt, the others share it."""
        first, *others = answers
        for request in others:
            request.forked_from = first
        for request in answers:
            self._scheduler.add(request)

    def _end(self, request: Request, reason: FinishReason) -> TokenEvent:
        if self._grammars.remove(request):
            return end_unscheduled(request, reason)
        event = self._scheduler.abort(request)
        assert event is not None, f"request {request.request_id} was live and had ended"
        return event

    def _pop_live(self, request_id: str, index: int) -> Request | None:
        """Remove an answer from the live ones and return it; None if it is not among them."""
        answers = self._live.get(request_id, [])
        request = next((answer for answer in answers if answer.index == index), None)
        if request is not None:
            answers.remove(request)
            if not answers:
                del self._live[request_id]
        return request
