"""Plans over block tables: made once per step, from tables that are copied as they are."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import torch

from engine.runner.input_rows import InputRow, make_batch_inputs
from engine.scheduling.request import table_of
from kernels.attention_rows import AttentionShape
from kernels.ops import PagedPlan, PagedPlanner
from tests.support.scheduling import make_request, make_scheduler, step

CPU = torch.device("cpu")
SIZE = 16


class UncountedTable(array):  # type: ignore[type-arg]  # subscripts of it came with Python 3.12
    """Nobody looks at its blocks one after the other."""

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("a step went through a block table in Python")


def plans(rows: list[InputRow], *windows: int | None) -> list[PagedPlan]:
    planners = []
    for window in windows:
        planner = PagedPlanner(AttentionShape(SIZE, 4, 2, 8, sliding_window=window), device=CPU)
        planner.workspace = f"of window {window}"
        planners.append(planner)
    inputs = make_batch_inputs(rows, block_size=SIZE, rotaries=[], planners=planners, device=CPU)
    assert all(isinstance(plan, PagedPlan) for plan in inputs.attention)
    return [plan for plan in inputs.attention if isinstance(plan, PagedPlan)]


def test_a_steps_tables_are_copied_as_they_lie() -> None:
    long, short = UncountedTable("i", [7, 3, 9]), UncountedTable("i", [4, 8])
    (plan,) = plans([InputRow([1], 40, long), InputRow([1, 2, 3], 14, short)], None)
    assert plan.block_tables.tolist() == [[7, 3, 9], [4, 8, 0]]
    assert plan.context_lens.tolist() == [41, 17]


def test_kinds_of_windows_have_one_set_of_tables_between_them() -> None:
    whole, sliding = plans([InputRow([1], 40, table_of([7, 3, 9])), InputRow([1, 2], 0, table_of([5]))], None, 32)
    assert sliding.block_tables.data_ptr() == whole.block_tables.data_ptr()
    assert sliding.shape.sliding_window == 32
    assert (whole.workspace, sliding.workspace) == ("of window None", "of window 32")
    assert sliding.query_starts is whole.query_starts
    assert (sliding.num_decodes, sliding.max_query_len) == (1, 2)


def test_a_requests_blocks_are_numbers_side_by_side_whatever_happens_to_it() -> None:
    scheduler = make_scheduler(num_blocks=8)
    request = make_request("grows", 9, max_tokens=8)
    scheduler.add(request)
    step(scheduler)
    tables = [request.block_table]
    while not request.is_finished:
        step(scheduler)
    tables.append(request.block_table)
    assert len(tables[0]) > 0
    assert not tables[1]
    assert all(memoryview(table).format == "i" and table.itemsize == 4 for table in tables)
