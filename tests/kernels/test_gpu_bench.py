"""The GPU benchmark, rehearsed without a GPU: every promised row appears, and implausible figures never pass."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement

from bench.gpu import check_attention, check_products, device_lost, driver, requirements
from bench.gpu.context import Context
from bench.gpu.idle import WORK, idle_from_trace
from bench.gpu.part import STACK_DUMP_S
from bench.gpu.plan import COMMANDS, PARTS, TOTAL_S, Job, allotted_s, stages, usual_s
from bench.gpu.processes import Outcome, shorten_log
from bench.gpu.report import WENT_WRONG, complete_rows, document, table
from bench.gpu.rows import GOALS_CARD, Row, Target, fill_ratios, verdict
from bench.gpu.targets import BY_NAME as TARGET_OF
from bench.gpu.targets import HOST_CALLS, TARGETS, error_row, invariance_row
from engine.triton_toolchain import toolchain_problem
from tests.support.required_parts import is_required
from tests.support.triton_versions import REPO, TritonVersion, installed

LIMIT_S = 900
REHEARSED = ("checks", "peers")
"""With what these need. All parts but the peers run on the rehearsed card too, where those that measure give every row."""

# What the engine must show on one H200: pass and stretch, and what is judged.
MUST_SHOW: dict[str, tuple[float, float | None, str]] = {
    "numbers: paged decode": (2.0, None, "value"),
    "same bits in any batch: paged decode": (0, None, "value"),
    "same bits in any batch: engine, batch_invariant": (0, None, "value"),
    "same tokens: ahead against plain": (0, None, "value"),
    **{f"same tokens, {kind} weights: requests that differ at all": (10, None, "value") for kind in ("int8", "int4", "fp8")},
    "decode 32/8 heads of 128, 256 × 1k, 8 GB of KV": (0.85, 0.92, "fraction"),
    "decode 32/8 heads of 128, 64 × 4k, 8 GB of KV": (0.85, 0.92, "fraction"),
    "decode 1 × 128k + 31 × 4k": (1.25, 1.10, "value"),
    "decode with fp8 KV, 256 × 1k": (1.7, 1.85, "value"),
    "prefill 8k, head 128, against the best SDPA": (0.75, 0.95, "ratio"),
    "prefill 8k, head 128, against compiled flex_attention": (1.0, None, "ratio"),
    "KV slots used at saturation": (96, 98, "value"),
    "Llama-3.1-8B bf16, batch 1": (230, 255, "value"),
    "Llama-3.2-1B bf16, batch 1": (1000, 1300, "value"),
    "Qwen3-0.6B bf16, batch 1": (1000, 1500, "value"),
    "Llama-3.1-8B fp8, batch 1": (400, 470, "value"),
    "Llama-3.1-8B int8, batch 1": (400, 470, "value"),
    "Llama-3.1-8B int4, batch 1": (520, 700, "value"),
    "Qwen3-0.6B, 256 requests of 100–1024 in and out": (22_000, 27_000, "value"),
    "Llama-3.1-8B, 256 requests of 100–1024 in and out": (9500, 10_600, "value"),
    "Llama-3.1-8B, 1000/1000 saturated": (8500, 9700, "value"),
    "against transformers continuous batching": (8, 14, "ratio"),
    "against transformers static generate, batches of 16": (15, 23, "ratio"),
    "32k prompt among 64 decoders: largest gap": (30, 20, "value"),
    "GPU idle in steady decode, batch 256": (3, 1, "value"),
    "host critical path per step, batch 256": (400, 200, "value"),
    "start of Llama-3.1-8B beyond reading weights, warm cache": (15, None, "value"),
}
ALSO_NAMED = (*(f"{model}, prefill of 8k tokens" for model in (
                  "Llama-3.1-8B fp8", "Llama-3.1-8B int8", "Llama-3.1-8B int4", "Qwen3-8B bf16")),
              "Qwen3-8B bf16, batch 1", "Llama-3.1-8B bf16, batch 64, 1k context", "Llama-3.1-8B bf16, batch 256, 1k context",
              "32k cached prefix + 128 new tokens: TTFT against cold", "planner: KV blocks", "planner: batch 1",
              "graph gap per kernel", *(f"{kind} {size} GB" for kind in ("copy", "read") for size in (1, 4, 8)),
              "matmul bf16 8192³", "matmul fp8 8192³")  # fmt: skip


def oldest_triton() -> TritonVersion:
    """The version of the GPU machine, where it is installed."""
    versions = sorted(installed(), key=lambda found: [int(part) for part in found.version.split(".") if part.isdigit()])
    if not versions:
        assert not is_required("triton"), "Triton is not installed; `python3 installer test` installs it"
        pytest.skip("Triton is not installed")
    return versions[0]


@dataclass(frozen=True)
class Rehearsed:
    """What became of a rehearsal; `folder` has its `result.json` and the `logs` of its parts."""

    answer: subprocess.CompletedProcess[str]
    folder: Path

    def report(self) -> dict[str, Any]:
        report: dict[str, Any] = json.loads((self.folder / "result.json").read_text("utf-8"))
        return report


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> Rehearsed:
    folder = tmp_path_factory.mktemp("rehearsal")
    answer = subprocess.run(
        [
            *(sys.executable, "-m", "bench.gpu", "--rehearse", "--only", ",".join(REHEARSED)),
            *("--out", folder / "result.json", "--logs", folder / "logs"),
        ],
        cwd=REPO,
        env={**oldest_triton().environment(folder / "cache", interpret=True), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    return Rehearsed(answer, folder)


def test_a_rehearsal_prints_every_row_without_figures(rehearsed: Rehearsed) -> None:
    answer, report = rehearsed.answer, rehearsed.report()
    rows = {row["name"]: row for row in report["rows"]}
    assert {name: row["error"] for name, row in rows.items() if row["error"]} == {}, answer.stderr[-2000:]
    assert answer.returncode == 0, answer.stdout[-3000:]
    assert {target.name for target in TARGETS if target.part in REHEARSED} <= set(rows)
    assert [part for part in report["parts"] if "error" in part] == []
    assert all(row["value"] is not None for name, row in rows.items() if name in TARGET_OF)
    assert {row["verdict"] for row in report["rows"]} == {"REHEARSAL"}
    printed = answer.stdout[answer.stdout.index("REHEARSAL") :]
    assert "tokens/s  " in printed
    assert "stretch" not in printed.replace("must show", "")


def test_every_promised_row_is_judged_by_its_figures() -> None:
    for name, (pass_at, stretch_at, judged) in MUST_SHOW.items():
        target = TARGET_OF[name]
        assert (target.pass_at, target.stretch_at, target.judged) == (pass_at, stretch_at, judged), name
    assert set(ALSO_NAMED) <= set(TARGET_OF)


def test_every_target_has_a_part_and_all_parts_take_eight_minutes() -> None:
    assert {target.part for target in TARGETS} <= {part.target for part in PARTS}
    assert TOTAL_S <= 480
    assert [job.name for job in stages({"peers"})[0]] == ["calibrate"]


def most_s(planned: Sequence[Sequence[Job]]) -> float:
    return sum(max(job.limit_s for job in stage) for stage in planned)


def test_the_usual_duration_of_all_parts_fits_the_time_of_a_run() -> None:
    assert usual_s(stages()) <= TOTAL_S
    assert all(part.usual_s <= part.limit_s for part in PARTS)
    assert {part.target for part in PARTS if part.on_request} == {"choices"}
    assert "choices" not in [job.name for stage in stages() for job in stage]


def test_host_costs_are_measured_while_only_one_process_imports() -> None:
    planned = stages()
    of_part = [any(part.target == TARGET_OF[HOST_CALLS].part for part in job.parts) for job, *_ in planned]
    assert {len(importing) for is_mine, importing in zip(of_part, planned[1:], strict=False) if is_mine} == {1}


def test_every_check_belongs_to_exactly_one_part(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, list[str]] = {}
    making: list[str] = []
    for module in (check_attention, check_products):
        for function, named in (("check_errors", error_row), ("check_invariant", invariance_row)):
            monkeypatch.setattr(module, function, lambda _, name, __, named=named: making.append(named(name)))
    for part in PARTS:
        if part.module in ("bench.gpu.check_attention", "bench.gpu.check_products"):
            making.clear()
            module = importlib.import_module(part.module)
            getattr(module, part.function)(Context(torch.device("cpu"), False, {}, lambda _: None, 0.0))
            made[part.name] = [*making]
    names = [name for each in made.values() for name in each]
    assert len(made) == 4
    assert all(made.values())
    assert len(names) == len(set(names))
    asked = {name for name in TARGET_OF if name.startswith(("numbers: paged", "numbers: product", "numbers: experts"))}
    assert set(names) == asked | {invariance_row(name) for name in ("paged decode", "product bf16", "product int4")}


def test_two_documented_commands_run_all_parts_with_their_full_limits() -> None:
    named = [target for call in COMMANDS for target in call]
    assert sorted({*named, "calibrate", "warm-up"}) == sorted({part.target for part in PARTS})
    for call in COMMANDS:
        assert most_s(stages(set(call))) <= TOTAL_S, call
        words = f"--only '{','.join(call)}'"
        assert all(words in (REPO / path).read_text("utf-8") for path in ("bench/gpu.sh", "docs/benchmarks.md")), words


def test_the_limit_of_a_part_leaves_time_for_later_parts() -> None:
    one, two, three = ([Job((replace(PARTS[0], usual_s=usual, limit_s=90.0),))] for usual in (10.0, 20.0, 30.0))
    assert allotted_s([one, two, three], 100.0) == 50.0
    assert allotted_s([two, three], 45.0) == 20.0, "its own usual time, though the one behind it has less then"
    assert allotted_s([three], 25.0) == 25.0


@pytest.mark.parametrize("target", sorted({part.target for part in PARTS if part.family in ("engines", "peers")}))
def test_an_engine_measured_alone_is_warmed_up_first(target: str) -> None:
    names = [[part.name for job in stage for part in job.parts] for stage in stages({target})]
    assert names[0] == ["calibrate"]
    assert names[1]
    assert all(name.startswith("warm") for name in names[1])
    assert len(names) == (4 if target == "peers" else 3), "peers are compared with what our own engine did"
    assert all(len(stage) == 1 for stage in names[2:])


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (Row(name="x", fraction=0.95), "stretch"),
        (Row(name="x", fraction=0.86), "pass"),
        (Row(name="x", fraction=0.5), "below"),
        (Row(name="x", fraction=1.11), "INVALID"),
        (Row(name="x", fraction=0.95, counted=7, returned=8), "INVALID"),
        (Row(name="x", fraction=0.95, peer=5.0, peer_on_cpu=6.0), "INVALID"),
        (Row(name="x", fraction=0.95, peer=5.0, peer_on_cpu=4.0), "stretch"),
        (Row(name="x", fraction=0.95, error="it broke"), "failed"),
        (Row(name="x"), "not measured"),
    ],
)
def test_a_row_passes_within_its_limits_unless_it_is_implausible(row: Row, expected: str) -> None:
    target = Target(name="x", part="kernels", unit="GB/s", judged="fraction", pass_at=0.85, stretch_at=0.92)
    assert verdict(row, target, card=GOALS_CARD) == expected


def test_a_target_may_be_a_maximum() -> None:
    target = Target(name="x", part="kernels", unit="µs", pass_at=150, stretch_at=80, higher=False)
    rows = [Row(name="x", value=value) for value in (79.0, 149.0, 151.0)]
    assert [verdict(row, target, card=GOALS_CARD) for row in rows] == ["stretch", "pass", "below"]
    assert fill_ratios(Row(name="x", value=50.0, limit=40.0, peer=100.0), higher=False).fraction == 0.8
    assert fill_ratios(Row(name="x", value=50.0, peer=100.0), higher=False).ratio == 2.0


@pytest.mark.parametrize(
    ("value", "card", "expected"), [(560.0, GOALS_CARD, "stretch"), (540.0, GOALS_CARD, "pass"), (540.0, "another", "stretch")]
)
def test_a_stretch_goal_with_a_rate_of_one_gpu_needs_both_on_that_gpu(value: float, card: str, expected: str) -> None:
    target = TARGET_OF["prefill 8k, head 128, against the best SDPA"]
    assert verdict(Row(name=target.name, value=value, ratio=0.96), target, card=card) == expected
    assert verdict(Row(name=target.name, value=560.0, ratio=0.8), target, card=card) == "pass"
    assert target.text == "≥ 0.75 / 0.95 × peer, 550 (H200)"


def test_a_row_without_its_peer_does_not_pass() -> None:
    target = TARGET_OF["against transformers static generate, batches of 16"]
    assert verdict(Row(name=target.name, value=1000.0), target, card=GOALS_CARD) == "not measured"


def test_the_log_of_a_part_is_kept(rehearsed: Rehearsed) -> None:
    report = rehearsed.report()
    part = next(part for part in report["parts"] if part["part"] == "calibrate")
    assert "error" not in part
    assert "INFO gatehouse.bench: begins part=calibrate" in part["log"]
    assert (rehearsed.folder / "logs" / "calibrate.txt").read_text("utf-8").endswith(part["log"])
    assert all(row["came_s"] is not None for row in report["rows"])


STANDS_STILL_S = 120.0
STANDS_STILL = """
import ctypes, sys, threading, types
from bench.gpu import part, plan
def waits(context):
    threading.Event().wait()
