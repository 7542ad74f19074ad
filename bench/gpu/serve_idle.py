"""The row for the GPU's idle share of a steady decode step: `bench.gpu.idle` explains what is measured and why."""

from __future__ import annotations

from contextlib import ExitStack

from bench.gpu import traffic
from bench.gpu.context import Context
from bench.gpu.graph_use import count_graph_use
from bench.gpu.idle import StepSpan, TracedSteps, growth_s, measure_idle, timed_replays
from bench.gpu.layer import launched_serially
from bench.gpu.rows import Row
from engine.loop import Engine


def progress(engine: Engine) -> float:
    """Tokens per running request. As all requests decode, the difference of two readings is the number of steps in between."""
    status = engine.status()
    return status.generation_tokens_total / max(1, status.num_running)


def steps(engine: Engine, num_steps: int) -> StepSpan:
    at = progress(engine)
    return StepSpan(at, traffic.steps(engine, lambda window: len(window.step_s) >= num_steps).step_s)


def idle_row(context: Context, name: str, engine: Engine, num_steps: int, earlier: StepSpan) -> None:
    """`earlier`: served steps measured before. The profiler runs last, because it may slow down whatever comes after it."""
    row, num_traced = Row(name=name), context.size(16, 3)
    with count_graph_use() as use, timed_replays(context.device) as replays:
        served = steps(engine, num_steps)
    row.value = row.facts["waits_percent"] = 100 * replays.waits
    use.annotate(row, whole=True)
    row.error = row.error or "the profiler gave no figure: waits for the host alone"
    context.emit(row)  # the profiler may crash the process
    growth = growth_s(earlier, served)
    try:
        with ExitStack() as stack:
            stack.enter_context(launched_serially())
            for graphs in replays.graphs:
                stack.enter_context(graphs.fresh_graphs())
            steps(engine, 3)  # captures graphs
            in_turn = steps(engine, num_traced)
            at = progress(engine) + num_traced / 2
            with count_graph_use() as traced_use:
                idle = measure_idle(lambda: steps(engine, num_traced), context.device)
    except Exception as error:  # noqa: BLE001 - the waits are kept, and the next row shows whether the device is broken
        row.error = f"{row.error} ({type(error).__name__}: {str(error)[:300]})"
        context.emit(row)
        return
    traced = TracedSteps(idle, num_traced, served.step_at(at, growth), in_turn.step_at(at, growth), replays.waits)
    row.value = 100 * traced.idle
    row.facts |= {"busy_percent": 100 * traced.busy, "gaps_percent": 100 * idle.share, "overlap_percent": 100 * idle.overlap}
    row.facts |= {"busy_us": traced.busy_us, "served_us": 1e6 * traced.served_s, "in_turn_us": 1e6 * traced.in_turn_s}
    row.facts |= {"kernels": idle.top, "span_us": idle.span_us, "num_kernels": idle.num_kernels}
    row.facts |= {"long_gaps_percent": 100 * idle.long, "longest_gap_us": idle.longest_us, "growth_us": 1e6 * growth}
    row.note = f"kernels take {traced.busy_us:.0f} µs of a served step of {1e6 * traced.served_s:.0f}; waits for the host "
    row.note += f"between graphs: {100 * replays.waits:.2f} %; not judged: gaps between kernels launched in turn, widened by "
    row.note += f"the profiler: {100 * idle.share:.2f} %, those above 5 µs {100 * idle.long:.2f} %"
    for each in (traced_use, use):
        each.annotate(row, whole=True)
    wrong = [use.problem, traced_use.problem, "" if context.rehearsal else traced.problem]
    row.error = "; ".join(words for words in wrong if words)
    context.emit(row)
