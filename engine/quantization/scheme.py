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
    packer = _packer(head, batch_invariant=batch_invariant)
    plain = packer if head == UNQUANTISED else ops.pack_linear
    decoded = None if scheme.decoded is None else DecodedCheckpoint(scheme.decoded, _names(directory, config))
    storage = OnTheFlyHeadStorage(scheme.storage, OnTheFlyStorage(packer, plain, decoded))
    return replace(scheme, storage=storage, head_packer=packer)


def _layers_scheme(directory: Path, config: ModelConfig, quantization: str | None, *, batch_invariant: bool) -> WeightScheme:
    plain = _packer(UNQUANTISED, batch_invariant=batch_invariant)
    stored = config.quantization
    if stored is not None and isinstance(stored.weights, MultipliedWeights):
        stored_matrices = CheckpointStorage(stored.weights, _names(directory, config), row_invariant=batch_invariant)
        return WeightScheme(stored.method, stored_matrices, plain)
    decoded = None if stored is None else stored.decoded
    checkpoint = None if decoded is None else DecodedCheckpoint(decoded, _names(directory, config))
    if quantization is None or quantization == UNQUANTISED:
        storage = None if checkpoint is None else OnTheFlyStorage(plain, plain, checkpoint)
        return WeightScheme(UNQUANTISED, storage, plain, decoded=decoded)
    packer = _packer(quantization, batch_invariant=batch_invariant)
    return WeightScheme(quantization, OnTheFlyStorage(packer, plain, checkpoint), packer, decoded=decoded)


def _names(directory: Path, config: ModelConfig) -> set[str]:
    """Names of the checkpoint's tensors, those of the decoder as it calls them."""
    part = config.family.text_part
    return stored_names(directory, () if part is None else part.renamed)


def _packer(name: str, *, batch_invariant: bool) -> ops.LinearPacker:
    """The packer of plain weights that are kept in the format `name`."""
    pack = ops.pack_linear if name == UNQUANTISED else PACKERS[name]

    def pack_row_invariant(weight: torch.Tensor, bias: torch.Tensor | None) -> ops.LinearKernel:
        return ops.row_invariant(pack(weight, bias), weight.shape[1], dtype=weight.dtype, device=weight.device)

    return pack_row_invariant if batch_invariant else pack
