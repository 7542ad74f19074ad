"""The state of an emulated card: streams as queues of work, events, captures, memory, and the host's synchronisations.

Launched work does not run at once. A stream is a queue, and waiting for it runs it up to the awaited position only. So the
device is as late as it can be, which exposes data that the host overwrites, frees or reads too early. `Schedule` can select
other timings.
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
"""Between any two events: so long that timing loops need no repetition."""
ALLOCATION_BYTES = 512
LAUNCH_BYTES = 24 << 10
"""Driver memory for each launch in a captured graph."""
SEGMENT_BYTES = 2 << 20
BLAS_WORKSPACE_BYTES = 1 << 20
"""What torch's allocator gives cuBLAS for each stream and never takes back. On Hopper it is 32 MiB, of more memory."""


@dataclass(frozen=True)
class Kind:
    """A card model: name and bytes of L2 cache. All have capability 9.0 (Hopper)."""

    name: str
    l2_bytes: int


H200 = Kind("NVIDIA H200", 60 << 20)
H100 = Kind("NVIDIA H100 80GB HBM3", 50 << 20)


class Schedule(Enum):
    """When launched work runs: only when the host waits for it, at once, or at seeded random times."""

    LATE = "late"
    EARLY = "early"
    RANDOM = "random"


@dataclass(frozen=True)
class Sync:
    """A wait of the host for the device. `where`: the stack within this repository, innermost last, as in
    `engine/runner/token_return.py:101 wait`."""

    kind: str
    where: tuple[str, ...]


