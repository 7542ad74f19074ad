"""Matrix products' errors against float64, relative to torch's in the same dtype; stored weights are decoded exactly."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch.nn import functional

from bench.gpu.context import Context
from bench.gpu.errors import Cases, ResultPair, ResultTriple, check_errors, check_invariant
from bench.gpu.inputs import PRODUCTS, normal, pack_weight
from kernels.quantised_weights import Fp8Weight, Int4Weight, Int8Weight, Weight, pack_fp8, pack_int4, pack_int8
from kernels.reference import experts as exact_experts
from kernels.reference import fused_linear as exact_fused
from kernels.reference import quantised as exact
from kernels.residual_stream import Gate
from kernels.triton.experts.mixture import bind_experts
from kernels.triton.products.fp8 import linear_fp8
from kernels.triton.products.fused_linear import linear_add, normed_linear
from kernels.triton.products.int4 import linear_int4
from kernels.triton.products.linear import linear
from kernels.triton.rows.fp8 import quantize_rows_fp8

EPS = 1e-6
T = TypeVar("T")
SUBNORMAL_DEVIATION = 2.0**-7
"""Standard deviation of 0 … 7 times 2^-9 with either sign, approximately."""


def check(context: Context) -> None:
    """Check products in 16 and 8 bits."""
    of_int8, of_fp8 = partial(_quantised, kind="int8"), partial(_quantised, kind="fp8")
    for name, make in (("bf16", _plain), ("int8", of_int8), ("fp8 weights", of_fp8), ("fp8 rows", _fp8_rows)):
        check_errors(context, f"product {name}", _cases(context, make))
    alone = [(str(shape), partial(_alone_and_batched, context, *shape, four_bits=False)) for shape in _shapes(context)]
    check_invariant(context, "product bf16", alone)


def check_fused(context: Context) -> None:
    """Check products in 4 bits (whose decoded weights are cached for later cases), fused products and experts."""
    check_errors(context, "product int4", _cases(context, _int4))
    row_counts = [count for count in _rows(context) if count <= 16]

    def fused(make: Callable[[Context, int, Tail], ResultTriple]) -> list[tuple[str, Callable[[], ResultTriple]]]:
        """One row is checked in all four products of a layer: it has its own kernels, and they serve the timed 8- and 4-bit
        models."""
        found = [(f"{m} rows", partial(make, context, m, _out_and_gates(context))) for m in row_counts]
        return [*found, ("1 row, down and query-key-value", partial(make, context, 1, _down_and_first(context)))]

    check_errors(context, "product + residual + norm", fused(_fused))
    subnormal = ("1 row, all weights subnormal", partial(_fused_subnormal, context, _out_and_gates(context)))
    check_errors(context, "product fp8 + residual + norm", [*fused(_fused_fp8), subnormal])
    check_errors(context, "product int8 + residual + norm", fused(_fused_int8))
    above = ("1 row, most of it above 0", partial(_fused_int4, context, 1, _out_and_gates(context), mean=1.0))
    check_errors(context, "product int4 + residual + norm", [*fused(_fused_int4), above])
    tokens = [3] if context.rehearsal else [1, 9, 64]
    check_errors(context, "experts", [(f"{m} tokens", partial(_experts, context, m)) for m in tokens])
    alone = [(str(shape), partial(_alone_and_batched, context, *shape, four_bits=True)) for shape in _shapes(context)]
    check_invariant(context, "product int4", alone)


def _shapes(context: Context) -> list[tuple[int, int]]:
    return [(40, 256)] if context.rehearsal else [(6144, 4096), (4096, 14336), (1024, 3072)]


def _rows(context: Context) -> list[int]:
    return [1, 3] if context.rehearsal else [1, 7, 9, 16, 17, 64, 200, 600]


def _cases(context: Context, make: Callable[[Context, int, int, int], ResultTriple]) -> Cases[ResultTriple]:
    shapes = _shapes(context)
    return [(f"{m} × {n} × {k}", partial(make, context, m, n, k)) for n, k in shapes for m in _rows(context)]


def _operands(context: Context, m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = normal(m, k, dtype=context.dtype, device=context.device)
    return x, normal(n, k, dtype=context.dtype, device=context.device, scale=k**-0.5)


def _product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.double() @ weight.double().T


def _plain(context: Context, m: int, n: int, k: int) -> ResultTriple:
    x, weight = _operands(context, m, n, k)
    return linear(x, weight), _product(x, weight), functional.linear(x, weight)


def _quantised(context: Context, m: int, n: int, k: int, *, kind: str) -> ResultTriple:
    x, weight = _operands(context, m, n, k)
    packed = pack_weight(kind, weight)
    assert not isinstance(packed, torch.Tensor), f"{kind} is not a quantised format"
    decoded = exact.dequantise(packed)
    return PRODUCTS[kind](x, packed), _product(x, decoded), functional.linear(x, decoded.to(x.dtype))


def _fp8_rows(context: Context, m: int, n: int, k: int) -> ResultTriple:
    x, weight = _operands(context, m, n, k)
    packed = pack_fp8(weight)
    values, scales = quantize_rows_fp8(x)
    ours = linear_fp8(values, packed, x_scales=scales, out_dtype=context.dtype)
    decoded = exact.dequantise(packed)
    dequantised = values.float() * scales
    return ours, _product(dequantised, decoded), functional.linear(dequantised.to(x.dtype), decoded.to(x.dtype))


def _int4(context: Context, m: int, n: int, k: int) -> ResultTriple:
    x, _ = _operands(context, m, n, k)
    packed, decoded = _int4_weight(context.dtype, context.device, n, k)
    return linear_int4(x, packed), _product(x, decoded), functional.linear(x, decoded.to(x.dtype))


@functools.cache
def _int4_weight(dtype: torch.dtype, device: torch.device, n: int, k: int) -> tuple[Int4Weight, torch.Tensor]:
    """The packed weight and its decoded values. Cached, because decoding column by column takes a second."""
    packed = pack_int4(normal(n, k, dtype=dtype, device=device, scale=k**-0.5), 128)
    return packed, exact.dequantise(packed)


class Tail(NamedTuple):
    """A product that is added to the residual stream, and the next one: width of the stream, columns of the first weight,
    outputs of the next, counting both halves if it is gated."""

    width: int
    columns: int
    outputs: int
    is_gated: bool

    def weights(self, make: Callable[[int, int], T]) -> tuple[T, T]:
        """The weights of both products, each made by `make(rows, columns)`."""
        return make(self.width, self.columns), make(self.outputs, self.width)


def _out_and_gates(context: Context) -> Tail:
    return Tail(32, 48, 2 * 40, True) if context.rehearsal else Tail(4096, 4096, 2 * 14336, True)


def _down_and_first(context: Context) -> Tail:
    """The last product of a layer and the first of the next."""
    return Tail(32, 80, 56, False) if context.rehearsal else Tail(4096, 14336, 6144, False)


def _fused(context: Context, m: int, tail: Tail) -> ResultTriple:
    """A product added to the residual stream, the norm of the sum, and the next product."""
    weights = _plain_weights(context, tail)
    return _layer_tail(context, m, tail, weights, (weights[0].float(), weights[1].float()))


def _fused_fp8(context: Context, m: int, tail: Tail) -> ResultTriple:
    first, second = _plain_weights(context, tail)
    return _fused_quantised(context, m, tail, (pack_fp8(first), pack_fp8(second)))


def _fused_subnormal(context: Context, tail: Tail) -> ResultTriple:
    """Weights that are all e4m3 numbers below 2^-6, which are subnormal as operands of bfloat16 too. With other weights a card
    whose matrix instructions flush them to zero would pass: among normally distributed weights about one in a thousand is
    subnormal, and those are the smallest."""

    def weight(rows: int, columns: int) -> Fp8Weight:
        codes = torch.randint(0, 8, (rows, columns), dtype=torch.uint8, device=context.device)
        codes |= torch.randint(0, 2, codes.shape, dtype=torch.uint8, device=context.device) << 7
        scale = 2.0 ** round(math.log2(columns**-0.5 / SUBNORMAL_DEVIATION))
        return Fp8Weight(codes.view(torch.float8_e4m3fn), torch.full((rows,), scale, device=context.device))

    return _fused_quantised(context, 1, tail, tail.weights(weight))


def _fused_int8(context: Context, m: int, tail: Tail) -> ResultTriple:
    first, second = _plain_weights(context, tail)
    return _fused_quantised(context, m, tail, (pack_int8(first), pack_int8(second)))


def _fused_quantised(
    context: Context, m: int, tail: Tail, weights: tuple[Int8Weight, Int8Weight] | tuple[Fp8Weight, Fp8Weight]
) -> ResultTriple:
    return _layer_tail(context, m, tail, weights, (exact.dequantise(weights[0]), exact.dequantise(weights[1])))


def _plain_weights(context: Context, tail: Tail) -> tuple[torch.Tensor, torch.Tensor]:
    def weight(rows: int, columns: int) -> torch.Tensor:
        return normal(rows, columns, dtype=context.dtype, device=context.device, scale=columns**-0.5)

    return tail.weights(weight)


def _fused_int4(context: Context, m: int, tail: Tail, *, mean: float = 0.0) -> ResultTriple:
    (first, exact_first), (second, exact_second) = tail.weights(partial(_int4_weight, context.dtype, context.device))
    return _layer_tail(context, m, tail, (first, second), (exact_first, exact_second), mean=mean)


def _layer_tail(
    context: Context,
    m: int,
    tail: Tail,
    weights: tuple[Weight, Weight],
    exact_weights: tuple[torch.Tensor, torch.Tensor],
    *,
    mean: float = 0.0,
) -> ResultTriple:
    """The result with `weights` as served, the one with `exact_weights` in float32, and torch's in the dtype of the rows.
    `mean`: mean of the input rows of the first product."""
    dtype, device = context.dtype, context.device
    gate: Gate | None = "silu" if tail.is_gated else None
    x, residual = mean + normal(m, tail.columns, dtype=dtype, device=device), normal(m, tail.width, dtype=dtype, device=device)
    norm_weight = 1 + normal(tail.width, dtype=dtype, device=device, scale=0.1)
    stream = linear_add(x, weights[0], residual, norm_weight)
    ours = [stream.total, normed_linear(stream, weights[1], EPS, gate=gate)]
    true = exact_fused.linear_add(x.float(), exact_weights[0], residual.float(), norm_weight)
    exact_outputs = [true.total, exact_fused.normed_linear(true, exact_weights[1], EPS, gate=gate)]
    first, second = (weight.to(dtype) for weight in exact_weights)
    total = residual + functional.linear(x, first)
    product = functional.linear(functional.rms_norm(total, (tail.width,), norm_weight, EPS), second)
    if tail.is_gated:
        gates, up = product.chunk(2, dim=1)
        product = functional.silu(gates) * up
    return ours, exact_outputs, [total, product]


def _experts(context: Context, m: int) -> ResultTriple:
    hidden, inner, count, top_k = (32, 24, 4, 2) if context.rehearsal else (2048, 768, 128, 8)
    dtype, device = context.dtype, context.device
    x = normal(m, hidden, dtype=dtype, device=device)
    gate_up = normal(count, 2 * inner, hidden, dtype=dtype, device=device, scale=hidden**-0.5)
    down = normal(count, hidden, inner, dtype=dtype, device=device, scale=inner**-0.5)
    top_probs, ids = torch.topk(torch.rand(m, count, device=device).softmax(-1), top_k)
    weights = (top_probs / top_probs.sum(-1, keepdim=True)).to(dtype)
    exact = exact_experts.mix_gated_experts(x.float(), weights.float(), ids, gate_up.float(), down.float())
    theirs = torch.zeros(m, hidden, dtype=dtype, device=device)
    for rank in range(top_k):
        gate_up_out = torch.einsum("tik,tk->ti", gate_up[ids[:, rank]], x)
        gated = functional.silu(gate_up_out[:, :inner]) * gate_up_out[:, inner:]
        theirs += torch.einsum("tki,ti->tk", down[ids[:, rank]], gated) * weights[:, rank, None]
    mix = bind_experts(list(gate_up), list(down), "silu")
    assert mix is not None, "matrices of one kind"
    return mix(x, weights, ids), exact, theirs


def _alone_and_batched(context: Context, n: int, k: int, *, four_bits: bool) -> ResultPair:
    """Each row of a full tile of 16 computed by itself, and the rows computed together."""
    x, weight = _operands(context, 4 if context.rehearsal else 16, n, k)
    packed = pack_int4(weight, 128) if four_bits else None

    def multiply(rows: torch.Tensor) -> torch.Tensor:
        return linear(rows, weight) if packed is None else linear_int4(rows, packed)

    return torch.cat([multiply(x[row : row + 1]) for row in range(x.shape[0])]), multiply(x)
