"""The state of a card that is not there: streams as queues of work, events, captures, memory, and what the host waited for.

Nothing runs when it is launched. A stream is a queue, and who waits for it runs it, no further than he waits: so the device is
always as late as it may be, and what the host overwrites, frees or reads too early shows. `Schedule` may hurry it instead.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tests.support.rehearsal.graphs import Graph

Work = Callable[[], object]
REPO = f"{Path(__file__).resolve().parents[3]}/"
PACKAGE = f"{Path(__file__).resolve().parent}/"
DEFAULT_BYTES = 1 << 30
CONTEXT_BYTES = 64 << 20
ELAPSED_MS = 100.0
"""Between any two events: so much that nobody repeats what he times."""
ALLOCATION_BYTES = 512
LAUNCH_BYTES = 24 << 10
"""That the driver keeps for each launch of a captured graph."""
SEGMENT_BYTES = 2 << 20


@dataclass(frozen=True)
class Kind:
    """What a card says of itself: its name and the bytes of its second-level cache. Both are Hopper's, of capability 9.0."""

    name: str
    l2_bytes: int


H200 = Kind("NVIDIA H200", 60 << 20)
H100 = Kind("NVIDIA H100 80GB HBM3", 50 << 20)


class Schedule(Enum):
    """When launched work runs: only when somebody waits for it, at once, or at times that a seed decides."""

    LATE = "late"
    EARLY = "early"
    RANDOM = "random"


@dataclass(frozen=True)
class Sync:
    """The host waited for the device. `where` are the lines of this repository that led there, the innermost last."""

    kind: str
    where: tuple[str, ...]

    @property
    def innermost(self) -> str:
        """As `engine/runner/staging.py:100 tokens`."""
        return self.where[-1] if self.where else "?"


class Stream:
    """A queue of work. Also what `torch.cuda.Stream` is while a card is rehearsed."""

    def __init__(self, device: object = None, priority: int = 0, **_: object) -> None:
        self.card = current_card()
        self.queue: deque[Work] = deque()
        self.launched = 0
        self.done = 0
        self.device = torch.device("cuda", 0)
        self.card.streams.append(self)

    def add(self, work: Work) -> None:
        """Launch work behind everything in this stream, or write it into the graph that is captured on it."""
        graph = self.card.capture
        if graph is not None and graph.captures(self):
            graph.works.append(work)
            return
        assert graph is None, "work is launched on a stream that does not belong to the capture under way"
        self.enqueue(work)
        self.card.progress(self)

    def enqueue(self, work: Work) -> None:
        """To the end of the queue, capture or not: what the allocator knows but no stream sees."""
        self.queue.append(work)
        self.launched += 1

    def run_to(self, position: int) -> None:
        """Run the queue up to a count of works since the beginning."""
        if self.done >= position:
            return
        if self.card.broken is not None:
            raise RuntimeError(f"CUDA error: the device is lost since: {self.card.broken!r}")
        with torch._C._DisableTorchDispatch(), torch._C._InferenceMode(True):
            while self.done < position:
                work = self.queue.popleft()
                self.done += 1
                try:
                    work()
                except Exception as error:
                    self.card.broken = self.card.broken or error
                    raise

    def wait_event(self, event: Event) -> None:
        if event.graph is not None:
            event.graph.streams.append(self)
        elif event.stream is not None:
            stream, position = event.stream, event.position
            self.add(lambda: stream.run_to(position))

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.card.wait("stream", self, self.launched)

    def query(self) -> bool:
        self.card.refuse_in_capture("a query of a stream")
        return self.done >= self.launched


