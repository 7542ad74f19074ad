"""Engines over fake runners: the loop and the scheduler without a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from engine.grammar.queue import GrammarQueue
from engine.loop import Engine
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.drafting import Drafter
from engine.scheduling.limits import SchedulerLimits
from engine.scheduling.prefix_cache import PrefixCache
from engine.scheduling.scheduled_batch import BlockMoves, ScheduledRequest, StepOutput
from engine.scheduling.scheduler import Scheduler
from engine.step_runner import Runner
from tests.support.engine_messages import engine_info
from tests.support.engines import unused_grammars

MAX_MODEL_LEN, BLOCK_SIZE, EOS = 64, 4, 9


class FakeRunner:
    """Generates `token_of`, by default 5. Raises for batches with a request of `culprits`, and always when `broken`; outputs
    only errors when `unreliable`."""

    def __init__(self) -> None:
        self.stage = "run"
        self.culprits: set[str] = set()
        self.broken = False
        self.unreliable = False
        self.token_of: Callable[[str, int], int] = lambda request_id, position: 5

    def move(self, moves: BlockMoves) -> None:
        raise AssertionError(f"this engine has no host tier and shares no partial block: {moves}")

    def run(self, items: Sequence[ScheduledRequest]) -> list[StepOutput]:
        if self.broken or any(item.request.request_id in self.culprits for item in items):
            raise RuntimeError("boom")
        if self.unreliable:
            return [StepOutput(error="not finite") for _ in items]
        return [
            StepOutput([self.token_of(i.request.request_id, i.request.num_tokens)]) if i.samples else StepOutput()
            for i in items
        ]


def engine_over(
    runner: Runner,
    *,
    num_blocks: int = 32,
    caches: bool = False,
    drafter: Drafter | None = None,
    grammars: GrammarQueue | None = None,
    clock: Callable[[], float] = lambda: 0.0,
    scheduler_clock: Callable[[], float] = lambda: 0.0,
    **limits: Any,
) -> Engine:
    """An engine with a vocabulary of 10 tokens, `num_blocks` blocks of 4 tokens and, unless `limits` say otherwise, 4 seats,
    16 tokens per step and a context of 64 tokens. Both clocks are in seconds."""
    chosen = {
        "max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": MAX_MODEL_LEN, "block_size": BLOCK_SIZE, **limits,
    }  # fmt: skip
    info = engine_info(
        max_model_len=MAX_MODEL_LEN, vocab_size=10, eos_token_ids=[EOS], block_size=BLOCK_SIZE, num_kv_blocks=num_blocks,
        max_num_seqs=4,
    )  # fmt: skip
    pool = BlockPool(num_blocks)
    cache = PrefixCache(pool, BLOCK_SIZE) if caches else None
    scheduler = Scheduler(SchedulerLimits(**chosen), pool, clock=scheduler_clock, prefix_cache=cache, drafter=drafter)
    return Engine(scheduler, runner, info, unused_grammars() if grammars is None else grammars, clock=clock)
