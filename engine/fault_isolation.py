"""A step that raises costs only the request at fault: the batch is halved until that request is alone. Knows no torch.

Repeating a step does no harm, because it only writes the cache slots of its own tokens, with the same values, and draws the
same tokens. With one culprit among B requests that is about 2 log₂ B passes, most of them small, in one step; afterwards
the culprit is gone and the batch is whole again.

    batch   a b c d e f g h        raises
    halves  a b c d │ e f g h      the left one runs, the right one raises
                      e f │ g h    …
                      e │ f        e fails alone and ends with the error
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from engine.errors import EngineBroken
from engine.scheduling.scheduled_batch import ScheduledRequest, StepOutput
from engine.step_runner import Runner

ERROR_CHARS_MAX = 500

log = logging.getLogger("gatehouse.engine")

STAGE_TEXT = {
    "compile": "compiling the grammar of this request",
    "prepare": "preparing this request for the device",
    "draft": "drafting tokens for this request",
    "run": "computing this request",
    "sample": "choosing the next token of this request",
}


def run_isolated(runner: Runner, items: Sequence[ScheduledRequest]) -> list[StepOutput]:
    """Outputs in the order of `items`. An item that raises on its own gets the error, which names the stage. One with draft
    tokens is tried again without them first: a bad draft must not end a request. `EngineBroken` is passed on."""
    outputs = _run_halving(runner, items)
    failed = [row for row, output in enumerate(outputs) if output.error is not None and items[row].num_draft_tokens]
    if failed:
        retried = _run_halving(runner, [_without_drafts(items[row]) for row in failed])
        for row, output in zip(failed, retried, strict=True):
            outputs[row] = output
    return outputs


def _without_drafts(item: ScheduledRequest) -> ScheduledRequest:
    return ScheduledRequest(item.request, item.start, item.num_known_tokens, item.samples)


def _run_halving(runner: Runner, items: Sequence[ScheduledRequest]) -> list[StepOutput]:
    try:
        return runner.run(items)
    except EngineBroken:
        raise  # no request is to blame
    except Exception as error:
        log.exception("step failed stage=%s request_ids=%s", runner.stage, _names(items))
        if len(items) == 1:
            return [StepOutput(error=failure_message(runner.stage, error))]
    middle = len(items) // 2
    return _run_halving(runner, items[:middle]) + _run_halving(runner, items[middle:])


def failure_message(stage: str, error: BaseException) -> str:
    """The error message for a request that failed inside the engine."""
    return f"the engine failed while {STAGE_TEXT.get(stage, stage)}: {type(error).__name__}: {error}"[:ERROR_CHARS_MAX]


def _names(items: Sequence[ScheduledRequest]) -> str:
    return ",".join(f"{item.request.request_id}/{item.request.index}" for item in items)
