"""Row operations' errors against the float32 reference, relative to torch's in the same dtype; block copies and step inputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from bench.gpu.context import Context
from bench.gpu.errors import ResultPair, ResultTriple, check_equal, check_errors, check_invariant
from bench.gpu.inputs import FP8, normal, rope_angles
from bench.gpu.timing import capture
from kernels.host_tokens import HostTokens
from kernels.reference import activation as exact
from kernels.reference import blocks as exact_blocks
from kernels.reference import decode_inputs as exact_inputs
from kernels.reference import norm as exact_norm
from kernels.reference.rope_and_cache import rope_and_cache as exact_rope
from kernels.triton.attention.rope_and_cache import rope_and_cache
from kernels.triton.rows import activation, norm
from kernels.triton.rows.fp8 import quantize_rows_fp8
from kernels.triton.step import blocks
from kernels.triton.step import inputs as decode_inputs
from kernels.triton.step.embedding import embed

EPS = 1e-6
HOST_TOKENS = "tokens left for the host"
REPLAYED = 64
"""Replays of a graph that writes tokens: far more than `HostTokens` has places."""


def check(context: Context) -> None:
    """Check first the operations on which every engine step depends: if tokens are wrong, so are all rows of the engines."""
    check_equal(
        context,
        HOST_TOKENS,
        [("launched", lambda: _host_tokens(context)), ("replayed", lambda: _host_tokens_of_graph(context))],
    )
    widths = [64] if context.rehearsal else [1024, 2048, 4096, 12288]
    rows = [1, 5] if context.rehearsal else [1, 7, 17, 333]
    sizes = [(count, width) for width in widths for count in rows]
    inner = [48] if context.rehearsal else [3072, 8192, 14336]
    gates = [(count, width) for width in inner for count in rows]

    def cases(
        make: Callable[[Context, int, int], ResultTriple], over: list[tuple[int, int]]
    ) -> list[tuple[str, Callable[[], ResultTriple]]]:
        return [(f"{count} × {width}", partial(make, context, count, width)) for count, width in over]

    check_errors(context, "rms norm", cases(_rms_norm, sizes))
    check_errors(context, "add + rms norm", cases(_add_norm, sizes))
    check_errors(context, "add + rms norm to fp8", cases(_add_norm_fp8, sizes))
    check_errors(context, "quantise rows to fp8", cases(_quantise, sizes))
    check_errors(context, "silu·mul", cases(_silu, gates))
    check_errors(context, "silu·mul to fp8", cases(_silu_fp8, gates))
    check_errors(context, "gelu·mul", cases(_gelu, gates))
    check_errors(context, "embedding", cases(_embedding, sizes))
    for name, variant in (("rope, QK-norm and KV write", {"normed": True}), ("rope and KV write, fp8 KV", {"fp8": True})):
        check_errors(context, name, [(f"{count} tokens", partial(_rope, context, count, **variant)) for count in rows[:3]])
    check_invariant(context, "rms norm", [(str(width), partial(_norm_alone_and_batched, context, width)) for width in widths])
    check_invariant(context, "rope and KV write", [("9 tokens", lambda: _rope_alone_and_batched(context))])
    check_equal(context, "step inputs", [("slots", lambda: _step_inputs(context))])
    check_equal(context, "block copy", [("layers", lambda: _copy(context))])
    check_equal(context, "block gather and scatter", [("there and back", lambda: _gather_and_scatter(context))])


def _rows(context: Context, count: int, width: int) -> torch.Tensor:
    return normal(count, width, dtype=context.dtype, device=context.device)


def _rms_norm(context: Context, count: int, width: int) -> ResultTriple:
    x, weight = _rows(context, count, width), _rows(context, 1, width)[0]
    theirs = functional.rms_norm(x, (width,), weight, EPS)
    return norm.rms_norm(x, weight, EPS), exact_norm.rms_norm(x.float(), weight, EPS), theirs


def _add_norm(context: Context, count: int, width: int) -> ResultTriple:
    x, residual, weight = _rows(context, count, width), _rows(context, count, width), _rows(context, 1, width)[0]
    total = x + residual
    theirs = (functional.rms_norm(total, (width,), weight, EPS), total)
    wide = exact_norm.add_rms_norm(x.float(), residual.float(), weight, EPS)
    return norm.add_rms_norm(x, residual, weight, EPS), wide, theirs


def _add_norm_fp8(context: Context, count: int, width: int) -> ResultTriple:
    x, residual, weight = _rows(context, count, width), _rows(context, count, width), _rows(context, 1, width)[0]
    values, scales, _ = norm.add_rms_norm_fp8(x, residual, weight, EPS)
    wide = exact_norm.add_rms_norm(x.float(), residual.float(), weight, EPS)[0]
    return _dequantise_rows(values, scales), wide, _torch_fp8(functional.rms_norm(x + residual, (width,), weight, EPS))


def _quantise(context: Context, count: int, width: int) -> ResultTriple:
    x = _rows(context, count, width)
    return _dequantise_rows(*quantize_rows_fp8(x)), x.float(), _torch_fp8(x)


def _silu(context: Context, count: int, width: int) -> ResultTriple:
    x = _rows(context, count, 2 * width)
    return activation.silu_mul(x), exact.silu_mul(x.float()), functional.silu(x[:, :width]) * x[:, width:]


def _silu_fp8(context: Context, count: int, width: int) -> ResultTriple:
    x = _rows(context, count, 2 * width)
    theirs = functional.silu(x[:, :width]) * x[:, width:]
    return _dequantise_rows(*activation.silu_mul_fp8(x)), exact.silu_mul(x.float()), _torch_fp8(theirs)


def _gelu(context: Context, count: int, width: int) -> ResultTriple:
    x = _rows(context, count, 2 * width)
    theirs = functional.gelu(x[:, :width], approximate="tanh") * x[:, width:]
    return activation.gelu_tanh_mul(x), exact.gelu_tanh_mul(x.float()), theirs


def _embedding(context: Context, count: int, width: int) -> ResultTriple:
    table = _rows(context, 97, width)
    ids = torch.randint(0, 97, (count,), device=context.device)
    return embed(ids, table), table.float()[ids], functional.embedding(ids, table)


def _dequantise_rows(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The e4m3 rows multiplied by their scales, in the dtype in which errors are measured."""
    assert values.dtype is FP8
    return values.float() * scales


