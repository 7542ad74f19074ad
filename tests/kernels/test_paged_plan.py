"""Plans over block tables: made once per step, from tables that are copied without iterating over them."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import torch

from engine.runner.token_spans import TokenSpan, make_forward_inputs
from engine.scheduling.request import table_of
from kernels.attention_rows import AttentionShape
from kernels.ops import PagedPlan, PagedPlanner
from tests.support.scheduling import make_request, make_scheduler, step

CPU = torch.device("cpu")
SIZE = 16


class UniterableTable(array):  # type: ignore[type-arg]  # subscripts of it came with Python 3.12
    """A block table that may not be iterated over in Python."""

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("a step went through a block table in Python")


def plans(rows: list[TokenSpan], *windows: int | None) -> list[PagedPlan]:
    planners = []
    for window in windows:
        planner = PagedPlanner(AttentionShape(SIZE, 4, 2, 8, sliding_window=window), device=CPU)
        planner.workspace = f"of window {window}"
        planners.append(planner)
    inputs = make_forward_inputs(rows, block_size=SIZE, rotaries=[], planners=planners, device=CPU)
    assert all(isinstance(plan, PagedPlan) for plan in inputs.attention)
    return [plan for plan in inputs.attention if isinstance(plan, PagedPlan)]


def test_block_tables_are_copied_without_iteration() -> None:
    long, short = UniterableTable("i", [7, 3, 9]), UniterableTable("i", [4, 8])
    (plan,) = plans([TokenSpan([1], 40, long), TokenSpan([1, 2, 3], 14, short)], None)
    assert plan.block_tables.tolist() == [[7, 3, 9], [4, 8, 0]]
    assert plan.context_lens.tolist() == [41, 17]


def test_layers_with_different_windows_share_one_set_of_tables() -> None:
    whole, sliding = plans([TokenSpan([1], 40, table_of([7, 3, 9])), TokenSpan([1, 2], 0, table_of([5]))], None, 32)
    assert sliding.block_tables.data_ptr() == whole.block_tables.data_ptr()
    assert sliding.shape.sliding_window == 32
    assert (whole.workspace, sliding.workspace) == ("of window None", "of window 32")
    assert sliding.query_starts is whole.query_starts
    assert (sliding.num_decodes, sliding.max_query_len) == (1, 2)


def test_a_requests_block_table_is_always_a_contiguous_array() -> None:
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
