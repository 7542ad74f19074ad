"""Which Triton kernel variants an engine requests at its start and while serving, on a machine without a GPU.

Run as a script: `python -m tests.support.triton_variants CASE …`. Launches go through Triton's own binder, which selects the
variant by the arguments (types, pointer alignment, integers that are 1 or divisible by 16, constants); nothing is compiled and
no kernel runs. Outputs are garbage at the start, when they must not be read, and zeros while serving, because tokens come from
them. Prints one JSON object per line, for each case and kernel: the number of variants `asked` for by warm-up launches, and the
variants first requested otherwise: `launched_first` at the start, or `while_serving`.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from engine.build import CachedModels, build_engine
from engine.config.model import ModelConfig
from engine.config.pooling import MODES, PoolingConfig
from engine.grammar.matcher import token_trie
from engine.grammar.vocabulary import NO_BYTES
from engine.loop import Engine
from engine.models.loading import LoadedDecoder
from engine.options import EngineOptions
from engine.quantization.destinations import Fp8CodesDestination
from engine.resolved_options import ResolvedOptions
from engine.runner.cuda_graphs import DirectCalls
from engine.runner.embedder import Embedder
from engine.runner.kernel_choices import KernelChoices
from engine.runner.kernel_trials import KernelTrials
from engine.runner.token_return import Fetch, ImmediateFetch, TokenReturn
from engine.scheduling.scheduled_batch import BlockMoves
from engine.speculation.adaptive_drafter import AdaptiveDrafter
from engine.speculation.options import SpeculativeOptions
from engine.step_mode import StepMode
from engine.weights import WeightPlan
from kernels import quantised_linear
from kernels.ops import HostTokens
from kernels.triton.launching import card_properties, early_launch
from tests.support.engines import FREE_ROWS, generation_request
from tests.support.fake_gpu_driver import FakeGpuDriver
from tests.support.grammars import BYTES, ImmediateCompiler
from tests.support.kernel_tables import replace_table

MULTIPROCESSORS = {80: 108, 89: 142, 90: 132, 100: 148}  # of an A100, an L40S, an H200 and a B200
LAYERS = 2
MODEL: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": LAYERS, "hidden_size": 256,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 512, "vocab_size": 4000,
    "tie_word_embeddings": True, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "hidden_act": "silu",
    "bos_token_id": 1, "eos_token_id": 2, "dtype": "bfloat16",
}  # fmt: skip
EXPERTS = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 256, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
LIMITS: dict[str, Any] = {
    "max_num_seqs": 256, "max_model_len": 4096, "num_kv_blocks": 4000, "max_num_batched_tokens": 4096, "swap_space": 0.02,
}  # fmt: skip
DRAFT = SpeculativeOptions(method="draft_model", model=Path("draft"), num_speculative_tokens=8)
ATTENTION, MLP = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    ("gate_proj", "up_proj", "down_proj"),
)


@dataclass(frozen=True)
class Case:
    """A model, as differences from the configuration `MODEL`, and its serving options. `stored`: if the checkpoint's linear
    modules are quantised, the name of the tensor that indicates it. `slow_defaults`: of kernels that can replace each other,
    the last one is timed as the fastest, otherwise the first."""

    model: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    stored: str = ""
    slow_defaults: bool = False


def quantised_case(
    method: str, mark: str, model: dict[str, Any] | None = None, options: dict[str, Any] | None = None, **settings: Any
) -> Case:
    return Case({**(model or {}), "quantization_config": {"quant_method": method, **settings}}, options or {}, mark)


AWQ: dict[str, Any] = {"bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
WIDE = 2304
"""So many outputs that programs of 16 each occupy all multiprocessors of an H200."""
WINDOW = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 300}
INVARIANT = {"batch_invariant": True}
NGRAM = {"speculative_config": SpeculativeOptions(method="ngram")}
MANY_SEATS: dict[str, Any] = {"max_num_seqs": 1024, "max_num_batched_tokens": 8192}
CASES: dict[str, Case] = {
    # The others have a smaller vocabulary: the host sampler is slow and launches no kernels.
    "plain": Case({"vocab_size": 32_000}, slow_defaults=True),
    "window-fp8": Case({**WINDOW, "intermediate_size": WIDE}, {"quantization": "fp8", "kv_cache_dtype": "fp8"}),
    "awq": replace(quantised_case("awq", "qweight", **AWQ), slow_defaults=True),
    "experts-int8": Case(EXPERTS, {"quantization": "int8"}),
    "experts-awq": quantised_case("awq", "qweight", EXPERTS, **AWQ),
    "ngram-int8-head": Case(
        {}, {**NGRAM, **MANY_SEATS, "quantization": "int8", "head_quantization": "int8"}, slow_defaults=True
    ),
    "draft-fp8-static": quantised_case("fp8", "weight_scale", None, {"speculative_config": DRAFT}, activation_scheme="static"),
    "draft-eager": Case({}, {"speculative_config": DRAFT, "enforce_eager": True}),
    "invariant-fp8": Case({}, {**INVARIANT, **MANY_SEATS, "quantization": "fp8", "kv_cache_dtype": "fp8"}),
    "invariant-awq-experts": quantised_case("awq", "qweight", EXPERTS, INVARIANT, **AWQ),
}
"""Weight formats and speculation are independent: formats without a case of their own are in a case with speculation."""
LETTERS = "[a-z]*"
MASKED: tuple[dict[str, Any], ...] = (
    {"guided_regex": LETTERS}, {"guided_regex": LETTERS, "temperature": 0.7},
    {"guided_regex": LETTERS, "temperature": 0.7, "typical_p": 0.9}, {"guided_regex": LETTERS, "prompt_logprobs": 1},
    {"bad_words_token_ids": [[3, 4]]},
)  # fmt: skip
"""Sampling options whose tokens wait for a mask, or are masked on the host."""

BURST_SIZES = (300, 600, 1088)
"""Numbers of short requests submitted at once after all phases, if the engine has many seats."""

PHASES = ((0, 0, 0, 0, 0, 0, 1), (0, 1, 1, 2), (0, 0, 0, 0), (0, 0, 5, 40, 100), (0, 0, 0, 0, 1, 2))
"""Numbers of new requests per step, by phase: single, some, none, many, some among remaining ones."""

PHASE_STEPS = 8  # twice as many launch the same variants, five launch fewer
STEPS = PHASE_STEPS * len(PHASES)

TURN_LENS = (9, 16, 17, 40, 100, 300)
"""Numbers of new tokens after a long cached prefix, each in a step of its own."""

GARBAGE = 0x5A
"""Every byte of uninitialised memory: 1.5e16 in float32, and out of range as an index."""


class GraphStandIn(DirectCalls):
    """Runs each function once before its first use, as a capture does. Admits only every other step."""

    def __init__(self) -> None:
        self._keys: set[Hashable] = set()
        self._num_queries = 0

    def is_ready(self, key: Hashable) -> bool:
        return key in self._keys

    def admits(self, key: Hashable) -> bool:
        self._num_queries += 1
        return self._num_queries % 2 == 0

    def make_ready(self, key: Hashable, function: Callable[[], None], *, is_kept: bool = False) -> None:
        function()
        self._keys.add(key)

    def discard(self, key: Hashable) -> None:
        self._keys.remove(key)


class TokensForHost(TokenReturn):
    """Makes steps write their tokens for the host, as on a GPU, but returns them directly, as on a CPU."""

    def __init__(self, max_rows: int, max_scores: int, *, device: torch.device) -> None:
        super().__init__(max_rows, max_scores, device=device)
        self.host = HostTokens(torch.zeros(4, 1 + max_rows, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))

    def fetch(self, tokens: torch.Tensor, scores: torch.Tensor | None = None, *, inputs: torch.Tensor | None = None) -> Fetch:
        kept_inputs = None if inputs is None else inputs.tolist()
        return ImmediateFetch(tokens.tolist(), None if scores is None else scores.clone(), kept_inputs)


@cache
def padded_byte_trie(vocab_size: int) -> Any:
    return token_trie(replace(BYTES, tokens=(*BYTES.tokens, *[NO_BYTES] * (vocab_size - BYTES.size))))


class NullKernel:
    """Replaces a compiled kernel; a launch does nothing."""

    function = packed_metadata = None

    def launch_metadata(self, *_: Any) -> None:
        return None

    def run(self, *_: Any) -> None:
        return None


class Recorder:
    """Records requested variants, by kernel, instead of compiling them."""

    def __init__(self) -> None:
        self.variants: dict[str, dict[str, bool]] = defaultdict(dict)  # whether a warm-up launch requested it
        self._kernels: set[Any] = set()

    def note(self, kernel: Any, key: Any, *arguments: Any) -> NullKernel:
        """Replaces `JITFunction._do_compile`, whose last argument is true for warm-up launches."""
        self.variants[kernel.__name__][str(key)] = bool(arguments[-1])
        self._kernels.add(kernel)
        stub = kernel.device_caches[0][0][key] = NullKernel()
        return stub

    def begin(self) -> None:
        """Reset for another engine, as in a new process."""
        for kernel in self._kernels:
            kernel.device_caches.clear()
        self.variants.clear()
        self._kernels.clear()


class Memory:
    """Fills uninitialised memory with garbage, or with zeros."""

    def __init__(self) -> None:
        self.fills_garbage = True

    def filling(self, make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def made(*arguments: Any, **options: Any) -> torch.Tensor:
            tensor = make(*arguments, **options)
            if self.fills_garbage and tensor.device.type == "cpu" and tensor.is_contiguous():
                tensor.view(-1).view(torch.uint8).fill_(GARBAGE)
                return tensor
            return tensor.zero_()

        return made


def prepare(recorder: Recorder, memory: Memory, capability: int = FakeGpuDriver.capability) -> None:
    """Replace what differs on a machine without a GPU; `capability`: of the emulated card."""
    card = FakeGpuDriver()
    card.capability = capability
    driver.set_active(card)
    is_early = capability >= early_launch.CAPABILITY_MIN

    def compile_nothing(kernel: Any, *arguments: Any) -> NullKernel:
        return recorder.note(kernel, *arguments)

    replaced: tuple[tuple[Any, str, Any], ...] = (
        (JITFunction, "_do_compile", compile_nothing),
        (card_properties, "INTERPRETED_CAPABILITY", capability),
        (card_properties, "INTERPRETED_MULTIPROCESSORS", MULTIPROCESSORS[capability]),
        (early_launch, "supports_early_launch", lambda _: is_early),
        (torch, "empty", memory.filling(torch.empty)),
        (torch, "empty_like", memory.filling(torch.empty_like)),
        (torch.Tensor, "new_empty", memory.filling(torch.Tensor.new_empty)),
        # The two slowest operations.
        (torch.nn.functional, "linear", lambda x, weight, *_: zeros((*x.shape[:-1], weight.shape[0]), x.dtype)),
        (torch.nn.functional, "scaled_dot_product_attention", lambda queries, *_, **__: torch.zeros_like(queries)),
    )
    for owner, name, value in replaced:
        setattr(owner, name, value)


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """torch.zeros through the operating system's zero pages: unread memory costs no time."""
    size = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(size, np.uint8)).view(dtype).view(shape)