def _torch_fp8(x: torch.Tensor) -> torch.Tensor:
    """Rows rounded to e4m3 by torch: one pass for the maximum of each row, one for the quotient."""
    scales = x.float().abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / 448
    return _dequantise_rows((x.float() / scales).to(FP8), scales)


def _rope_inputs(context: Context, count: int, *, fp8: bool) -> dict[str, Any]:
    heads, kv_heads, size = (4, 2, 32) if context.rehearsal else (32, 8, 128)
    device, dtype = context.device, context.dtype
    cos, sin = rope_angles(count, size, dtype, device)
    slots = torch.randperm(count + 20, device=device)[:count]
    slots[count // 2] = -1  # padding: no key or value is written
    return {
        "qkv": normal(count, heads + 2 * kv_heads, size, dtype=dtype, device=device),
        "cos": cos,
        "sin": sin,
        "kv_cache": torch.zeros(count // 16 + 2, 16, 2, kv_heads, size, dtype=FP8 if fp8 else dtype, device=device),
        "slot_mapping": slots,
        "num_kv_heads": kv_heads,
        "rotary_dim": size,
    }


def _rope(context: Context, count: int, *, normed: bool = False, fp8: bool = False) -> ResultTriple:
    inputs = _rope_inputs(context, count, fp8=fp8)
    if normed:
        weights = _rows(context, 2, inputs["rotary_dim"])
        inputs |= {"q_weight": weights[0], "k_weight": weights[1], "eps": EPS}
    if fp8:
        inputs["kv_scales"] = torch.tensor([0.5, 2.0], device=context.device)
    wide = {**inputs, "qkv": inputs["qkv"].float(), "kv_cache": torch.zeros_like(inputs["kv_cache"], dtype=torch.float32)}
    exact_rope(**{**wide, "kv_scales": None})
    if fp8:  # the reference itself rounds to e4m3: its unrounded result, divided by the scales, is the exact one
        wide["kv_cache"] = wide["kv_cache"] / inputs["kv_scales"].view(2, 1, 1)
    theirs = _torch_rope({**inputs, "qkv": inputs["qkv"].clone(), "kv_cache": inputs["kv_cache"].clone()})
    rope_and_cache(**inputs)
    ours = [inputs["qkv"], inputs["kv_cache"].to(torch.float32 if fp8 else context.dtype)]
    return ours, [wide["qkv"], wide["kv_cache"]], theirs


def _torch_rope(inputs: dict[str, Any]) -> list[torch.Tensor]:
    """The computation as transformers does it: normalise, rotate by halves, write; all in the model's dtype."""
    qkv, kv_heads, size = inputs["qkv"], inputs["num_kv_heads"], inputs["rotary_dim"]
    heads = qkv.shape[1] - 2 * kv_heads
    for weight, part in (("q_weight", slice(0, heads)), ("k_weight", slice(heads, heads + kv_heads))):
        if weight in inputs:
            qkv[:, part] = functional.rms_norm(qkv[:, part], (size,), inputs[weight], EPS)
        x = qkv[:, part]
        qkv[:, part] = x * inputs["cos"] + x.roll(size // 2, dims=-1) * inputs["sin"]
    cache, slots = inputs["kv_cache"], inputs["slot_mapping"]
    kept = slots >= 0
    written = qkv[kept, heads:].unflatten(1, (2, kv_heads))
    if "kv_scales" in inputs:
        written = written.float() / inputs["kv_scales"].view(2, 1, 1)
    flat = cache.to(torch.float32 if cache.dtype is FP8 else cache.dtype).flatten(0, 1)
    flat[slots[kept]] = written.to(cache.dtype).to(flat.dtype)
    return [qkv, flat.view(cache.shape)]


def _norm_alone_and_batched(context: Context, width: int) -> ResultPair:
    x, weight = _rows(context, 5 if context.rehearsal else 300, width), _rows(context, 1, width)[0]
    together = norm.rms_norm(x, weight, EPS)
    return torch.cat([norm.rms_norm(x[row : row + 1], weight, EPS) for row in (0, 3, 4)]), together[[0, 3, 4]]


def _rope_alone_and_batched(context: Context) -> ResultPair:
    count = 9 if context.rehearsal else 300
    inputs = _rope_inputs(context, count, fp8=False)
    alone = {**inputs, "qkv": inputs["qkv"].clone(), "kv_cache": inputs["kv_cache"].clone()}
    rope_and_cache(**inputs)
    for row in range(count if context.rehearsal else 12):
        part = {name: alone[name][row : row + 1] for name in ("qkv", "cos", "sin", "slot_mapping")}
        rope_and_cache(**{**alone, **part})
    rows = slice(0, 9)
    return [alone["qkv"][rows]], [inputs["qkv"][rows]]


def _step_inputs(context: Context) -> ResultPair:
    device, lengths = context.device, torch.tensor([1, 15, 16, 17, 33, 96, 2], dtype=torch.int32)
    columns = 8
    request_state = (
        torch.randint(0, 1000, (7,)).to(device),
        lengths.to(device),
        torch.randperm(7 * columns).int().view(7, -1).to(device),
    )
    slots = torch.tensor([6, -1, 3, 0, 5, -1, 2, 1, 4], dtype=torch.int32, device=device)

    def run(prepare: Callable[..., None]) -> list[torch.Tensor]:
        int64_outputs = {
            name: torch.full((9,), -7, dtype=torch.int64, device=device) for name in ("token_ids", "positions", "slot_mapping")
        }
        lens = torch.full((9,), -7, dtype=torch.int32, device=device)
        tables = torch.full((9, columns), -7, dtype=torch.int32, device=device)
        prepare(slots, *request_state, block_size=16, **int64_outputs, context_lens=lens, block_tables=tables)
        return [*int64_outputs.values(), lens, tables]

    return run(decode_inputs.prepare_decode), run(exact_inputs.prepare_decode)


def _host_tokens(context: Context) -> ResultPair:
    """Tokens written to page-locked memory by a GPU, read after an event as the engine does. Three steps: one with padding, one
    of padding alone, and one with more rows than the kernel handles at once."""
    device = context.device
    on_card = device.type == "cuda"
    steps = [[3, 0, -1], [-1, -1], [*range(300)]]

    def run(advance: Callable[..., None], *, locked: bool) -> list[torch.Tensor]:
        places = torch.zeros(4, 301, dtype=torch.int64, device=None if locked else device, pin_memory=locked and on_card)
        host = HostTokens(places, torch.zeros(1, dtype=torch.int64, device=device))
        last = torch.zeros(300, dtype=torch.int64, device=device)
        lens = torch.zeros(300, dtype=torch.int32, device=device)
        for rows in steps:
            slots = torch.tensor(rows, dtype=torch.int32, device=device)
            advance(slots, slots.long() * 7 + 1, last, lens, host=host)
        if on_card:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            event.synchronize()
        return [places.clone().to(device), host.num_steps, last, lens]

    return run(decode_inputs.advance_slots, locked=True), run(exact_inputs.advance_slots, locked=False)


def _host_tokens_of_graph(context: Context) -> ResultPair:
    """As in the engine: a captured step is replayed, an event follows each replay, and its tokens are read once the event has
    completed, while the next replay runs. If this differs although "launched" does not, tokens were not yet in main memory when
    the event had completed, or the capture is wrong. Without a card the step is called directly."""
    device, size = context.device, context.size(256, 3)
    on_card = device.type == "cuda"
    host = HostTokens(
        torch.zeros(4, 1 + size, dtype=torch.int64, pin_memory=on_card), torch.zeros(1, dtype=torch.int64, device=device)
    )
    slots, tokens = torch.arange(size, dtype=torch.int32, device=device), torch.arange(size, device=device)
    last, lens = torch.zeros(size, dtype=torch.int64, device=device), torch.zeros(size, dtype=torch.int32, device=device)

    def step() -> None:
        tokens.add_(7)
        decode_inputs.advance_slots(slots, tokens, last, lens, host=host)

    replay = capture(step) if on_card else step
    first = 2 if on_card else 1  # the capture has run a step
    read_back: list[torch.Tensor] = []

    def read(number: int, event: torch.cuda.Event | None) -> None:
        if event is not None:
            event.synchronize()
        read_back.append(host.places[number % len(host.places)].clone())

    pending: list[tuple[int, torch.cuda.Event | None]] = []
    numbers = range(first, first + context.size(REPLAYED, 6))
    for number in numbers:
        replay()
        event = torch.cuda.Event() if on_card else None  # type: ignore[no-untyped-call]
        if event is not None:
            event.record()
        pending.append((number, event))
        if len(pending) > on_card:
            read(*pending.pop(0))
    for each in pending:
        read(*each)
    expected = [[number, *(row + 7 * number for row in range(size))] for number in numbers]
    return torch.stack(read_back), torch.tensor(expected)


def _caches(context: Context) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shape = (9, 16, 2, 2, 16)
    return [torch.randn(shape, generator=generator).to(context.dtype).to(context.device) for _ in range(3)]


def _copy(context: Context) -> ResultPair:
    made, expected = _caches(context), _caches(context)
    ids = torch.tensor([[8, 0, 8], [3, 2, 7]], device=context.device)
    blocks.copy_blocks(made, ids[0], ids[1])
    exact_blocks.copy_blocks(expected, ids[0], ids[1])
    return made, expected


def _gather_and_scatter(context: Context) -> ResultPair:
    """Gather and scatter blocks through page-locked memory on a GPU, as the host tier does."""
    made, expected = _caches(context), _caches(context)
    staging = torch.zeros(4, 3, *made[0].shape[1:], dtype=context.dtype, pin_memory=context.device.type == "cuda")
    twin = torch.zeros_like(staging, device=context.device, pin_memory=False)
    rows, sources, targets = (torch.tensor(ids, device=context.device) for ids in ([3, 0], [8, 1], [0, 5]))
    for module, caches, buffer in ((blocks, made, staging), (exact_blocks, expected, twin)):
        module.gather_blocks(caches, sources, buffer, rows)
        module.scatter_blocks(caches, targets, buffer, rows)
    if context.device.type == "cuda":
        torch.cuda.synchronize()
    return [*made, staging.to(context.device)], [*expected, twin]
