"""A tensor that reports an NVIDIA GPU as its device and is stored in main memory: operations on it are launched, not computed.

`CardTensor` wraps a CPU tensor, `data_on_host`. `dispatch` receives every torch operation that uses or creates one:

- views are created at once, as they read nothing;
- outputs of operations are allocated, filled with garbage, with the shapes from torch's meta device, and the computation is
  launched on the current stream;
- operations that need a value on the host wait for the stream, and the wait is recorded;
- copies from and to the host are handled separately; as on a GPU, any other use of a host tensor is an error, except of scalars
  (tensors without dimensions) and indices, which torch copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.sampling_columns import SamplingColumns
from tests.support.rehearsal.card import current_card
from tests.support.rehearsal.indexing import get_item, is_mask, split_index
from tests.support.rehearsal.leaves import leaves_of, map_leaves
from tests.support.rehearsal.memory import Memory, allocate_garbage, fill_with_garbage, is_page_locked, make_page_locked
from tests.support.rehearsal.missing import refuse_missing
from tests.support.rehearsal.shapes import Geometry, output_geometry
from tests.support.rehearsal.writes import run_operation

aten = torch.ops.aten
DEVICE = torch.device("cuda", 0)
CPU = torch.device("cpu")

# Output sizes or results depend on values: on a GPU, torch waits for these.
SYNCHRONOUS = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::_unique2", "aten::unique_dim",
    "aten::unique_consecutive", "aten::unique_dim_consecutive", "aten::repeat_interleave", "aten::bincount",
}  # fmt: skip
# Not decomposed: torch would decompose the first for the device that it reports, and the others without need.
NOT_DECOMPOSED = {"aten::scaled_dot_product_attention", "aten::rms_norm", "aten::linear", "aten::matmul"}
EMPTY = {"aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty", "aten::new_empty_strided"}
# cuBLAS computes them.
PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::linear", "aten::matmul"}
INDEXED = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}


class CardTensor(torch.Tensor):
    """`data_on_host`: the same tensor in main memory; `memory`: its allocation."""

    data_on_host: torch.Tensor
    memory: Memory

    @staticmethod
    def __new__(cls, data: torch.Tensor, memory: Memory | None = None) -> CardTensor:
        with torch._C._InferenceMode(False):  # else torch could not make views of it in inference mode
            found: CardTensor = torch.Tensor._make_wrapper_subclass(
                cls, data.size(), strides=data.stride(), storage_offset=data.storage_offset(), dtype=data.dtype, device=DEVICE
            )
        found.data_on_host = data
        found.memory = memory or Memory(current_card(), data)
        return found

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return dispatch(func, args, kwargs or {}, mode())

    def data_ptr(self) -> int:
        return self.data_on_host.data_ptr()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError(
            "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first."
        )

    def __array__(self, *_: Any, **__: Any) -> Any:
        return self.numpy()

    # In these methods torch needs its CUDA library before it dispatches.

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> CardTensor:
        found: CardTensor = aten.copy_.default(self, source, non_blocking)
        return found

    def contiguous(self, *_: Any, **__: Any) -> torch.Tensor:
        return self if self.is_contiguous() else self.clone(memory_format=torch.contiguous_format)

    def nonzero(self, *, as_tuple: bool = False) -> Any:
        found = aten.nonzero.default(self)
        return found.unbind(1) if as_tuple else found

    def __invert__(self) -> torch.Tensor:
        return self.bitwise_not()

    def __contains__(self, value: Any) -> bool:
        return bool((self == value).any())

    def __bool__(self) -> bool:
        return bool(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __float__(self) -> float:
        return float(self.item())

    __index__ = __int__

    def __format__(self, words: str) -> str:
        return format(self.item(), words) if self.dim() == 0 else object.__format__(self, words)

    def is_pinned(self, *_: Any) -> bool:
        return False

    def record_stream(self, stream: Any) -> None:
        self.memory.streams.append(stream)

    def __getitem__(self, key: Any) -> Any:
        return get_item(self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        place, indices = split_index(self, key)
        if isinstance(value, torch.Tensor) and not indices:
            value = value.view(value.shape[max(0, value.dim() - place.dim()) :])  # leading dimensions of 1 are ignored
        if not isinstance(value, torch.Tensor):
            if not indices:  # a scalar is copied from main memory, synchronously (THPVariable_setitem)
                place.copy_(torch.tensor(value, dtype=self.dtype))
                return
            value = torch.full((), value, dtype=self.dtype)
        if indices:
            aten.index_put_.default(place, indices, value)
        else:
            place.copy_(value)

    def __repr__(self, *_: Any, **__: Any) -> str:  # type: ignore[override]
        return f"CardTensor({self.data_on_host!r} as of now)"

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.clone()


class RehearsalMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Intercepts factory functions, for tensors on the card or in page-locked memory."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled, and torch's compiler takes seconds to import

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {}, self)


def mode() -> RehearsalMode:
    return RehearsalMode()  # type: ignore[no-untyped-call]


def dispatch(func: Any, args: Sequence[Any], kwargs: dict[str, Any], mode: TorchDispatchMode) -> Any:
    """Execute a torch operation as on a GPU."""
    name = func._schema.name
    if name == "aten::is_pinned":
        return not isinstance(args[0], CardTensor) and is_page_locked(args[0])
    if name in ("aten::pin_memory", "aten::_pin_memory"):
        return args[0] if is_page_locked(args[0]) else make_page_locked(args[0])
    kinds = {type(each) for each in leaves_of((args, kwargs))}
    on_card = CardTensor in kinds
    device = kwargs.get("device")
    wanted = None if device is None else torch.device(device)
    if not on_card and (wanted is None or wanted.type != "cuda"):
        if kwargs.get("pin_memory"):
            found = func(*args, **{**kwargs, "pin_memory": False})
            if name in EMPTY:
                fill_with_garbage(found)
            return make_page_locked(found)
        return func(*args, **kwargs)
    refuse_missing(name, (args, kwargs))
    if name not in NOT_DECOMPOSED and _can_decompose(func):
        args, kwargs = map_leaves(_with_index, (args, kwargs))
        with mode:
            found = func.decompose(*args, **kwargs)
        if found is not NotImplemented:
            return found
    special = HANDLERS.get(name)
    if special is not None:
        return special(func, args, kwargs)
    if on_card and any(kind is not CardTensor and issubclass(kind, torch.Tensor) for kind in kinds):
        args, kwargs = map_leaves(lambda each: _of_one_device(name, each), (args, kwargs))
    if name in SYNCHRONOUS or (name in INDEXED and _has_mask(args)):
        return _run_synchronously(func, args, kwargs)
    if _is_view(func):
        return _view(func, args, kwargs)
    return _launch(func, args, kwargs)


@cache
def _can_decompose(func: Any) -> bool:
    return bool(func._can_decompose())


def _with_index(value: Any) -> Any:
    """Resolve `cuda`, for which torch would ask its CUDA library."""
    return DEVICE if isinstance(value, torch.device) and value.type == "cuda" else value


def to_host(value: Any) -> Any:
    """Arguments for execution: tensors in main memory, and the CPU as the device."""
    if isinstance(value, CardTensor):
        return value.data_on_host
    if isinstance(value, torch.device):
        return CPU
    if isinstance(value, SamplingColumns):
        return replace(value, **{each.name: to_host(getattr(value, each.name)) for each in fields(value)})
    return value


def refuse_host(values: Any) -> None:
    """Raise Triton's error for pageable host memory; kernels can access page-locked memory."""
    for each in leaves_of(values):
        if isinstance(each, torch.Tensor) and not isinstance(each, CardTensor) and not is_page_locked(each):
            raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")


