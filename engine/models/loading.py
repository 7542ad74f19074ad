"""Loads a decoder: its weights, as the checkpoint stores them or quantised while they are read, bound to kernels."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.config.model import ModelConfig
from engine.formats import UNQUANTISED
from engine.models.decoder import Decoder
from engine.quantization.scheme import weight_scheme
from engine.weights import WeightsSize, load_weights

log = logging.getLogger("gatehouse.engine")


@dataclass(frozen=True, slots=True)
class LoadedDecoder:
    """A decoder with its weights, before it has a cache. `quantization`: how they are kept. `decoded_from`: the form in which
    they were stored, if they were decoded while they were read."""

    decoder: Decoder
    size: WeightsSize
    quantization: str
    decoded_from: str | None = None


def load_decoder(
    directory: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    quantization: str | None = None,
    head_quantization: str | None = None,
    batch_invariant: bool = False,
    progress: Callable[[float], None] = lambda _: None,
) -> LoadedDecoder:
    """`quantization`, `head_quantization` and `batch_invariant` are as in `EngineOptions`; `progress` gets the loaded fraction.
    Raises `WeightsError`, and `EngineConfigError` for formats that contradict the checkpoint."""
    scheme = weight_scheme(directory, config, quantization, head=head_quantization, batch_invariant=batch_invariant)
    decoder = Decoder(config, dtype=dtype, device=device, batch_invariant=batch_invariant)
    plan = decoder.weight_plan(scheme.storage)
    load_weights(directory, plan, progress=progress)
    size = WeightsSize.of(plan)
    if scheme.decoded is not None:
        kept = "unquantised" if scheme.name == UNQUANTISED else f"in {scheme.name}"
        log.info("weights were stored as %s, decoded while they were read, and are kept %s", scheme.decoded, kept)
    del plan  # it refers to the plain tensors, which packing releases
    decoder.pack(scheme.packer, scheme.head_packer)
    return LoadedDecoder(decoder, size, scheme.name, None if scheme.decoded is None else str(scheme.decoded))
