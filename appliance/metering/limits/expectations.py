"""How long an answer is expected to be, from recent ones of the same key and model. Changes no request, only what is held."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from appliance.metering.limits.reservations import Work

EXPECTED_OUTPUT_TOKENS = 256
"""Output expected of a key of which fewer than OUTPUTS_MIN requests with this model are known."""
OUTPUTS_MIN = 20
OUTPUTS_KEPT = 100
KNOWN_PER_RUNNING = 9
"""For each running answer, of which nobody knows how long it will be, so many must be known: then, if it is a long one, nine in
ten of the key's answers were still as short as expected. Else a row of short answers would make a burst of long ones cheap."""


class OutputsReader(Protocol):
    """Where the lengths of answers come from that earlier processes gave."""

    async def outputs(self, key_id: str, model: str) -> Sequence[int]:
        """Return the output tokens of the last requests of a key with a model, at most OUTPUTS_KEPT, oldest first."""
        ...


class Lengths:
    """What is known of the answers of one key with one model: how long the latest were, and how many run."""

    def __init__(self, ended: Iterable[int] = ()) -> None:
        self.ended = deque(ended, maxlen=OUTPUTS_KEPT)
        self.running = 0

    def guess(self, more: int = 0) -> int:
        """Return the length that nine in ten recent answers stayed within, when `more` begin beside those that run.

        Where too little is known, for a new key or for as many at once, it is at least EXPECTED_OUTPUT_TOKENS.
        """
        known = len(self.ended)
        if known < OUTPUTS_MIN:
            return EXPECTED_OUTPUT_TOKENS
        usual = percentile_90(self.ended)
        return usual if KNOWN_PER_RUNNING * (self.running + more) <= known else max(usual, EXPECTED_OUTPUT_TOKENS)


class Expectations:
    """Lengths by key and model. Those of earlier processes are read at the first request of each. Belongs to one event loop."""

    def __init__(self, reader: OutputsReader) -> None:
        self._reader = reader
        self._lengths: dict[tuple[str, str], Lengths] = {}
        self._first_use = asyncio.Lock()

    async def meet(self, key_id: str, model: str) -> None:
        """Read what is known of a key and a model, once."""
        whose = (key_id, model)
        if whose in self._lengths:
            return
        async with self._first_use:
            if whose not in self._lengths:
                self._lengths[whose] = Lengths(await self._reader.outputs(key_id, model))

    def began(self, work: Work) -> None:
        """Hear that a request was admitted, of a key and a model that were met."""
        self._lengths[work.key_id, work.model].running += work.answers

    def ended(self, work: Work, output_tokens: int) -> None:
        """Hear how long each of its answers was; 0 when there was none."""
        lengths = self._lengths[work.key_id, work.model]
        lengths.running -= work.answers
        if output_tokens:
            lengths.ended.append(output_tokens)

    def output(self, work: Work, max_output_tokens: int | None, room: float) -> int:
        """Return the output to reserve for each answer of `work`, never above the asked maximum.

        When nothing was asked for, a guess never makes a request larger than a limit: it is cut to the `room` that the limits
        leave beside the prompt.
        """
        guess = self._lengths[work.key_id, work.model].guess(work.answers - 1)
        if max_output_tokens is not None:
            return min(max_output_tokens, guess)
        return int(max(0, min(guess, room)))


def percentile_90(values: Iterable[int]) -> int:
    """Return the smallest value that nine in ten of `values` do not pass."""
    ordered = sorted(values)
    return ordered[-(-9 * len(ordered) // 10) - 1]
