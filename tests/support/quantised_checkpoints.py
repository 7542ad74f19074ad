"""Writes quantised checkpoints in the published layouts, with float32 twins of the same values.

No code is shared with the engine or its kernels: codes are packed into words here, in the order of each method's own packer,
so that a reader and a writer cannot share an error.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
GROUP = 32
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "initializer_range": 0.2}
"""For `make_model`: every matrix has whole words and whole groups in both directions."""

AWQ_PLACES = {0: 0, 2: 1, 4: 2, 6: 3, 1: 4, 3: 5, 5: 6, 7: 7}
"""Output within a group of eight → index of its four bits in the word."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How one matrix [N, K] is stored: its tensors by the last part of their names, and its value in float32."""

    settings: dict[str, Any]
    store: Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor]]
    rounds_input: Callable[[str, torch.Tensor], torch.Tensor] | None = None


@dataclass(frozen=True)
class WrittenCheckpoint:
    """A quantised model directory and its twin with the same values in float32."""

    directory: Path
    twin: Path
    layout: Layout
    modules: list[str] = field(default_factory=list)

    def reference(self) -> Any:
        """The twin in transformers; inputs of quantised modules are rounded as the layout prescribes."""
        model = transformers.AutoModelForCausalLM.from_pretrained(self.twin, dtype=torch.float32).eval()
        rounds = self.layout.rounds_input
        if rounds is not None:
            for module in self.modules:
                model.get_submodule(module).register_forward_pre_hook(_rounding(rounds, module))
        return model


def _rounding(rounds: Callable[[str, torch.Tensor], torch.Tensor], module: str) -> Callable[..., Any]:
    return lambda _, arguments: (rounds(module, arguments[0]), *arguments[1:])


def write(
    source: Path, target: Path, layout: Layout, *, skipped: Sequence[str] = ("lm_head",), extra: Tensors | None = None
) -> WrittenCheckpoint:
    """Quantise the linear modules of `source` whose name ends with none of `skipped`; embeddings and routers never are."""
    target.mkdir(parents=True)
    quantised, twin = target / "quantised", target / "twin"
    for directory in (quantised, twin):
        shutil.copytree(source, directory, ignore=shutil.ignore_patterns("*.safetensors*"))
    stored: Tensors = {}
    plain: Tensors = {}
    modules = []
    for name, tensor in load_file(source / "model.safetensors").items():
        module = name.removesuffix(".weight")
        never = ("embed_tokens", ".gate", "norm")
        if tensor.dim() != 2 or module.endswith((*never, *skipped)):
            stored[name] = plain[name] = tensor
            continue
        tensors, plain[name] = layout.store(module, tensor)
        stored |= {f"{module}.{last}": each.contiguous() for last, each in tensors.items()}
        modules.append(module)
    save_file({**stored, **(extra or {})}, quantised / "model.safetensors", {"format": "pt"})
    save_file(plain, twin / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (quantised / "config.json").write_text(json.dumps({**config, "quantization_config": layout.settings}))
    return WrittenCheckpoint(quantised, twin, layout, modules)


def to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """x clamped to the range of e4m3 and rounded to the nearest."""
    return x.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)


