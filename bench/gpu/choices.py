"""Choices made without a GPU, timed against their alternatives on a card.

No row is judged, and most of the time goes into compiling kernels that are not in service. A row's value is the time of the
choice over that of the fastest candidate, so 1 if it is the fastest; its facts list the microseconds of each. Candidates are
those that could not be ranked by their machine code. One row is a model's rate with an option that operators can set.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from statistics import median
from types import ModuleType
from unittest import mock

import torch

from bench.gpu.context import Context
from bench.gpu.inputs import LLAMA, PRODUCTS, TINY, Pages, make_pages, make_queries, normal, pack_weight, rope_angles
from bench.gpu.layer import CHOSEN, emit_choice, make_layer
from bench.gpu.prefill_by_groups import prefill_by_groups
from bench.gpu.rows import Row
from bench.gpu.serve import head_in_8_bits
from bench.gpu.sooner import SOONER
from bench.gpu.targets import TILE_CHOICES, product_tiles_row, slabs_row
from bench.gpu.timing import Call, seconds
from engine.device import is_lost
from engine.runner.warm_up import compiles_at_first_use, compiling
from kernels.operations import FUSED_ROWS_MAX
from kernels.quantised_weights import Int4Weight, Weight, values_and_scales
from kernels.residual_stream import Stream
from kernels.triton.attention import chunk_splits, lone_decode
from kernels.triton.attention import decode as attention_decode
from kernels.triton.attention import prefill as attention_prefill
from kernels.triton.attention import prefill_hopper as attention_prefill_hopper
from kernels.triton.attention import splits as attention_splits
from kernels.triton.attention.newest_token import Rotation
from kernels.triton.attention.rope_and_cache import rope_and_cache
from kernels.triton.attention.rotated_decode import rotated_decode
from kernels.triton.attention.splits import DecodeTiling
from kernels.triton.launching.card_properties import capability, has_gluon, multiprocessors
from kernels.triton.products import dequantised_slabs, fused_int4, fused_linear
from kernels.triton.products.fused_linear import AnyTiles, linear_add, normed_linear
from kernels.triton.products.fused_row import GemvTiles
from kernels.triton.products.hopper_tiles import OPERAND_ROWS, HopperTiles
from kernels.variants import CompilationFailed

log = logging.getLogger("gatehouse.bench")

ROW_TILES = [GemvTiles(2, 2048), GemvTiles(2, 2048, 8), GemvTiles(4, 1024), GemvTiles(8, 512), GemvTiles(16, 512, 8)]
PREFILL = "prefill 8k: chosen tile over others"
CHAT_TURN = "100 tokens behind 32k: chosen splits over others"
SLAB_ROWS = 600
LAYER = "layer of Llama-8B, 1 row: launches as served over sooner ones"


def measure(context: Context) -> None:
    for kind, row_counts in TILE_CHOICES.items():
        names = [product_tiles_row(kind, rows) for rows in row_counts]
        context.guard(names, partial(_products, context, kind))
    for lengths in ([1024] * 256, [1024]):
        name = f"decode {len(lengths)} × 1k: chosen splits over others"
        context.guard(name, partial(_decode, context, name, lengths))
        name = f"decode {len(lengths)} × 1k with its rotation: chosen launches over others"
        context.guard(name, partial(_rotation, context, name, lengths))
    for kind in ("int8", "int4"):
        name = slabs_row(kind, SLAB_ROWS)
        context.guard(name, partial(_slabs, context, name, kind))
    context.guard(LAYER, lambda: _layer(context))
    context.guard(CHAT_TURN, lambda: _chat_turn(context))
    head = "Llama-3.1-8B int4, head in 8 bits, batch 1"
    context.guard(head, lambda: head_in_8_bits(context, head))
    context.guard(PREFILL, lambda: _prefill(context))


def _products(context: Context, kind: str) -> None:
    """All four products of layers whose weights together exceed the cache, each with the tiles of every candidate, for each
    number of rows."""
    hidden, inner, layers = (32, 48, 1) if context.rehearsal else (4096, 14_336, 4)
    device, dtype = context.device, context.dtype
    sizes = {"qkv": (hidden * 3 // 2, hidden), "out": (hidden, hidden), "gate_up": (2 * inner, hidden), "down": (hidden, inner)}

    def weight(rows: int, columns: int) -> Weight:
        return pack_weight(kind, normal(rows, columns, dtype=dtype, device=device, scale=columns**-0.5))

    weights = {part: [weight(*size) for _ in range(layers)] for part, size in sizes.items()}
    streams = {rows: _stream(context, rows, hidden, weights["out"][0]) for rows in TILE_CHOICES[kind]}
    if compiles_at_first_use(device):
        try:
            with compiling("candidates"):  # nearly a hundred, which one after another take longer than the part may
                for stream, (part, size) in product(streams.values(), sizes.items()):
                    _launch_candidates(context, part, size, weights[part][0], stream)
        except CompilationFailed:
            log.exception("the candidates that are left are compiled one by one")
    for rows, stream in streams.items():
        name, failed = product_tiles_row(kind, rows), dict[str, str]()
        times_s = {part: _candidate_times(context, part, sizes[part], weights[part], stream, failed) for part in sizes}
        fastest = sum(min(part_times_s.values()) for part_times_s in times_s.values())
        row = Row(name=name, value=sum(part_times_s[CHOSEN] for part_times_s in times_s.values()) / fastest)
        row.facts = {
            "us": {part: {case: each * 1e6 for case, each in part_times_s.items()} for part, part_times_s in times_s.items()},
            "failed": failed,
        }
        context.emit(row)


def _stream(context: Context, rows: int, hidden: int, weight: Weight) -> Stream:
    residual = normal(rows, hidden, dtype=context.dtype, device=context.device)
    return linear_add(residual, weight, residual, torch.ones(hidden, dtype=context.dtype, device=context.device))


def _slabs(context: Context, name: str, kind: str) -> None:
    """The four products of a layer for little more than the fewest rows that take slabs, with slabs and in tiles."""
    hidden, inner = (32, 48) if context.rehearsal else (4096, 14_336)
    sizes = [(hidden * 3 // 2, hidden), (hidden, hidden), (2 * inner, hidden), (hidden, inner)]
    rows, device, dtype = context.size(SLAB_ROWS, 3), context.device, context.dtype
    inputs = {columns: normal(rows, columns, dtype=dtype, device=device) for columns in (hidden, inner)}
    weights = [pack_weight(kind, normal(*size, dtype=dtype, device=device, scale=size[1] ** -0.5)) for size in sizes]
    calls: list[Call] = [
        partial(PRODUCTS[kind], inputs[columns], weight) for (_, columns), weight in zip(sizes, weights, strict=True)
    ]
    times_s = {}
    for case, tiled_rows_max in ((CHOSEN, rows - 1), ("tiles", rows)):
        with mock.patch.object(dequantised_slabs, "TILED_ROWS_MAX", tiled_rows_max):
            times_s[case] = len(calls) * median(seconds(calls, device, samples=3))
    emit_choice(context, name, times_s)


def _launch_candidates(context: Context, part: str, size: tuple[int, int], weight: Weight, stream: Stream) -> None:
    """Launch a product once with the chosen tiles and once with each candidate's."""
    call, (rows, _) = _product_call(context, part, size, stream), stream.total.shape
    is_gated = part == "gate_up"
    call(weight)
    for tiles in _candidates(context, weight, size[0] // 2 if is_gated else size[0], rows, gated=is_gated).values():
        with _returning(fused_linear, "choose_tiles", tiles):
            call(weight)


def _product_call(context: Context, part: str, size: tuple[int, int], stream: Stream) -> Callable[[Weight], object]:
    """One of a layer's products, of as many rows as `stream` has, as a function of its weight."""
    rows, hidden = stream.total.shape
    if part not in ("out", "down"):
        return lambda weight: normed_linear(stream, weight, 1e-6, gate="silu" if part == "gate_up" else None)
    x = normal(rows, size[1], dtype=context.dtype, device=context.device)
    norm_weight = torch.ones(hidden, dtype=context.dtype, device=context.device)
    return lambda weight: linear_add(x, weight, stream.total, norm_weight)


def _candidate_times(
    context: Context, part: str, size: tuple[int, int], weights: list[Weight], stream: Stream, failed: dict[str, str]
) -> dict[str, float]:
    """Seconds of a product of as many rows as `stream` has with the chosen tiles, and with other candidates; `failed` gets the
    errors of candidates that cannot run. Raises what fails with the chosen tiles, and what loses the device."""
    is_gated, has_squares_out, rows = part == "gate_up", part in ("out", "down"), len(stream.total)
    outputs, x = size[0] // 2 if is_gated else size[0], torch.empty(rows, size[1], dtype=context.dtype, device=context.device)
    call = _product_call(context, part, size, stream)
    chosen = fused_linear.choose_tiles(x, weights[0], outputs, gated=is_gated, has_squares_out=has_squares_out)
    calls: list[Call] = [partial(call, weight) for weight in weights]
    times_s = {CHOSEN: median(seconds(calls, context.device))}
    for label, tiles in _candidates(context, weights[0], outputs, rows, gated=is_gated).items():
        if tiles != chosen:
            try:
                with _returning(fused_linear, "choose_tiles", tiles):
                    times_s[label] = median(seconds(calls, context.device, samples=3))
            except Exception as error:
                if is_lost(context.device):
                    error.add_note(f"{part} with {label}")
                    raise
                failed[f"{part}, {label}"] = f"{type(error).__name__}: {str(error)[:300]}"
    return times_s


def _candidates(context: Context, weight: Weight, outputs: int, rows: int, *, gated: bool) -> dict[str, AnyTiles]:
    """Tiles that load weights through shared memory (4 bits, and 8 bits for more than one row); into registers (one row of 16
    and 8 bits); as operands of tensor cores, with different numbers of warps and outputs (Hopper, 8 and 4 bits)."""
    candidates: dict[str, AnyTiles] = {}
    if rows == 1 and not isinstance(weight, Int4Weight):
        candidates = {f"{each.block_n}x{each.block_k} of {each.num_warps} warps": each for each in ROW_TILES}
    elif isinstance(weight, Int4Weight):
        tiles = fused_int4.fused_int4_tiles(outputs, weight.num_columns, multiprocessors(context.device), gated=gated)
        candidates = {"through shared memory": tiles}
    else:
        values, card = values_and_scales(weight)[0], (capability(context.device), multiprocessors(context.device))
        sizes = {"gated": gated, "weight_bytes": values.element_size()}
        candidates = {"through shared memory": fused_linear.fused_tiles(outputs, values.shape[1], *card, **sizes)}
    if not isinstance(weight, torch.Tensor) and not context.rehearsal and has_gluon(context.device):
        padded = 1 if rows == 1 else -(-rows // OPERAND_ROWS) * OPERAND_ROWS
        candidates |= {
            f"operands, {block_n} outputs, {warps} warps of {registers} registers": HopperTiles(
                warps, registers, block_n, padded
            )
            for block_n in ((16,) if rows == 1 else (16, 32))
            for warps, registers in ((2, 128), (4, 128), (8, 128), *(((4, 168), (8, 168)) if rows > 8 else ()))
        }
    return candidates


def _layer(context: Context) -> None:
    """Layers of one row whose kernels trigger the next one before they end (`bench.gpu.sooner`)."""
    run, layers = make_layer(context, "Llama-8B", 1)
    times_s = {CHOSEN: median(seconds([run], context.device, samples=3))}
    for way, begin in SOONER.items():
        with begin():
            times_s[way] = median(seconds([run], context.device, samples=3))
    emit_choice(context, LAYER, {case: time_s / layers for case, time_s in times_s.items()})


def _decode(context: Context, name: str, lengths: list[int]) -> None:
    """Other split sizes and other numbers of programs per multiprocessor, over KV caches larger than the L2 cache."""
    shape, device = (TINY if context.rehearsal else LLAMA), context.device
    lengths = [20, 5] if context.rehearsal else lengths
    copies = context.size(2 if len(lengths) > 1 else 32, 1)
    caches = [make_pages(lengths, shape, dtype=context.dtype, device=device) for _ in range(copies)]
    q = make_queries(caches[0], len(lengths), context.dtype)
    chosen = attention_splits.shape_tiling(shape, context.dtype, 1, device)
    cases = {
        CHOSEN: chosen,
        "splits of half the size": replace(chosen, split=max(chosen.tile, chosen.split // 2)),
        "splits of twice the size": replace(chosen, split=2 * chosen.split),
        "one program less": replace(chosen, programs=chosen.programs - 1),
    }

    def median_s(tiling: DecodeTiling) -> float:
        with _returning(attention_splits, "shape_tiling", tiling), _returning(attention_decode, "shape_tiling", tiling):
            width = caches[0].tables.shape[1]
            workspace = attention_splits.decode_workspace(shape, len(lengths), width, context.dtype, device)
            decode = attention_decode.paged_decode
            calls: list[Call] = [
                partial(decode, q, pages.cache, pages.tables, pages.context_lens, shape, workspace=workspace)
                for pages in caches
            ]
            return median(seconds(calls, device, samples=3))

    emit_choice(context, name, {case: median_s(tiling) for case, tiling in cases.items()})


def _rotation(context: Context, name: str, lengths: list[int]) -> None:
    """The operations between a layer's projection and its next product, fused and separate."""
    shape, device, num_requests = (TINY if context.rehearsal else LLAMA), context.device, len(lengths)
    lengths = [20, 5] if context.rehearsal else lengths
    copies = context.size(2 if len(lengths) > 1 else 32, 1)
    caches = [make_pages(lengths, shape, dtype=context.dtype, device=device) for _ in range(copies)]
    workspace = attention_splits.decode_workspace(shape, len(lengths), caches[0].tables.shape[1], context.dtype, device)
    heads, size = shape.num_heads, shape.head_dim
    qkv = normal(len(lengths), heads + 2 * shape.num_kv_heads, size, dtype=context.dtype, device=device)
    cos, sin = rope_angles(len(lengths), size, context.dtype, device)
    slots = torch.arange(len(lengths), device=device) * shape.block_size

    def two_launches(pages: Pages) -> None:
        rope_and_cache(qkv, cos, sin, pages.cache, slots, num_kv_heads=shape.num_kv_heads, rotary_dim=size)
        args = (qkv[:, :heads], pages.cache, pages.tables, pages.context_lens, shape)
        attention_decode.paged_decode(*args, workspace=workspace)

    def one_launch(pages: Pages) -> None:
        args = (qkv, cos, sin, pages.cache, slots, pages.tables, pages.context_lens, shape)
        rotated_decode(*args, rotary_dim=size, workspace=workspace)

    def separate_merge(pages: Pages) -> None:
        out = torch.empty_like(qkv[:, :heads])
        args = (qkv, pages.cache, pages.tables, pages.context_lens, shape, out, workspace)
        attention_decode.launch_decode(*args, rotation=Rotation(cos, sin, slots, None, None, 0.0, size))

    cases = {CHOSEN: one_launch, "two launches": two_launches}
    if num_requests == 1:
        cases["splits, then their merge"] = separate_merge
    if num_requests > FUSED_ROWS_MAX:  # `PagedPlan.takes_projections`
        cases = {CHOSEN: two_launches, "one launch": one_launch}

    def median_s(call: Callable[[Pages], None]) -> float:
        return median(seconds([partial(call, pages) for pages in caches], device, samples=3))

    times_s = {case: median_s(call) for case, call in cases.items()}
    if num_requests == 1:
        with mock.patch.object(lone_decode, "TILE_ELEMENTS", lone_decode.TILE_ELEMENTS // 2):
            times_s["tiles of half the size"] = median_s(one_launch)
    emit_choice(context, name, times_s)


def _prefill(context: Context) -> None:
    """Alternatives without overlap, in plain Triton, which waits for each product: the same tile, and tiles of half the queries
    or keys, where one program of a multiprocessor exponentiates while another multiplies. Last, a kernel not in service."""
    shape, length = (TINY if context.rehearsal else LLAMA), context.size(8192, 20)
    pages = make_pages([length], shape, dtype=context.dtype, device=context.device)
    q = make_queries(pages, length, context.dtype)
    starts = torch.tensor([0, length], dtype=torch.int32, device=context.device)
    sizes = (shape.head_dim, pages.cache.element_size(), length * shape.group)
    chosen = attention_prefill.prefill_tiling(*sizes, False, capability(context.device))
    cases = {
        CHOSEN: chosen,
        "no overlap": chosen,
        "128 × 64": replace(chosen, rows=128, keys=64, num_warps=8),
        "64 × 64": replace(chosen, rows=64, keys=64, num_warps=4),
        "64 × 128": replace(chosen, rows=64, keys=128, num_warps=4),
    }
    prefill = partial(
        attention_prefill.paged_prefill, q, pages.cache, pages.tables, starts, pages.context_lens, shape, max_query_len=length
    )
    times_s = {}
    for case, tiling in cases.items():
        with _returning(attention_prefill, "prefill_tiling", tiling), nullcontext() if case == CHOSEN else _not_overlapped():
            times_s[case] = median(seconds([prefill], context.device, samples=3))
    emit_choice(context, PREFILL, times_s)
    rows, card = attention_prefill_hopper.ROWS, capability(context.device)
    if not context.rehearsal and attention_prefill_hopper.is_overlapped(shape, pages.cache.element_size(), rows, card):
        with mock.patch.object(attention_prefill_hopper, "overlapped_prefill", prefill_by_groups):
            times_s["groups of warps"] = median(seconds([prefill], context.device, samples=3))
        emit_choice(context, PREFILL, times_s)


def _chat_turn(context: Context) -> None:
    """A chat turn after its cached prefix: keys without splits, with half as many and with twice as many splits, and by the
    kernel without overlap."""
    shape, count, length = (TINY if context.rehearsal else LLAMA), context.size(100, 9), context.size(32_768, 140)
    pages = make_pages([length], shape, dtype=context.dtype, device=context.device)
    q = make_queries(pages, count, context.dtype)
    starts = torch.tensor([0, count], dtype=torch.int32, device=context.device)
    chat_turn = partial(
        attention_prefill.paged_prefill, q, pages.cache, pages.tables, starts, pages.context_lens, shape, max_query_len=count
    )
    choose, split_keys = chunk_splits.max_tile_splits, context.size(chunk_splits.SPLIT_KEYS, 32)

    def median_s(splits: Callable[[int], int], *, overlapped: bool = True) -> float:
        with (
            mock.patch.object(chunk_splits, "SPLIT_KEYS", split_keys),
            mock.patch.object(chunk_splits, "max_tile_splits", lambda *sizes, **known: splits(choose(*sizes, **known))),
            nullcontext() if overlapped else _not_overlapped(),
        ):
            return median(seconds([chat_turn], context.device, samples=3))

    cases = {
        CHOSEN: median_s(lambda chosen: chosen),
        "no splits": median_s(lambda _: 1),
        "half as many": median_s(lambda chosen: max(1, chosen // 2)),
        "twice as many": median_s(lambda chosen: 2 * chosen),
        "no overlap": median_s(lambda chosen: chosen, overlapped=False),
    }
    emit_choice(context, CHAT_TURN, cases)


def _returning(module: ModuleType, name: str, value: object) -> AbstractContextManager[object]:
    """Inside the block the function `name` of a module returns `value`."""
    return mock.patch.object(module, name, mock.Mock(return_value=value))


def _not_overlapped() -> AbstractContextManager[object]:
    """Inside the block a prefill on Hopper is served by the kernel of the other cards."""
    return _returning(attention_prefill_hopper, "is_overlapped", False)
