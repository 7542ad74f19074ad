"""A run of the GPU benchmark: rows, limits, results, logs and summary."""

from __future__ import annotations

import gc
import io
import json
import signal
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.nn.attention import sdpa_kernel

from bench.gpu import __main__ as command
from bench.gpu import calibration, driver, part, peers, serve, serve_idle, speed_attention
from bench.gpu.context import Context
from bench.gpu.idle import Replays, timed_replays
from bench.gpu.models import random_engine
from bench.gpu.processes import Outcome, Recorder
from bench.gpu.report import WENT_WRONG, complete_rows, document, table
from bench.gpu.result_files import ResultFiles
from bench.gpu.rows import GOALS_CARD, PEER_MISSING, Row
from bench.gpu.summary import CHARS_MAX, summary
from bench.gpu.targets import CHUNK_SIZES, TARGETS, chunk_row
from engine.protocol import KernelChoice
from engine.runner.cuda_graphs import DirectCalls
from tests.support.triton_versions import REPO

CPU = torch.device("cpu")


def context_of(told: list[dict[str, Any]], **facts: Any) -> Context:
    return Context(CPU, True, facts, told.append, 600.0, clock=lambda: 0.0)


def test_the_calibration_is_printed_as_soon_as_it_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, Any]] = []

    def too_large(context: Context, size: int, *_: object) -> None:
        raise torch.OutOfMemoryError(f"no room for {size} GB")

    copy = calibration._copy
    monkeypatch.setattr(calibration, "_copy", lambda *given: (copy if given[1] == 1 else too_large)(*given))
    calibration.calibrate(context_of(told))
    names = [name for line in told for name in ([line["row"]["name"]] if "row" in line else line["facts"])]
    assert names.index("bandwidth") < names.index("flops") < names.index("copy 4 GB")
    assert [line["row"]["name"] for line in told if "row" in line and line["row"]["error"]] == ["copy 4 GB", "copy 8 GB"]
    assert driver.WAIT_S == 3.0


