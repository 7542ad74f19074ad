"""Weights in 8 and 4 bits on the CPU against plain weights: two engines with the same random model and the same requests.

Usage: python -m bench.quantised_cpu [--size 100M] [--rounds 5] [--batches 1,16] [--quantization int8|fp8|gptq]

Every round runs the plain engine and the quantised one back to back, in swapped order every other time, so that
other work on the machine affects both; results are ratios within a round. Outputs are not compared token for token, because
rounded weights change them: the row has the mean difference of the prompt's log-probabilities, and the bytes that the weights
take. gptq is a 4-bit checkpoint written for the bench; the other formats are made from the plain one when it is read. One JSON
row per run is appended to bench/results/quantised_cpu.jsonl.
"""

from __future__ import annotations

import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from bench.engine_pairs import (
    THREADS,
    OtherWork,
    environment,
    greedy_tokens,
    make_prompts,
    ratio_figures,
    time_pairs,
)
from bench.int4_checkpoint import write_int4
from bench.peers.models import MAX_MODEL_LEN, SHAPES, make_model
from bench.rows import argument_parser, publish, row_header
from engine import LLM, SamplingParams

PROMPT_TOKENS, OUTPUT_TOKENS = 64, 64


def compare(plain: LLM, quantised: LLM, prompts: list[list[int]], num_outputs: int, rounds: int, tokens: int) -> dict[str, Any]:
    """Run both once to warm up, then `rounds` pairs. `tokens`: how many tokens of a run its rate counts."""
    run_plain, run_quantised = (partial(greedy_tokens, llm, prompts, num_outputs) for llm in (plain, quantised))
    run_plain(), run_quantised()
    other_work = OtherWork()
    pairs = time_pairs(run_plain, run_quantised, rounds)
    return {
        **ratio_figures(pairs),
        "plain_wall_s": [round(a.wall_s, 3) for a, _ in pairs],
        "quantised_wall_s": [round(b.wall_s, 3) for _, b in pairs],
        "plain_tokens_per_s": round(tokens / min(a.wall_s for a, _ in pairs), 1),
        "quantised_tokens_per_s": round(tokens / min(b.wall_s for _, b in pairs), 1),
        "other_cpu_cores": round(other_work.cores(), 2),
    }


def logprob_difference(plain: LLM, quantised: LLM, prompts: list[list[int]]) -> float:
    """Mean absolute difference of the prompt tokens' log-probabilities."""
    scored = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    found = [
        [
            entry[token_id].logprob
            for output in llm.generate(prompts, scored, use_tqdm=False)
            for token_id, entry in zip(output.prompt_token_ids, output.prompt_logprobs or [], strict=True)
            if entry is not None
        ]
        for llm in (plain, quantised)
    ]
    return float(statistics.mean(abs(a - b) for a, b in zip(*found, strict=True)))


def measure(size: str, quantization: str, rounds: int, batches: list[int]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder, "plain")
        make_model(SHAPES[size], directory)
        source = directory
        if quantization == "gptq":
            source = Path(folder, quantization)
            write_int4(directory, source)
        shared: dict[str, Any] = {
            "device": "cpu", "enable_prefix_caching": False, "threads": THREADS, "max_model_len": MAX_MODEL_LEN,
        }  # fmt: skip
        plain, quantised = LLM(str(directory), **shared), LLM(str(source), quantization=quantization, **shared)
        vocab_size = SHAPES[size]["vocab_size"]
        infos = [llm._generating_engine().info for llm in (plain, quantised)]
        results: dict[str, Any] = {
            f"decode, {count} at once": compare(
                plain,
                quantised,
                make_prompts(vocab_size, count, PROMPT_TOKENS),
                OUTPUT_TOKENS,
                rounds,
                tokens=count * OUTPUT_TOKENS,
            )
            for count in batches
        }
        long = make_prompts(vocab_size, 1, 512)
        results["prefill, 512 tokens"] = compare(plain, quantised, long, 1, rounds, tokens=512)
        return {
            "results": results,
            "kernels": [info.kernels for info in infos],
            "weights_bytes": [info.weights_bytes for info in infos],
            "logprob_difference_mean": round(logprob_difference(plain, quantised, long), 4),
        }


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--size", choices=sorted(SHAPES), default="100M")
    parser.add_argument("--quantization", choices=("int8", "fp8", "gptq"), default="int8")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", default="1,16")
    options = parser.parse_args()
    batches = [int(batch) for batch in options.batches.split(",")]
    row = {
        **row_header("quantised_cpu"),
        "size": options.size,
        "quantization": options.quantization,
        **environment(),
        **measure(options.size, options.quantization, options.rounds, batches),
    }
    publish(row, options)


if __name__ == "__main__":
    main()
