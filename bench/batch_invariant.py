"""The cost of batch-invariant mode: the same requests through the same model with it and without.

Usage: python -m bench.batch_invariant [--size 8M|100M] [--rounds 5]

Two engines in one process run one right after the other in each round, in swapped order every other time. `one` is a single
request, `sixteen` is 16 at once, `prompt` is a long prompt with one output token. Before anything is timed, the invariant
engine must give the same bits for a request alone and in the batch of sixteen. One row is appended to
bench/results/batch_invariant.jsonl.
"""

from __future__ import annotations

import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from bench.engine_pairs import THREADS, environment, greedy_tokens, make_prompts, time_pairs
from bench.peers.models import SHAPES, make_model
from bench.rows import argument_parser, publish, row_header
from engine import LLM, SamplingParams

OUTPUT_LEN = 64
PROMPT_LEN = 96
LONG_PROMPT_LEN = 768


def greedy_logprobs(llm: LLM, prompts: list[list[int]]) -> list[list[float]]:
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0)
    answers = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    return [[entry[i].logprob for i, entry in zip(a.token_ids, a.logprobs or [], strict=True)] for a in answers]


def ratios(plain: LLM, invariant: LLM, prompts: list[list[int]], max_tokens: int, rounds: int) -> dict[str, Any]:
    """Wall-clock and CPU time of the invariant engine over the plain engine's, after a warm-up of both."""
    run_plain, run_invariant = (partial(greedy_tokens, llm, prompts, max_tokens) for llm in (plain, invariant))
    run_plain(), run_invariant()
    pairs = time_pairs(run_plain, run_invariant, rounds)
    slower = [invariant_cost.wall_s / plain_cost.wall_s for plain_cost, invariant_cost in pairs]
    cpu_slower = [invariant_cost.cpu_s / plain_cost.cpu_s for plain_cost, invariant_cost in pairs]
    return {
        "times_slower_median": round(statistics.median(slower), 2),
        "times_slower": [round(ratio, 2) for ratio in slower],
        "cpu_times_slower_median": round(statistics.median(cpu_slower), 2),
    }


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--size", choices=sorted(SHAPES), default="8M")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    common: dict[str, Any] = {"device": "cpu", "threads": THREADS, "max_num_seqs": 16, "enable_prefix_caching": False}
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        shape = SHAPES[options.size]
        make_model(shape, directory)
        vocab_size = shape["vocab_size"]
        many = make_prompts(vocab_size, 16, PROMPT_LEN)
        long = make_prompts(vocab_size, 1, LONG_PROMPT_LEN)
        with LLM(directory, **common) as plain, LLM(directory, batch_invariant=True, **common) as invariant:
            alone, batched = greedy_logprobs(invariant, many[3:4]), greedy_logprobs(invariant, many)[3:4]
            if alone != batched:
                raise SystemExit("the invariant engine gives different bits in a batch, so no speed is reported")
            results = {
                "one": ratios(plain, invariant, many[:1], OUTPUT_LEN, options.rounds),
                "sixteen": ratios(plain, invariant, many, OUTPUT_LEN, options.rounds),
                "prompt": ratios(plain, invariant, long, 1, options.rounds),
            }
    row = {**row_header("batch_invariant"), "size": options.size, **environment(), "results": results}
    publish(row, options)


if __name__ == "__main__":
    main()
