"""Speculative decoding against plain decoding, one request at a time: prompt lookup on text that repeats itself and on text
that does not, and a draft model that is right most of the time.

Usage: python -m bench.speculative [--rounds 7] [--models demo,100m]

Two engines of one model in one process, with speculative decoding and without. Their tokens are compared before anything is
timed and must be equal. Each round runs both right after each other, in swapped order every other time, so that other work on
the machine affects both; figures are ratios within a round. `demo` is the bundled model continuing documents; `100m` is a
random model (12 layers, d 768, vocabulary 8,192) with the initialisation of transformers, whose greedy text runs into loops by
itself, and with a wider one, whose text never repeats: there drafts can only cost time. The draft model is the first layer of
a second model of the wider kind, whose other layers contribute little: the share of accepted drafts is by construction, and
reported with the figure (`accepted_share`). One row per run is appended to bench/results/speculative.jsonl.
"""

from __future__ import annotations

import random
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.environment import prepare_environment

prepare_environment()

import torch  # noqa: E402 - must see the environment set above
import transformers  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from bench.engine_pairs import THREADS, environment, greedy_tokens, ratio_figures, time_pairs  # noqa: E402
from bench.rows import TREE, argument_parser, publish, row_header  # noqa: E402
from engine import LLM  # noqa: E402

DEMO = TREE / "engine" / "demo" / "gatehouse-demo"
RANDOM_SIZES: dict[str, Any] = {
    "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 4,
    "intermediate_size": 2048, "vocab_size": 8192, "max_position_embeddings": 1024,
}  # fmt: skip
LOOPING, WANDERING = 0.02, 0.1
"""Standard deviations of the random weights. The narrow one is transformers' default."""
QUIET = 0.03
"""The output of a quiet layer as a fraction of its normal output."""
DRAFT_TOKENS = 5
OUTPUT_TOKENS = 160

LOG = "".join(f"2026-11-{day:02d} GET /v1/models 200 {day * 7} ms tenant=acme key=a{day}\n" for day in range(1, 9)) * 2
LIST = "The following list is repeated.\n- apples\n- pears\n- plums\n- cherries\n" * 6
CODE = "def area(width, height):\n    return width * height\n\n\nprint(area(2, 3))\n\n\n" * 4
PROSE = "Tell me about the history of the town where you were born, and what you liked most about it."


@dataclass(frozen=True)
class Case:
    """A model with its prompts. `repeats`: whether the text is of the kind that prompt lookup is meant for. `draft`: the draft
    model, None for prompt lookup."""

    name: str
    model: Path
    prompts: list[Any]
    repeats: bool
    draft: Path | None = None

    @property
    def speculative_config(self) -> dict[str, Any]:
        if self.draft is None:
            return {"method": "ngram"}
        return {"method": "draft_model", "model": self.draft, "num_speculative_tokens": DRAFT_TOKENS}


def make_random_model(folder: Path, deviation: float) -> Path:
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(initializer_range=deviation, **RANDOM_SIZES)).eval().save_pretrained(folder)
    return folder


def make_pair(folder: Path) -> tuple[Path, Path]:
    """A random model in which all layers but the first contribute little, and that first layer as a model of its own."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(initializer_range=WANDERING, **RANDOM_SIZES)).eval()
    for layer in model.model.layers[1:]:
        for output in (layer.self_attn.o_proj, layer.mlp.down_proj):
            output.weight.data *= QUIET
    model.save_pretrained(folder / "large")
    first = LlamaForCausalLM(LlamaConfig(**{**RANDOM_SIZES, "num_hidden_layers": 1})).eval()
    first.load_state_dict(model.state_dict(), strict=False)
    first.save_pretrained(folder / "first layer")
    return folder / "large", folder / "first layer"


def cases(folder: Path, models: list[str]) -> Iterator[Case]:
    if "demo" in models:
        yield Case("demo model, a list said again and again", DEMO, [LIST], repeats=True)
        yield Case("demo model, code said again and again", DEMO, [CODE], repeats=True)
        yield Case("demo model, a log with changing numbers", DEMO, [LOG], repeats=True)
        yield Case("demo model, prose", DEMO, [PROSE], repeats=False)
    if "100m" in models:
        rng = random.Random(3)
        prompts = [{"prompt_token_ids": [rng.randrange(3, 8000) for _ in range(128)]} for _ in range(2)]
        looping = make_random_model(folder / "looping", LOOPING)
        yield Case("random 100m model, greedy loops", looping, prompts, repeats=True)
        wandering = make_random_model(folder / "wandering", WANDERING)
        yield Case("random 100m model, no repetition", wandering, prompts, repeats=False)
        large, first = make_pair(folder)
        yield Case("random 100m model, its first layer as draft model", large, prompts, repeats=False, draft=first)


def compare(case: Case, rounds: int) -> dict[str, Any]:
    options: dict[str, Any] = {"device": "cpu", "threads": THREADS, "max_num_seqs": 8, "enable_prefix_caching": False}
    with (
        LLM(case.model, **options) as plain,
        LLM(case.model, speculative_config=case.speculative_config, **options) as speculative,
    ):

        def answers(llm: LLM) -> list[list[int]]:
            return [greedy_tokens(llm, [prompt], OUTPUT_TOKENS)[0] for prompt in case.prompts]

        if answers(plain) != answers(speculative):
            raise SystemExit(f"{case.name}: the tokens differ, so no speed is reported")
        before = speculative.status()
        pairs = time_pairs(lambda: answers(plain), lambda: answers(speculative), rounds)
        after = speculative.status()
    total = OUTPUT_TOKENS * len(case.prompts)
    drafted = after.draft_tokens_total - before.draft_tokens_total
    return {
        "case": case.name,
        "method": case.speculative_config["method"],
        "repeats": case.repeats,
        "tokens_equal": True,
        **ratio_figures(pairs),
        "ratio_interval_95": bootstrap_interval([slow.wall_s / fast.wall_s for slow, fast in pairs]),
        "plain_tokens_per_s": round(total / min(slow.wall_s for slow, _ in pairs), 1),
        "guessing_tokens_per_s": round(total / min(fast.wall_s for _, fast in pairs), 1),
        "tokens_per_step": round(rounds * total / (after.steps_total - before.steps_total), 2),
        "accepted_share": round((after.accepted_draft_tokens_total - before.accepted_draft_tokens_total) / max(1, drafted), 2),
        "drafted_per_token": round(drafted / (rounds * total), 2),
    }


def bootstrap_interval(ratios: list[float]) -> list[float]:
    """95 % bootstrap interval of the median."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(2000))
    return [round(medians[50], 2), round(medians[1949], 2)]


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--models", default="demo,100m")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        rows = [compare(case, options.rounds) for case in cases(Path(folder), options.models.split(","))]
    row = {
        **row_header("speculative"),
        "rounds": options.rounds,
        "tokens": OUTPUT_TOKENS,
        **environment(),
        "results": rows,
    }
    publish(row, options)


if __name__ == "__main__":
    main()