class Stream:
    """A queue of work; replaces `torch.cuda.Stream` during a rehearsal."""

    def __init__(self, device: object = None, priority: int = 0, **_: object) -> None:
        self.card = current_card()
        self.queue: deque[Work] = deque()
        self.launched = 0
        self.done = 0
        self.device = torch.device("cuda", 0)
        self.card.streams.append(self)

    def add(self, work: Work) -> None:
        """Append work to this stream, or to the graph being captured on it."""
        self.card.check_alive()
        graph = self.card.capture
        if graph is not None and graph.captures(self):
            graph.works.append(work)
            return
        assert graph is None, "work is launched on a stream that does not belong to the capture under way"
        self.enqueue(work)
        self.card.progress(self)

    def enqueue(self, work: Work) -> None:
        """Append work regardless of captures: actions of the allocator, which no stream records."""
        self.queue.append(work)
        self.launched += 1

    def run_to(self, position: int) -> None:
        """Run the queue up to this number of works since its creation."""
        if self.done >= position:
            return
        self.card.check_alive()
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
    """A position in a stream; replaces `torch.cuda.Event` during a rehearsal."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, **_: object) -> None:
        self.card = current_card()
        self.has_timing = enable_timing
        self.is_blocking = blocking
        self.stream: Stream | None = None
        self.graph: Graph | None = None
        self.position = 0

    def record(self, stream: Stream | None = None) -> None:
        self.card.check_alive()
        used: Stream = stream or torch.cuda.current_stream()  # type: ignore[assignment]
        capture = self.card.capture
        if capture is not None and capture.captures(used):
            self.graph, self.stream = capture, None
        else:
            self.graph, self.stream, self.position = None, used, used.launched

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.card.stream).wait_event(self)

    def query(self) -> bool:
        """Whether it has passed; each query lets the device run one work."""
        self.card.refuse_in_capture("a query of an event")
        self.card.check_alive()
        if self.stream is None or self.stream.done >= self.position:
            return True
        self.stream.run_to(self.stream.done + 1)
        return self.stream.done >= self.position

    def synchronize(self) -> None:
        if self.stream is not None:
            self.card.wait("event", self.stream, self.position)

    def elapsed_time(self, end: Event) -> float:
        """A constant number of milliseconds."""
        if not (self.has_timing and end.has_timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        assert self.stream is not None, "the first event was never recorded"
        assert end.stream is not None, "the second event was never recorded"
        assert end.stream.done >= end.position, "nobody waited for the second event"
        return ELAPSED_MS


@dataclass
class Card:
    """One emulated device."""

    schedule: Schedule = Schedule.LATE
    seed: int = 0
    total_bytes: int = DEFAULT_BYTES
    kind: Kind = H200
    streams: list[Stream] = field(default_factory=list)
    capture: Graph | None = None
    syncs: list[Sync] = field(default_factory=list)
    computed_early: set[str] = field(default_factory=set)
    """Operations whose output shapes depend on values: the stream is run before each."""
    broken: Exception | None = None
    allocated_bytes: int = 0
    peak_bytes: int = 0
    reserved_bytes: int = 0
    graph_bytes: int = 0
    others_bytes: int = 0
    """Memory of other processes on the card."""
    num_pools: int = 0
    recording: set[object] = field(default_factory=set)
    """Memory pools of captures that are under way or were invalidated."""
    pool_uses: dict[object, int] = field(default_factory=dict)
    """How many graphs use a memory pool, counted as torch 2.11 does: those whose capture was invalidated for good."""
    blas_streams: set[Stream] = field(default_factory=set)
    """Streams with a workspace of cuBLAS."""
    num_captures: int = 0
    num_replays: int = 0
    only_compiles: bool = False
    """Whether launches of Triton kernels request their compilation, and run nothing."""
    closed: bool = False

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self.stream: Stream

    def progress(self, stream: Stream) -> None:
        """Let the device run work, according to the schedule."""
        if self.schedule is Schedule.EARLY:
            stream.run_to(stream.launched)
        elif self.schedule is Schedule.RANDOM and self._random.random() < 0.1:
            chosen = self._random.choice(self.streams)
            chosen.run_to(min(chosen.launched, chosen.done + self._random.randint(1, 40)))

    def check_alive(self) -> None:
        """Raise if a work has failed on the device: from then on CUDA refuses every call."""
        if self.broken is not None:
            raise RuntimeError(f"CUDA error: the device is lost since: {self.broken!r}")

    def wait(self, kind: str, stream: Stream, position: int) -> None:
        """Wait for a position in a stream; not recorded as a wait if the device has passed it."""
        self.refuse_in_capture(f"a wait for the device ({kind})")
        self.check_alive()
        if stream.done < position:
            self.note(kind)
            stream.run_to(position)

    def wait_for_value(self, kind: str) -> None:
        """Wait for the current stream; always recorded as a wait."""
        self.refuse_in_capture(f"a wait for the device ({kind})")
        self.check_alive()
        self.note(kind)
        self.drain()

    def wait_for_all(self, kind: str) -> None:
        """Wait for all launched work."""
        self.refuse_in_capture(f"a wait for the device ({kind})")
        self.check_alive()
        self.note(kind)
        for stream in self.streams:
            stream.run_to(stream.launched)

    def drain(self) -> None:
        """Run the current stream for the emulation itself, without recording a wait."""
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
        """Raise torch.OutOfMemoryError if `num_bytes` are not free."""
        if self.allocated_bytes + num_bytes + CONTEXT_BYTES > self.total_bytes:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {num_bytes} bytes of {self.total_bytes}")

    @property
    def used_bytes(self) -> int:
        """Used memory as the driver reports it."""
        return self.reserved_bytes + self.graph_bytes + self.others_bytes + CONTEXT_BYTES

    def allocate(self, num_bytes: int) -> int:
        """Count an allocation, rounded up as by torch's allocator. Raises torch.OutOfMemoryError. → bytes allocated"""
        rounded = -(-num_bytes // ALLOCATION_BYTES) * ALLOCATION_BYTES
        self.check_memory(rounded)
        self.allocated_bytes += rounded
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
        self.reserved_bytes = max(self.reserved_bytes, -(-self.allocated_bytes // SEGMENT_BYTES) * SEGMENT_BYTES)
        return rounded

    def allocate_blas_workspace(self) -> None:
        """That of the current stream, which its first product takes, in a capture too."""
        if self.stream not in self.blas_streams:
            self.allocate(BLAS_WORKSPACE_BYTES)
            self.blas_streams.add(self.stream)


def repo_stack() -> tuple[str, ...]:
    """The current call stack within this repository, without this package."""
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


def begin(card: Card) -> None:
    """Make it the current card of this process."""
    assert not _cards, "one card is rehearsed at a time"
    _cards.append(card)
    card.stream = Stream()


def end(card: Card) -> None:
    assert _cards == [card]
    card.closed = True
    _cards.clear()