def _host_arguments(args: Any, kwargs: Any) -> tuple[Any, Any]:
    if kwargs:
        kwargs = map_leaves(to_host, {name: value for name, value in kwargs.items() if name != "pin_memory"})
    return map_leaves(to_host, args), kwargs


def _of_one_device(name: str, value: Any) -> Any:
    """Raise torch's error for a host tensor among device tensors; scalars are passed by their current value."""
    if not isinstance(value, torch.Tensor) or isinstance(value, CardTensor):
        return value
    if value.dim() == 0:
        return value.clone()  # a launch copies the value
    if name in INDEXED:
        return _copy_indices(value)
    raise RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! ({name})"
    )


def _copy_indices(index: torch.Tensor) -> torch.Tensor:
    """Copy host indices to the card, as torch does, from pageable memory."""
    return _from_host(index.clone(), index.dtype, non_blocking=False, pageable=True)


def _has_mask(args: Any) -> bool:
    return any(is_mask(each) for each in args[1] if each is not None)


@cache
def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(each.alias_info is not None and not each.alias_info.is_write for each in returns)


def _view(func: Any, args: Any, kwargs: Any) -> Any:
    base = (
        args[0] if isinstance(args[0], CardTensor) else next(each for each in leaves_of(args) if isinstance(each, CardTensor))
    )
    host_args, host_kwargs = _host_arguments(args, kwargs)
    with torch._C._InferenceMode(True):
        found = func(*host_args, **host_kwargs)
    return map_leaves(lambda each: CardTensor(each, base.memory) if isinstance(each, torch.Tensor) else each, found)


