"""Writes checkpoints as llm-compressor, DeepSeek, Qwen and ModelOpt publish them, with float32 twins of the same values.

As `tests.support.quantised_checkpoints`, and like it sharing no code with the engine: every code is placed into its word here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tests.support.quantised_checkpoints import (
    GROUP,
    Layout,
    Tensors,
    compressed_settings,
    four_bits,
    fp8,
    to_e4m3,
    transposed,
    words,
)

BLOCK = (48, 40)
"""Of tests: no multiple of it is the size of a matrix, so that blocks at both edges are cut."""


def weights_settings(**changes: Any) -> dict[str, Any]:
    """The `weights` of a group of llm-compressor's settings."""
    common = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP, "dynamic": False}
    return {**common, "actorder": None, "block_structure": None, "observer": "minmax", **changes}


def group_settings(format_name: str, *, input_activations: dict[str, Any] | None = None, **weights: Any) -> dict[str, Any]:
    """`quantization_config` as llm-compressor writes it, with these of its `weights`."""
    group = {
        "targets": ["Linear"],
        "weights": weights_settings(**weights),
        "input_activations": input_activations,
        "output_activations": None,
    }
    return {**compressed_settings("channel", "none"), "format": format_name, "config_groups": {"group_0": group}}


def bytes_in_words(codes: torch.Tensor) -> torch.Tensor:
    """[R, K] numbers from 0 to 255 → [R, ⌈K / 4⌉] int32; number i of four begins at bit 8·i"""
    padded = torch.nn.functional.pad(codes.long(), (0, -codes.shape[1] % 4))
    found = (padded.view(codes.shape[0], -1, 4) << torch.tensor([0, 8, 16, 24])).sum(-1)
    return torch.where(found >= 1 << 31, found - (1 << 32), found).int()


