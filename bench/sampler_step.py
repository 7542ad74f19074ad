"""The cost of sampling a step's tokens on a CPU, by kind of request: milliseconds, and ratios to one `softmax` of the
same logits.

Usage: python -m bench.sampler_step [--vocab 32000] [--rounds 15]

The ratio is comparable between machines and loads, because both are measured alternately in one process. One JSON row per run
is appended to bench/results/sampler_step.jsonl.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from bench.rows import argument_parser, row_header, save_row
from engine.protocol import SamplingParams
from engine.sampling.logits_rules import SampledRow
from engine.sampling.sampler import Sampler
from engine.scheduling.request import Request

NUM_ROWS, THREADS = 64, 1
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top-p": {"temperature": 0.8, "top_p": 0.95},
    "top-k": {"top_k": 50},
    "min-p": {"min_p": 0.05},
    "typical": {"typical_p": 0.9},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.1, "presence_penalty": 0.5},
    "bad words": {"temperature": 0.0, "bad_words_token_ids": [[i, i + 1] for i in range(500)]},
    "logprobs": {"temperature": 0.0, "logprobs": 5},
    "grammar": {"temperature": 0.0, "guided_regex": "a*"},
}


def make_row(index: int, vocab_size: int, sampling: dict[str, Any]) -> SampledRow:
    """A request with 300 prompt tokens and 200 generated ones, at its next position."""
    generator = torch.Generator().manual_seed(index)
    request = Request(
        request_id=str(index),
        tenant_id="bench",
        sampling=SamplingParams(seed=index, max_tokens=None, **sampling),
        token_ids=torch.randint(vocab_size, (500,), generator=generator).tolist(),
        num_prompt_tokens=300,
        max_total_tokens=100_000,
        stop_ids=frozenset({0}),
        arrived_s=0.0,
    )
    return SampledRow(request, request.num_tokens)


def timed(work: Callable[[torch.Tensor], object], logits: torch.Tensor) -> float:
    """Seconds of one call on a copy of the logits, without the copying."""
    copy = logits.clone()
    started_s = time.perf_counter()
    work(copy)
    return time.perf_counter() - started_s


def measure(logits: torch.Tensor, sampling: dict[str, Any], rounds: int) -> dict[str, float]:
    """Medians of `rounds` alternating calls of sampler and calibrator; the first pair is not counted."""
    sampler = Sampler(logits.device)
    rows = [make_row(index, logits.shape[-1], sampling) for index in range(len(logits))]
    words = -(-logits.shape[-1] // 32)
    masks = torch.full((len(rows), words), 0x55555555, dtype=torch.int32) if "guided_regex" in sampling else None
    ours, calibrator = [], []
    for _ in range(rounds + 1):
        ours.append(timed(lambda copy: sampler.sample(copy, rows, masks), logits))
        calibrator.append(timed(lambda copy: torch.softmax(copy, dim=-1), logits))
    ours_ms, calibrator_ms = statistics.median(ours[1:]) * 1e3, statistics.median(calibrator[1:]) * 1e3
    return {"ms": round(ours_ms, 3), "ratio_to_softmax": round(ours_ms / calibrator_ms, 2)}


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(NUM_ROWS, options.vocab, generator=generator) * 4
    cases = {name: measure(logits, sampling, options.rounds) for name, sampling in CASES.items()}
    for name, figures in cases.items():
        print(f"{name:12} {figures['ms']:9.3f} ms   {figures['ratio_to_softmax']:7.2f} × softmax")
    row = {
        **row_header("sampler_step"),
        "torch": torch.__version__,
        "rows": NUM_ROWS,
        "vocab": options.vocab,
        "rounds": options.rounds,
        "threads": THREADS,
        "cases": cases,
    }
    save_row(row, options)


if __name__ == "__main__":
    main()
