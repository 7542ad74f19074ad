"""Reads safetensors into the tensors that a decoder needs, and accounts for every tensor on both sides.

A decoder hands over a `WeightPlan`: the destination of each tensor of the checkpoint, by name. Fused weights are several
destinations in one tensor, so nothing is held twice. Missing, unexpected and misshapen tensors are errors that name them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from engine.config.model import read_json
from engine.errors import WeightsError
from kernels import ops

NAMES_SHOWN_MAX = 8
INDEX_FILE = "model.safetensors.index.json"
OTHER_FORMATS = (".bin", ".gguf", ".pt", ".pth")
LFS_POINTER = b"version https://git-lfs"
FOREIGN = "the files do not belong to this config.json, or not all were fetched"
SINGLE_FILE = "model.safetensors"


class Destination(Protocol):
    """Converts a tensor of the checkpoint as it is loaded. `num_parameters` and `num_bytes`: what is kept of it, if any."""

    num_parameters: int = 0
    num_bytes: int = 0

    def load(self, tensor: torch.Tensor) -> None:
        """Raises `WeightsError` with what is wrong about shape or type, without the name."""


class StoredLinear(Protocol):
    """A fused linear module whose matrices are not plain tensors: plans what to load, then packs it into a kernel."""

    def plan(self, plan: WeightPlan) -> None: ...

    def pack(self, packer: ops.LinearPacker) -> ops.LinearKernel: ...


class LinearStorage(Protocol):
    """How the linear modules of a model are stored. `modules`: the names and rows of matrices that are stacked into one."""

    def linear(
        self, modules: Sequence[tuple[str, int]], columns: int, *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> StoredLinear | None:
        """None if the module is stored as plain tensors."""


Renamed = tuple[tuple[str, str], ...]
"""Pairs of prefixes of tensor names: in a checkpoint, and here."""


@dataclass(slots=True)
class WeightPlan:
    """`destinations` maps a checkpoint name to the (view of a) tensor that takes it, `tied` the name of a tied tensor to that
    of the tensor it equals; a checkpoint may hold both.

    Checkpoints may leave out `optional_prefix` and the tensors of `optional`; tensors whose names begin with one of `ignored`
    are not needed. `renamed`: prefixes of names in the checkpoint, and here. `storage`: how linear modules are stored, None is
    as plain tensors.
    """

    destinations: dict[str, torch.Tensor | Destination] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    optional_prefix: str = ""
    ignored: tuple[str, ...] = ()
    renamed: Renamed = ()
    optional: set[str] = field(default_factory=set)
    storage: LinearStorage | None = None

    def add(self, name: str, destination: torch.Tensor | Destination, *, optional: bool = False) -> None:
        assert name not in self.destinations, f"two destinations for {name}"
        self.destinations[name] = destination
        if optional:
            self.optional.add(name)

    def name_of(self, stored: str) -> str:
        """The name here of what the checkpoint calls `stored`."""
        stored = rename_prefix(stored, self.renamed)
        whole = self.optional_prefix + stored
        return whole if stored not in self.destinations and whole in self.destinations else stored


@dataclass(frozen=True, slots=True)
class WeightsSize:
    """How much was loaded; tied tensors count once."""

    num_parameters: int
    num_bytes: int

    @classmethod
    def of(cls, plan: WeightPlan) -> WeightsSize:
        sizes = [_size(destination) for destination in plan.destinations.values()]
        return cls(sum(parameters for parameters, _ in sizes), sum(num_bytes for _, num_bytes in sizes))


def _size(destination: torch.Tensor | Destination) -> tuple[int, int]:
    if isinstance(destination, torch.Tensor):
        return destination.numel(), destination.nbytes
    return destination.num_parameters, destination.num_bytes


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a model directory, single or sharded; `WeightsError` when none or some are missing."""
    index_path = directory / INDEX_FILE
    if index_path.is_file():
        weight_map = read_json(index_path).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise WeightsError(f"{index_path} has no weight_map")
        strangers = [name for name in weight_map.values() if not isinstance(name, str) or Path(name).name != name]
        if strangers:
            raise WeightsError(f"{index_path}: weight_map must name files of its own folder, not {strangers[0]!r}")
        files = [directory / name for name in sorted(set(weight_map.values()))]
        for path in files:
            if not os.path.isfile(path):  # unlike `is_file`, false for a name that is too long
                raise WeightsError(f"{path} is missing, and {INDEX_FILE} names it: not all was fetched; fetch it again")
        return files
    if not (directory / SINGLE_FILE).is_file():
        others = sorted(path.name for path in directory.iterdir() if path.suffix in OTHER_FORMATS)
        if others:
            kinds = f"{others[0]} is not read here: fetch or convert the weights as safetensors"
            raise WeightsError(f"{directory} has no {SINGLE_FILE}, and {kinds}")
        raise WeightsError(f"{directory} has no weights: they must be {SINGLE_FILE} or the shards of {INDEX_FILE}")
    return [directory / SINGLE_FILE]


def _unreadable(path: Path, error: Exception) -> WeightsError:
    """What is wrong with a file, and what to do about it."""
    try:
        with path.open("rb") as file:
            start, size = file.read(len(LFS_POINTER)), path.stat().st_size
    except OSError as refused:
        return WeightsError(f"{path} cannot be read: {refused.strerror}")
    if start == LFS_POINTER:
        return WeightsError(f"{path} is a pointer of Git LFS and not the file; fetch it with `git lfs pull`")
    return WeightsError(f"{path} is not a readable safetensors file ({error}): it has {size} bytes; fetch it again")


