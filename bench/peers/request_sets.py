"""The requests for every engine: prompts of random token ids with the exact number of tokens to generate for each."""

from __future__ import annotations

import random
from dataclasses import dataclass

PROMPT_LENS = (16, 200)
OUTPUT_LENS = (16, 128)
ONE_BY_ONE = 4
"""Number of requests that run one at a time: a machine's CPU-time counters are too coarse for a single one."""
ONE_LENS = (100, 64)
FIRST_ORDINARY_ID = 3


@dataclass(frozen=True, slots=True)
class RequestSet:
    """Requests that are submitted together, or each when the previous one is done."""

    prompts: list[list[int]]
    output_lens: list[int]
    at_once: bool = True

    @property
    def num_output_tokens(self) -> int:
        return sum(self.output_lens)


def request_set(count: int, vocab_size: int) -> RequestSet:
    """`count` mixed requests at once; for 1, ONE_BY_ONE requests of equal lengths, one at a time. Deterministic; the lengths do
    not depend on the vocabulary."""
    lengths, ids = random.Random(count), random.Random(count + 1)
    if count == 1:
        pairs = [ONE_LENS] * ONE_BY_ONE
    else:
        pairs = [(lengths.randint(*PROMPT_LENS), lengths.randint(*OUTPUT_LENS)) for _ in range(count)]
    prompts = [[ids.randrange(FIRST_ORDINARY_ID, vocab_size) for _ in range(length)] for length, _ in pairs]
    return RequestSet(prompts, [length for _, length in pairs], at_once=count > 1)
