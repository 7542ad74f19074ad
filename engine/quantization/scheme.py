"""Chooses the storage and packer of a model's weights: by its checkpoint's format, or by the option `quantization`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from engine.config.model import ModelConfig
from engine.formats import check_quantization
from engine.quantization.checkpoint import CheckpointStorage
from engine.quantization.on_the_fly import PACKERS, OnTheFlyHeadStorage, OnTheFlyStorage
from engine.weights import LinearStorage, stored_names
from kernels import ops

UNQUANTISED = "none"


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """`name` is for `EngineInfo`; `packer` is for what `storage` leaves plain, the output head among it unless there is a
    `head_packer`."""

    name: str
    storage: LinearStorage | None
    packer: ops.LinearPacker
    head_packer: ops.LinearPacker | None = None


def weight_scheme(
    directory: Path, config: ModelConfig, quantization: str | None, *, head: str | None = None, batch_invariant: bool = False
) -> WeightScheme:
    """The scheme of a model directory with its output head as `head` says, None is like the rest. Raises `EngineConfigError`
    where checkpoint and options contradict each other."""
    check_quantization(config, quantization, head)
    scheme = _layers_scheme(directory, config, quantization, batch_invariant=batch_invariant)
    if head is None:
        return scheme
    packer = ops.pack_linear if head == UNQUANTISED else PACKERS[head]
    packer = _row_invariant(packer) if batch_invariant else packer
    storage = OnTheFlyHeadStorage(scheme.storage, packer, is_plain=head == UNQUANTISED)
    return replace(scheme, storage=storage, head_packer=packer)


def _layers_scheme(directory: Path, config: ModelConfig, quantization: str | None, *, batch_invariant: bool) -> WeightScheme:
    plain = ops.pack_linear_row_invariant if batch_invariant else ops.pack_linear
    checkpoint_format = config.quantization
    if checkpoint_format is not None:
        storage = CheckpointStorage(checkpoint_format, stored_names(directory), row_invariant=batch_invariant)
        return WeightScheme(checkpoint_format.method, storage, plain)
    if quantization is None:
        return WeightScheme(UNQUANTISED, None, plain)
    packer = _row_invariant(PACKERS[quantization]) if batch_invariant else PACKERS[quantization]
    return WeightScheme(quantization, OnTheFlyStorage(packer, plain), packer)


def _row_invariant(packer: ops.LinearPacker) -> ops.LinearPacker:
    def pack(weight: torch.Tensor, bias: torch.Tensor | None) -> ops.LinearKernel:
        return ops.row_invariant(packer(weight, bias), weight.shape[1], dtype=weight.dtype, device=weight.device)

    return pack
