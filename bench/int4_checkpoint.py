"""Writes a 4-bit version of a plain checkpoint for measurements: GPTQ's layout, rounded to nearest. Heads stay plain."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

GROUP_SIZE, ZERO, CODES_PER_WORD = 128, 8, 8
SETTINGS = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": GROUP_SIZE,
    "sym": True,
    "desc_act": False,
    "checkpoint_format": "gptq",
}


def write_int4(source: Path, target: Path) -> None:
    """Write the model of `source` to `target`, projections in 4 bits; their input widths must be multiples of GROUP_SIZE."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors*"))
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.endswith("_proj"):
            stored |= {f"{module}.{last}": part.contiguous() for last, part in _parts(tensor.float()).items()}
        else:
            stored[name] = tensor
    save_file(stored, target / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "quantization_config": SETTINGS}))


def _parts(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """weight: [N, K]"""
    groups = weight.view(weight.shape[0], -1, GROUP_SIZE)
    scales = (groups.abs().amax(dim=2) / (ZERO - 1)).half()
    codes = (groups / scales.float()[:, :, None]).round_().add_(ZERO).clamp_(0, 2 * ZERO - 1)
    zeros = torch.full_like(scales.T, ZERO - 1)  # the layout stores them minus one
    return {"qweight": _words(codes.view_as(weight)).T, "qzeros": _words(zeros), "scales": scales.T}


def _words(values: torch.Tensor) -> torch.Tensor:
    """[R, C] → [R, C / 8] int32, the first of eight values in the lowest bits"""
    nibbles = values.to(torch.int64).view(values.shape[0], -1, CODES_PER_WORD)
    words = (nibbles << torch.arange(0, 32, 4)).sum(dim=2)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
