"""Which decode steps of a stretch ran as whole captured graphs, and how many captures happened meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from unittest import mock

from bench.gpu.rows import Row
from engine.runner.cuda_graphs import CudaGraphs
from engine.runner.decode_step import DecodeShape, DecodeSteps
from engine.sampling.columns import SamplingNeeds


@dataclass(slots=True)
class GraphUse:
    """Counts of decode steps, of those whose graph ended with the logits, before tokens were chosen, and of captures."""

    steps: int = 0
    without_choice: int = 0
    captured: int = 0

    @property
    def problem(self) -> str:
        """Why the time of these steps is not that of whole graphs; empty if it is."""
        found = [f"{self.captured} graphs were captured within the time"] if self.captured else []
        if self.without_choice:
            found.append(f"{self.without_choice} of {self.steps} steps chose their tokens outside of a graph")
        return ", ".join(found)

    def annotate(self, row: Row, *, whole: bool = False) -> Row:
        """Add what the steps lacked to the row's note. `whole`: the row claims whole graphs, and fails without them."""
        row.facts["graphs"] = asdict(self)
        row.note = "; ".join(words for words in (self.problem, row.note) if words)
        if whole:
            row.error = self.problem
        return row


@contextmanager
def count_graph_use() -> Iterator[GraphUse]:
    """Count the decode steps inside the block, and those whose graph was not whole. An engine without graphs lacks none."""
    use = GraphUse()
    select_shape, make_ready = DecodeSteps.select_shape, CudaGraphs.make_ready

    def count_step(steps: DecodeSteps, num_rows: int, needs: SamplingNeeds, *, has_drafts: bool = False) -> DecodeShape:
        shape = select_shape(steps, num_rows, needs, has_drafts=has_drafts)
        use.steps += 1
        use.without_choice += shape.kind is None and not needs.masked
        return shape

    def count_capture(graphs: CudaGraphs, key: Hashable, function: Callable[[], None], *, is_kept: bool = False) -> None:
        use.captured += 1
        make_ready(graphs, key, function, is_kept=is_kept)

    with mock.patch.object(DecodeSteps, "select_shape", count_step), mock.patch.object(CudaGraphs, "make_ready", count_capture):
        yield use