def stored_names(directory: Path, prefixes: Renamed = ()) -> set[str]:
    """Names of all tensors in the files of a model directory, with these prefixes renamed. Raises `WeightsError`."""
    names: set[str] = set()
    for path in weight_files(directory):
        with _opened(path) as tensors:
            names.update(rename_prefix(name, prefixes) for name in tensors.keys())  # noqa: SIM118 - not a mapping
    return names


def rename_prefix(name: str, prefixes: Renamed) -> str:
    """`name` with the first of these prefixes that it begins with replaced."""
    for stored, own in prefixes:
        if name.startswith(stored):
            return own + name[len(stored) :]
    return name


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """The tensors of one file. What cannot be read of it, now or inside the block, is raised as `WeightsError`."""
    try:
        with safe_open(path, framework="pt") as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise _unreadable(path, error) from error


def _read_ahead(paths: Sequence[Path]) -> None:
    """Have the system read the files that are needed next while others are copied to the device."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(descriptor)


def load_weights(directory: Path, plan: WeightPlan, *, progress: Callable[[float], None]) -> None:
    """Fill all destinations of `plan`. `progress` gets the loaded fraction, from 0 to 1. Raises `WeightsError`."""
    names_read: set[str] = set()
    unexpected: list[str] = []
    tied: dict[str, torch.Tensor] = {}
    files, num_required = weight_files(directory), len(plan.destinations.keys() - plan.optional)
    for number, path in enumerate(files):
        with _opened(path) as tensors:
            _read_ahead(files[number : number + 2])
            for stored in tensors.keys():  # noqa: SIM118 - not a mapping
                name = plan.name_of(stored)
                if name in names_read:
                    raise WeightsError(f"{path.name}: tensor {stored} is in two files")
                names_read.add(name)
                if name in plan.tied:
                    tied[name] = tensors.get_tensor(stored)
                elif not _load_tensor(plan, name, partial(tensors.get_tensor, stored), path):
                    unexpected.append(stored)
                progress(min(1.0, len(names_read) / num_required))
    _check_complete(directory, plan, names_read, unexpected)
    for name, tensor in tied.items():
        _check_tied(plan, name, tensor, directory)


def _load_tensor(plan: WeightPlan, name: str, read: Callable[[], torch.Tensor], path: Path) -> bool:
    """Load one tensor into its destination; False if the plan has none for it."""
    if name.endswith(".rotary_emb.inv_freq") or name.startswith(plan.ignored):
        return True  # the former is a buffer of old checkpoints: computed from the configuration here
    destination = plan.destinations.get(name)
    if destination is None:
        return False
    try:
        if isinstance(destination, torch.Tensor):
            copy_checked(destination, read())
        else:
            destination.load(read())
    except WeightsError as error:
        raise WeightsError(f"{path.name}: tensor {name} {error}") from error
    return True


def copy_checked(destination: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy a tensor of the same shape and the same kind: the codes of a quantised matrix must not be copied as numbers.

    Raises `WeightsError` without the name of the tensor.
    """
    if tensor.shape != destination.shape:
        raise WeightsError(f"has shape {tuple(tensor.shape)}, expected {tuple(destination.shape)} by config.json")
    if tensor.dtype != destination.dtype and not (_is_number(tensor.dtype) and _is_number(destination.dtype)):
        raise WeightsError(
            f"is {tensor.dtype}, expected {destination.dtype}; config.json and the scales must describe quantised weights"
        )
    destination.copy_(tensor)


def _is_number(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize > 1


def _check_tied(plan: WeightPlan, name: str, tensor: torch.Tensor, directory: Path) -> None:
    """A tied tensor may also be in the files, but must then equal the tensor it is tied to: as it was loaded, or on the meta
    device, which keeps no numbers, as it is stored."""
    destination = plan.destinations[plan.tied[name]]
    assert isinstance(destination, torch.Tensor), "tied tensors are plain"
    expected = _stored_tensor(directory, plan, plan.tied[name]).to(destination.dtype) if destination.is_meta else destination
    if not torch.equal(tensor.to(device=expected.device, dtype=expected.dtype), expected):
        raise WeightsError(f"tie_word_embeddings is set, but {name} differs from {plan.tied[name]}")


def _stored_tensor(directory: Path, plan: WeightPlan, name: str) -> torch.Tensor:
    for path in weight_files(directory):
        with _opened(path) as tensors:
            for stored in tensors.keys():  # noqa: SIM118 - not a mapping
                if plan.name_of(stored) == name:
                    tensor: torch.Tensor = tensors.get_tensor(stored)
                    return tensor
    raise AssertionError(f"{name} was read before")


def _check_complete(directory: Path, plan: WeightPlan, names_read: set[str], unexpected: list[str]) -> None:
    missing = sorted(set(plan.destinations) - names_read - plan.optional)
    if missing:
        verb = "tensor is" if len(missing) == 1 else "tensors are"
        raise WeightsError(f"{directory}: {len(missing)} {verb} missing: {_shown(missing)}; {FOREIGN}")
    if unexpected:
        verb = "tensor belongs" if len(unexpected) == 1 else "tensors belong"
        raise WeightsError(
            f"{directory}: {len(unexpected)} {verb} to no part of this model: {_shown(sorted(unexpected))}; {FOREIGN}"
        )


def _shown(names: list[str]) -> str:
    rest = len(names) - NAMES_SHOWN_MAX
    return ", ".join(names[:NAMES_SHOWN_MAX]) + (f" and {rest} more" if rest > 0 else "")