def hangs(context):
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):  # the second lock never comes, whatever signals do
        ctypes.CDLL(None).pthread_mutex_lock(mutex)
sys.modules["stands_still"] = types.SimpleNamespace(waits=waits, hangs=hangs)
for name in ("waits", "hangs"):
    plan.BY_NAME[name] = plan.Part(name, "checks", "stands_still", name, 1, 1, "checks")
sys.argv = ["part", sys.argv[1], "--rehearse"]
part.main()
"""


def test_of_a_long_log_the_result_contains_beginning_and_end() -> None:
    assert shorten_log("a line\n") == "a line\n"
    words = shorten_log("begin" + "." * 20_000 + "end")
    assert words.startswith("begin")
    assert words.endswith("end")
    assert "… 12008 characters …" in words


def test_the_output_of_the_driver_is_kept_and_its_absence_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert driver.state().startswith("FileNotFoundError")
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho driver_version, clocks\necho 580.1, 1980 MHz\n", "utf-8")
    program.chmod(0o755)
    assert driver.state() == "driver_version, clocks | 580.1, 1980 MHz"
    refusal = 'Field "clocks_throttle_reasons.active" is not a valid field to query.'
    program.write_text(f"#!/bin/sh\ncase $1 in *throttle*) echo '{refusal}';; *) echo 580.1;; esac\n", "utf-8")
    assert driver.state() == "580.1"


@pytest.mark.parametrize(("name", "who"), [("waits", "Current thread"), ("hangs", "Timeout")])
def test_a_part_reports_its_progress_and_its_watchdog_the_stack_of_a_hang(name: str, who: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", STANDS_STILL, name], cwd=REPO, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    last_resort = threading.Timer(STANDS_STILL_S, process.kill)
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        last_resort.start()
        next(line for line in process.stdout if '"ready"' in line)
        process.stdin.write(json.dumps({"facts": {}, "until_s": time.monotonic() + STACK_DUMP_S + 3.0, "done": []}) + "\n")
        process.stdin.flush()
        told = next(line for line in process.stdout if line.startswith(("Current thread", "Timeout")))
        where = next(line for line in process.stdout if f"in {name}" in line)
        process.kill()
    last_resort.cancel()
    assert told.startswith(who)
    assert 'File "<string>"' in where


LOSES_DEVICE = """
import os, sys, types
from bench.gpu import part, plan
from bench.gpu.device_lost import DeviceLost
class PageLockedMemory:
    def __del__(self):
        os.abort()  # as torch's, where the device is lost
