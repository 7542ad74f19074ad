"""Which variants of Triton's kernels an engine asks for, at its start and while it serves, on a machine without a GPU.

Run as a script: `python -m tests.support.triton_variants CASE`. Launches go through Triton's own binder, which decides by its
arguments (types, alignment of pointers, numbers that are 1 or divisible by 16, constants) which variant is meant; nothing is
compiled and no kernel runs, so that what serves are zeros. Prints a JSON object: for each kernel its variants `at_start`, and
those that came `while_serving`, with what they were asked for.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from engine.build import build_engine
from engine.loop import Engine
from engine.options import EngineOptions
from engine.runner.cuda_graphs import DirectCalls
from engine.runner.weights import WeightPlan
from engine.scheduling.scheduled_batch import BlockMoves
from engine.speculation.options import SpeculativeOptions
from kernels import ops, quantised_linear
from kernels.triton import early_launch, tuning
from tests.support.engines import wanted

MODEL: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "hidden_size": 256,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 512, "vocab_size": 32_000,
    "tie_word_embeddings": True, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "hidden_act": "silu",
    "bos_token_id": 1, "eos_token_id": 2, "dtype": "bfloat16",
}  # fmt: skip
EXPERTS = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 256, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "window-fp8": (
        {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 300},
        {"quantization": "fp8", "kv_cache_dtype": "fp8"},
    ),
    "experts-int8": (EXPERTS, {"quantization": "int8"}),
    "guesses": ({}, {"speculative_config": SpeculativeOptions(method="ngram")}),
}
CROWDS = ((0, 0, 0, 0, 0, 0, 1), (0, 1, 1, 2), (0, 0, 0, 0), (0, 0, 5, 40, 100), (0, 0, 0, 0, 1, 2))
"""New requests of a step, in phases of 60 steps: alone, some, none, many, some beside those that are left."""

STEPS = 300
SEEN: dict[str, dict[str, None]] = defaultdict(dict)


class Driver:
    """An H200 that is asked what it is, and nothing else."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class Captured(DirectCalls):
    """Runs what is asked for once before its first use, as whoever captures it does."""

    def __init__(self) -> None:
        self._keys: set[Hashable] = set()

    def is_ready(self, key: Hashable) -> bool:
        return key in self._keys

    def make_ready(self, key: Hashable, function: Callable[[], None]) -> None:
        function()
        self._keys.add(key)


def noted(kernel: Any, key: Any, *_: Any, **__: Any) -> None:
    """In the place of compiling: remember what was asked for; without a kernel nothing is launched."""
    SEEN[kernel.__name__][str(key)] = None


def prepare() -> None:
    """Everything that a machine without a GPU does otherwise. Memory that nobody writes is zeros, as tokens come from it."""
    driver.set_active(Driver())
    replaced: tuple[tuple[Any, str, Any], ...] = (
        (JITFunction, "_do_compile", noted),
        (tuning, "capability", lambda _: 90),
        (early_launch, "capability", lambda _: 90),
        (tuning, "multiprocessors", lambda _: 132),
        (early_launch, "early_launch", lambda _: {"EARLY": True, "launch_pdl": True}),
        (torch, "empty", torch.zeros),
        (torch, "empty_like", torch.zeros_like),
        (torch.Tensor, "new_empty", torch.Tensor.new_zeros),
    )
    for owner, name, value in replaced:
        setattr(owner, name, value)


@contextmanager
def engine_of(folder: Path, changes: dict[str, Any], options: dict[str, Any]) -> Iterator[Engine]:
    (folder / "config.json").write_text(json.dumps(MODEL | changes), "utf-8")

    def fill(_: Path, plan: WeightPlan, **__: Any) -> None:
        for name, place in plan.places.items():
            if isinstance(place, torch.Tensor):
                place.zero_()
            elif name not in plan.optional:
                place.take(torch.ones(place._shape, dtype=torch.bfloat16))  # type: ignore[attr-defined]

    limits: dict[str, Any] = {"max_num_seqs": 256, "max_model_len": 4096, "num_kv_blocks": 4000, "max_num_batched_tokens": 4096}
    limits["swap_space"] = 0.02
    with ExitStack() as stack:
        stack.enter_context(mock.patch("engine.build.load_weights", fill))
        stack.enter_context(mock.patch("engine.quantization.scheme.stored_names", return_value=set()))
        stack.enter_context(mock.patch("engine.build.launches_ahead", lambda options, _: options.speculative_config is None))
        stack.enter_context(mock.patch("engine.build.records_steps", return_value=False))
        stack.enter_context(mock.patch("engine.runner.ahead.DirectCalls", Captured))
        for module in ("build", "runner.slot_runner"):
            stack.enter_context(mock.patch(f"engine.{module}.compiles_at_first_use", return_value=True))
        stack.enter_context(mock.patch.dict(quantised_linear._MODULES, cpu=quantised_linear._MODULES["cuda"]))
        stack.enter_context(ops.replaced("cpu", "cuda"))
        engine = build_engine(EngineOptions(model=folder, device="cpu", dtype="bfloat16", threads=1, **limits, **options))
        yield engine
        engine.close()


def traffic(engine: Engine, steps: int, seed: int) -> None:
    """Requests of all sizes, alone, some and many at once, sampled in every way."""
    rng, number = random.Random(seed), 0
    for step in range(steps):
        crowd = rng.choice(CROWDS[step // 60 % len(CROWDS)])
        for _ in range(crowd):
            length = rng.choice([1, 2, 3, 5, 8, 9, 17, 33, 100, 255, 500, 1500])
            prompt = [rng.randrange(3, 500) for _ in range(length)]
            engine.submit(wanted(str(number), prompt, max_tokens=rng.choice([1, 2, 9, 40]), **sampling(rng)))
            number += 1
        engine.step()
        pairs = [(number, number) for number in range(rng.randrange(4))]
        engine.runner.move(BlockMoves(swap_out=pairs, swap_in=pairs, copies=pairs))  # to where they are


def sampling(rng: random.Random) -> dict[str, Any]:
    """Most are greedy or have a temperature; the others want what a request may want."""
    return rng.choice(
        [
            {}, {}, {}, {"temperature": 0.7}, {"temperature": 0.7}, {"temperature": 1.0, "top_p": 0.9},
            {"temperature": 1.0, "top_k": 20, "top_p": 0.9}, {"temperature": 1.0, "min_p": 0.1}, {"presence_penalty": 0.5},
            {"logprobs": rng.choice([0, 1, 5, 20])}, {"logit_bias": {7: 1.0}},
        ]
    )  # fmt: skip


def main(case: str, steps: int) -> dict[str, Any]:
    prepare()
    with tempfile.TemporaryDirectory() as folder, engine_of(Path(folder), *CASES[case]) as engine:
        at_start = {name: set(keys) for name, keys in SEEN.items()}
        traffic(engine, steps, seed=0)
    late = {name: sorted(set(keys) - at_start.get(name, set())) for name, keys in SEEN.items()}
    return {
        "at_start": {name: len(keys) for name, keys in at_start.items()},
        "while_serving": {name: keys for name, keys in late.items() if keys},
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else STEPS)))
