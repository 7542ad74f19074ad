"""Decode steps by shape, each captured before it first runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from engine.runner.cuda_graphs import Calls
from engine.runner.decode_step import DecodeStep
from engine.runner.step_inputs import StepInputs
from engine.sampling.columns import Kind, SamplingNeeds
from engine.step_sizes import guesses_size, logits_size, sizes, step_size

NO_ROWS: list[int] = []
NO_INPUTS: list[list[int]] = [[]] * 5


class DecodeShape(NamedTuple):
    """What a graph is made for, and its key: `size` rows of the model called `name`, padding included. Without a `kind` it ends
    with the logits; all kinds of a size have that one in common."""

    name: str
    size: int
    kind: Kind | None
    has_guesses: bool


class ReadySteps:
    """Runs the step of one model by shape."""

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

    def shape(self, num_rows: int, kind: Kind | None, *, has_guesses: bool = False) -> DecodeShape:
        """The shape of a step of so many rows, rounded up to a size that there are graphs of."""
        if self._is_synchronous:
            size = num_rows
        elif has_guesses:
            size = guesses_size(num_rows, self._inputs.max_rows)
        else:
            size = (logits_size if kind is None else step_size)(num_rows, self._max_num_seqs)
        return DecodeShape(self._name, size, kind, has_guesses)

    def choose_shape(self, num_rows: int, needs: SamplingNeeds, *, has_guesses: bool = False) -> DecodeShape:
        """The shape to compute a step in, made ready: of the step's own kind, or of none where rows wait for masks or its kind
        is too rare for a graph. Write the inputs after this call, which may capture the graph."""
        shape = self.shape(num_rows, needs.kind, has_guesses=has_guesses)
        if needs.masked or not self._calls.admits(shape):
            shape = self.shape(num_rows, None, has_guesses=has_guesses)
        self.make_ready(shape)
        return shape

    def make_ready(self, shape: DecodeShape) -> None:
        """Capture the steps of this shape, unless that is done."""
        if not self._calls.is_ready(shape):  # captured with nothing but padding: the step changes nothing
            if shape.has_guesses:
                self._inputs.write(NO_INPUTS, shape.size)
            else:
                self._inputs.write_rows(NO_ROWS, shape.size)
            self._calls.make_ready(shape, self._computing(shape))

    def run(self, shape: DecodeShape) -> None:
        """Compute a step of a shape that is ready, whose inputs are written."""
        self._calls.run(shape, self._computing(shape))

    def _computing(self, shape: DecodeShape) -> Callable[[], None]:
        return partial(self.step, shape.size, shape.kind, has_guesses=shape.has_guesses)