class Event:
    """A place in a stream. Also what `torch.cuda.Event` is while a card is rehearsed."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, **_: object) -> None:
        self.card = current_card()
        self.has_timing = enable_timing
        self.is_blocking = blocking
        self.stream: Stream | None = None
        self.graph: Graph | None = None
        self.position = 0

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self.card.stream
        capture = self.card.capture
        if capture is not None and capture.captures(stream):
            self.graph, self.stream = capture, None
        else:
            self.graph, self.stream, self.position = None, stream, stream.launched

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.card.stream).wait_event(self)

    def query(self) -> bool:
        """Whether it has passed; the device does a little whenever it is asked."""
        self.card.refuse_in_capture("a query of an event")
        if self.stream is None or self.stream.done >= self.position:
            return True
        self.stream.run_to(self.stream.done + 1)
        return self.stream.done >= self.position

    def synchronize(self) -> None:
        if self.stream is not None:
            self.card.wait("event", self.stream, self.position)

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds, which mean nothing here."""
        if not (self.has_timing and end.has_timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        assert self.stream is not None, "the first event was never recorded"
        assert end.stream is not None, "the second event was never recorded"
        assert end.stream.done >= end.position, "nobody waited for the second event"
        return ELAPSED_MS


@dataclass
class Card:
    """One rehearsed device."""

    schedule: Schedule = Schedule.LATE
    seed: int = 0
    total_bytes: int = DEFAULT_BYTES
    kind: Kind = H200
    streams: list[Stream] = field(default_factory=list)
    capture: Graph | None = None
    syncs: list[Sync] = field(default_factory=list)
    computed_early: set[str] = field(default_factory=set)
    """Operations whose results have shapes that torch cannot tell without values: the stream is run before each."""
    broken: Exception | None = None
    allocated_bytes: int = 0
    peak_bytes: int = 0
    reserved_bytes: int = 0
    graph_bytes: int = 0
    others_bytes: int = 0
    """Of other processes on the card."""
    num_pools: int = 0
    recording: set[object] = field(default_factory=set)
    """Pools of memory that a capture allocates from, or did when it was spoilt."""
    num_captures: int = 0
    num_replays: int = 0
    num_launches: int = 0
    closed: bool = False

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self.stream: Stream

    def progress(self, stream: Stream) -> None:
        """Let the device do what it does meanwhile."""
        if self.schedule is Schedule.EARLY:
            stream.run_to(stream.launched)
        elif self.schedule is Schedule.RANDOM and self._random.random() < 0.1:
            chosen = self._random.choice(self.streams)
            chosen.run_to(min(chosen.launched, chosen.done + self._random.randint(1, 40)))

    def wait(self, kind: str, stream: Stream, position: int) -> None:
        """The host waits for a place in a stream; it is no wait where the device has come past it."""
        self.refuse_in_capture(f"a wait for the device ({kind})")
        if stream.done < position:
            self.note(kind)
            stream.run_to(position)

    def wait_for_value(self, kind: str) -> None:
        """The host waits for the current stream, and would if nothing were launched."""
        self.refuse_in_capture(f"a wait for the device ({kind})")
        self.note(kind)
        self.drain()

    def wait_for_all(self, kind: str) -> None:
        """The host waits for everything launched."""
        self.refuse_in_capture(f"a wait for the device ({kind})")
        self.note(kind)
        for stream in self.streams:
            stream.run_to(stream.launched)

    def drain(self) -> None:
        """Run the current stream; of the rehearsal itself, no wait of the host."""
        self.stream.run_to(self.stream.launched)

    def note(self, kind: str) -> None:
        self.syncs.append(Sync(kind, repo_stack()))

    def refuse_in_capture(self, what: str) -> None:
        if self.capture is not None:
            error = f"CUDA error: operation not permitted when stream is capturing: {what}"
            self.capture.invalidate(error)
            raise RuntimeError(error)

    def make_pool(self) -> tuple[int, int]:
        self.num_pools += 1
        return (0, self.num_pools)

    def check_memory(self, num_bytes: int) -> None:
        """Raise torch.OutOfMemoryError where there is none."""
        if self.allocated_bytes + num_bytes + CONTEXT_BYTES > self.total_bytes:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {num_bytes} bytes of {self.total_bytes}")

    @property
    def used_bytes(self) -> int:
        """As the driver tells it."""
        return self.reserved_bytes + self.graph_bytes + self.others_bytes + CONTEXT_BYTES

    def allocate(self, num_bytes: int) -> int:
        """Count an allocation as torch's allocator does, in units. Raises torch.OutOfMemoryError. → bytes taken"""
        rounded = -(-num_bytes // ALLOCATION_BYTES) * ALLOCATION_BYTES
        self.check_memory(rounded)
        self.allocated_bytes += rounded
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
        self.reserved_bytes = max(self.reserved_bytes, -(-self.allocated_bytes // SEGMENT_BYTES) * SEGMENT_BYTES)
        return rounded


def repo_stack() -> tuple[str, ...]:
    """Where the host stands, without this package."""
    found = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(REPO) and not name.startswith(PACKAGE):
            found.append(f"{name[len(REPO) :]}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return tuple(reversed(found))


_cards: list[Card] = []


def current_card() -> Card:
    assert _cards, "no card is rehearsed at this time"
    return _cards[-1]


def is_rehearsing() -> bool:
    return bool(_cards)


def begin(card: Card) -> None:
    """Make it the card of this process."""
    assert not _cards, "one card is rehearsed at a time"
    _cards.append(card)
    card.stream = Stream()


def end(card: Card) -> None:
    assert _cards == [card]
    card.closed = True
    _cards.clear()
