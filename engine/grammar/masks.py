"""Grammar states of live answers, and the masks of a step, filled in a thread of their own while the device computes.

A state advances only after its token was sampled and accepted. So a step may be repeated: its mask is the same again.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch

from engine.grammar.compile_queue import NO_THREAD, overloaded
from engine.grammar.matcher import CompiledGrammar, GrammarState
from engine.grammar.spec import GrammarError, GrammarSpec
from engine.grammar.stacks import STACK_BYTES, thread_stack_size
from engine.scheduling.request import Request

WORD_BITS = 32


def allow_all(num_rows: int, vocab_size: int, device: torch.device) -> torch.Tensor:
    """Masks that allow every token: [num_rows, ceil(V / 32)] int32"""
    return torch.full((num_rows, -(-vocab_size // WORD_BITS)), -1, dtype=torch.int32, device=device)


@dataclass(frozen=True, slots=True)
class StepMasks:
    """Masks of the sampled rows of a step: [R, ceil(V / 32)] int32, all ones for requests without a grammar. `errors`: by row,
    why there is no mask."""

    rows: torch.Tensor
    errors: dict[int, GrammarError]


class GrammarMasks:
    """Tracks the grammar state of every constrained answer. One thread fills masks; one other thread makes all other calls."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._states: WeakKeyDictionary[Request, GrammarState] = WeakKeyDictionary()
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar-masks")
        self._has_thread = False

    def start(self, request: Request, grammar: CompiledGrammar) -> None:
        """Constrain a new answer to `grammar`. Raises `EngineOverloaded` if no thread can be started to fill its masks."""
        if not self._has_thread:
            self._start_thread(grammar.spec)
        self._states[request] = grammar.start()

    def fill(self, requests: Sequence[Request]) -> Future[StepMasks] | None:
        """Begin to fill the masks of these rows; None when none of them has a grammar."""
        if not self._states:
            return None
        states = {index: self._states[request] for index, request in enumerate(requests) if request in self._states}
        if not states:
            return None
        return self._worker.submit(self._fill, len(requests), states)

    def _start_thread(self, spec: GrammarSpec) -> None:
        """Start the thread before a step needs it: a failure to start it then would fail every request of that step."""
        try:
            with thread_stack_size(STACK_BYTES):
                self._worker.submit(int)
        except RuntimeError as error:
            raise overloaded(spec, NO_THREAD) from error
        self._has_thread = True

    def nothing_forbidden(self, num_rows: int) -> StepMasks:
        """Masks that allow everything."""
        return StepMasks(allow_all(num_rows, self._vocab_size, torch.device("cpu")), {})

    @property
    def are_empty(self) -> bool:
        """Whether no answer is constrained to a grammar."""
        return not self._states

    def _fill(self, num_rows: int, states: dict[int, GrammarState]) -> StepMasks:
        masks = self.nothing_forbidden(num_rows)
        buffers = masks.rows.numpy()
        for index, state in states.items():
            try:
                state.fill_mask(buffers[index])
            except GrammarError as error:
                masks.errors[index] = error
        return masks

    def accept(self, request: Request, token_ids: Sequence[int]) -> GrammarError | None:
        """Advance by accepted tokens. Returns the error that ends the answer if its grammar cannot be followed further."""
        state = self._states.get(request)
        if state is None:
            return None
        try:
            for token_id in token_ids:
                state.accept(token_id)
        except GrammarError as error:
            return error
        return None

    def close(self) -> None:
        """End the thread."""
        self._worker.shutdown()