def fp8(*, per_row: bool, activations: str, compressed: bool) -> Layout:
    """`activations`: dynamic, static or none; `compressed`: described in config.json as by llm-compressor."""

    def store(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        largest = weight.abs().amax(dim=1, keepdim=True) if per_row else weight.abs().max()
        scale = largest / 448
        values = to_e4m3(weight / scale)
        tensors = {"weight": values, "weight_scale": scale}
        if activations == "static":
            tensors["input_scale"] = torch.tensor(input_scale(module))
        return tensors, values.float() * scale

    def rounds(module: str, x: torch.Tensor) -> torch.Tensor:
        if activations == "static":
            return to_e4m3(x / input_scale(module)).float() * input_scale(module)
        scale = x.abs().amax(dim=-1, keepdim=True).clamp(min=1e-9) / 448  # rows of padding are zero
        return to_e4m3(x / scale).float() * scale

    settings: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": activations, "ignored_layers": ["lm_head"]}
    if compressed:
        settings = compressed_settings("channel" if per_row else "tensor", activations)
    return Layout(settings=settings, store=store, rounds_input=None if activations == "none" else rounds)


def input_scale(module: str) -> float:
    """Scale of static activations: small enough to clip some inputs, and different for values and queries."""
    return 0.004 if module.endswith("v_proj") else 0.008


def compressed_settings(strategy: str, activations: str) -> dict[str, Any]:
    """`quantization_config` as llm-compressor writes it for FP8."""
    common = {"num_bits": 8, "type": "float", "symmetric": True, "group_size": None, "actorder": None, "block_structure": None}
    of_input = {
        "none": None,
        "dynamic": {**common, "strategy": "token", "dynamic": True},
        "static": {**common, "strategy": "tensor", "dynamic": False},
    }
    group = {
        "targets": ["Linear"],
        "weights": {**common, "strategy": strategy, "dynamic": False, "observer": "minmax"},
        "input_activations": of_input[activations],
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


@dataclass(frozen=True)
class Int4Codes:
    """4-bit numbers of a matrix [N, K]: `codes` [N][K], `zeros` and `scales` [N][G], `groups` [K]."""

    codes: list[list[int]]
    zeros: list[list[int]]
    scales: torch.Tensor
    groups: list[int]

    def meaning(self) -> torch.Tensor:
        """The matrix that the codes represent."""
        steps = torch.tensor(self.codes) - torch.tensor(self.zeros)[:, self.groups]
        return (steps * self.scales[:, self.groups].double()).float()


def four_bits(
    weight: torch.Tensor, *, group_size: int, symmetric: bool, order_seed: int | None = None, signed_scales: bool = False
) -> Int4Codes:
    """Round to nearest. Zero points are 1 to 15; with `order_seed`, columns are assigned to groups in shuffled order; with
    `signed_scales`, the number of largest magnitude in a group has the code 0, so that the scale has the opposite sign."""
    rows, columns = weight.shape
    size = columns if group_size == -1 else group_size
    groups = [column // size for column in range(columns)]
    if order_seed is not None:
        random.Random(order_seed).shuffle(groups)
    num_groups = columns // size
    zeros = [[8 if symmetric else 1 + (row + 3 * group) % 15 for group in range(num_groups)] for row in range(rows)]
    scales = torch.empty(rows, num_groups, dtype=torch.float16)
    for group in range(num_groups):
        members = [column for column in range(columns) if groups[column] == group]
        inside = weight[:, members]
        if signed_scales:
            scales[:, group] = inside.gather(1, inside.abs().argmax(1, keepdim=True))[:, 0] / -8
        else:
            scales[:, group] = inside.abs().amax(1) / 7
    steps = (weight / scales[:, groups]).round().long()
    codes = (steps + torch.tensor(zeros)[:, groups]).clamp(0, 15)
    return Int4Codes(codes.tolist(), zeros, scales, groups)


def words(values: Sequence[Sequence[int]], places: dict[int, int] | None = None) -> torch.Tensor:
    """[R][8·C] 4-bit numbers → [R, C] int32; number i of eight is at bit 4·places[i], or at bit 4·i"""
    shifts = torch.tensor([4 * (i if places is None else places[i]) for i in range(8)])
    found = (torch.tensor(values).view(len(values), -1, 8) << shifts).sum(-1)
    return torch.where(found >= 1 << 31, found - (1 << 32), found).int()


def transposed(values: Sequence[Sequence[int]]) -> list[list[int]]:
    return [list(column) for column in zip(*values, strict=True)]


def awq(*, group_size: int = GROUP) -> Layout:
    """AutoAWQ's GEMM layout: words along the outputs in AWQ's order; rows are inputs."""

    def store(_: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        four = four_bits(weight, group_size=group_size, symmetric=False)
        tensors = {
            "qweight": words(transposed(four.codes), AWQ_PLACES),
            "qzeros": words(transposed(four.zeros), AWQ_PLACES),
            "scales": four.scales.T,
        }
        return tensors, four.meaning()

    settings = {"quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": True, "version": "gemm"}
    return Layout(settings={**settings, "modules_to_not_convert": None}, store=store)


def gptq(
    *,
    group_size: int = GROUP,
    symmetric: bool = False,
    version: str = "gptq",
    desc_act: bool = False,
    same_order: bool = True,
    signed_scales: bool = False,
) -> Layout:
    """AutoGPTQ's layout: words along the inputs, in order; columns are outputs; version `gptq` stores zero points minus one.
    AutoRound writes it with `signed_scales`."""

    def store(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        seed = (3 if same_order else len(module)) if desc_act else None
        four = four_bits(weight, group_size=group_size, symmetric=symmetric, order_seed=seed, signed_scales=signed_scales)
        lacking = 1 if version == "gptq" else 0
        tensors = {
            "qweight": words(four.codes).T,
            "qzeros": words([[zero - lacking for zero in row] for row in transposed(four.zeros)]),
            "scales": four.scales.T,
            "g_idx": torch.tensor(four.groups, dtype=torch.int32),
        }
        return tensors, four.meaning()

    settings = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": group_size,
        "sym": symmetric,
        "desc_act": desc_act,
        "checkpoint_format": version,
        "lm_head": False,
        "damp_percent": 0.1,
    }
    return Layout(settings=settings, store=store)


def damaged_copy(source: WrittenCheckpoint, directory: Path, **changes: torch.Tensor | None) -> Path:
    """Copy a checkpoint, with tensors of the first query projection replaced by the last part of their names; None removes
    one. → directory"""
    shutil.copytree(source.directory, directory)
    tensors = load_file(directory / "model.safetensors")
    for last_part, tensor in changes.items():
        name = f"model.layers.0.self_attn.q_proj.{last_part}"
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory
