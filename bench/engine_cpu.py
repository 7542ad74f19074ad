"""Our engine against `generate` of transformers on the CPU: the same random model, the same requests, the same number of seats.
`bench.engine_peers` compares it with continuous batching.

Usage: python -m bench.engine_cpu [--size 8M|100M] [--rounds 3] [--requests 48]

Every round runs both one right after the other, so that other work on the machine affects both; results are ratios within a
round. Outputs are compared before anything is timed: greedy, float32, equal token for token up to the first near-tie. One JSON
row per run is appended to bench/results/engine_cpu.jsonl.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from engine.environment import prepare_environment

prepare_environment()

import torch  # noqa: E402 - must see the environment set above
import transformers  # noqa: E402

from bench.chat_lengths import OUTPUT_LENS, PROMPT_LENS, draw_length  # noqa: E402
from bench.engine_pairs import THREADS, OtherWork, environment, ratio_figures, time_pairs  # noqa: E402
from bench.peers.models import SHAPES, make_model  # noqa: E402
from bench.rows import argument_parser, publish, row_header  # noqa: E402
from engine import LLM, SamplingParams  # noqa: E402

SEATS = 16
NUM_REQUESTS = 48
LENGTH_DIVISOR = 4
"""Lengths of conversations are divided by this, to suit two cores."""


@dataclass(frozen=True)
class Workload:
    """Prompts and the exact number of tokens to generate for each."""

    prompts: list[list[int]]
    output_lens: list[int]

    @property
    def num_output_tokens(self) -> int:
        return sum(self.output_lens)


def make_workload(vocab_size: int, count: int) -> Workload:
    """Prompts of random tokens, with the lengths of conversations."""
    rng = random.Random(5)

    def length(lens: Sequence[int]) -> int:
        return max(2, round(draw_length(rng, lens) / LENGTH_DIVISOR))

    prompts = [[rng.randrange(3, vocab_size) for _ in range(length(PROMPT_LENS))] for _ in range(count)]
    return Workload(prompts, [length(OUTPUT_LENS) for _ in prompts])


def run_ours(llm: LLM, work: Workload) -> list[list[int]]:
    params = [SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True) for length in work.output_lens]
    outputs = llm.generate(work.prompts, params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def run_static(model: Any, work: Workload) -> list[list[int]]:
    """`generate` over left-padded batches in order of arrival: each runs until its longest output is done."""
    answers: list[list[int]] = []
    for first in range(0, len(work.prompts), SEATS):
        prompts, lengths = work.prompts[first : first + SEATS], work.output_lens[first : first + SEATS]
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=mask, max_new_tokens=max(lengths), do_sample=False, eos_token_id=None, pad_token_id=0
            )
        answers += [row[width : width + length].tolist() for row, length in zip(out, lengths, strict=True)]
    return answers


def equal_share(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """Share of requests whose tokens are all equal; at a near-tie two float32 programs may differ."""
    return sum(a == b for a, b in zip(ours, theirs, strict=True)) / len(ours)


def compare(
    peer: str, rounds: int, ours: Callable[[], list[list[int]]], theirs: Callable[[], list[list[int]]], tokens: int
) -> dict[str, Any]:
    """Compare outputs, then time `rounds` pairs."""
    equal = equal_share(ours(), theirs())
    other_work = OtherWork()
    pairs = time_pairs(theirs, ours, rounds)
    return {
        "peer": peer,
        "equal_requests": round(equal, 3),
        **ratio_figures(pairs),
        "ours_tokens_per_s": round(tokens / min(our_cost.wall_s for _, our_cost in pairs), 1),
        "peer_tokens_per_s": round(tokens / min(their_cost.wall_s for their_cost, _ in pairs), 1),
        "ours_tokens_per_cpu_s": round(tokens / min(our_cost.cpu_s for _, our_cost in pairs), 1),
        "peer_tokens_per_cpu_s": round(tokens / min(their_cost.cpu_s for their_cost, _ in pairs), 1),
        "other_cpu_cores": round(other_work.cores(), 2),
    }


def measure(size: str, rounds: int, count: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        make_model(SHAPES[size], directory)
        model = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
        work = make_workload(SHAPES[size]["vocab_size"], count)
        one = Workload([work.prompts[0]], [128])
        llm = LLM(directory, device="cpu", max_num_seqs=SEATS, enable_prefix_caching=False, threads=THREADS)
        rows = []
        for name, peer_work in (
            ("transformers generate, batches of 16", work),
            ("transformers generate, one request", one),
        ):
            ours, theirs = partial(run_ours, llm, peer_work), partial(run_static, model, peer_work)
            rows.append(compare(name, rounds, ours, theirs, peer_work.num_output_tokens))
        for side in ("ours", "peer"):
            rows[-1][f"{side}_ms_per_token"] = round(1000 / rows[-1][f"{side}_tokens_per_s"], 2)
        return rows


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--size", choices=sorted(SHAPES), default="8M")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=NUM_REQUESTS)
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    transformers.logging.set_verbosity_error()
    rows = measure(options.size, options.rounds, options.requests)
    row = {
        **row_header("engine_cpu"),
        "size": options.size,
        "requests": options.requests,
        "seats": SEATS,
        **environment(),
        "results": rows,
    }
    publish(row, options)


if __name__ == "__main__":
    main()