def write_weights(_: Path, plan: WeightPlan, **__: Any) -> None:
    """Replaces loading: valid values for every format."""
    for name, destination in plan.destinations.items():
        if isinstance(destination, torch.Tensor):
            destination.zero_()
        elif name not in plan.optional:
            destination.load(weights_for(name, destination))


def weights_for(name: str, destination: Any) -> torch.Tensor:
    """Valid values for a weight; the input scale of values differs from that of queries and keys."""
    kind = name.rpartition(".")[2]
    if kind in ("qweight", "qzeros"):
        return torch.zeros(destination._shape, dtype=torch.int32)
    if kind == "scales":
        return torch.ones(destination._shape, dtype=torch.float16)
    if kind in ("weight_scale", "input_scale"):
        return torch.full((1,), 2.0 if name.endswith("v_proj.input_scale") else 1.0)
    if isinstance(destination, Fp8CodesDestination):
        return torch.zeros(destination._target.shape, dtype=torch.float8_e4m3fn)
    return torch.ones(destination._shape, dtype=torch.bfloat16)


def stored_names(case: Case) -> set[str]:
    """Names of the tensors that mark a module as quantised."""
    if not case.stored:
        return set()
    experts = case.model.get("num_experts", 0)
    folders = [f"mlp.experts.{expert}" for expert in range(experts)] or ["mlp"]
    modules = [*ATTENTION, *(f"{folder}.{name}" for folder in folders for name in MLP)]
    return {f"model.layers.{layer}.{module}.{case.stored}" for layer in range(LAYERS) for module in modules}