def _run_synchronously(func: Any, args: Any, kwargs: Any) -> Any:
    """Wait for the stream, because the host needs a value, and compute."""
    current_card().wait_for_value(func._schema.name)
    return compute_now(func, args, kwargs)


def compute_now(func: Any, args: Any, kwargs: Any) -> Any:
    """Compute at once; new tensors are on the card, and returned arguments keep their identity."""
    host_args, host_kwargs = _host_arguments(args, kwargs)
    with torch.inference_mode():
        found = func(*host_args, **host_kwargs)
    given = {id(each.data_on_host): each for each in leaves_of((args, kwargs)) if isinstance(each, CardTensor)}

    def wrapped(each: Any) -> Any:
        return (given[id(each)] if id(each) in given else CardTensor(each)) if isinstance(each, torch.Tensor) else each

    return map_leaves(wrapped, found)


def refuse_written_inference(tensor: Any) -> None:
    """Raise torch's error for a tensor that was made in inference mode and is written outside of it. Kernels of Triton may."""
    if isinstance(tensor, CardTensor) and tensor.memory.is_inference and not torch.is_inference_mode_enabled():
        raise RuntimeError("Inplace update to inference tensor outside InferenceMode is not allowed.")


def _launch(func: Any, args: Any, kwargs: Any) -> Any:
    schema = func._schema
    if schema.name in PRODUCTS:
        current_card().allocate_blas_workspace()
    host_args, host_kwargs = _host_arguments(args, kwargs)
    written = _written_arguments(func, args, kwargs)
    for each in written:
        refuse_written_inference(each)
    if written or not schema.returns:
        current_card().stream.add(lambda: run_operation(func, host_args, host_kwargs))
        return None if not schema.returns else written[0] if len(schema.returns) == 1 else tuple(written)
    shapes = output_geometry(func, args, kwargs)
    if shapes is None:
        current_card().computed_early.add(schema.name)
        current_card().drain()
        outs = compute_now(func, args, kwargs)
    else:
        outs = map_leaves(lambda each: CardTensor(allocate_garbage(*each.of)) if isinstance(each, Geometry) else each, shapes)
    if schema.name in EMPTY:
        return outs
    if isinstance(outs, CardTensor):
        only = outs.data_on_host
        current_card().stream.add(lambda: only.copy_(func(*host_args, **host_kwargs)))
        return outs
    places = [each.data_on_host if isinstance(each, CardTensor) else None for each in leaves_of(outs)]

    def fill() -> None:
        found = leaves_of(func(*host_args, **host_kwargs))
        for place, each in zip(places, found, strict=True):
            if place is not None:
                place.copy_(each)

    current_card().stream.add(fill)
    return outs


