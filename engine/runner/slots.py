"""Request slots: the state of decoding requests on the device, and the host's record of what each slot holds.

A slot holds the last token of a request, its number of tokens, and its row of the block table: enough for the device to make
the inputs of the next step before the host has seen that token. The sampler keeps its columns by the same slot numbers.

A slot is a copy of the scheduler's state, never the only one: whatever differs from the host's record is sent again, and a slot
of a request that is not in the step may be given to another. The end of a request need not be announced.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from operator import and_, is_
from typing import Protocol

import numpy as np
import torch

from engine.runner.staging import Staging
from engine.scheduling.request import Request
from engine.scheduling.scheduled_batch import ScheduledRequest
from kernels import ops

NOTHING = -1


class SlotState:
    """The state of S slots of at most M blocks each, on the device. Only kernels read it."""

    def __init__(self, num_slots: int, max_blocks: int, *, device: torch.device, dtype: torch.dtype | None = None) -> None:
        """`dtype`: of the model, whose operations advance the slots; None is any."""
        self.last_tokens = torch.zeros(num_slots, dtype=torch.int64, device=device)  # [S]
        self.num_tokens = torch.zeros(num_slots, dtype=torch.int32, device=device)  # [S], the last one included
        self.tables = torch.zeros(num_slots, max_blocks, dtype=torch.int32, device=device)  # [S, M]
        self._flat_tables = self.tables.view(-1)
        self._staging = Staging(device)
        self.host_tables = self.tables.numpy() if device.type == "cpu" else None  # the same memory
        self._ops = ops.operations(device, dtype)

    @property
    def num_slots(self) -> int:
        return self.tables.shape[0]

    def write_lengths(self, slots: Sequence[int], last_tokens: Sequence[int], num_tokens: Sequence[int]) -> None:
        """A last token that is below 0 is not known and left as it is on the device."""
        known = [(slot, token) for slot, token in zip(slots, last_tokens, strict=True) if token >= 0]
        num_known, num_slots = len(known), len(slots)
        wide = [*(slot for slot, _ in known), *(token for _, token in known), *slots]
        sent, lens = self._send(wide, num_tokens)
        if known:
            self.last_tokens.index_copy_(0, sent[:num_known], sent[num_known : 2 * num_known])
        self.num_tokens.index_copy_(0, sent[-num_slots:], lens)

    def write_blocks(self, pieces: Sequence[tuple[int, int, Sequence[int]]]) -> None:
        """pieces: (slot, first column, block ids)"""
        if self.host_tables is not None:
            for slot, first, ids in pieces:
                self.host_tables[slot, first : first + len(ids)] = ids
            return
        columns = self.tables.shape[1]
        places, blocks = array("q"), array("i")
        for slot, first, ids in pieces:
            place = slot * columns + first
            places.extend(range(place, place + len(ids)))
            blocks.extend(ids)
        self._flat_tables.index_copy_(0, *self._send(places, blocks))

    def _send(self, wide: Sequence[int], narrow: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Both on the device, by one copy and nothing else: [len(wide)] int64, as indices are, and [len(narrow)] int32"""
        num_wide, num_narrow = len(wide), len(narrow)
        numbers = np.empty(num_wide + (num_narrow + 1) // 2, dtype=np.int64)
        numbers[:num_wide] = wide
        numbers[num_wide:].view(np.int32)[:num_narrow] = narrow
        sent = self._staging.send(numbers)
        return sent[:num_wide], sent[num_wide:].view(torch.int32)[:num_narrow]

    def advance(self, slots: torch.Tensor, sampled: torch.Tensor, *, out: torch.Tensor | None = None) -> None:
        """slots: [R] int32, below 0 is padding; sampled: [R] int64, copied to `out`; where it is below 0 there is no token,
        and token 0 stands in the slot"""
        self._ops.advance_slots(slots, sampled, self.last_tokens, self.num_tokens, out=out)


class SlotListener(Protocol):
    """Keeps further state of requests by slot, as the sampler does."""

    def place(self, slots: Sequence[int], requests: Sequence[Request]) -> None:
        """Assign the slots to these requests."""
        ...

    def restart(self, slot: int, request: Request, num_tokens: int) -> None:
        """Set up the slot anew from the first `num_tokens` tokens of its request: what it holds is out of date or another's."""
        ...


class SlotTable:
    """The host's record of each slot: its request, the tokens it will hold after the steps launched so far, its blocks."""

    def __init__(self, state: SlotState, listener: SlotListener) -> None:
        num_slots = state.num_slots
        self._state = state
        self._listener = listener
        self._of: dict[Request, int] = {}
        self._free = list(range(num_slots - 1, -1, -1))
        self._lens = np.full(num_slots, NOTHING, dtype=np.int64)
        self._tables: list[Sequence[int] | None] = [None] * num_slots
        self._num_blocks = [0] * num_slots
        self._items: Sequence[ScheduledRequest] | None = None  # of the last step
        self._requests: list[Request] = []
        self._slots: list[int] = []
        self._step_slots = np.zeros(0, dtype=np.int64)
        self._step_tables: list[Sequence[int]] = []
        self._step_sizes: list[int] = []
        self._num_gone_on = 0  # steps by which `_lens` is behind for these slots

    def holds(self, request: Request) -> bool:
        """Whether the request has a slot."""
        return request in self._of

    def forget(self) -> None:
        """Drop all assignments: what the device holds is in doubt, blocks and parameters too."""
        self._of.clear()
        self._free = list(range(len(self._lens) - 1, -1, -1))
        self._drop_step()

    def invalidate(self, requests: Sequence[Request]) -> None:
        """Mark the slots of these requests as out of date: a step with them is computed without the slots."""
        self._drop_step()
        for request in requests:
            if request in self._of:
                self._lens[self._of[request]] = NOTHING

    def update(self, items: Sequence[ScheduledRequest]) -> list[int]:
        """Bring the slots of `items`, all of which yield a token, up to date, and expect the step to advance them. → slots

        The very list of the last step says that nobody in it came, went or lost blocks since.
        Where the slot is not current, the input token must be known, unless the step computes a chunk from known ones."""
        if items is self._items:
            return self._go_on()
        requests = [item.request for item in items]
        if requests == self._requests and all(map(is_, (request.block_table for request in requests), self._step_tables)):
            self._items = items
            return self._go_on()
        slots = self._bring_up(items, requests)
        self._items, self._requests, self._slots = items, requests, slots
        self._step_tables = [request.block_table for request in requests]
        self._step_sizes = [*map(len, self._step_tables)]
        return slots

    def update_beside_guesses(self, items: Sequence[ScheduledRequest], *, sends_tokens: bool = True) -> list[int]:
        """As `update`, for a step in which some requests verify guesses; their slots are sent again with a later step.
        `sends_tokens`: their input tokens come from the host with the step, and not from their slots."""
        slots = self._bring_up(items, [item.request for item in items], sends_tokens=sends_tokens)
        self._lens[[slot for item, slot in zip(items, slots, strict=True) if item.num_draft_tokens]] = NOTHING
        return slots

    def _bring_up(self, items: Sequence[ScheduledRequest], requests: list[Request], *, sends_tokens: bool = False) -> list[int]:
        self._drop_step()  # until the step is as `update` says
        slots = self._seats(requests)
        index = self._step_slots = np.array(slots, dtype=np.int64)
        lens = np.array([item.start + item.num_tokens - item.num_draft_tokens for item in items], dtype=np.int64)
        is_known = self._lens[index] == lens
        if sends_tokens:
            is_known |= np.array([item.num_draft_tokens > 0 for item in items])
        tables = (self._tables[slot] for slot in slots)
        has_table = map(is_, tables, (request.block_table for request in requests))
        stale = [i for i, is_current in enumerate(map(and_, is_known.tolist(), has_table)) if not is_current]
        if stale:
            self._send([requests[i] for i in stale], [slots[i] for i in stale], lens[stale].tolist())
        self._grow(requests, slots)
        self._lens[index] = lens + 1
        return slots

    def _go_on(self) -> list[int]:
        """Update the record for the same requests as in the last step, with the same tables. → slots"""
        sizes = [*map(len, self._step_tables)]
        if sizes != self._step_sizes:
            self._grow(self._requests, self._slots)
            self._step_sizes = sizes
        self._num_gone_on += 1
        return self._slots

    def _drop_step(self) -> None:
        """The next step is none of the same requests with current slots."""
        self._items, self._requests = None, []
        if self._num_gone_on:
            self._lens[self._step_slots] += self._num_gone_on
            self._num_gone_on = 0

    def _send(self, requests: Sequence[Request], slots: Sequence[int], lens: Sequence[int]) -> None:
        """Send the slots of these requests, of whose tokens the first `lens` are known or under way."""
        tokens: list[int] = []
        for request, slot, num_tokens in zip(requests, slots, lens, strict=True):
            is_current = self._lens[slot] == num_tokens
            token_id = request.token_ids[num_tokens - 1]
            assert is_current or token_id >= 0, f"neither host nor device knows the last token of {request.request_id}"
            tokens.append(NOTHING if is_current else token_id)
            if not is_current:
                self._listener.restart(slot, request, num_tokens)
            self._tables[slot], self._num_blocks[slot] = request.block_table, 0
        self._state.write_lengths(slots, tokens, lens)

    def _grow(self, requests: Sequence[Request], slots: Sequence[int]) -> None:
        """Send the blocks that were added to tables."""
        counts = self._num_blocks
        pieces: list[tuple[int, int, Sequence[int]]] = []
        for request, slot in zip(requests, slots, strict=True):
            table, known = request.block_table, counts[slot]
            if len(table) != known:
                pieces.append((slot, known, table[known:]))
                counts[slot] = len(table)
        if pieces:
            self._state.write_blocks(pieces)

    def _seats(self, requests: Sequence[Request]) -> list[int]:
        """Slots of these requests. One without a slot gets one, if need be that of a request which is not among them."""
        slots = [self._of.get(request, NOTHING) for request in requests]
        new = [i for i, slot in enumerate(slots) if slot == NOTHING]
        if not new:
            return slots
        if len(new) > len(self._free):
            staying = set(requests)
            for request in [request for request in self._of if request not in staying]:
                self._free.append(self._of.pop(request))
        for i in new:
            slot = self._free.pop()
            slots[i] = self._of[requests[i]] = slot
            self._lens[slot], self._tables[slot] = NOTHING, None
        self._listener.place([slots[i] for i in new], [requests[i] for i in new])
        return slots
