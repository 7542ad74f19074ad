"""Chooses the storage and packer of a model's weights: by its checkpoint's format, or by the option `quantization`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from engine.config.model import ModelConfig
from engine.config.stored_weights import DecodedWeights, MultipliedWeights
from engine.formats import UNQUANTISED, check_quantization
from engine.quantization.checkpoint import CheckpointStorage
from engine.quantization.decoding import DecodedCheckpoint
from engine.quantization.on_the_fly import PACKERS, OnTheFlyHeadStorage, OnTheFlyStorage
from engine.weights import LinearStorage, stored_names
from kernels import ops


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """`name`: the format in which weights are kept. `packer` is for what `storage` leaves plain, the output head among it
    unless there is a `head_packer`. `decoded`: the form of the checkpoint, if it is decoded while it is read."""

    name: str
    storage: LinearStorage | None
    packer: ops.LinearPacker
    head_packer: ops.LinearPacker | None = None
    decoded: DecodedWeights | None = None


def weight_scheme(
    directory: Path, config: ModelConfig, quantization: str | None, *, head: str | None = None, batch_invariant: bool = False
) -> WeightScheme:
    """The scheme of a model directory with its output head in the format `head`, None is like the rest. Raises
    `EngineConfigError` where checkpoint and options contradict each other."""
    check_quantization(config, quantization, head)
    scheme = _layers_scheme(directory, config, quantization, batch_invariant=batch_invariant)
    if head is None:
        return scheme
    packer = ops.pack_linear if head == UNQUANTISED else PACKERS[head]
    packer = _row_invariant(packer) if batch_invariant else packer
    plain = packer if head == UNQUANTISED else ops.pack_linear
    decoded = None if scheme.decoded is None else DecodedCheckpoint(scheme.decoded, _names(directory, config))
    storage = OnTheFlyHeadStorage(scheme.storage, OnTheFlyStorage(packer, plain, decoded))
    return replace(scheme, storage=storage, head_packer=packer)


def _layers_scheme(directory: Path, config: ModelConfig, quantization: str | None, *, batch_invariant: bool) -> WeightScheme:
    plain = ops.pack_linear_row_invariant if batch_invariant else ops.pack_linear
    stored = config.quantization
    if stored is not None and isinstance(stored.weights, MultipliedWeights):
        storage = CheckpointStorage(stored.weights, _names(directory, config), row_invariant=batch_invariant)
        return WeightScheme(stored.method, storage, plain)
    decoded = None if stored is None else stored.decoded
    checkpoint = None if decoded is None else DecodedCheckpoint(decoded, _names(directory, config))
    name = quantization or UNQUANTISED
    packer: ops.LinearPacker = plain
    if name != UNQUANTISED:
        packer = _row_invariant(PACKERS[name]) if batch_invariant else PACKERS[name]
    elif checkpoint is None:
        return WeightScheme(name, None, plain)
    return WeightScheme(name, OnTheFlyStorage(packer, plain, checkpoint), packer, decoded=decoded)


def _names(directory: Path, config: ModelConfig) -> set[str]:
    """Names of the checkpoint's tensors, those of the decoder as it calls them."""
    part = config.family.text_part
    return stored_names(directory, () if part is None else part.renamed)


def _row_invariant(packer: ops.LinearPacker) -> ops.LinearPacker:
    def pack(weight: torch.Tensor, bias: torch.Tensor | None) -> ops.LinearKernel:
        return ops.row_invariant(packer(weight, bias), weight.shape[1], dtype=weight.dtype, device=weight.device)

    return pack
