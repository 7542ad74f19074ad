"""Decode steps by size and kind, each captured before it first runs."""

from __future__ import annotations

from engine.runner.cuda_graphs import Calls
from engine.runner.decode_step import DecodeStep
from engine.runner.step_inputs import StepInputs
from engine.sampling.columns import Kind, SamplingNeeds
from engine.step_sizes import guesses_size, logits_size, sizes, step_size

NO_ROWS: list[int] = []
NO_INPUTS: list[list[int]] = [[]] * 5


class ReadySteps:
    """Runs the step of one model by size and kind."""

    def __init__(
        self, name: str, step: DecodeStep, inputs: StepInputs, calls: Calls, *, max_num_seqs: int, is_synchronous: bool
    ) -> None:
        """`name`: of the model's graphs among those of `calls`. `max_num_seqs`: rows of a step without guesses.
        `is_synchronous`: a step is recorded instead of rounded up to one of the sizes of graphs."""
        self.step = step
        self._name = name
        self._inputs = inputs
        self._calls = calls
        self._max_num_seqs = max_num_seqs
        self._is_synchronous = is_synchronous

    @property
    def guess_sizes(self) -> list[int]:
        """The sizes of steps with guesses."""
        return sizes(guesses_size, self._inputs.max_rows, fewest=2)

    def choose_graph(self, num_rows: int, needs: SamplingNeeds, *, has_guesses: bool = False) -> tuple[int, Kind | None]:
        """The graph of a step: the size that the step is rounded up to, and its kind, or None for the graph that ends with the
        logits, which all kinds of a size have in common. Inputs are written after this call, which may capture the graph."""
        kind: Kind | None = needs.kind
        size = self._size(num_rows, kind, has_guesses=has_guesses)
        if needs.masked or not self._calls.admits(self._key(size, kind, has_guesses=has_guesses)):
            kind = None
        return self.make_ready(num_rows, kind, has_guesses=has_guesses), kind

    def make_ready(self, num_rows: int, kind: Kind | None, *, has_guesses: bool = False) -> int:
        """Capture the step of so many rows unless that is done; the size that it is rounded up to. A step of kind None ends
        with its logits."""
        size = self._size(num_rows, kind, has_guesses=has_guesses)
        key = self._key(size, kind, has_guesses=has_guesses)
        if not self._calls.is_ready(key):  # captured with nothing but padding: the step changes nothing
            if has_guesses:
                self._inputs.write(NO_INPUTS, size)
            else:
                self._inputs.write_rows(NO_ROWS, size)
            self._calls.make_ready(key, lambda: self.step(size, kind, has_guesses=has_guesses))
        return size

    def run(self, size: int, kind: Kind | None, *, has_guesses: bool = False) -> None:
        """Compute a step that is ready and whose inputs are written."""
        key = self._key(size, kind, has_guesses=has_guesses)
        self._calls.run(key, lambda: self.step(size, kind, has_guesses=has_guesses))

    def _key(self, size: int, kind: Kind | None, *, has_guesses: bool) -> tuple[str, int, Kind | None, bool]:
        return self._name, size, kind, has_guesses

    def _size(self, num_rows: int, kind: Kind | None, *, has_guesses: bool) -> int:
        if self._is_synchronous:
            return num_rows
        if has_guesses:
            return guesses_size(num_rows, self._inputs.max_rows)
        return (logits_size if kind is None else step_size)(num_rows, self._max_num_seqs)
