"""A run of the GPU bench continues when something hangs, and leaves results, logs and a summary."""

from __future__ import annotations

import gc
import io
import json
import os
import queue
import select
import subprocess
import sys
import tarfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.nn.attention import sdpa_kernel

from bench.gpu import calibration, driver, part, peers, processes, serve, serve_idle, speed_attention
from bench.gpu.context import Context
from bench.gpu.idle import Replays, timed_replays
from bench.gpu.models import random_engine
from bench.gpu.plan import BY_NAME, Job
from bench.gpu.processes import Outcome
from bench.gpu.report import complete_rows, document, table
from bench.gpu.result_files import ResultFiles
from bench.gpu.rows import GOALS_CARD, PEER_MISSING, Row, invalid_reason
from bench.gpu.summary import CHARS_MAX, summary
from bench.gpu.targets import TARGETS
from engine.runner.cuda_graphs import DirectCalls
from tests.support.triton_versions import REPO

CPU = torch.device("cpu")


def context_of(told: list[dict[str, Any]], **facts: Any) -> Context:
    return Context(CPU, True, facts, told.append, 600.0, clock=lambda: 0.0)


@dataclass(eq=False)
class Stuck:
    """A process that is late, and whose output somebody holds open when it was killed."""

    job: Job
    allowed_s: float = 1.0
    limit_s: float = 1.0
    left_s: float = -1.0
    elapsed_s: float = 2.0
    ended: bool = False
    abandon_reason: str = ""
    ends: int = 0

    def begin(self, facts: dict[str, Any], limit_s: float) -> None: ...

    def time_out(self) -> None:
        self.ended, self.ends = True, self.ends + 1

    def close(self) -> tuple[int | None, str]:
        self.abandon_reason = "it does not end"
        return None, "its log"


def test_a_process_that_cannot_be_ended_is_noted_and_the_run_goes_on() -> None:
    stuck, outcome, shown = Stuck(Job((BY_NAME["latency"],))), Outcome(), list[str]()
    lines: Any = queue.Queue()
    processes._run([stuck], lines, 1.0, outcome, shown.append, None)  # type: ignore[list-item]
    assert stuck.ends == 1
    assert outcome.parts[0]["error"] == "ended after its limit of 1 s; it does not end"
    assert outcome.parts[0]["log"] == "its log"
    assert shown


class Script(list[Any]):
    """Stands for the queue of lines: gives what is next, or raises it."""

    def get(self, timeout: float) -> Any:
        entry = self.pop(0)
        if isinstance(entry, BaseException):
            raise entry
        return entry


def test_what_a_process_says_after_it_was_given_up_is_left_out_while_others_run() -> None:
    stuck, other = Stuck(Job((BY_NAME["latency"],))), Stuck(Job((BY_NAME["formats"],)), left_s=5.0)
    row = json.dumps({"row": Row(name="late").as_dict()}) + "\n"
    lines: Any = Script([queue.Empty(), queue.Empty(), (stuck, row), (stuck, None), (other, None)])
    outcome = Outcome()
    processes._run([stuck, other], lines, 1.0, outcome, lambda _: None, None)  # type: ignore[list-item]
    assert [entry["part"] for entry in outcome.parts] == ["latency", "formats"]
    assert not outcome.rows


def test_a_part_that_takes_too_long_is_ended_its_rows_say_so_and_nobody_waits_for_it_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held: list[subprocess.Popen[str]] = []
    wait = subprocess.Popen.wait

    def hangs(process: subprocess.Popen[str], timeout: float | None = None) -> int:
        assert timeout == processes.KILL_WAIT_S
        held.append(process)
        raise subprocess.TimeoutExpired("part", timeout)

    late = Job((replace(BY_NAME["check rows"], limit_s=0.00125),))
    kept: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(subprocess.Popen, "wait", hangs)
        outcome = processes.run_stages(
            [[late]], rehearse=True, total_s=60, facts={}, show=lambda _: None, keep=lambda found: kept.append(len(found.parts))
        )
    for process in held:
        wait(process)
    assert "ended after its limit of 0.01 s; its process does not end" in outcome.parts[0]["error"]
    assert "begins part=check rows" in outcome.parts[0]["log"], "what it imports is not of its time"
    assert kept == [1], "behind each stage"
    rows = {row.name: row for row in complete_rows(outcome, {"checks"})}
    assert "check rows: ended after its limit" in rows["numbers: rms norm"].error
    assert "failed" in table(document(list(rows.values()), outcome, rehearsal=False, taken_s=1.0))
    assert not invalid_reason(rows["numbers: rms norm"])


