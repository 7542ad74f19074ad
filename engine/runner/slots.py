"""Request slots: the state of decoding requests on the device, and the host's record of what each slot holds.

A slot holds the last token of a request, its number of tokens, and its row of the block table: enough for the device to make
the inputs of the next step before the host has seen that token. The sampler keeps its columns by the same slot numbers.

A slot is a copy of the scheduler's state, never the only one: whatever differs from the host's record is sent again, and a slot
of a request that is not in the step may be given to another. The end of a request need not be announced.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from engine.runner.staging import Staging
from engine.scheduling.request import Request
from engine.scheduling.row_diff import removed_rows
from engine.scheduling.scheduled_batch import ScheduledBatch, ScheduledRequest
from kernels import ops

NOTHING = -1

Int64Array = np.ndarray[Any, np.dtype[np.int64]]
EMPTY_INT64: Int64Array = np.empty(0, dtype=np.int64)


@dataclass(slots=True)
class SlotWrites:
    """Changes to slots, sent before a step or with it.

    `slots`, `last_tokens`, `num_tokens`: in columns, the slots that get a new length. A negative last token is one that the
    host does not know: the slot keeps the one it has. `blocks`: parts of block tables, (slot, first column, block ids).
    `words`: what listeners write.
    """

    slots: list[int] = field(default_factory=list)
    last_tokens: list[int] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    blocks: list[tuple[int, int, Sequence[int]]] = field(default_factory=list)
    words: list[ops.Words] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.slots or self.blocks or self.words)


def slot_words(beside: ops.Pieces, device: torch.device, *, num_slots: int, max_blocks: int) -> ops.DeviceWords:
    """The buffer that holds the state of S slots of at most M blocks each, and the pieces `beside` it: one write changes
    all."""
    pieces: ops.Pieces = {
        "last_tokens": (torch.int64, (num_slots,)),
        "num_tokens": (torch.int32, (num_slots,)),
        "tables": (torch.int32, (num_slots, max_blocks)),
        "unread": (torch.int32, (1,)),
    }
    return ops.DeviceWords({**pieces, **beside}, device, send_numbers=Staging(device).send)


class SlotState:
    """The state of S slots of at most M blocks each, on the device. Only kernels read it."""

    def __init__(self, words: ops.DeviceWords, *, dtype: torch.dtype | None = None) -> None:
        """`words`: the buffer of `slot_words`. `dtype`: the model's, whose operations advance the slots; None is any."""
        self.words = words
        self.last_tokens = self.words.tensor("last_tokens")  # [S]
        self.num_tokens = self.words.tensor("num_tokens")  # [S], the last one included
        self.tables = self.words.tensor("tables")  # [S, M]
        self._ops = ops.operations(self.tables.device, dtype)

    @property
    def num_slots(self) -> int:
        return self.tables.shape[0]

    @property
    def host_tables(self) -> np.ndarray[Any, Any] | None:
        """The tables themselves, where the device is the host."""
        return None if self.words.on_host is None else self.tables.numpy()

    def write(self, writes: SlotWrites) -> None:
        """Change slots, no value of them twice, with one copy and one operation."""
        self.words.write(*self.packed(writes))

    def packed(self, writes: SlotWrites) -> ops.Words:
        """The arguments of `words.write` that change slots, no word twice."""
        offsets, values = array("q"), array("i")
        first, columns = self.words.first("tables"), self.tables.shape[1]
        for slot, column, ids in writes.blocks:
            offset = first + slot * columns + column
            offsets.extend(range(offset, offset + len(ids)))
            values.extend(ids)
        first = self.words.first("num_tokens")
        offsets.extend(first + slot for slot in writes.slots)
        values.extend(writes.num_tokens)
        first = self.words.first("last_tokens")
        for slot, token_id in zip(writes.slots, writes.last_tokens, strict=True):
            if token_id >= 0:
                offset = first + 2 * slot
                offsets.extend((offset, offset + 1))
                values.extend((token_id, 0))
        for indices, words in writes.words:
            offsets.frombytes(indices.tobytes())
            values.frombytes(words.tobytes())
        return np.frombuffer(offsets, np.int64), np.frombuffer(values, np.int32)

    def advance(
        self,
        slots: torch.Tensor,
        sampled: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        host: ops.HostTokens | None = None,
    ) -> None:
        """Append a token to each slot. slots: [R] int32, negative for padding; sampled: [R] int64, copied to `out` and to
        `host` as well. A negative value is no token; the slot then gets token 0."""
        self._ops.advance_slots(slots, sampled, self.last_tokens, self.num_tokens, out=out, host=host)


