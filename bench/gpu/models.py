"""Models of real shapes with random weights, created on the device: a model's directory has only a config.json.

The engine is built as usual, except for two functions that read weight files: their replacement fills every tensor from a seed
derived from the tensor's name, so that a peer can be given the same weights.
"""

from __future__ import annotations

import gc
import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from bench.gpu.context import Context
from engine.build import build_engine
from engine.loop import Engine
from engine.options import EngineOptions
from engine.step_mode import StepMode
from engine.weights import WeightPlan

LLAMA_ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def _llama(layers: int, hidden: int, heads: int, size: int, inner: int, tied: bool) -> dict[str, Any]:
    return {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": layers, "hidden_size": hidden,
        "num_attention_heads": heads, "num_key_value_heads": 8, "head_dim": size, "intermediate_size": inner,
        "vocab_size": 128_256, "tie_word_embeddings": tied, "rms_norm_eps": 1e-5, "max_position_embeddings": 131_072,
        "hidden_act": "silu", "rope_parameters": LLAMA_ROPE, "bos_token_id": 128_000, "eos_token_id": 128_009,
    }  # fmt: skip


def _qwen(layers: int, hidden: int, heads: int, inner: int, tied: bool) -> dict[str, Any]:
    return {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": layers, "hidden_size": hidden,
        "num_attention_heads": heads, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": inner,
        "vocab_size": 151_936, "tie_word_embeddings": tied, "rms_norm_eps": 1e-6, "max_position_embeddings": 40_960,
        "hidden_act": "silu", "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "bos_token_id": 151_643, "eos_token_id": 151_645,
    }  # fmt: skip


CONFIGS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": _llama(32, 4096, 32, 128, 14_336, False),
    "llama-3.2-1b": _llama(16, 2048, 32, 64, 8192, True),
    "qwen3-0.6b": _qwen(28, 1024, 16, 3072, True),
    "qwen3-8b": _qwen(36, 4096, 32, 12_288, False),
}
TINY = {
    "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 128, "vocab_size": 256, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
INT4 = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}


def config_of(context: Context, name: str, *, int4: bool = False, layers: int | None = None) -> dict[str, Any]:
    """The content of config.json. `layers` reduces the number of layers: the kernels stay those of the whole model."""
    dtype = torch.float32 if context.device.type == "cpu" else context.dtype
    config = {**CONFIGS[name], "dtype": str(dtype).removeprefix("torch.")}
    if context.rehearsal:
        config |= TINY
    if layers is not None:
        config["num_hidden_layers"] = layers
    if int4:
        config["quantization_config"] = {**INT4, "group_size": 32 if context.rehearsal else 128}
    return config


def model_directory(folder: Path, name: str, *, int4: bool = False, layers: int | None = None) -> Path:
    """Where `random_engine` writes the config.json of a model."""
    return folder / f"{name}{'-int4' if int4 else ''}-{layers or 'all'}"


@contextmanager
def random_engine(
    context: Context, folder: Path, name: str, *, int4: bool = False, layers: int | None = None, **options: Any
) -> Iterator[Engine]:
    """An engine over a model of random weights; it is closed and its memory released at the end."""
    config = config_of(context, name, int4=int4, layers=layers)
    directory = model_directory(folder, name, int4=int4, layers=layers)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config), "utf-8")
    shapes = tensor_shapes(config)

    def fill(_: Path, plan: WeightPlan, *, progress: Callable[[float], None]) -> None:
        fill_plan(plan, shapes, context.device)
        progress(1.0)

    chosen = {"device": context.device.type, **(_rehearsal_options(options) if context.rehearsal else options)}
    with ExitStack() as stack:
        stack.enter_context(mock.patch("engine.models.loading.load_weights", fill))
        stack.enter_context(mock.patch("engine.quantization.scheme.stored_names", return_value=set(shapes)))
        if context.rehearsal:  # everything that a GPU does, on a CPU, except graphs
            stack.enter_context(
                mock.patch("engine.resolved_options.resolve_step_mode", return_value=_rehearsal_mode(context, chosen))
            )
            if chosen.pop("interpreted", False):
                stack.enter_context(mock.patch.dict("kernels.ops._TABLES", cpu="kernels.triton.table"))
        engine = build_engine(EngineOptions(model=directory, name=name, **chosen))
        context.engines += 1
        gc.collect()
        gc.freeze()  # as a serving process does
        try:
            yield engine
        finally:
            gc.unfreeze()
            context.engines -= 1
            engine.close()
    del engine


