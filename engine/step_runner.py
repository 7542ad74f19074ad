"""What the loop needs of a runner: steps computed at once, or launched ahead of their results. Knows no torch.

`runner.model_runner` computes steps at once; `runner.slot_runner` also launches them, as `runner.launched_step`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from engine.protocol import PlainReason
from engine.scheduling.scheduled_batch import BlockMoves, RowResult, ScheduledBatch, ScheduledRequest, StepOutput


class Runner(Protocol):
    """What the loop needs of a model runner; tests bring one without tensors. `stage` names what it was doing when it raised:
    prepare, draft, run, sample or move."""

    @property
    def stage(self) -> str: ...

    def move(self, moves: BlockMoves) -> None: ...

    def run(self, items: Sequence[ScheduledRequest]) -> list[StepOutput]: ...


class PendingStep(Protocol):
    """A launched step."""

    def complete(self) -> None:
        """Begin what had to wait for the step before to be settled, if anything. Raises when it cannot."""

    def outputs(self) -> list[RowResult]:
        """Wait for its results, in the order of its rows; None for a row without a usable token. Raises when it failed."""

    @property
    def lacks_tokens(self) -> bool:
        """Whether any of its `outputs` may be None, when these were returned."""


@runtime_checkable
class AheadRunner(Runner, Protocol):
    """A runner that can also launch a step and return at once."""

    @property
    def is_synchronous(self) -> bool:
        """Whether a launched step is over when `launch` returns, so that nothing is gained by collecting it later."""

    def plain_reason(self, batch: ScheduledBatch) -> PlainReason | None:
        """Why a step with these rows cannot be launched before the one before it is settled; None where it can."""

    def launch(self, batch: ScheduledBatch) -> PendingStep:
        """Begin a step, after those begun before it. Raises when it cannot. Where some rows verify drafts, everything before
        the step is settled."""

    def invalidate_slots(self) -> None:
        """Send the state of requests again with the next step: what the device holds of them is in doubt."""
