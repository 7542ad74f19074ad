"""Steps that overlap: step n + 1 is planned and launched before the tokens of step n have reached the host. Knows no torch.

    host    plan 1  launch 1 │ plan 2  launch 2  settle 1 │ plan 3  launch 3  settle 2 │ …
    device           step 1 ─────────────┤├── step 2 ────────────────┤├── step 3 ──────

Where a row waits for a mask that depends on the token before (a grammar), `launch` begins what does not need the mask, and
`complete`, after `settle`, the rest. A batch with a request that no slot can hold is computed in the plain way, once everything
before it is settled. A step that failed is computed again in the plain way: its rows are as they were planned, `run_isolated`
finds the culprit, and the step launched after it is computed again too. Rows of requests that ended or lost their blocks
meanwhile are left out. The plain way is correct, but slow for every request in the step, so both cases are counted, with
reasons.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from engine.fault_isolation import run_isolated
from engine.protocol import PlainReason
from engine.scheduling.in_flight_batch import InFlightBatch, as_planned
from engine.scheduling.scheduled_batch import RowResult, ScheduledBatch, StepOutput
from engine.step_runner import AheadRunner, PendingStep

log = logging.getLogger("gatehouse.engine")

REASON_CHARS_MAX = 500
Result = TypeVar("Result")


@dataclass(slots=True)
class Fallbacks:
    """How many steps were computed in the plain way because the fast way failed, and why the last one was; a row for which
    neither way has a token does not count. `plain_steps`: those that no slot could hold; empty where none is launched ahead."""

    count: int = 0
    reason: str | None = None
    plain_steps: Counter[PlainReason] = field(default_factory=Counter)
    _kinds: Counter[tuple[str, type[Exception] | None]] = field(default_factory=Counter)

    def record(self, problem: str, error: Exception | None = None) -> None:
        """Count a step. Of failures of one kind the first, second, fourth, eighth … are logged, the first with its traceback,
        because a device that fails for good fails many times a second."""
        self.count += 1
        self.reason = problem if error is None else f"{problem}: {type(error).__name__}: {error}"[:REASON_CHARS_MAX]
        kind = problem, None if error is None else type(error)
        self._kinds[kind] += 1
        times = self._kinds[kind]
        if times & (times - 1) == 0:
            exc_info = error if times == 1 else None
            log.error("%s; %d steps so far, on the slow path", self.reason, self.count, exc_info=exc_info)


@dataclass(slots=True)
class InFlightStep:
    """A launched step, which the scheduler has advanced past. `pending` is None if it must be computed in the plain way.
    `host_s`: how long the host took to launch it, where the device computes meanwhile."""

    batch: ScheduledBatch
    in_flight: InFlightBatch
    pending: PendingStep | None
    predicted_s: float
    launched_s: float
    host_s: float = 0.0


class OverlappedSteps:
    """Launches steps and gets their results, in order, whatever fails."""

    def __init__(self, runner: AheadRunner, advance: Callable[[ScheduledBatch], InFlightBatch], fallbacks: Fallbacks) -> None:
        """`fallbacks` counts the steps that are computed in the plain way."""
        self._runner = runner
        self._advance = advance
        self._fallbacks = fallbacks
        fallbacks.plain_steps.update(dict.fromkeys(PlainReason, 0))
        self.is_synchronous = runner.is_synchronous

    def launch(self, batch: ScheduledBatch, *, predicted_s: float, now_s: float) -> InFlightStep:
        """Begin a step and book it. Never raises for what the step itself does."""
        pending = None
        if self._can_launch(batch):
            pending = self._attempt("a step could not be launched", lambda: self._runner.launch(batch))
        return InFlightStep(batch, self._advance(batch), pending, predicted_s, now_s)

    def complete(self, step: InFlightStep) -> None:
        """Begin the rest of a step, when everything before it is settled. Never raises for what the step itself does."""
        if step.pending is not None:
            step.pending = self._attempt("a step could not be launched to its end", partial(_complete, step.pending))

    def collect(self, step: InFlightStep, successor: InFlightStep | None) -> list[RowResult]:
        """Results of a step whose predecessors are settled. If they are in doubt, so is `successor`, the step that was
        launched after it."""
        pending = step.pending
        outputs = None if pending is None else self._attempt("a step in flight failed", pending.outputs)
        if pending is None or outputs is None:
            self._invalidate(successor)
            return self._recompute(step.in_flight, range(len(step.in_flight.requests)))
        if pending.lacks_tokens and self._replace_unusable(outputs, partial(self._recompute, step.in_flight)):
            self._invalidate(successor)
        return outputs

    def verify(self, batch: ScheduledBatch) -> list[StepOutput]:
        """Results of a step in which some rows verify drafts. How many are accepted is not known beforehand, so no step is
        in flight before it, and none is launched after it."""
        items, outputs = batch.items, None
        if self._can_launch(batch):
            outputs = self._attempt("a verification step failed", lambda: _complete(self._runner.launch(batch)).outputs())
        if outputs is None:
            return run_isolated(self._runner, items)
        self._replace_unusable(outputs, lambda rows: run_isolated(self._runner, [items[row] for row in rows]))
        return [StepOutput([output]) if isinstance(output, int) else output for output in outputs if output is not None]

    def drop_steps(self) -> None:
        """Drop the steps in flight: their results are unused, and the recorded state of slots is in doubt."""
        self._runner.invalidate_slots()

    def _can_launch(self, batch: ScheduledBatch) -> bool:
        """Whether slots can hold every request of the step. If not, the step is counted."""
        reason = self._runner.plain_reason(batch)
        if reason is None:
            return True
        self._fallbacks.plain_steps[reason] += 1
        return False

    def _attempt(self, problem: str, work: Callable[[], Result]) -> Result | None:
        """What `work` returns; None if it raises. Then the step is counted, and what the device holds of its requests is in
        doubt."""
        try:
            return work()
        except Exception as error:  # noqa: BLE001 - noted, with its traceback
            self._fallbacks.record(problem, error)
            self._runner.invalidate_slots()
            return None

    def _invalidate(self, step: InFlightStep | None) -> None:
        if step is not None and step.pending is not None:
            step.pending = None
            self._runner.invalidate_slots()

    def _replace_unusable(self, outputs: list[RowResult], recompute: Callable[[Sequence[int]], Sequence[RowResult]]) -> bool:
        """Compute the rows without a usable token in the plain way. Returns whether that has one for any of them."""
        rows = [row for row, output in enumerate(outputs) if output is None]
        if not rows:
            return False
        recomputed = recompute(rows)
        for row, output in zip(rows, recomputed, strict=True):
            outputs[row] = output
        has_token = any(isinstance(output, StepOutput) and output.error is None for output in recomputed)
        if has_token:
            self._fallbacks.record("a step gave no token where the plain way has one")
        return has_token

    def _recompute(self, in_flight: InFlightBatch, rows: Sequence[int]) -> list[RowResult]:
        """Results of these rows in the plain way; None for a request that has ended or lost its blocks."""
        live_rows: list[int] = []
        for row in rows:
            if in_flight.is_live(row):
                live_rows.append(row)
            elif not in_flight.requests[row].block_table:  # one that has started again has no unknown tokens of this step
                in_flight.requests[row].discard_unknown_tokens()
        computed: dict[int, StepOutput] = {}
        if live_rows:
            with as_planned(in_flight, live_rows) as items:
                computed = dict(zip(live_rows, run_isolated(self._runner, items), strict=True))
        return [computed.get(row) for row in rows]


def _complete(pending: PendingStep) -> PendingStep:
    pending.complete()
    return pending
