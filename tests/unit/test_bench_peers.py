"""The peer benchmark without peers: requests, disturbed rounds, evaluation, and the protocol of workers."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.engine_peers import document, options_parser
from bench.gpu.rows import Row
from bench.peers import disturbance
from bench.peers.disturbance import Disturbance, Reading, disturbance_between, read_machine
from bench.peers.gguf_names import gguf_name, interleaved
from bench.peers.models import SHAPES, weight_shapes
from bench.peers.plan import COMPILED, EAGER, LLAMA, comparisons, slower_vllm_settings
from bench.peers.request_sets import RequestSet, request_set
from bench.peers.rounds import Measurement, equal_tokens, make_row, measure
from bench.peers.workers import EngineSetup, PeerFailed, Sample, Worker, running_worker

REPO = Path(__file__).resolve().parents[2]
QUIET = Disturbance(0.01, 0.0, 1.0)
BUSY = Disturbance(0.5, 0.0, 1.0)
ECHO = """
from bench.peers.protocol import serve_commands
def load(folder, threads, settings):
    def run(prompts, output_lens):
        print("noise on stdout")
        return [prompt[:1] * (length + settings["off"]) for prompt, length in zip(prompts, output_lens)]
    return run, {"threads": threads}
serve_commands(load)
"""


def sample(wall_s: float, noise: Disturbance = QUIET) -> Sample:
    return Sample(wall_s, 2 * wall_s, noise)


class ScriptedEngine:
    """An engine whose runs return the given samples in order."""

    def __init__(self, *samples: Sample) -> None:
        self._samples: Iterator[Sample] = iter(samples)

    def run(self, requests: RequestSet) -> tuple[list[list[int]], Sample]:
        return [], next(self._samples)


def test_requests_are_deterministic_and_within_their_bounds() -> None:
    requests = request_set(16, 4096)
    assert requests == request_set(16, 4096)
    assert {16 <= len(prompt) <= 200 for prompt in requests.prompts} == {True}
    assert {16 <= length <= 128 for length in requests.output_lens} == {True}
    assert all(3 <= token_id < 4096 for prompt in requests.prompts for token_id in prompt)
    assert requests.output_lens == request_set(16, 32000).output_lens


def test_a_count_of_one_means_several_sequential_requests() -> None:
    one, many = request_set(1, 4096), request_set(48, 4096)
    assert not one.at_once
    assert many.at_once
    assert len({len(prompt) for prompt in one.prompts}) == 1


def test_cpu_time_of_other_processes_is_the_rest() -> None:
    found = disturbance_between(Reading(10.0, 100.0, 5.0), Reading(12.0, 103.0, 5.5), known_cpu_s=2.0)
    assert (found.others_cores, found.steal_cores, found.wall_s) == (0.5, 0.25, 2.0)


def test_busy_time_excludes_idle_iowait_and_steal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disturbance, "tick_s", lambda: 0.01)
    reading = read_machine("cpu  100 20 3 4000 500 6 7 80 9 9\ncpu0 1 1 1")
    assert reading.busy_s == pytest.approx(1.36)
    assert reading.steal_s == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("others", "steal", "wall_s", "kept"),
    [
        (0.02, 0.0, 10.0, True),
        (0.2, 0.0, 10.0, False),
        (0.0, 0.2, 10.0, False),
        (0.04, 0.04, 10.0, False),
        (0.2, 0.0, 0.1, True),
    ],
)
def test_a_run_is_disturbed_by_other_cpu_time_or_steal_beyond_one_tick(
    monkeypatch: pytest.MonkeyPatch, others: float, steal: float, wall_s: float, kept: bool
) -> None:
    monkeypatch.setattr(disturbance, "tick_s", lambda: 0.01)
    assert (Disturbance(others, steal, wall_s).reason(0.06) == "") is kept


def test_rounds_alternate_the_order_and_pair_adjacent_runs() -> None:
    ours, peer = ScriptedEngine(*map(sample, (1.0, 2.0, 4.0, 5.0))), ScriptedEngine(*map(sample, (2.0, 6.0, 8.0, 5.0)))
    measured = measure(ours, peer, request_set(1, 100), rounds=2)
    assert [[name for name, _ in each] for each in measured.rounds] == [
        ["ours", "peer", "peer", "ours"],
        ["peer", "ours", "ours", "peer"],
    ]
    assert measured.ratios == [2.0, 3.0, 2.0, 1.0]


def test_a_disturbed_round_is_repeated_and_discarded() -> None:
    ours = ScriptedEngine(sample(1.0), sample(1.0), sample(1.0), sample(1.0))
    peer = ScriptedEngine(sample(9.0), sample(9.0, BUSY), sample(2.0), sample(2.0))
    measured = measure(ours, peer, request_set(1, 100), rounds=1)
    assert measured.ratios == [2.0, 2.0]
    assert [reason for reason, _ in measured.discarded] == ["peer: others used 0.50 cores, the host took 0.00"]


def test_without_an_undisturbed_round_a_row_has_an_error_and_no_value() -> None:
    never = [sample(1.0, BUSY)] * 6
    requests = request_set(1, 100)
    row = make_row("row", "peer", requests, measure(ScriptedEngine(*never), ScriptedEngine(*never), requests, rounds=1), 1)
    assert row.value is None
    assert row.ratio is None
    assert "all 3 rounds were disturbed" in row.error
    assert len(row.facts["discarded"]) == 3


def test_a_row_has_median_rates_median_ratio_and_all_samples() -> None:
    requests = RequestSet([[5]], [12])
    measured = Measurement(
        rounds=[[(name, sample(wall_s)) for name, wall_s in (("ours", 2.0), ("peer", 3.0), ("peer", 8.0), ("ours", 4.0))]]
    )
    row = make_row("row", "peer", requests, measured, 1)
    assert (row.value, row.ratio, row.samples) == (4.0, 1.75, [1.5, 2.0])
    assert row.peer == pytest.approx(12 / 5.5)
    assert [each["who"] for each in row.facts["rounds"][0]] == ["ours", "peer", "peer", "ours"]


def test_tokens_count_as_equal_up_to_the_first_difference() -> None:
    assert equal_tokens([[1, 2, 3, 4], [5, 6]], [[1, 9, 3, 4], [5, 6]]) == (0.5, 0.5)


def test_only_the_faster_vllm_setting_counts_per_request_set() -> None:
    rows = {(each.peer.name, each.count): each for each in comparisons("8M")}
    fast, slow = rows[COMPILED.name, 16], rows[EAGER.name, 16]
    alone, other = rows[EAGER.name, 48], rows[LLAMA.name, 1]
    assert slower_vllm_settings({fast: 1.2, slow: 1.6, alone: 2.0, other: 0.1}) == {slow}
    assert slower_vllm_settings({fast: 2.0, slow: 1.5}) == {fast}
    assert slower_vllm_settings({fast: 1.5, slow: None}) == {slow}
    assert fast.target("8M", judged=True).text == "≥ 1 / 1.5 × peer"
    assert fast.target("8M", judged=False).pass_at is None


@pytest.mark.parametrize("model", SHAPES)
def test_every_weight_has_a_unique_gguf_name(model: str) -> None:
    names = [gguf_name(name) for name, _ in weight_shapes(SHAPES[model])]
    assert len(set(names)) == len(names) == 3 - SHAPES[model]["tie_word_embeddings"] + 9 * SHAPES[model]["num_hidden_layers"]
    assert gguf_name("model.layers.11.self_attn.o_proj.weight") == "blk.11.attn_output.weight"


def test_an_unknown_weight_is_refused() -> None:
    with pytest.raises(KeyError):
        gguf_name("model.layers.0.self_attn.q_norm.weight")


def test_the_halves_of_each_head_are_interleaved() -> None:
    assert interleaved(12, 2) == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]


def test_output_of_a_library_does_not_disturb_the_protocol_of_a_worker(tmp_path: Path) -> None:
    requests = RequestSet([[7], [8]], [1, 3])
    with running_worker(echo_worker(tmp_path, off=0), tmp_path, tmp_path, 1, tmp_path) as worker:
        assert worker.facts["threads"] == 1
        tokens, run_sample = worker.run(requests)
        assert worker.run(requests)[0] == tokens == [[7], [8, 8, 8]]
    assert run_sample.wall_s >= 0


def test_a_worker_that_returns_a_wrong_number_of_tokens_is_named(tmp_path: Path) -> None:
    with (
        running_worker(echo_worker(tmp_path, off=1), tmp_path, tmp_path, 1, tmp_path) as worker,
        pytest.raises(PeerFailed) as failed,
    ):
        worker.run(RequestSet([[7]], [1]))
    assert "echo_worker: RuntimeError: generated [2] tokens instead of [1]" in str(failed.value)


def test_a_worker_that_exits_is_named(tmp_path: Path) -> None:
    with pytest.raises(PeerFailed, match="gone"), (tmp_path / "gone.log").open("w") as log:
        Worker(EngineSetup("gone", "no_such_module"), tmp_path, tmp_path, 1, log)


def test_a_missing_environment_names_the_command_that_creates_it(tmp_path: Path) -> None:
    with pytest.raises(PeerFailed, match=r"bench/peers/set_up\.sh --only llama --folder"):
        LLAMA.interpreter(tmp_path)


def test_set_up_refuses_a_folder_inside_the_repository() -> None:
    answer = subprocess.run(
        [str(REPO / "bench" / "peers" / "set_up.sh"), "--folder", str(REPO)], capture_output=True, text=True, check=False
    )
    assert answer.returncode == 1
    assert "inside the repository" in answer.stderr


def test_set_up_refuses_an_unknown_peer() -> None:
    answer = subprocess.run(
        [str(REPO / "bench" / "peers" / "set_up.sh"), "--only", "other"], capture_output=True, text=True, check=False
    )
    assert answer.returncode == 1
    assert "vllm, llama or transformers" in answer.stderr


def echo_worker(folder: Path, off: int) -> EngineSetup:
    """Write the module of a worker that repeats the first prompt token into `folder`, its working directory."""
    (folder / "echo_worker.py").write_text(ECHO)
    return EngineSetup("echo_worker", "echo_worker", settings={"off": off})


def test_every_row_of_the_results_has_a_verdict() -> None:
    rows = [(Row(name=each.name("8M"), ratio=1.2), each.target("8M", judged=True)) for each in comparisons("8M")]
    written = document("8M", rows, options_parser().parse_args([]), 60.0)
    assert [row["verdict"] for row in written["rows"]] == [*["pass"] * 6, "below", "stretch"]