@pytest.mark.parametrize(("left_s", "measured"), [(30.0, True), (serve.JUDGED_LAST_S - 1.0, False)])
def test_rows_without_a_goal_are_skipped_if_later_judged_rows_would_lack_time(
    left_s: float, measured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[dict[str, Any]] = []
    context = replace(context_of(told), deadline_s=left_s)
    for name in ("_turnover", "measure_chunk"):
        monkeypatch.setattr(serve, name, lambda *_: context.emit(Row(name="measured")))
    serve._measure_unjudged(context, Mock())
    rows = [(line["row"]["name"], line["row"]["error"][:8]) for line in told]
    names = [serve.TURNOVER, *map(chunk_row, CHUNK_SIZES)]
    assert rows == ([("measured", "")] * 3 if measured else [(name, "left out") for name in names])
    assert all(target.pass_at is None for target in TARGETS if target.name in names)


def test_a_failure_after_a_measurement_keeps_its_row_and_is_reported() -> None:
    told: list[dict[str, Any]] = []
    context = context_of(told)

    def measure(name: str, error: str = "") -> None:
        context.emit(Row(name=name, value=1.0, error=error))
        raise RuntimeError("boom")

    one, two, three = [target.name for target in TARGETS if target.part == "kernels"][:3]
    context.guard([one, two], lambda: measure(one))
    context.guard(two, lambda: measure(two, "no graph"))
    context.guard(three, lambda: measure(three))
    rows = {row.name: row.error for row in complete_rows(Outcome([Row(**line["row"]) for line in told]), set())}
    assert rows == {one: "", two: "RuntimeError: boom", three: "", f"after {three}": "RuntimeError: boom"}


@pytest.mark.parametrize("facts", [{"bandwidth": 4e12}, {"bandwidth": 4e12, "flops": 8e14}])
def test_without_a_calibration_figure_rows_have_no_limit(facts: dict[str, float]) -> None:
    told: list[dict[str, Any]] = []
    serve.llama_8b(context_of(told, **facts))
    rows = {line["row"]["name"]: line["row"] for line in told if "row" in line}
    has_limits = "flops" in facts
    assert bool(rows["planner: batch 1"]["error"]) is not has_limits
    measured = ("Llama-3.1-8B bf16, batch 1", "Llama-3.1-8B bf16, batch 64, 1k context",
                "Llama-3.1-8B, 256 requests of 100–1024 in and out")  # fmt: skip
    for name in measured:
        assert rows[name]["error"] == ""
        assert rows[name]["value"] > 0
        assert (rows[name]["limit"] is not None) is has_limits
        assert ("no limit: the calibration gave no flops" in rows[name]["note"]) is not has_limits
    printed = table(document([], Outcome(facts=facts), rehearsal=False, taken_s=1.0))
    assert f"calibrated: 4000 GB/s{', 800 TFLOP/s bf16' if has_limits else ''}" in printed.splitlines()


def test_the_row_of_one_request_names_refused_kernels_first_and_then_those_that_serve() -> None:
    choices = [
        KernelChoice(name="products", serves="tiles", us={"tiles": 2.0}, refused={"GEMV": "wrong results"}),
        KernelChoice(name="attention", serves="one launch", us={"one launch": 2.0, "splits": 3.0}),
    ]
    assert serve._served_by(choices) == (
        "GEMV refused for products: wrong results; served by tiles (products), one launch (attention)"
    )
    assert serve._served_by([]) == ""


def test_waits_for_the_host_are_the_time_without_a_replay() -> None:
    assert Replays([(0.0, 3.0), (3.0, 6.0), (8.0, 10.0)]).waits == pytest.approx(0.2)
    assert Replays([(0.0, 100.0), (0.0, 100.0)]).waits == 0.0
    with pytest.raises(RuntimeError, match="no step was replayed"):
        _ = Replays().waits


def test_steps_are_timed_only_within_the_timing_block() -> None:
    called: list[int] = []
    with timed_replays(CPU) as replays:
        for number in range(3):
            DirectCalls().run("key", lambda number=number: called.append(number))  # type: ignore[misc]
    DirectCalls().run("key", lambda: None)
    assert called == [0, 1, 2]
    assert len(replays.spans_ms) == 3
    assert 0.0 <= replays.waits <= 1.0


def test_waits_and_idle_time_are_judged_only_with_a_profiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def breaks(*_: object) -> None:
        raise RuntimeError("no trace")

    rows = {}
    for profiler in ("works", "breaks"):
        told: list[dict[str, Any]] = []
        if profiler == "breaks":
            monkeypatch.setattr(serve_idle, "measure_idle", breaks)
        serve.llama_8b(context_of(told, bandwidth=4e12, flops=8e14))
        rows[profiler] = [line["row"] for line in told if line.get("row", {}).get("name") == IDLE]
    first, last = rows["works"]
    assert "the profiler gave no figure" in first["error"]
    assert last["error"] == ""
    facts = last["facts"]
    assert last["value"] == pytest.approx(max(0.0, facts["waits_percent"], 100 - facts["busy_percent"]))
    assert facts["busy_percent"] == pytest.approx(100 * facts["busy_us"] / facts["served_us"])
    assert facts.keys() >= {"gaps_percent", "overlap_percent", "in_turn_us", "growth_us"}
    assert "RuntimeError: no trace" in rows["breaks"][-1]["error"]


IDLE = "GPU idle in steady decode, batch 256"


def judged(**of_row: Any) -> dict[str, Any]:
    rows = [Row(name=target.name, **of_row) for target in TARGETS]
    return document(rows, Outcome(facts={"card": {"name": GOALS_CARD}}), rehearsal=False, taken_s=470.0)


@pytest.mark.parametrize("of_row", [{"value": 12345.6, "fraction": 0.87, "ratio": 9.5}, {"error": "RuntimeError: boom"}])
def test_the_summary_lists_every_judged_row_within_its_size(of_row: dict[str, Any]) -> None:
    words = summary(judged(**of_row))
    assert len(words) < CHARS_MAX
    assert "more, in the table" not in words
    for target in TARGETS:
        if target.pass_at is not None and target.part not in ("checks", "invariant"):
            assert f" {target.name}:  " in words
        elif target.pass_at is None:
            assert f" {target.name}:  " not in words
    assert "pass       decode 32/8 heads of 128, 256 × 1k, 8 GB of KV:  0.87  (≥ 0.85 / 0.92 of limit)" in words or of_row.get(
        "error"
    )
    assert words.splitlines()[-1].endswith("; 470.0 s")


def test_a_truncated_summary_says_how_much_is_omitted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.gpu.summary.CHARS_MAX", 500)
    words = summary(judged(value=1.0))
    assert len(words) < 500
    assert "lines more, in the table" in words


def test_passing_checks_are_counted_and_failing_ones_named() -> None:
    report = judged(value=0.0)
    (wrong,) = (row for row in report["rows"] if row["name"] == "numbers: rms norm")
    wrong["verdict"] = "below"
    words = summary(report)
    assert "checks: 1 below, " in words
    assert "below      numbers: rms norm:  0  (≤ 2)" in words
    assert "numbers: embedding" not in words


def test_logs_go_into_one_archive_and_results_are_written_after_each_stage(tmp_path: Path) -> None:
    with ResultFiles(tmp_path / "out" / "result.json", tmp_path / "logs.tgz") as files:
        assert files.logs is not None
        (files.logs / "calibrate.txt").write_text("words", "utf-8")
        files.write({"rows": []})
        (files.logs / "check-rows.txt").write_text("more words", "utf-8")
        files.write({"rows": [1]})
    assert json.loads((tmp_path / "out" / "result.json").read_text("utf-8")) == {"rows": [1]}
    with tarfile.open(tmp_path / "logs.tgz") as archive:
        assert archive.getnames() == ["calibrate.txt", "check-rows.txt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["logs.tgz", "out"]
    with ResultFiles(None, tmp_path / "folder") as files:
        assert files.logs == tmp_path / "folder"
        files.write({})


def test_a_result_is_written_before_it_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "run_stages", with_a_row)
    monkeypatch.setattr(command, "table", Mock(side_effect=KeyError("l2_bytes")))
    monkeypatch.setattr(signal, "signal", Mock())
    monkeypatch.setattr(sys, "argv", ["bench.gpu", "--rehearse", "--out", str(tmp_path / "result.json")])
    with pytest.raises(KeyError):
        command.main()
    assert any(row["value"] == 1.0 for row in json.loads((tmp_path / "result.json").read_text("utf-8"))["rows"])


def test_rows_that_failed_for_the_same_reason_share_a_line() -> None:
    rows = [Row(name=f"copy {size} GB", error="no room" if size > 1 else "its own") for size in (1, 4, 8)]
    report = document([Row(name="read 1 GB", value=1.0), *rows], Outcome(), rehearsal=False, taken_s=1.0)
    printed = table(report).partition(f"{WENT_WRONG}\n")[2].splitlines()
    assert printed[:2] == ["  copy 1 GB: its own", "  copy 4 GB and 1 more: no room"]


def with_a_row(*_: object, recorder: Recorder, **__: object) -> None:
    recorder.outcome.rows.append(Row(name="copy 1 GB", value=1.0))


def test_an_interrupted_run_prints_and_writes_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*given: object, recorder: Recorder, **others: object) -> None:
        with_a_row(recorder=recorder)
        raise SystemExit(143)

    monkeypatch.setattr(command, "run_stages", interrupted)
    monkeypatch.setattr(signal, "signal", Mock())
    monkeypatch.setattr(sys, "argv", ["bench.gpu", "--rehearse", "--out", str(tmp_path / "result.json")])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 143
    printed = capsys.readouterr().out
    assert "  copy 4 GB and " in printed
    assert ": its part was not begun" in printed
    assert "\njudged\n" in printed
    assert any(row["value"] == 1.0 for row in json.loads((tmp_path / "result.json").read_text("utf-8"))["rows"])


