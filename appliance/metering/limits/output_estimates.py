"""Estimates the length of answers from recent ones of the same key and model. Affects only reservations, never the request."""

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
"""Recent answers of a key with a model from which the next length is estimated."""
EXPECTED_OUTPUT_TOKENS = 256
"""Estimate for a key with fewer than OUTPUTS_MIN known requests with this model."""
OUTPUTS_MIN = 20
PAIRS_KEPT = 10_000
"""Pairs of key and model whose lengths are kept in memory; an evicted pair is read from the ledger again."""
KNOWN_PER_RUNNING = 9
"""Finished answers that must be known for each running one: then, even if all running ones turn out long, nine in ten of the
key's answers were as short as estimated. Otherwise a series of short answers would make a burst of long ones cheap."""

_log = structlog.get_logger()


class OutputsReader(Protocol):
    """Source of the lengths of answers from before this process."""

    async def outputs(self, key_id: str, model: str, before: datetime) -> Sequence[int]:
        """Return the output tokens of the last requests of a key with a model, admitted `before`, at most OUTPUTS_KEPT, oldest
        first."""
        ...


class AnswerLengths:
    """The lengths of one key's latest answers with one model, and its number of running answers; tracked from `since` on."""

    def __init__(self, since: datetime) -> None:
        self.since = since
        self.ended: deque[int] = deque(maxlen=OUTPUTS_KEPT)
        self.running = 0

    def prepend(self, earlier: Iterable[int]) -> None:
        """Put the answers from before `since` ahead of those that have ended meanwhile."""
        self.ended = deque([*earlier, *self.ended], maxlen=OUTPUTS_KEPT)

    def estimate(self, more: int = 0) -> int:
        """Return the 90th percentile of recent lengths, for an answer that starts together with `more` others.

        At least EXPECTED_OUTPUT_TOKENS if too few lengths are known: the key is new, or too many answers run at once.
        """
        known = len(self.ended)
        if known < OUTPUTS_MIN:
            return EXPECTED_OUTPUT_TOKENS
        usual = percentile_90(self.ended)
        return usual if KNOWN_PER_RUNNING * (self.running + more) <= known else max(usual, EXPECTED_OUTPUT_TOKENS)


class OutputEstimates:
    """Answer lengths by key and model. Belongs to one event loop.

    After the first request of a pair, one background task reads its earlier lengths from the ledger, one pair at a time. No
    request waits for that: until then, only answers since the start are known.
    """

    def __init__(self, reader: OutputsReader, clock: Clock) -> None:
        self._reader = reader
        self._clock = clock
        self._lengths: OrderedDict[tuple[str, str], AnswerLengths] = OrderedDict()  # least recently used first
        self._unread: dict[tuple[str, str], AnswerLengths] = {}
        self._has_unread = asyncio.Event()
        self._reading = Background("answer lengths", self._run)

    def start(self) -> None:
        """Start reading earlier lengths in the background."""
        self._reading.start()

    async def stop(self) -> None:
        """Stop the background task; pairs that were not read stay unread."""
        await self._reading.stop()

    async def read(self) -> None:
        """Read the earlier lengths of every pair that is new since the last call."""
        while self._unread:
            key_id, model = pair = next(iter(self._unread))
            lengths = self._unread.pop(pair)
            try:
                lengths.prepend(await self._reader.outputs(key_id, model, lengths.since))
            except Exception:  # noqa: BLE001 - without its history a key is treated as new
                _log.exception("lengths of earlier answers could not be read", key_id=key_id, model=model)

    async def _run(self) -> None:
        while True:
            await self._has_unread.wait()
            self._has_unread.clear()
            await self.read()

    def lengths_of(self, key_id: str, model: str) -> AnswerLengths:
        """Return the lengths of a key with a model; empty for a new pair, whose history is read later."""
        pair = (key_id, model)
        known = self._lengths.get(pair)
        if known is not None:
            self._lengths.move_to_end(pair)
            return known
        if len(self._lengths) >= PAIRS_KEPT:
            self._evict_one()
        lengths = self._lengths[pair] = self._unread[pair] = AnswerLengths(self._clock.now())
        self._has_unread.set()
        return lengths

    def _evict_one(self) -> None:
        """Evict the least recently used pair without running answers: these must be counted down when they end."""
        pair = next((pair for pair, lengths in self._lengths.items() if not lengths.running), None)
        if pair is not None:
            del self._lengths[pair]
            self._unread.pop(pair, None)

    def note_started(self, request: AdmissionRequest) -> None:
        """Count the answers of an admitted request as running."""
        self.lengths_of(request.key_id, request.model).running += request.num_answers

    def note_ended(self, request: AdmissionRequest, output_tokens: int) -> None:
        """Record the length of each of the request's answers; 0 if there was none."""
        lengths = self._lengths[request.key_id, request.model]
        lengths.running -= request.num_answers
        if output_tokens:
            lengths.ended.append(output_tokens)

    def estimate_output(self, request: AdmissionRequest, room: float) -> int:
        """Return the output tokens to reserve for each answer of `request`, never more than the longest that it may get.

        Without a requested maximum the estimate is cut to the `room` that the limits leave after the prompt, so that an
        estimate never makes a request larger than a limit.
        """
        estimate = self.lengths_of(request.key_id, request.model).estimate(request.num_answers - 1)
        if request.output_room is not None:
            estimate = min(request.output_room, estimate)
        if request.max_output_tokens is not None:
            return min(request.max_output_tokens, estimate)
        return int(max(0, min(estimate, room)))


def percentile_90(values: Iterable[int]) -> int:
    """Return the smallest value that at least nine in ten of `values` do not exceed."""
    ordered = sorted(values)
    return ordered[-(-9 * len(ordered) // 10) - 1]