def times_in_order(replays: dict[str, Callable[[], None]], *, first_is_slowest: bool) -> dict[str, float]:
    """Replaces timing: run each alternative once, and report them in the order of their speed."""
    for replay in replays.values():
        replay()
    times_s = [1.0 + position for position in range(len(replays))]
    return dict(zip(replays, reversed(times_s) if first_is_slowest else times_s, strict=True))


def choices_to_be_timed(resolved: ResolvedOptions, _: LoadedDecoder, cached: CachedModels) -> KernelChoices:
    """The choices of an engine with graphs, which `GraphStandIn` replaces."""
    has_choices = cached.mode.has_slots and not resolved.options.batch_invariant
    folder = resolved.options.model
    if not has_choices:
        return KernelChoices(None)
    return KernelChoices(folder / "choices.json", KernelTrials(folder / "trials", "start", resolved.device))


def mode_without_graphs(_: ModelConfig, options: EngineOptions, **__: Any) -> StepMode:
    """The step mode of a GPU without graphs, which `GraphStandIn` replaces."""
    return StepMode.of(options, "cuda").without_graphs()


@contextmanager
def engine_of(folder: Path, case: Case) -> Iterator[Engine]:
    (folder / "config.json").write_text(json.dumps(MODEL | case.model), "utf-8")
    speculative = case.options.get("speculative_config")
    options: dict[str, Any] = {**LIMITS, **case.options}
    if speculative is not None and speculative.model is not None:
        (folder / "draft").mkdir()
        (folder / "draft" / "config.json").write_text(json.dumps(MODEL | case.model | {"num_hidden_layers": 1}), "utf-8")
        options["speculative_config"] = speculative = replace(speculative, model=folder / "draft")
    with ExitStack() as stack:
        stack.enter_context(mock.patch("engine.models.loading.load_weights", write_weights))
        stack.enter_context(mock.patch("engine.quantization.scheme.stored_names", return_value=stored_names(case)))
        stack.enter_context(mock.patch("engine.resolved_options.resolve_step_mode", mode_without_graphs))
        grammars = ImmediateCompiler(padded_byte_trie((MODEL | case.model)["vocab_size"]))
        stack.enter_context(mock.patch("engine.build.LazyCompiler", return_value=grammars))
        stack.enter_context(mock.patch("engine.runner.runner_choice.DirectCalls", GraphStandIn))
        stack.enter_context(mock.patch("engine.runner.slot_steps.TokenReturn", TokensForHost))
        stack.enter_context(mock.patch("engine.build._kernel_choices", choices_to_be_timed))
        timed = partial(times_in_order, first_is_slowest=case.slow_defaults)
        stack.enter_context(mock.patch("engine.runner.kernel_timing.interleaved_s", timed))
        for module in ("build", "runner.slot_warm_up"):
            stack.enter_context(mock.patch(f"engine.{module}.compiles_at_first_use", return_value=True))
        stack.enter_context(mock.patch.dict(quantised_linear._MODULES, cpu=quantised_linear._MODULES["cuda"]))
        stack.enter_context(replace_table("cpu", "cuda"))
        engine = build_engine(EngineOptions(model=folder, device="cpu", dtype="bfloat16", threads=1, **options))
        if speculative is not None:  # independent of the depth calibrated on this machine
            engine._scheduler._drafting._drafter = AdaptiveDrafter(speculative, FREE_ROWS)  # type: ignore[union-attr]
        yield engine
        engine.close()