def breaks(context):
    kept = PageLockedMemory()
    raise DeviceLost("the device is broken since then")
sys.modules["loses_device"] = types.SimpleNamespace(breaks=breaks)
plan.BY_NAME["breaks"] = plan.Part("breaks", "checks", "loses_device", "breaks", 1, 1, "checks")
sys.argv = ["part", "breaks", "--rehearse"]
part.run_and_exit()
"""


def test_a_part_that_loses_the_device_reports_it_last_and_does_not_abort() -> None:
    start = json.dumps({"facts": {}, "until_s": time.monotonic() + STANDS_STILL_S, "done": []}) + "\n"
    ended = subprocess.run(
        [sys.executable, "-c", LOSES_DEVICE], cwd=REPO, input=start, capture_output=True, text=True, check=False
    )
    assert ended.returncode == device_lost.STATUS
    assert ended.stderr.splitlines()[-1] == "the device is broken since then"


def test_failures_are_printed_after_the_table() -> None:
    rows = [Row(name="numbers: rms norm", error="RuntimeError: boom"), Row(name="numbers: embedding", value=1.0)]
    parts = [{"part": "check rows", "targets": ["checks"], "error": "exit status 1: boom", "log": "first\nlast words\n"}]
    report = document(rows, Outcome(parts=parts), rehearsal=False, taken_s=1.0)
    printed = table({**report, "switches": {"GATEHOUSE_GRAPHS": "0"}})
    assert "with GATEHOUSE_GRAPHS=0" in printed
    wrong = printed[printed.index(WENT_WRONG) :]
    assert "numbers: rms norm: RuntimeError: boom" in wrong
    assert "part check rows: exit status 1: boom" in wrong
    assert "    | last words" in wrong
    assert WENT_WRONG not in table(document(rows[1:], Outcome(), rehearsal=False, taken_s=1.0))


def test_environment_switches_are_recorded_in_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GATEHOUSE_EARLY_LAUNCH", "0")
    monkeypatch.delenv("GATEHOUSE_GRAPHS", raising=False)
    switches = document([], Outcome(), rehearsal=False, taken_s=1.0)["switches"]
    assert switches["GATEHOUSE_EARLY_LAUNCH"] == "0"
    assert "GATEHOUSE_GRAPHS" not in switches


def test_without_a_gpu_the_bench_says_so_and_starts_nothing(tmp_path: Path) -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "bench.gpu", "--only", "formats", "--out", str(tmp_path / "result.json")],
        cwd=REPO,
        env={**oldest_triton().environment(tmp_path / "cache", interpret=False), "CUDA_VISIBLE_DEVICES": "", "CC": "true"},
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert answer.returncode == 1
    assert "torch finds no NVIDIA GPU here" in answer.stdout
    assert "formats: not begun, the card could not be calibrated" in answer.stdout
    lines = answer.stdout.splitlines()
    assert len(lines) < 40
    last = lines[-1]
    assert last.startswith("nothing was measured: exit status 1: torch finds no NVIDIA GPU here")


def test_a_run_without_measurements_lists_its_parts_instead_of_every_goal() -> None:
    parts = [
        {"part": "calibrate", "targets": ["checks"], "error": "exit status 1: boom", "log": "last words\n"},
        {"part": "check rows", "targets": ["checks"], "error": "not begun: the card could not be calibrated"},
    ]
    outcome = Outcome(parts=parts)
    printed = table(document(complete_rows(outcome, {"checks"}), outcome, rehearsal=False, taken_s=1.0)).splitlines()
    assert printed[0].startswith("no GPU · ")
    assert printed[-3:] == [WENT_WRONG, "  part calibrate: exit status 1: boom", "    | last words"]
    assert len(printed) < 7


def test_all_missing_packages_are_named_in_one_message() -> None:
    assert requirements.missing({"json": "is there", "no_such_package": "does nothing"}) == [
        "  no_such_package is missing: does nothing"
    ]
    stand_in = requirements.StandIn("grammars")
    with pytest.raises(RuntimeError, match="grammars is not installed"):
        stand_in.LLMatcher()


WITHOUT_THE_REST = """
import importlib, sys
from importlib.abc import MetaPathFinder
from bench.gpu import requirements
from bench.gpu.plan import PARTS

