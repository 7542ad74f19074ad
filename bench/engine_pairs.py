"""Shared by the benches of engines on a CPU: prompts, and the costs of two engines that run alternately. Their models are those
of `bench.peers.models`.

Both run in this process, one right after the other, in swapped order every other round, so that other work on the machine
affects both. Compare them within a round only.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from engine.environment import prepare_environment

prepare_environment()

import torch  # noqa: E402 - must see the environment set above
import transformers  # noqa: E402

from bench.peers.disturbance import disturbance_between, read_machine  # noqa: E402
from engine import LLM, SamplingParams  # noqa: E402

THREADS = 1
"""Threads of each engine: the other core is left to other work on the machine."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Time of a run. CPU seconds cover all threads of this process: a busy neighbour affects them less than wall-clock time."""

    wall_s: float
    cpu_s: float


def timed(run: Callable[[], object]) -> Cost:
    started_s, started_cpu_s = time.perf_counter(), time.process_time()
    run()
    return Cost(time.perf_counter() - started_s, time.process_time() - started_cpu_s)


def time_pairs(first: Callable[[], object], second: Callable[[], object], rounds: int) -> list[tuple[Cost, Cost]]:
    """The costs of both in each round. `first` is first in even rounds, counted from 0."""
    pairs = []
    for number in range(rounds):
        if number % 2 == 0:
            first_cost, second_cost = timed(first), timed(second)
        else:
            second_cost, first_cost = timed(second), timed(first)
        pairs.append((first_cost, second_cost))
    return pairs


def ratio_figures(pairs: Sequence[tuple[Cost, Cost]]) -> dict[str, Any]:
    """How many times as long as the second the first of each pair took, by wall-clock and by CPU time."""
    ratios = [first.wall_s / second.wall_s for first, second in pairs]
    return {
        "ratio_median": round(statistics.median(ratios), 2),
        "ratios": [round(ratio, 2) for ratio in ratios],
        "cpu_ratio_median": round(statistics.median(first.cpu_s / second.cpu_s for first, second in pairs), 2),
    }


def make_prompts(vocab_size: int, count: int, length: int) -> list[list[int]]:
    """Random tokens, the same for every engine."""
    rng = random.Random(5)
    return [[rng.randrange(3, vocab_size) for _ in range(length)] for _ in range(count)]


def greedy_tokens(llm: LLM, prompts: list[Any], num_tokens: int) -> list[list[int]]:
    """The `num_tokens` likeliest tokens after each prompt."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


class OtherWork:
    """CPU time that other processes have used since this object was created. Linux only."""

    def __init__(self) -> None:
        self._before, self._own_s = read_machine(), time.process_time()

    def cores(self) -> float:
        """Average number of cores that they, and the host, used."""
        found = disturbance_between(self._before, read_machine(), time.process_time() - self._own_s)
        return found.others_cores + found.steal_cores


def environment() -> dict[str, Any]:
    """What torch's speed depends on besides the machine."""
    return {
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": THREADS,
        "mkl_cbwr": os.environ.get("MKL_CBWR"),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
