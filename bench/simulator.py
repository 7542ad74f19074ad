"""What the scheduler achieves on real traffic, simulated: Llama-3.1-8B in bfloat16 on an H200.

Usage: python -m bench.simulator --traces DIR [--parts goodput,noisy,fairness,cache,others]

DIR holds azure_conv_2023.csv, azure_code_2023.csv, servegen_chat_tenants.csv, servegen_reason_tenants.csv,
mooncake_conversation.jsonl and sharegpt_lengths.csv. Every part prints its rows and appends one JSON row to
bench/results/simulator.jsonl. Everything is deterministic except the CPU seconds.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

from bench.rows import argument_parser, row_header, save_row
from engine.simulator.models import find_gpu, find_model
from engine.simulator.replay import Replay, Setup
from engine.simulator.report import Objective, make_report
from engine.simulator.workload import Workload, WorkloadOptions, load_workload, make_scenario

MODEL, GPU = find_model("llama-3.1-8b"), find_gpu("h200")
SLICE_S = 240.0
GOOD_SHARE = 0.99
SPEEDS, SEARCH_STEPS = (2.8, 4.4), 6
BUDGETS = (512, 1024, 2048, 8192)
SAMPLES = (0, 1, 2, 3)
Row = dict[str, Any]


def run(workload: Workload, **options: Any) -> Row:
    """Run one simulation; return its report, with the CPU seconds that it took. The objective is 1 s to the first token and
    25 ms for each further one."""
    replay = Replay(Setup(model=MODEL, gpu=GPU, **options), workload)
    started_s = time.process_time()
    replay.run()
    return make_report(replay, Objective()) | {"cpu_s": round(time.process_time() - started_s, 1)}


def highest_rate(path: Path, **options: Any) -> Row:
    """Find the highest rate at which 99 % of the requests meet the objective, by bisecting the speed of the traffic."""
    best: Row = {"req_per_s": 0.0}
    low, high = SPEEDS
    for _ in range(SEARCH_STEPS):
        speed = (low + high) / 2
        report = run(load_workload(path, WorkloadOptions(speed=speed, duration_s=SLICE_S)), **options)
        if report["goodput"]["good_share"] < GOOD_SHARE:
            high = speed
            continue
        low = speed
        best = {
            "req_per_s": report["load"]["req_per_s"],
            "speed": round(speed, 4),
            "ttft_ms": report["ttft_ms"],
            "tpot_ms": report["tpot_ms"],
            "cpu_s": report["cpu_s"],
        }
    return best


def goodput(traces: Path) -> Iterator[Row]:
    """The first 240 s after scaling."""
    for policy, budget in (("fair", None), *(("fcfs", budget) for budget in BUDGETS)):
        found = highest_rate(traces / "azure_conv_2023.csv", policy=policy, token_budget=budget)
        yield {"policy": policy, "budget": budget or "adaptive", **found}


def noisy(traces: Path) -> Iterator[Row]:
    """Four victims and a hog that sends 50 requests per second for 40 s."""
    lengths = traces / "sharegpt_lengths.csv"
    for scenario in ("noisy-none", "noisy-prefill", "noisy-decode"):
        for policy, budget in (("fcfs", 2048), ("vtc", 2048), ("vtc", 512), ("fair", None)):
            report = run(make_scenario(scenario, seed=0, lengths=lengths), policy=policy, token_budget=budget)
            victims = report["victims"]
            yield {
                "scenario": scenario,
                "policy": policy,
                "budget": budget or "adaptive",
                "victims_ttft_p99_ms": victims["ttft_ms"]["p99"],
                "victims_tpot_p99_ms": victims["tpot_ms"]["p99"],
                "victims_gap_p99_ms": victims["gap_ms"]["p99"],
                "makespan_s": report["throughput"]["makespan_s"],
                "tokens_per_s": report["throughput"]["total_tokens_per_s"],
                "preemptions": report["kv"]["preemptions"],
                "longest_without_token_s": report["fairness"]["longest_without_token_s"],
            }


def fairness(traces: Path) -> Iterator[Row]:
    """46 tenants with chats and 20 with long answers, at several times their traffic: more than the GPU can serve."""
    overloads = (("servegen_chat_tenants.csv", 8), ("servegen_reason_tenants.csv", 3), ("servegen_reason_tenants.csv", 8))
    for (name, speed), policy in product(overloads, ("fair", "vtc", "fcfs")):
        report = run(load_workload(traces / name, WorkloadOptions(speed=speed)), policy=policy)
        yield {
            "trace": name,
            "speed": speed,
            "policy": policy,
            **report["fairness"],
            "good_share": report["goodput"]["good_share"],
            "makespan_s": report["throughput"]["makespan_s"],
            "waste": report["kv"]["waste"],
            "cpu_s": report["cpu_s"],
        }


def cache(traces: Path) -> Iterator[Row]:
    """Ten per cent of the conversations, without and with main memory for evicted blocks."""
    for host_cache_gib in (0, 64):
        for seed in SAMPLES:
            workload = load_workload(traces / "mooncake_conversation.jsonl", WorkloadOptions(sample=0.1, seed=seed))
            report = run(workload, host_cache_gib=host_cache_gib)
            yield {"host_cache_gib": host_cache_gib, "seed": seed, **report["cache"], "ttft_p99_ms": report["ttft_ms"]["p99"]}


def others(traces: Path) -> Iterator[Row]:
    """Other kinds of traffic at their recorded speed: whether any tenant starves, and how long simulating an hour takes."""
    for name in ("azure_conv_2023.csv", "azure_code_2023.csv", "servegen_chat_tenants.csv", "servegen_reason_tenants.csv"):
        report = run(load_workload(traces / name, WorkloadOptions()))
        yield {
            "trace": name,
            "duration_s": report["load"]["duration_s"],
            "req_per_s": report["load"]["req_per_s"],
            "good_share": report["goodput"]["good_share"],
            "ttft_p99_ms": report["ttft_ms"]["p99"],
            "tpot_p99_ms": report["tpot_ms"]["p99"],
            "longest_without_token_s": report["fairness"]["longest_without_token_s"],
            "jain_min": report["fairness"]["jain_min"],
            "steps": report["throughput"]["steps"],
            "cpu_s": report["cpu_s"],
        }


PARTS: dict[str, Callable[[Path], Iterator[Row]]] = {
    "goodput": goodput,
    "noisy": noisy,
    "fairness": fairness,
    "cache": cache,
    "others": others,
}


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--parts", default=",".join(PARTS))
    options = parser.parse_args()
    for part in options.parts.split(","):
        started_s = time.perf_counter()
        results = []
        for result in PARTS[part](options.traces):
            results.append(result)
            print(part, json.dumps(result), flush=True)
        row = {
            **row_header("simulator"),
            "part": part,
            "model": MODEL.name,
            "gpu": GPU.name,
            "wall_s": round(time.perf_counter() - started_s, 1),
            "results": results,
        }
        save_row(row, options)


if __name__ == "__main__":
    main()