class SlotListener(Protocol):
    """Keeps further state of requests by slot, as the sampler does."""

    def assign(self, slots: Sequence[int], requests: Sequence[Request]) -> ops.Words:
        """Assign the slots to these requests. Returns what must be written to the slots' buffer for that."""
        ...

    def restart(self, slot: int, request: Request, num_tokens: int) -> None:
        """Set up the slot anew from the first `num_tokens` tokens of its request: what it holds is out of date or another's."""
        ...


class SlotTable:
    """The host's record of each slot: its request, the tokens it will hold after the steps launched so far, its blocks.

    Most requests of a step were in the last one, and have one more token and the same block table. So the last step is kept in
    columns: requests that left are removed, the others advance together, and only new ones are handled one by one.
    """

    def __init__(self, state: SlotState, listener: SlotListener) -> None:
        num_slots = state.num_slots
        self._state = state
        self._listener = listener
        self._slot_of: dict[Request, int] = {}
        self._free = list(range(num_slots - 1, -1, -1))
        self._lens = np.full(num_slots, NOTHING, dtype=np.int64)
        self._tables: list[Sequence[int] | None] = [None] * num_slots
        self._num_blocks = [0] * num_slots
        self._idle: dict[Request, None] = {}  # have a slot and are not in the last step, longest idle first
        self._decodes: Sequence[ScheduledRequest] | None = None  # of the last step
        self._requests: list[Request] = []  # of the last step, as the columns below
        self._step_tables: list[Sequence[int]] = []
        self._slots = array("q")
        self._slot_array = EMPTY_INT64  # the same
        self._num_advanced = 0  # steps by which `_lens` lags for these slots

    def items_without_slot(self, items: Sequence[ScheduledRequest]) -> list[ScheduledRequest]:
        """The items whose request has no slot yet."""
        return [item for item in items if item.request not in self._slot_of]

    def clear(self) -> None:
        """Drop all assignments: what the device holds is in doubt, blocks and parameters too."""
        self._drop_step()
        self._slot_of.clear()
        self._idle.clear()
        self._free = list(range(len(self._lens) - 1, -1, -1))

    def invalidate(self, requests: Sequence[Request]) -> None:
        """Mark the slots of these requests as out of date: a step with them is computed without the slots."""
        self._drop_step()
        for request in requests:
            if request in self._slot_of:
                self._lens[self._slot_of[request]] = NOTHING

    def update(
        self, batch: ScheduledBatch, more: Sequence[ScheduledRequest] = (), *, unsent: SlotWrites | None = None
    ) -> Int64Array:
        """Bring the slots of the decodes of a step, and then of `more`, up to date for a step that yields a token for each of
        them. Returns their slots. `unsent`: gets the changes, for a caller that sends them with the step.

        Getting the array object of the last step means that slots and order are the same. Where a slot is out of date, the
        host must know the last token that the step reads.
        """
        decodes, writes = batch.decodes, SlotWrites() if unsent is None else unsent
        if decodes is self._decodes:
            self._remove_rows(range(len(decodes), len(self._requests)))
        else:
            self._remove_rows(removed_rows(self._step_tables, batch.tables))
        self._num_advanced += 1
        new = [*decodes[len(self._requests) :], *more]
        if new:
            self._add_items(new, writes)
        self._write_new_blocks(batch.grown, [self._slot_of[request] for request in batch.grown], writes)
        self._decodes = decodes
        if len(self._slot_array) != len(self._slots):
            self._slot_array = np.array(self._slots)
        if writes and unsent is None:
            self._state.write(writes)
        return self._slot_array

    def positions(self) -> Int64Array:
        """The index in prompt plus output of the token that each slot of the last step yields."""
        return self._lens[self._slot_array] + (self._num_advanced - 1)

    def update_for_verification(self, items: Sequence[ScheduledRequest], *, sends_tokens: bool = True) -> list[int]:
        """As `update`, for a step in which some requests verify drafts; their slots are sent again with a later step.
        `sends_tokens`: their input tokens come from the host with the step, and not from their slots."""
        requests, writes = [item.request for item in items], SlotWrites()
        self._drop_step()
        slots = self._refresh(items, requests, writes, sends_tokens=sends_tokens)
        self._idle.update(dict.fromkeys(requests))
        if writes:
            self._state.write(writes)
        self._lens[[slot for item, slot in zip(items, slots, strict=True) if item.num_draft_tokens]] = NOTHING
        return slots

    def _remove_rows(self, rows: Sequence[int]) -> None:
        """Remove these rows, which are in ascending order, from the last step."""
        for row in reversed(rows):
            request, slot = self._requests.pop(row), self._slots.pop(row)
            del self._step_tables[row]
            self._idle[request] = None
            self._lens[slot] += self._num_advanced
            self._slot_array = EMPTY_INT64

    def _add_items(self, items: Sequence[ScheduledRequest], writes: SlotWrites) -> None:
        """Append the requests of a step that were not in the last one."""
        requests = [item.request for item in items]
        self._slots.extend(self._refresh(items, requests, writes))
        self._requests += requests
        self._step_tables += [request.block_table for request in requests]
        self._slot_array = EMPTY_INT64

    def _refresh(
        self,
        items: Sequence[ScheduledRequest],
        requests: Sequence[Request],
        writes: SlotWrites,
        *,
        sends_tokens: bool = False,
    ) -> list[int]:
        """Bring the slots of these requests up to date without relying on the last step. Returns the slots."""
        for request in requests:
            self._idle.pop(request, None)
        slots = self._assign_slots(requests, writes)
        lens = [item.start + item.num_tokens - item.num_draft_tokens for item in items]
        for item, slot, num_tokens, num_held in zip(items, slots, lens, self._lens[slots].tolist(), strict=True):
            request, is_current = item.request, num_held == num_tokens
            is_sent = sends_tokens and item.num_draft_tokens > 0
            if request.block_table is not self._tables[slot] or not (is_current or is_sent):
                self._write_slot(request, slot, num_tokens, writes, is_current=is_current)
        self._write_new_blocks(requests, slots, writes)
        self._lens[slots] = [num_tokens + 1 - self._num_advanced for num_tokens in lens]
        return slots

    def _drop_step(self) -> None:
        """Forget the last step: which of its slots are current must be found out one by one."""
        self._idle.update(dict.fromkeys(self._requests))
        self._lens[self._slots] += self._num_advanced
        self._num_advanced, self._decodes, self._slot_array = 0, None, EMPTY_INT64
        self._requests, self._step_tables, self._slots = [], [], array("q")

    def _write_slot(self, request: Request, slot: int, num_tokens: int, writes: SlotWrites, *, is_current: bool) -> None:
        """Send the slot of a request, of whose tokens the first `num_tokens` are known or in flight. `is_current`: its blocks
        alone are out of date."""
        token_id = request.token_ids[num_tokens - 1]
        assert is_current or token_id >= 0, f"neither host nor device knows the last token of {request.request_id}"
        writes.slots.append(slot)
        writes.last_tokens.append(NOTHING if is_current else token_id)
        writes.num_tokens.append(num_tokens)
        if not is_current:
            self._listener.restart(slot, request, num_tokens)
        self._tables[slot], self._num_blocks[slot] = request.block_table, 0

    def _write_new_blocks(self, requests: Sequence[Request], slots: Sequence[int], writes: SlotWrites) -> None:
        """Send the blocks that were added to tables."""
        counts = self._num_blocks
        for request, slot in zip(requests, slots, strict=True):
            table, num_sent = request.block_table, counts[slot]
            if len(table) != num_sent:
                writes.blocks.append((slot, num_sent, table[num_sent:]))
                counts[slot] = len(table)

    def _assign_slots(self, requests: Sequence[Request], writes: SlotWrites) -> list[int]:
        """The slots of these requests. One without a slot takes a free one, or else that of a request which is not in the
        step."""
        slots = [self._slot_of.get(request, NOTHING) for request in requests]
        new = [i for i, slot in enumerate(slots) if slot == NOTHING]
        if not new:
            return slots
        while len(new) > len(self._free):
            idlest = next(iter(self._idle))
            del self._idle[idlest]
            self._free.append(self._slot_of.pop(idlest))
        for i in new:
            slot = self._free.pop()
            slots[i] = self._slot_of[requests[i]] = slot
            self._lens[slot], self._tables[slot] = NOTHING, None
        writes.words.append(self._listener.assign([slots[i] for i in new], [requests[i] for i in new]))
        return slots