def packed_4_bits(*, group_size: int = GROUP, symmetric: bool = True, order_seed: int | None = None) -> Layout:
    """`pack-quantized` (W4A16): words along the inputs, rows are outputs; zero points share words along the outputs."""

    def store(_: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        four = four_bits(weight, group_size=group_size, symmetric=symmetric, order_seed=order_seed)
        tensors = {
            "weight_packed": words(four.codes),
            "weight_scale": four.scales.to(torch.float16),
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            tensors["weight_zero_point"] = words(transposed(four.zeros)).T
        if order_seed is not None:
            tensors["weight_g_idx"] = torch.tensor(four.groups, dtype=torch.int32)
        return tensors, four.meaning()

    strategy = {"strategy": "channel", "group_size": None} if group_size == -1 else {"group_size": group_size}
    actorder = None if order_seed is None else "group"
    return Layout(settings=group_settings("pack-quantized", symmetric=symmetric, actorder=actorder, **strategy), store=store)


def eight_bits(weight: torch.Tensor, *, per_row: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, K] → codes from -128 to 127 and scales [N, 1] or [1]; the smallest number of each row or matrix becomes -128."""
    largest = weight.abs().amax(1, keepdim=True) if per_row else weight.abs().amax().reshape(1)
    scale = (largest / 128).to(torch.bfloat16)
    return (weight / scale.float()).round().clamp(-128, 127), scale


def int8(*, per_row: bool = True, activations: str = "dynamic") -> Layout:
    """`int-quantized` (W8A8). `activations`: dynamic, static or none; the twin rounds none of them."""

    def store(_: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        codes, scale = eight_bits(weight, per_row=per_row)
        tensors = {"weight": codes.to(torch.int8), "weight_scale": scale}
        if activations == "static":
            tensors |= {"input_scale": torch.tensor([0.01]), "input_zero_point": torch.tensor([3], dtype=torch.int8)}
        return tensors, codes * scale.float()

    common = {"num_bits": 8, "type": "int", "symmetric": activations == "dynamic"}
    inputs = {
        "none": None,
        "dynamic": {**common, "strategy": "token", "dynamic": True},
        "static": {**common, "strategy": "tensor", "dynamic": False},
    }[activations]
    strategy = "channel" if per_row else "tensor"
    weights = {"num_bits": 8, "strategy": strategy, "group_size": None}
    return Layout(settings=group_settings("int-quantized", input_activations=inputs, **weights), store=store)


def packed_8_bits() -> Layout:
    """`pack-quantized` with 8 bits for each output (W8A16): four codes share a word."""

    def store(_: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        codes, scale = eight_bits(weight)
        tensors = {"weight_packed": bytes_in_words(codes + 128), "weight_scale": scale}
        return {**tensors, "weight_shape": torch.tensor(weight.shape)}, codes * scale.float()

    return Layout(settings=group_settings("pack-quantized", num_bits=8, strategy="channel", group_size=None), store=store)


def _eight_bit_groups(
    weight: torch.Tensor, group_size: int, order: Sequence[int] | None, zeros: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [N, K], scales [N, G] float16 and the value of weights in groups; `order`: the group of each column."""
    groups = torch.arange(weight.shape[1]) // group_size if order is None else torch.tensor(order)
    num_groups = int(groups.max()) + 1
    largest = [weight[:, groups == group].abs().amax(1) for group in range(num_groups)]
    scales = (torch.stack(largest, dim=1) / 100).half()
    wide = scales[:, groups].double()
    codes = ((weight / wide).round() + zeros[:, groups]).clamp(0, 255)
    return codes, scales, ((codes - zeros[:, groups]) * wide).float()


def packed_8_bit_groups(*, group_size: int = GROUP, symmetric: bool = False) -> Layout:
    """`pack-quantized` with 8 bits for each group of inputs."""

    def store(_: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        num_groups = weight.shape[1] // group_size
        zeros = torch.full((weight.shape[0], num_groups), 128)
        if not symmetric:
            zeros = 100 + torch.arange(zeros.numel()).view(zeros.shape) % 50
        codes, scales, meaning = _eight_bit_groups(weight, group_size, None, zeros)
        tensors = {
            "weight_packed": bytes_in_words(codes),
            "weight_scale": scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        return tensors if symmetric else {**tensors, "weight_zero_point": bytes_in_words(zeros.T).T}, meaning

    return Layout(
        settings=group_settings("pack-quantized", num_bits=8, symmetric=symmetric, group_size=group_size), store=store
    )


def gptq_8_bits(*, desc_act: bool = False) -> Layout:
    """AutoGPTQ's layout with 8 bits: words of four codes along the inputs, zero points minus one."""

    def store(_: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        num_groups = weight.shape[1] // GROUP
        order = [(column * 7) % num_groups for column in range(weight.shape[1])] if desc_act else None
        zeros = 100 + torch.arange(weight.shape[0] * num_groups).view(-1, num_groups) % 50
        codes, scales, meaning = _eight_bit_groups(weight, GROUP, order, zeros)
        tensors = {
            "qweight": bytes_in_words(codes).T,
            "qzeros": bytes_in_words(zeros.T - 1),
            "scales": scales.T,
            "g_idx": torch.tensor(order or [column // GROUP for column in range(weight.shape[1])]),
        }
        return tensors, meaning

    settings = {"quant_method": "gptq", "bits": 8, "group_size": GROUP, "sym": False, "desc_act": desc_act}
    return Layout(settings=settings, store=store)


def fp8_blocks(*, block: tuple[int, int] = BLOCK, compressed: bool = False, dtype: torch.dtype = torch.float32) -> Layout:
    """E4M3 with a scale for each block, as DeepSeek and Qwen publish it, or llm-compressor's strategy `block`."""

    def store(_: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        (rows, columns), (height, width) = weight.shape, block
        scales = torch.empty(-(-rows // height), -(-columns // width))
        codes, meaning = torch.empty(rows, columns).to(torch.float8_e4m3fn), torch.empty(rows, columns)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                place = slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width)
                scale = (weight[place].abs().max() / 448).to(dtype).float()
                scales[i, j] = scale
                codes[place] = to_e4m3(weight[place] / scale)
                meaning[place] = codes[place].float() * scale
        return {"weight": codes, "weight_scale" if compressed else "weight_scale_inv": scales.to(dtype)}, meaning

    settings: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
    settings["weight_block_size"] = list(block)
    if compressed:
        inputs = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 128, "dynamic": True, "symmetric": True}
        weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": list(block), "group_size": None}
        settings = group_settings("float-quantized", input_activations=inputs, **weights)
    return Layout(settings=settings, store=store)


def modelopt_fp8(*, kv_cache: bool = False) -> Layout:
    """E4M3 with one scale for the matrix and one for its inputs, as ModelOpt's `quantization_config` describes it."""
    stored = fp8(per_row=False, activations="static", compressed=False)
    eight = {"dynamic": False, "num_bits": 8, "type": "float"}
    settings: dict[str, Any] = {
        "quant_method": "modelopt",
        "quant_algo": "FP8",
        "config_groups": {"group_0": {"input_activations": eight, "weights": eight, "targets": ["Linear"]}},
        "ignore": ["lm_head"],
        "producer": {"name": "modelopt", "version": "0.31.0"},
    }
    if kv_cache:
        settings["kv_cache_scheme"] = eight
    return Layout(settings=settings, store=stored.store, rounds_input=stored.rounds_input)