def _written_arguments(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The arguments that are also outputs, in the order of outputs."""
    return [
        args[index] if index is not None and index < len(args) else kwargs.get(name) for index, name in _output_arguments(func)
    ]


@cache
def _output_arguments(func: Any) -> list[tuple[int | None, str]]:
    """Index (None if keyword-only) and name of each argument that is also an output."""
    schema = func._schema
    by_set: dict[str, tuple[int | None, str]] = {}
    for index, each in enumerate(schema.arguments):
        if each.alias_info is not None and each.alias_info.is_write:
            for name in each.alias_info.before_set:
                by_set[name] = None if each.kwarg_only else index, each.name
    for each in schema.returns:
        assert bool(each.alias_info) == bool(by_set), f"{schema.name} has results of both kinds"
    return [by_set[next(iter(each.alias_info.before_set))] for each in schema.returns if each.alias_info is not None]


def _from_host(source: torch.Tensor, dtype: torch.dtype, *, non_blocking: bool, pageable: bool) -> CardTensor:
    out = CardTensor(allocate_garbage(source.size(), source.contiguous().stride(), dtype))
    copy_from_host(out, source, non_blocking=non_blocking, pageable=pageable)
    return out


def copy_from_host(target: CardTensor, source: torch.Tensor, *, non_blocking: bool, pageable: bool | None = None) -> None:
    """Copy to the card. Only contiguous page-locked memory of the same dtype is read asynchronously; anything else is first
    copied to pageable memory, as by torch."""
    card, place = current_card(), target.data_on_host
    if pageable is None:
        pageable = not is_page_locked(source)
    direct = source.dtype == place.dtype and source.is_contiguous() and place.is_contiguous() and source.shape == place.shape
    if pageable or not direct:
        card.refuse_in_capture("a copy from pageable memory")
        card.note("copy from pageable memory")
        source = source.clone()
    card.stream.add(lambda: place.copy_(source))
    if not non_blocking:
        card.wait_for_value("copy to the card")


def copy_to_host(target: torch.Tensor, source: CardTensor, *, non_blocking: bool) -> None:
    card, place = current_card(), source.data_on_host
    direct = target.dtype == place.dtype and target.is_contiguous() and place.is_contiguous() and target.shape == place.shape
    is_async = non_blocking and is_page_locked(target) and direct
    if not is_async:
        card.refuse_in_capture("a copy to pageable memory")
    card.stream.add(lambda: target.copy_(place))
    if not is_async:
        card.wait_for_value("copy to the host")


def _copy(func: Any, args: Any, kwargs: Any) -> Any:
    target, source, *rest = args
    non_blocking = bool(rest[0] if rest else kwargs.get("non_blocking", False))
    torch.empty(source.shape, device="meta").expand(target.shape)  # raises if the shapes do not match
    refuse_written_inference(target)
    if isinstance(target, CardTensor) and isinstance(source, CardTensor):
        to, of = target.data_on_host, source.data_on_host
        current_card().stream.add(lambda: to.copy_(of))
    elif isinstance(target, CardTensor):
        if source.dim() == 0 and not is_page_locked(source):
            value, to = source.clone(), target.data_on_host
            current_card().note("copy from pageable memory")
            current_card().refuse_in_capture("a copy from pageable memory")
            current_card().stream.add(lambda: to.copy_(value))
        else:
            copy_from_host(target, source, non_blocking=non_blocking)
    else:
        copy_to_host(target, source, non_blocking=non_blocking)
    return target


def _to_copy(func: Any, args: Any, kwargs: Any) -> Any:
    source = args[0]
    dtype = kwargs.get("dtype") or source.dtype
    device = torch.device(kwargs.get("device") or source.device)
    non_blocking = bool(kwargs.get("non_blocking"))
    if not isinstance(source, CardTensor):
        return _from_host(source, dtype, non_blocking=non_blocking, pageable=None if is_page_locked(source) else True)  # type: ignore[arg-type]
    if device.type == "cuda":
        kept = {name: value for name, value in kwargs.items() if name not in ("device", "non_blocking", "pin_memory")}
        return _launch(func, args, kept)
    if dtype != source.dtype:
        source = source.to(dtype)
    target = torch.empty(source.size(), dtype=dtype)
    if non_blocking:
        target = make_page_locked(target)  # as torch does
    copy_to_host(target, source, non_blocking=non_blocking)
    return target


def _lift(func: Any, args: Any, kwargs: Any) -> Any:
    return args[0]


HANDLERS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "aten::copy_": _copy, "aten::_to_copy": _to_copy, "aten::lift_fresh": _lift,
    "aten::detach_": _lift,
}  # fmt: skip