def test_a_hanging_git_loses_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", Mock(side_effect=subprocess.TimeoutExpired("git", 10)))
    monkeypatch.delenv("GATEHOUSE_REVISION", raising=False)
    report = document([], Outcome(), rehearsal=False, taken_s=1.0)
    assert (report["revision"], report["changed"]) == ("unknown", None)


def test_parts_that_have_not_started_are_not_in_intermediate_results(tmp_path: Path) -> None:
    outcome = Outcome(parts=[{"part": "calibrate", "targets": ["calibrate"]}], rows=[Row(name="copy 1 GB", value=1.0)])
    names = {row.name for row in complete_rows(outcome, {"calibrate"})}
    assert names == {target.name for target in TARGETS if target.part == "calibrate"}


def test_peer_libraries_are_imported_before_a_part_is_ready_if_installed(caplog: pytest.LogCaptureFixture) -> None:
    assert "transformers" in peers.LIBRARIES
    assert "torch._dynamo" in speed_attention.LIBRARIES
    part._import_libraries(["json", "no_such_library"])
    assert "not imported library=no_such_library" in caplog.text
    assert PEER_MISSING


def test_no_part_uses_cudnn_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """From capability 9.0 on torch 2.11 asks its attention first: the peer's too, whose keys are longer with every token."""
    lines_out = io.StringIO()
    monkeypatch.setattr(part, "_reserve_stdout", lambda: lines_out)
    monkeypatch.setattr(part, "_prepare_interpreter", lambda: None)
    monkeypatch.setattr("sys.argv", ["part", "calibrate", "--rehearse"])
    monkeypatch.setattr("sys.stdin", io.StringIO(""))  # told nothing, it ends
    try:
        part.main()
        assert "ready" in lines_out.getvalue()
        assert not torch._C._get_cudnn_sdp_enabled()
        with sdpa_kernel(speed_attention.BACKENDS["cudnn"]):
            assert torch._C._get_cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


def test_the_script_lets_python_write_byte_code() -> None:
    """Twenty processes would compile all of it again."""
    assert "PYTHONDONTWRITEBYTECODE" not in (REPO / "bench" / "gpu.sh").read_text("utf-8")


def test_a_measured_engine_is_exempt_from_garbage_collection_until_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken_back = Mock()
    monkeypatch.setattr(gc, "unfreeze", taken_back)  # what the suite has frozen stays so
    before = gc.get_freeze_count()
    with random_engine(context_of([]), tmp_path, "qwen3-0.6b", layers=1, max_num_seqs=2):
        assert gc.get_freeze_count() > before
        taken_back.assert_not_called()
    taken_back.assert_called_once_with()
