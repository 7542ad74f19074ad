"""Waiting requests: in a tenant's queue, with a time limit, and forks of a prompt that is not computed yet. Knows no torch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator
from heapq import heapify, heappop, heappush
from itertools import chain, count
from weakref import ref

from engine.scheduling.request import Request

DEADLINES_KEPT = 512
"""Up to this many deadlines are kept without checking which requests still wait."""


class WaitingQueue:
    """The waiting requests of one account: preempted ones in the order of their preemption, then the others, then those that
    are late for their first token."""

    def __init__(self) -> None:
        self._preempted: OrderedDict[Request, None] = OrderedDict()
        self._regular: OrderedDict[Request, None] = OrderedDict()
        self._late: OrderedDict[Request, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._preempted) + len(self._regular) + len(self._late)

    def __bool__(self) -> bool:
        return bool(self._preempted or self._regular or self._late)

    def __iter__(self) -> Iterator[Request]:
        return chain(self._preempted, self._regular, self._late)

    @property
    def preempted(self) -> Collection[Request]:
        """In the order of their preemption."""
        return self._preempted.keys()

    @property
    def first_regular(self) -> Request | None:
        return next(iter(self._regular), None)

    @property
    def first_late(self) -> Request | None:
        return next(iter(self._late), None)

    def move_to_late(self, request: Request) -> None:
        """Move a request that is late for its first token after those that are not."""
        del self._regular[request]
        self._late[request] = None

    def add(self, request: Request, *, first: bool) -> None:
        """Add a request at the end of its kind; with `first`, an ordinary one goes before the other ordinary ones. A request
        is late only once it has waited (`move_to_late`) or run."""
        if request.num_preemptions:
            self._preempted[request] = None
        else:
            self._regular[request] = None
            if first:
                self._regular.move_to_end(request, last=False)

    def remove(self, request: Request) -> None:
        if request.num_preemptions:
            del self._preempted[request]
        elif request in self._late:
            del self._late[request]
        else:
            del self._regular[request]

    @property
    def head(self) -> Request | None:
        return next(iter(self), None)


class Deadlines:
    """Requests by the time at which they have waited too long; O(log n) each over time. Holds weak references, so it keeps no
    request or prompt alive. Nearly all stop waiting long before that time: they are removed whenever they may be half of it."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, ref[Request]]] = []
        self._sequence = count()
        self._len_max = DEADLINES_KEPT

    def __len__(self) -> int:
        """Number of entries, including requests that no longer wait."""
        return len(self._heap)

    def add(self, request: Request) -> None:
        if request.queue_deadline_s is None:
            return
        if len(self._heap) >= self._len_max:
            self._heap = [entry for entry in self._heap if _still_waiting(entry[-1]) is not None]
            heapify(self._heap)
            self._len_max = max(DEADLINES_KEPT, 2 * len(self._heap))
        heappush(self._heap, (request.queue_deadline_s, next(self._sequence), ref(request)))

    def expired(self, now_s: float) -> list[Request]:
        """Requests that were never scheduled and whose time is up."""
        expired_requests: list[Request] = []
        while self._heap and self._heap[0][0] <= now_s:
            request = _still_waiting(heappop(self._heap)[-1])
            if request is not None:
                expired_requests.append(request)
        return expired_requests


def _still_waiting(reference: ref[Request]) -> Request | None:
    """The request, if it was never scheduled and has not ended."""
    request = reference()
    return None if request is None or request.first_scheduled_s is not None or request.is_finished else request


class ParkedForks:
    """Further answers of a request whose prompt is not computed yet."""

    def __init__(self) -> None:
        self._by_parent: dict[Request, dict[Request, None]] = {}
        self._num_parked = 0

    def __len__(self) -> int:
        return self._num_parked

    def __iter__(self) -> Iterator[Request]:
        for forks in self._by_parent.values():
            yield from forks

    def park(self, request: Request) -> bool:
        """Keep a fork until its parent's prompt is computed. False if that has happened already or cannot happen any more, and
        for a request that is no fork."""
        parent = request.forked_from
        if parent is None or parent.is_finished or parent.num_prompt_tokens_computed == parent.num_prompt_tokens:
            return False
        self._by_parent.setdefault(parent, {})[request] = None
        self._num_parked += 1
        return True

    def remove(self, request: Request) -> bool:
        """Remove a parked fork that has ended. False when it was not parked."""
        forks = None if request.forked_from is None else self._by_parent.get(request.forked_from)
        if forks is None or request not in forks:
            return False
        del forks[request]
        self._num_parked -= 1
        return True

    def of(self, parent: Request) -> list[Request]:
        """The forks that wait for the prompt of a parent."""
        return list(self._by_parent.get(parent, ()))

    def pop(self, parent: Request) -> list[Request]:
        """The forks of a parent whose prompt is computed, or that has ended."""
        forks = self.of(parent)
        self._by_parent.pop(parent, None)
        self._num_parked -= len(forks)
        return forks