def test_the_first_part_may_import_in_peace_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: Any = queue.Queue()
    one, other = (Stuck(Job((BY_NAME["calibrate"],))) for _ in range(2))
    lines_out = [(one, '{"ready": []}\n'), (other, None)]
    for line in lines_out:
        lines.put(line)
    processes._wait_for_imports([one, other], lines)  # type: ignore[list-item]
    assert [lines.get_nowait() for _ in lines_out] == lines_out, "what was said is still there for whoever reads it"
    monkeypatch.setattr(processes, "IMPORT_S", 0.01)
    processes._wait_for_imports([one], lines)  # type: ignore[list-item]


def test_a_run_that_is_broken_off_keeps_the_rows_of_the_stage_under_way_before_it_waits_for_anybody() -> None:
    notes: list[str] = []

    @dataclass(eq=False)
    class Measuring(Stuck):
        left_s: float = 5.0

        def kill(self) -> None:
            notes.append("killed")

    process = Measuring(Job((BY_NAME["latency"],)))
    row = json.dumps({"row": Row(name="decode 1 × 32k", value=1.0).as_dict()}) + "\n"
    lines: Any = Script([(process, row), SystemExit(143)])
    with pytest.raises(SystemExit):
        processes._run(
            [process], lines, 1.0, Outcome(), lambda _: None, None,  # type: ignore[list-item]
            keep=lambda outcome: notes.append(f"kept {len(outcome.rows)}"),
        )  # fmt: skip
    assert notes == ["kept 1", "killed"]


