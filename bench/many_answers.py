"""How long a request for many answers to one long prompt delays the steps of everyone: the engine's loop and scheduler, with a
device that takes no time.

Usage: python -m bench.many_answers

`submit_ms` is the time that queueing the request takes the step thread, `longest_ms` the longest step, `sum_ms` all steps
together, and `steps` their number. The smallest of the tries is kept: other programs on the machine only add time. One JSON row
per run is appended to bench/results/many_answers.jsonl.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence

from bench.host_step import BLOCK_SIZE, VOCAB_SIZE, engine_without_model
from bench.rows import argument_parser, publish, row_header
from engine.protocol import GenerationRequest, SamplingParams
from engine.scheduling.limits import SchedulerLimits
from engine.scheduling.scheduled_batch import BlockMoves, ScheduledRequest, StepOutput

MAX_NUM_SEQS = 256
STEP_TOKENS = 8192
OUTPUT_LEN = 40
ANSWERS, PROMPT_LEN, TRIES = 128, 130_000, 5


class NoDevice:
    """Every request gets token 5."""

    def move(self, moves: BlockMoves) -> None: ...

    def run(self, items: Sequence[ScheduledRequest]) -> list[StepOutput]:
        return [StepOutput([5]) if item.samples else StepOutput() for item in items]


def measure() -> tuple[float, list[float]]:
    """Seconds that queueing took, and seconds of each step until all answers have ended."""
    max_model_len, num_blocks = PROMPT_LEN + 2 * OUTPUT_LEN, PROMPT_LEN // BLOCK_SIZE + ANSWERS * 8
    limits = SchedulerLimits(
        max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=STEP_TOKENS, max_model_len=max_model_len, block_size=BLOCK_SIZE
    )
    engine, _ = engine_without_model(limits, num_blocks, NoDevice())
    sampling = SamplingParams(temperature=0.0, seed=1, ignore_eos=True, n=ANSWERS, max_tokens=OUTPUT_LEN)
    prompt = [2 + index % (VOCAB_SIZE - 2) for index in range(PROMPT_LEN)]
    request = GenerationRequest(request_id="a", tenant_id="alice", prompt_token_ids=prompt, sampling=sampling)
    started_s = time.perf_counter()
    engine.submit(request)
    submit_s, steps = time.perf_counter() - started_s, []
    while engine.has_requests:
        started_s = time.perf_counter()
        engine.step()
        steps.append(time.perf_counter() - started_s)
    return submit_s, steps


def main() -> None:
    options = argument_parser(__doc__).parse_args()
    tries = []
    for _ in range(TRIES):
        gc.collect()
        tries.append(measure())
    figures = {
        "submit_ms": round(min(submit_s for submit_s, _ in tries) * 1e3, 1),
        "longest_ms": round(min(max(steps) for _, steps in tries) * 1e3, 1),
        "sum_ms": round(min(sum(steps) for _, steps in tries) * 1e3, 1),
        "steps": len(tries[0][1]),
    }
    publish({**row_header("many_answers"), "answers": ANSWERS, "prompt": PROMPT_LEN, **figures}, options)


if __name__ == "__main__":
    main()
