"""How long an answer is expected to be, from recent ones of the same key and model. Changes no request, only what is held."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Protocol

import structlog

from appliance.base.background import Background
from appliance.base.clock import Clock
from appliance.metering.limits.admission_request import AdmissionRequest

OUTPUTS_KEPT = 100
"""Answers of a key with a model by which the length of the next one is guessed."""
EXPECTED_OUTPUT_TOKENS = 256
"""Output expected of a key of which fewer than OUTPUTS_MIN requests with this model are known."""
OUTPUTS_MIN = 20
PAIRS_KEPT = 10_000
"""Keys with a model of which the lengths are in memory; one that was forgotten is read from the ledger again."""
KNOWN_PER_RUNNING = 9
"""Finished answers that must be known for each running one: should that one be long, nine in ten of the key's answers were
still as short as expected. Otherwise a series of short answers would make a burst of long ones cheap."""

_log = structlog.get_logger()


class OutputsReader(Protocol):
    """Where the lengths of answers come from that earlier processes gave."""

    async def outputs(self, key_id: str, model: str, before: datetime) -> Sequence[int]:
        """Return the output tokens of the last requests of a key with a model, admitted `before`, at most OUTPUTS_KEPT, oldest
        first."""
        ...


class Lengths:
    """What is known of the answers of one key with one model, met at `since`: how long the latest were, and how many run."""

    def __init__(self, since: datetime) -> None:
        self.since = since
        self.ended: deque[int] = deque(maxlen=OUTPUTS_KEPT)
        self.running = 0

    def remember(self, earlier: Iterable[int]) -> None:
        """Put the answers from before `since` before those that have ended meanwhile."""
        self.ended = deque([*earlier, *self.ended], maxlen=OUTPUTS_KEPT)

    def guess(self, more: int = 0) -> int:
        """Return the length that nine in ten recent answers stayed within, when `more` begin beside those that run.

        Where too little is known, for a new key or for as many at once, it is at least EXPECTED_OUTPUT_TOKENS.
        """
        known = len(self.ended)
        if known < OUTPUTS_MIN:
            return EXPECTED_OUTPUT_TOKENS
        usual = percentile_90(self.ended)
        return usual if KNOWN_PER_RUNNING * (self.running + more) <= known else max(usual, EXPECTED_OUTPUT_TOKENS)


class OutputEstimates:
    """Lengths by key and model. Belongs to one event loop.

    Those of earlier processes are read after the first request of each, one after the other in one task: no request waits for
    them, and until they are there the key is known by its answers since the start alone.
    """

    def __init__(self, reader: OutputsReader, clock: Clock) -> None:
        self._reader = reader
        self._clock = clock
        self._lengths: OrderedDict[tuple[str, str], Lengths] = OrderedDict()  # the one that was asked for last is the last
        self._unread: dict[tuple[str, str], Lengths] = {}
        self._met = asyncio.Event()
        self._reading = Background("answer lengths", self._run)

    def start(self) -> None:
        """Begin to read what earlier processes knew."""
        self._reading.start()

    async def stop(self) -> None:
        """End the task; what has not been read is not needed any more."""
        await self._reading.stop()

    async def read(self) -> None:
        """Read what the ledger knows of every key and model that was met since the last time."""
        while self._unread:
            key_id, model = pair = next(iter(self._unread))
            lengths = self._unread.pop(pair)
            try:
                lengths.remember(await self._reader.outputs(key_id, model, lengths.since))
            except Exception:  # noqa: BLE001 - without its history a key is one of which nothing is known
                _log.exception("lengths of earlier answers could not be read", key_id=key_id, model=model)

    @property
    def pairs(self) -> int:
        """Return of how many keys with a model something is known."""
        return len(self._lengths)

    async def _run(self) -> None:
        while True:
            await self._met.wait()
            self._met.clear()
            await self.read()

    def lengths_of(self, key_id: str, model: str) -> Lengths:
        """Return what is known of a key with a model. At their first meeting that is nothing: the ledger is read later."""
        pair = (key_id, model)
        known = self._lengths.get(pair)
        if known is not None:
            self._lengths.move_to_end(pair)
            return known
        if len(self._lengths) >= PAIRS_KEPT:
            self._forget_one()
        made = self._lengths[pair] = self._unread[pair] = Lengths(self._clock.now())
        self._met.set()
        return made

    def _forget_one(self) -> None:
        """Forget the least recently used that has no answer running: a running answer must be counted down when it ends."""
        pair = next((pair for pair, lengths in self._lengths.items() if not lengths.running), None)
        if pair is not None:
            del self._lengths[pair]
            self._unread.pop(pair, None)

    def began(self, request: AdmissionRequest) -> None:
        """Count the answers of a request that was admitted as running."""
        self.lengths_of(request.key_id, request.model).running += request.answers

    def ended(self, request: AdmissionRequest, output_tokens: int) -> None:
        """Remember how long each of its answers was; 0 when there was none."""
        lengths = self._lengths[request.key_id, request.model]
        lengths.running -= request.answers
        if output_tokens:
            lengths.ended.append(output_tokens)

    def output(self, request: AdmissionRequest, room: float) -> int:
        """Return the output to reserve for each answer of `request`, never above the maximum that it asked for.

        When nothing was asked for, a guess never makes a request larger than a limit: it is cut to the `room` that the limits
        leave beside the prompt.
        """
        guess = self.lengths_of(request.key_id, request.model).guess(request.answers - 1)
        if request.max_output_tokens is not None:
            return min(request.max_output_tokens, guess)
        return int(max(0, min(guess, room)))


def percentile_90(values: Iterable[int]) -> int:
    """Return the smallest value that nine in ten of `values` do not pass."""
    ordered = sorted(values)
    return ordered[-(-9 * len(ordered) // 10) - 1]
