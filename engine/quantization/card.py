"""Formats that this machine's card cannot compute with, refused before anything is loaded."""

from __future__ import annotations

import torch

from engine.config.model import ModelConfig
from engine.formats import check_formats
from engine.options import EngineOptions
from engine.runner.device import format_name


def check_card(config: ModelConfig, options: EngineOptions, dtype: torch.dtype, device: torch.device) -> None:
    """Raise `EngineConfigError`, naming the option, for formats that cannot be: see `engine.formats`."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    check_formats(config, options, format_name(dtype), capability)