def _rehearsal_mode(context: Context, options: dict[str, Any]) -> StepMode:
    is_plain = bool(options.get("batch_invariant") or options.get("enforce_eager"))
    mode = StepMode.of(EngineOptions(model=Path(), enforce_eager=is_plain), "cuda")
    return mode if context.device.type == "cuda" else mode.without_graphs()


def _rehearsal_options(options: dict[str, Any]) -> dict[str, Any]:
    """The same options for a model of a few thousand weights."""
    options = {name: value for name, value in options.items() if name != "kv_cache_bytes"}
    small = {"max_num_seqs": 4, "max_model_len": 64, "max_num_batched_tokens": 32}
    always = {"num_kv_blocks": 64, "threads": 1}
    at_start = {"max_num_batched_tokens": 64}  # the engine computes its largest possible step at its start
    return {**at_start, **options, **{name: value for name, value in small.items() if name in options}, **always}


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names, as in transformers, and shapes of a checkpoint's tensors."""
    hidden, size, inner = config["hidden_size"], config["head_dim"], config["intermediate_size"]
    queries, keys = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    quantised = config.get("quantization_config")
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = (config["vocab_size"], hidden)
    linears = {
        "self_attn.q_proj": (queries, hidden), "self_attn.k_proj": (keys, hidden), "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{prefix}.{name}.weight"] = (hidden,)
        if config["model_type"] == "qwen3":
            found |= {f"{prefix}.self_attn.{part}_norm.weight": (size,) for part in "qk"}
        for name, (rows, columns) in linears.items():
            if quantised is None:
                found[f"{prefix}.{name}.weight"] = (rows, columns)
            else:
                groups = columns // quantised["group_size"]
                found[f"{prefix}.{name}.qweight"] = (columns, rows // 8)
                found[f"{prefix}.{name}.qzeros"] = (groups, rows // 8)
                found[f"{prefix}.{name}.scales"] = (groups, rows)
    return found


def fill_plan(plan: WeightPlan, shapes: dict[str, tuple[int, ...]], device: torch.device) -> None:
    """Fill every destination with random values. Raises KeyError for one without a tensor, and names what is left over."""
    for name, destination in plan.destinations.items():
        if isinstance(destination, torch.Tensor):
            fill(name, destination)
        elif name in shapes or name not in plan.optional:
            destination.load(make_tensor(name, shapes[name], device))
    unused = set(shapes) - set(plan.destinations) - set(plan.tied)
    assert not unused, f"the model does not take {sorted(unused)[:4]}"


def make_tensor(name: str, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Make the tensor of that name, in the format of the checkpoint."""
    generator = _generator(name, device)
    if name.endswith((".qweight", ".qzeros")):
        words = torch.randint(-(2**31), 2**31, shape, generator=generator, device=device, dtype=torch.int64)
        return words.to(torch.int32)
    if name.endswith(".scales"):
        return torch.rand(shape, generator=generator, device=device).mul_(0.004).add_(0.002).to(torch.float16)
    tensor = torch.empty(shape, dtype=torch.bfloat16, device=device)
    fill(name, tensor)
    return tensor


def fill(name: str, tensor: torch.Tensor) -> None:
    """Norms near one, matrices with a standard deviation of 0.02, embeddings with a larger one."""
    wide = torch.empty(tensor.shape, dtype=torch.bfloat16, device=tensor.device)
    if "norm" in name:
        wide.normal_(1.0, 0.05, generator=_generator(name, tensor.device))
    else:
        wide.normal_(0.0, 0.05 if "embed" in name else 0.02, generator=_generator(name, tensor.device))
    tensor.copy_(wide)


def _generator(name: str, device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
