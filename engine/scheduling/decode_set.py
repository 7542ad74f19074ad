"""The decoding requests, each with a lasting item; the paused ones; calendars of their blocks and ends. Integers only.

A decoding request computes one token per step, so the step in which its last block is full is known when the block is
allocated, and the request is not visited before. Accepted drafts and pauses move that step; a request that is due too early is
entered in the calendar again. The step that samples its last token is known when it begins to decode; drafts and pauses move
that one too.

Among many requests some are full in every step, and sending the device one block costs as much as sending many. So once in
`EARLY_GROWTH_STEPS` steps, requests that will be full before the next such step get their blocks too.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter

from engine.scheduling.accounts import Account, Accounts, is_paused
from engine.scheduling.request import Request, RequestStatus
from engine.scheduling.scheduled_batch import ScheduledBatch, ScheduledRequest

EARLY_GROWTH_STEPS = 8
"""Steps between two in which requests get their next blocks together. A block comes early by half its tokens at most."""


class DecodeSet:
    """Decoding requests in the order in which they began, and those of paused accounts. Books them as decoding."""

    def __init__(self, accounts: Accounts, block_size: int) -> None:
        self.items: dict[Request, ScheduledRequest] = {}
        self._columns: tuple[list[ScheduledRequest], list[Request], list[Sequence[int]]] | None = None  # of the last batch
        self._paused: dict[Request, ScheduledRequest] = {}
        self._calendar: dict[int, list[Request]] = {}
        self._ending: dict[int, dict[Request, None]] = {}  # by last step, only while they decode
        self._accounts = accounts
        self._block_size = block_size

    def batch(self, grown: list[Request]) -> ScheduledBatch:
        """The decodes of the step being planned, of which `grown` got a block. Callers must not change the columns."""
        if self._columns is None:
            self._columns = [*self.items.values()], [*self.items], [request.block_table for request in self.items]
        items, requests, tables = self._columns
        ending = [*self._ending.pop(self._accounts.step, ())]
        return ScheduledBatch(items, requests, tables, grown, ending, num_tokens=len(items))

    def add(self, request: Request) -> None:
        """A prefill is complete: the request decodes from the next step on."""
        item = ScheduledRequest(request, request.num_computed_tokens, 1, samples=True)
        if is_paused(request):
            self._paused[request] = item
        else:
            self._resume(request, item)

    def remove(self, request: Request) -> None:
        if self._paused.pop(request, None) is None and self._pop_item(request) is not None:
            self._accounts.stop_decoding(request)

    def pause(self, account: Account) -> None:
        """Leave the requests of an account, except the recovering one, out of the steps; they keep their blocks."""
        account.is_paused = True
        for request in account.running:
            item = None if request is account.recovering else self._pop_item(request)
            if item is not None:
                self._paused[request] = item
                self._accounts.stop_decoding(request)

    def resume(self, account: Account) -> None:
        account.is_paused = False
        for request in account.running:
            item = self._paused.pop(request, None)
            if item is not None:
                self._resume(request, item)

    def _pop_item(self, request: Request) -> ScheduledRequest | None:
        item = self.items.pop(request, None)
        if item is not None:
            self._columns = None
            self._remove_end(request)
        return item

    def _resume(self, request: Request, item: ScheduledRequest) -> None:
        self.items[request] = item
        self._columns = None
        self._accounts.start_decoding(request)
        self._schedule(request)

    def reschedule(self, request: Request) -> None:
        """Count the steps of a decoding request anew: it has advanced by accepted drafts too."""
        self._remove_end(request)
        self._schedule(request)

    def _schedule(self, request: Request) -> None:
        """Enter the steps in which a request needs a block and samples its last token, counted from the next one."""
        self._schedule_growth(request)
        request.last_step = self._last_step(request)
        self._ending.setdefault(request.last_step, {})[request] = None

    def _last_step(self, request: Request) -> int:
        """The last token is sampled from the one before it, and itself never computed."""
        return self._accounts.step + max(1, request.max_total_tokens - request.num_computed_tokens - 1)

    def _remove_end(self, request: Request) -> None:
        ending = self._ending.get(request.last_step, {})
        ending.pop(request, None)
        if not ending:
            self._ending.pop(request.last_step, None)

    def _schedule_growth(self, request: Request) -> None:
        slots = len(request.block_table) * self._block_size
        request.growth_step = self._accounts.step + 1 + slots - request.num_computed_tokens
        self._calendar.setdefault(request.growth_step, []).append(request)

    def schedule_next_growth(self, requests: list[Request]) -> None:
        """Schedule requests that got one block each, counted from the step in which they would have been full."""
        for due, requests_due in groupby(requests, attrgetter("growth_step")):
            grown, step = [*requests_due], due + self._block_size
            for request in grown:
                request.growth_step = step
            self._calendar.setdefault(step, []).extend(grown)

    def pop_due(self) -> list[Request]:
        """The requests that cannot compute a token in the next step without one more block."""
        return self._pop_full(self._accounts.step + 1)

    def pop_due_soon(self, max_requests: int) -> list[Request]:
        """Once in `EARLY_GROWTH_STEPS` steps: at most `max_requests` requests that will need a block before the next such step
        and will not have ended by then. Call `pop_due` first."""
        next_step = self._accounts.step + 1
        soon: list[Request] = []
        if next_step % EARLY_GROWTH_STEPS == 0:
            for step in range(next_step + 1, next_step + EARLY_GROWTH_STEPS):
                if len(soon) + len(self._calendar.get(step, ())) > max_requests:
                    break
                ending: list[Request] = []
                for request in self._pop_full(step):
                    (ending if self._ends_before_full(request) else soon).append(request)
                if ending:
                    self._calendar[step] = ending
        return soon

    def _ends_before_full(self, request: Request) -> bool:
        """Whether a request has its last token before its blocks are full: the last one is never computed."""
        return len(request.block_table) * self._block_size >= request.max_total_tokens - 1

    def _pop_full(self, step: int) -> list[Request]:
        """The requests whose blocks will be full before this step, each once: a rejected draft enters the same step again."""
        size, items = self._block_size, self.items
        num_steps = step - self._accounts.step - 1  # before that one
        full: list[Request] = []
        for request in dict.fromkeys(self._calendar.pop(step, ())):
            if request.growth_step == step and request in items:
                if request.num_computed_tokens + num_steps == len(request.block_table) * size:
                    full.append(request)
                else:
                    self._schedule_growth(request)
        return full

    def check_invariants(self) -> None:
        """Raise `AssertionError` unless items, calendar and accounts agree."""
        columns = [*self.items.values()], [*self.items], [request.block_table for request in self.items]
        assert self._columns in (None, columns), "the batch is not that of the decoding requests"
        for request, item in self.items.items():
            assert request.status is RequestStatus.DECODE, f"{request.request_id} decodes while {request.status}"
            assert (item.start, item.num_tokens) == (request.num_computed_tokens, 1), f"{request.request_id}: stale item"
            slots = len(request.block_table) * self._block_size
            limit = self._accounts.step + 1 + slots - request.num_computed_tokens
            assert self._accounts.step < request.growth_step <= limit, f"{request.request_id} grows in no future step"
            is_entered = request in self._calendar.get(request.growth_step, ())
            assert is_entered, f"{request.request_id} is not in the calendar"
            assert request in self._ending.get(self._last_step(request), ()), f"{request.request_id} has another last step"
        ending = {request for requests in self._ending.values() for request in requests}
        assert ending == self.items.keys(), "requests that do not decode have a last step"
        contexts = sum(request.num_computed_tokens for request in self.items)
        total = self._accounts.aggregate
        assert (total.num_decoding, total.context_at(self._accounts.step)) == (len(self.items), contexts), "wrong contexts"