class Missing(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1:]:
            raise ModuleNotFoundError(f"{name} is not among the requirements")

sys.meta_path.insert(0, Missing())
requirements.replace_grammars()
for module in sorted({part.module for part in PARTS}):
    importlib.import_module(module)
"""
NAMES_OF_IMPORTS = {"argon2-cffi": "argon2", "nvidia-ml-py": "pynvml", "prometheus-client": "prometheus_client"}


def test_parts_import_no_package_of_this_project_but_the_required_ones() -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text("utf-8"))["project"]
    names = {Requirement(line).name for line in project["dependencies"]}
    missing = [NAMES_OF_IMPORTS.get(name, name) for name in sorted(names - requirements.NEEDED.keys())]
    assert "msgspec" in missing
    answer = subprocess.run(
        [sys.executable, "-c", WITHOUT_THE_REST, *missing], cwd=REPO, capture_output=True, text=True, check=False
    )
    assert answer.stderr == ""
    assert answer.returncode == 0


def test_a_machine_that_cannot_launch_kernels_is_told_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "true")
    assert toolchain_problem() is None
    monkeypatch.setenv("CC", "false")
    assert str(toolchain_problem()).startswith("false cannot use Python.h")
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", "")
    assert str(toolchain_problem()).startswith("a C compiler is missing")


@pytest.mark.parametrize(
    ("torch_is", "triton_is", "numpy_is", "rehearsal_only"),
    [
        ((2, 11), (3, 6), (2, 3), []),
        ((2, 13), (3, 9), (2, 5), []),
        ((2, 11), (3, 6), (2, 5), ["numpy"]),
    ],
)
def test_a_rehearsal_reports_a_numpy_that_is_too_new_for_the_interpreter(
    torch_is: tuple[int, int], triton_is: tuple[int, int], numpy_is: tuple[int, int], rehearsal_only: list[str]
) -> None:
    versions: dict[str, tuple[int, ...]] = {"torch": torch_is, "triton": triton_is, "numpy": numpy_is}
    assert requirements.unsuitable(versions, rehearse=False) == []
    assert [line.split()[0] for line in requirements.unsuitable(versions, rehearse=True)] == rehearsal_only


def test_an_unsupported_version_is_named_before_anything_runs() -> None:
    assert requirements.unsuitable({"torch": (2, 10), "triton": (3, 5), "numpy": (1, 26)}, rehearse=False) == [
        "  torch 2.10: 2.11 or newer is needed",
        "  triton 3.5: 3.6 or newer is needed",
    ]
    assert requirements.unsuitable({"triton": (3, 10)}, rehearse=False) == ["  triton 3.10: a version below 3.10 is needed"]


def test_the_supported_range_equals_that_of_the_project_file() -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text("utf-8"))["project"]
    wanted = [Requirement(line) for line in [*project["dependencies"], *project["optional-dependencies"]["gpu"]]]
    ranges = {line.name: {str(each) for each in line.specifier} for line in wanted if line.name in requirements.OLDEST}
    assert ranges == {"torch": {">=2.11"}, "triton": {">=3.6", "<3.10"}}
    assert requirements.OLDEST == {"torch": (2, 11), "triton": (3, 6)}
    assert requirements.BELOW == {"triton": (3, 10)}


def test_the_script_refuses_an_old_python() -> None:
    script = (REPO / "bench" / "gpu.sh").read_text("utf-8")
    assert "sys.version_info < (3, 11)" in script
    answer = subprocess.run(
        ["bash", "bench/gpu.sh"], cwd=REPO, env={**os.environ, "PYTHON": "false"}, capture_output=True, text=True, check=False
    )
    assert (answer.returncode, answer.stdout) == (1, "")
    assert "needs Python 3.11 or newer" in answer.stderr


def test_idle_time_is_the_time_without_a_running_kernel() -> None:
    def ran(begin: float, taken: float, kind: str = "kernel") -> dict[str, Any]:
        return {"ts": begin, "dur": taken, "cat": kind, "name": "k"}

    events = [ran(0, 10), ran(5, 10, "gpu_memcpy"), ran(17, 3), ran(40, 10), ran(2, 90, "cpu_op"), {"name": "no time"}]
    idle = idle_from_trace(events, WORK)
    assert idle.share == pytest.approx(22 / 50)
    assert idle.long == pytest.approx(20 / 50)
    assert idle.longest_us == 20