@pytest.mark.skipif(sys.platform != "linux", reason="nobody else tells a process that its parent has ended")
def test_a_part_ends_with_the_run_that_started_it_though_that_was_killed() -> None:
    waits = "import os, signal; from bench.parent import end_with_parent; end_with_parent(); print(os.getpid(), flush=True); "
    waits += "signal.pause()"
    starts = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {waits!r}], start_new_session=True).wait()"
    with subprocess.Popen([sys.executable, "-c", starts], cwd=REPO, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        part_ends = os.pidfd_open(int(run.stdout.readline()))
        assert select.select([part_ends], [], [], 0.0)[0] == []
        run.kill()
        assert select.select([part_ends], [], [], 30.0)[0] == [part_ends]
    os.close(part_ends)


@dataclass(eq=False)
class Noted(Stuck):
    """A process that ends as soon as it is told to begin, and notes what is done with it."""

    left_s: float = 5.0
    notes: list[str] = field(default_factory=list)
    lines: Any = None

    def start_reader(self, lines: Any) -> None:
        self.lines = lines

    def begin(self, facts: dict[str, Any], limit_s: float) -> None:
        self.notes.append(f"{self.job.name} begins")
        self.lines.put((self, None))

    def close(self) -> tuple[int | None, str]:
        return 0, ""


def test_all_processes_of_a_stage_import_while_the_one_before_measures_and_never_while_the_first_imports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    notes: list[str] = []

    def started(job: Job, **_: object) -> Noted:
        notes.append(f"{job.name} starts")
        return Noted(job, notes=notes)

    monkeypatch.setattr(processes, "Process", started)
    monkeypatch.setattr(processes, "_wait_for_imports", lambda *_: notes.append("ready"))
    stages = [[Job((BY_NAME[name],)) for name in names] for names in (["calibrate"], ["check rows", "warm llama"], ["latency"])]
    processes.run_stages(stages, rehearse=False, total_s=60.0, facts={processes.BASE_FACT: 4e12}, show=lambda _: None)
    assert notes == [
        "calibrate starts", "ready", "check rows starts", "warm llama starts", "calibrate begins",
        "latency starts", "check rows begins", "warm llama begins", "latency begins",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("names", "expected"), [(["warm llama"], [part.WARM_UP_NICENESS]), (["check rows"], []), (["check rows", "warm llama"], [])]
)
def test_what_only_warms_up_leaves_the_cores_to_the_checks_beside_it(
    names: list[str], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr("os.nice", asked.append)
    part._lower_priority(names)
    assert asked == expected


def test_the_calibration_tells_what_all_divide_by_as_soon_as_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize("facts", [{"bandwidth": 4e12}, {"bandwidth": 4e12, "flops": 8e14}])
def test_rows_are_emitted_without_a_limit_where_the_calibration_lacks_a_figure(facts: dict[str, float]) -> None:
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
    assert f"calibrated: 4000 GB/s{', 800 TFLOP/s bf16' if has_limits else ''}\n" in printed


def test_waits_for_the_host_are_what_no_replay_covers() -> None:
    assert Replays([(0.0, 3.0), (3.0, 6.0), (8.0, 10.0)]).waits == pytest.approx(0.2)
    assert Replays([(0.0, 100.0), (0.0, 100.0)]).waits == 0.0
    with pytest.raises(RuntimeError, match="no step was replayed"):
        _ = Replays().waits


def test_every_step_is_timed_while_they_are_and_none_afterwards() -> None:
    called: list[int] = []
    with timed_replays(CPU) as replays:
        for number in range(3):
            DirectCalls().run("key", lambda number=number: called.append(number))  # type: ignore[misc]
    DirectCalls().run("key", lambda: None)
    assert called == [0, 1, 2]
    assert len(replays.spans_ms) == 3
    assert 0.0 <= replays.waits <= 1.0


def test_waits_and_what_kernels_leave_of_a_served_step_are_judged_and_without_a_profiler_nothing_is(
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
def test_the_summary_has_every_judged_row_and_is_short(of_row: dict[str, Any]) -> None:
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


def test_a_summary_that_would_be_too_long_says_how_much_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.gpu.summary.CHARS_MAX", 500)
    words = summary(judged(value=1.0))
    assert len(words) < 500
    assert "lines more, in the table" in words


def test_checks_that_pass_are_counted_and_others_named() -> None:
    report = judged(value=0.0)
    (wrong,) = (row for row in report["rows"] if row["name"] == "numbers: rms norm")
    wrong["verdict"] = "below"
    words = summary(report)
    assert "checks: 1 below, " in words
    assert "below      numbers: rms norm:  0  (≤ 2)" in words
    assert "numbers: embedding" not in words


def test_logs_are_one_archive_where_the_name_says_so_and_results_are_there_behind_each_stage(tmp_path: Path) -> None:
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


def test_what_parts_that_were_not_begun_would_give_is_not_in_what_is_kept_before(tmp_path: Path) -> None:
    outcome = Outcome(parts=[{"part": "calibrate", "targets": ["calibrate"]}], rows=[Row(name="copy 1 GB", value=1.0)])
    names = {row.name for row in complete_rows(outcome, {"calibrate"})}
    assert names == {target.name for target in TARGETS if target.part == "calibrate"}


def test_libraries_of_peers_are_imported_before_a_part_is_ready_and_may_be_absent(caplog: pytest.LogCaptureFixture) -> None:
    assert "transformers" in peers.LIBRARIES
    assert "torch._dynamo" in speed_attention.LIBRARIES
    part._import_libraries(["json", "no_such_library"])
    assert "not imported library=no_such_library" in caplog.text
    assert PEER_MISSING


def test_no_part_waits_for_plans_of_cudnn_for_each_length_of_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_script_lets_python_keep_what_it_compiles() -> None:
    """Twenty processes would compile all of it again."""
    assert "PYTHONDONTWRITEBYTECODE" not in (REPO / "bench" / "gpu.sh").read_text("utf-8")


def test_an_engine_that_is_measured_is_out_of_the_collectors_way_until_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken_back = Mock()
    monkeypatch.setattr(gc, "unfreeze", taken_back)  # what the suite has frozen stays so
    before = gc.get_freeze_count()
    with random_engine(context_of([]), tmp_path, "qwen3-0.6b", layers=1, max_num_seqs=2):
        assert gc.get_freeze_count() > before
        taken_back.assert_not_called()
    taken_back.assert_called_once_with()