def send_traffic(engine: Engine, steps: int, seed: int) -> None:
    """Submit requests of all sizes, single, some and many at once, with all kinds of sampling."""
    rng, number = random.Random(seed), 0
    for step in range(steps):
        num_new = rng.choice(PHASES[step // PHASE_STEPS % len(PHASES)])
        for _ in range(num_new):
            length = rng.choice([1, 2, 3, 5, 8, 9, 17, 33, 100, 255, 500, 1500])
            first = rng.randrange(3, 500)
            prompt = range(first, first + length)
            engine.submit(generation_request(str(number), prompt, max_tokens=rng.choice([1, 2, 9, 40]), **random_sampling(rng)))
            number += 1
        engine.step()
        pairs = [(number, number) for number in range(rng.randrange(4))]
        engine.runner.move(BlockMoves(swap_out=pairs, swap_in=pairs, copies=pairs))  # each block to itself


def send_bursts(engine: Engine, seed: int) -> None:
    """Submit more requests at once than a kernel is compiled for; repetitive prompts make some of them verify drafts."""
    rng = random.Random(seed)
    for size in BURST_SIZES:
        for number in range(size):
            prompt = [3, 4] * rng.randrange(1, 3) if number % 16 else range(3, 300)
            engine.submit(generation_request(f"{size}-{number}", prompt, max_tokens=rng.choice([2, 3, 4])))
        while engine.has_requests:
            engine.step()


def send_masked_requests(engine: Engine) -> None:
    """Submit requests of each kind that waits for masks, one by one and all together."""
    requests = [
        generation_request(f"masked-{number}", [5, 6, 7], max_tokens=3, **options) for number, options in enumerate(MASKED)
    ]
    for together in (*([request] for request in requests), requests):
        for request in together:
            engine.submit(request)
        while engine.has_requests:
            engine.step()


def send_short_prompts(engine: Engine) -> None:
    """Submit short prompts together: few requests with more rows than are launched early, and many."""
    for count, length in itertools.product((2, 7, 20, 31, 60), (3, 7)):
        for number in range(count):
            engine.submit(
                generation_request(f"{count} of {length}: {number}", range(3 + number, 3 + number + length), max_tokens=2)
            )
        while engine.has_requests:
            engine.step()


def send_chat_turns(engine: Engine) -> None:
    """Submit chat turns whose prefix is so long that its keys are split."""
    prefix = [*range(3, 503)] * 6
    for number, length in enumerate((1, *TURN_LENS)):
        engine.submit(
            generation_request(f"turn {number}", [*prefix, *range(600 + number, 600 + number + length)], max_tokens=2)
        )
        while engine.has_requests:
            engine.step()


def embed_texts(engine: Engine) -> None:
    """Embed texts of all lengths, single and in batches."""
    text_model = engine.runner.target.text_model  # type: ignore[attr-defined]
    embedders = [Embedder(text_model, PoolingConfig(mode=mode)) for mode in MODES]
    for lengths in ((1,), (2,), (9,), (17,), (100,), (500,), (1500,), (3, 1), (40, 40, 5), (1,) * 30, (700, 20)):
        for embedder in embedders:
            embedder.embed([[7] * length for length in lengths])


def random_sampling(rng: random.Random) -> dict[str, Any]:
    """Random sampling options: mostly greedy or with a temperature."""
    return rng.choice(
        [
            {}, {}, {}, {"temperature": 0.7}, {"temperature": 0.7}, {"temperature": 1.0, "top_p": 0.9},
            {"temperature": 1.0, "top_k": 20, "top_p": 0.9}, {"temperature": 1.0, "min_p": 0.1}, {"presence_penalty": 0.5},
            {"temperature": 0.7, "typical_p": 0.9}, {"logprobs": rng.choice([0, 1, 5, 20])}, {"logit_bias": {7: 1.0}},
        ]
    )  # fmt: skip


def variants(case: Case, recorder: Recorder, memory: Memory, steps: int) -> dict[str, Any]:
    """The variants that `case` requests."""
    recorder.begin()
    memory.fills_garbage = True
    with tempfile.TemporaryDirectory() as folder, engine_of(Path(folder), case) as engine:
        memory.fills_garbage = False
        at_start = {name: dict(keys) for name, keys in recorder.variants.items()}
        send_traffic(engine, steps, seed=0)
        if engine.info.max_num_seqs > LIMITS["max_num_seqs"]:
            send_bursts(engine, seed=0)
        send_masked_requests(engine)
        send_short_prompts(engine)
        send_chat_turns(engine)
        embed_texts(engine)
    asked = {name: sum(keys.values()) for name, keys in at_start.items()}
    launched = {name: [key for key, only_asked in keys.items() if not only_asked] for name, keys in at_start.items()}
    late = {name: sorted(set(keys) - set(at_start.get(name, ()))) for name, keys in recorder.variants.items()}
    return {"asked": _filled(asked), "launched_first": _filled(launched), "while_serving": _filled(late)}


def _filled(table: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in table.items() if value}


def main(names: list[str]) -> None:
    recorder, memory = Recorder(), Memory()
    prepare(recorder, memory)
    for name in names:
        sys.stdout.write(json.dumps({"case": name, **variants(CASES[name], recorder, memory, STEPS)}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
