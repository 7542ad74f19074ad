"""Which Triton kernel variants models of real sizes request on a card, and which of these the compile gate does not cover.

Run as a script: `python -m tests.support.triton_models CAPABILITY=MODEL,… …`, each card in a process of its own. It uses
`triton_variants`, but only for an engine's start, when all variants are requested. Weights are neither read nor written where
they are not quantised: untouched memory takes no space. Prints one JSON object per line, for each card and model: the number of
variants `asked` for, the `missing` ones by kernel, and of these, by kernel, the launch `options` (warps, stages, fusion,
registers) with which the gate compiles that kernel for no size: a limit of registers at the launch alone would spill unseen.

A variant is covered if the gate has one of the same kernel with the same types, constants, warps, stages and registers.
Differences that do not matter to the assembler are ignored: the number of heads beyond those of a tile, float16 or bfloat16,
32- or 64-bit integers, also for positions (32 in decodes, 64 in chunks), and, for drafts, whose registers are granted, the
number of requests that are searched. If a kernel receives its stages as a constant, that constant counts.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from kernels.triton.gate.declared import declared, module_names
from kernels.triton.launching.card_properties import card
from tests.support import triton_variants
from tests.support.triton_variants import Case, Memory, NullKernel, Recorder

ONE_LAYER: dict[str, Any] = {"num_hidden_layers": 1, "tie_word_embeddings": False}
QWEN3 = {"vocab_size": 151_936, "head_dim": 128}
SMALL = {"num_kv_blocks": 600, "swap_space": 0.0}
MODELS: dict[str, Case] = {
    "llama-8b": Case({
        **ONE_LAYER, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "intermediate_size": 14_336, "vocab_size": 128_256,
    }, SMALL),
    "qwen3-0.6b": Case({
        **QWEN3, "num_hidden_layers": 1, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 1024,
        "num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 3072,
    }, SMALL),
    "qwen3-30b-a3b": Case({
        **triton_variants.EXPERTS, **QWEN3, **ONE_LAYER, "hidden_size": 2048, "num_attention_heads": 32,
        "num_key_value_heads": 4, "intermediate_size": 6144, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    }, SMALL),
    "gemma-3-4b": Case({
        "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 6, "hidden_size": 2560,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "intermediate_size": 10_240,
        "vocab_size": 262_208, "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 1024,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"], "query_pre_attn_scalar": 256,
        "rope_local_base_freq": 10_000.0, "rope_theta": 1_000_000.0,
    }, {**SMALL, "kv_cache_dtype": "fp8"}),
}  # fmt: skip
LLAMA = {**MODELS["llama-8b"].model, "tie_word_embeddings": True}
MODELS |= {
    "llama-8b-int8": Case(LLAMA, {**SMALL, "quantization": "int8"}),
    "llama-8b-fp8": Case(LLAMA, {**SMALL, "quantization": "fp8", "kv_cache_dtype": "fp8"}),
    "llama-8b-awq": triton_variants.quantised_case("awq", "qweight", LLAMA, SMALL, **triton_variants.AWQ),
    "llama-8b-invariant": Case(LLAMA, {**SMALL, "batch_invariant": True}),
    "llama-8b-invariant-awq": triton_variants.quantised_case(
        "awq", "qweight", LLAMA, {**SMALL, "batch_invariant": True}, **triton_variants.AWQ
    ),
}
Key = tuple[str, ...]


class UninitialisedMemory(Memory):
    """Leaves memory uninitialised."""

    def filling(self, make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return make


class VariantKeys(Recorder):
    """The requested variants, by the gate's keys."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: set[Key] = set()

    def note(self, kernel: Any, key: Any, *arguments: Any) -> NullKernel:
        signature, _, constants, options, *_ = arguments
        named = {kernel.arg_names[path[0]]: value for path, value in constants.items()}
        # A launch turns arguments equal to 1 into constants; for the gate they are ordinary arguments.
        ones = {param.name for param in kernel.params if not param.is_constexpr and named.get(param.name) == 1}
        passed = {name: kind for name, kind in signature.items() if kind != "constexpr"} | dict.fromkeys(ones, "i32")
        named = {name: value for name, value in named.items() if name not in ones}
        launch = (options.num_warps, options.num_stages, options.enable_fp_fusion, options.maxnreg)
        self.keys.add(key_of(kernel.__name__, passed, named, *launch))
        return super().note(kernel, key, *arguments)


def key_of(kernel: str, passed: Mapping[str, str], constants: Mapping[str, object], *launch: object) -> Key:
    """The key of a kernel variant."""
    same = {"*fp16": "*bf16", "i64": "i32"}
    types = {name: same.get(kind, kind) for name, kind in passed.items()}
    if types.get("positions") == "*i64":
        types["positions"] = "*i32"
    left_out = {"EARLY", "H", "K", *(("REQUESTS",) if constants.get("QUERIES", 1) != 1 else ())}
    kept = {name: value for name, value in constants.items() if name not in left_out}
    num_warps, num_stages, *others = launch
    return (
        kernel,
        *(json.dumps(each, sort_keys=True, default=str) for each in (types, kept)),
        str((num_warps, kept.get("STAGES", num_stages), *others)),
    )


def compiled_keys(capability: int) -> set[Key]:
    """The keys of all variants that the gate compiles for `capability`."""
    return {
        key_of(c.kernel.__name__, c.passed, c.constants, c.num_warps, c.num_stages, c.fp_fusion, c.registers_max)
        for module in module_names()
        for c in declared(module)
        if capability in c.capabilities
    }


def by_kernel(keys: Iterable[Key]) -> dict[str, list[str]]:
    found = defaultdict(list)
    for kernel, *rest in sorted(keys):
        found[kernel].append(" ".join(rest))
    return found


def case_for(name: str, capability: int) -> Case:
    """The model with options that the card supports: no fp8 cache without fp8 hardware."""
    case = MODELS[name]
    return case if card(capability).has_fp8 else replace(case, options=SMALL)


def main(*cards: str) -> None:
    for module in module_names():
        declared(module)  # import each module once, before forking
    for card_argument in cards:
        number, _, names = card_argument.partition("=")
        child = multiprocessing.get_context("fork").Process(target=report_card, args=(int(number), names.split(",")))
        child.start()
        child.join()
        if child.exitcode:
            sys.exit(child.exitcode)


def report_card(capability: int, names: Sequence[str]) -> None:
    """Print the variants that models request on one card."""
    recorder = VariantKeys()
    triton_variants.prepare(recorder, UninitialisedMemory(), capability)
    compiled = compiled_keys(capability)
    for name in names:
        recorder.begin()
        recorder.keys.clear()
        case = case_for(name, capability)
        with tempfile.TemporaryDirectory() as folder, ExitStack() as patches:
            if not case.stored and "quantization" not in case.options:  # matrices that have to be read are read
                patches.enter_context(mock.patch.object(triton_variants, "write_weights"))
            patches.enter_context(triton_variants.engine_of(Path(folder), case))
        missing, known_options = recorder.keys - compiled, {(kernel, options) for kernel, *_, options in compiled}
        other_options = {(kernel, options) for kernel, *_, options in missing} - known_options
        answer = {
            "capability": capability,
            "model": name,
            "asked": len(recorder.keys),
            "missing": by_kernel(missing),
            "options": by_kernel(other_options),
        }
        sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
