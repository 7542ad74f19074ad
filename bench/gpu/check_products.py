"""Matrix products against float64, beside torch's own in the same dtype: weights as they are stored, decoded exactly."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional

from bench.gpu.context import Context
from bench.gpu.errors import Cases, Three, Two, compare, invariant
from bench.gpu.inputs import PRODUCTS, Weight, coded, normal
from kernels.quantised_weights import Fp8Weight, Int4Weight, Int8Weight, pack_fp8, pack_int4, pack_int8
from kernels.reference import experts as exact_experts
from kernels.reference import fused_linear as exact_fused
from kernels.reference import quantised as exact
from kernels.triton.experts import bind_experts
from kernels.triton.fp8_rows import quantize_rows_fp8
from kernels.triton.fused_linear import linear_add, normed_linear
from kernels.triton.linear import linear
from kernels.triton.linear_fp8 import linear_fp8
from kernels.triton.linear_int4 import linear_int4

EPS = 1e-6
SUBNORMAL_DEVIATION = 2.0**-7
"""Of 0 … 7 times 2^-9 with either sign, roughly."""


def check(context: Context) -> None:
    """Products in 16 and 8 bits."""
    of_int8, of_fp8 = partial(_coded, kind="int8"), partial(_coded, kind="fp8")
    for name, make in (("bf16", _plain), ("int8", of_int8), ("fp8 weights", of_fp8), ("fp8 rows", _fp8_rows)):
        compare(context, f"product {name}", _cases(context, make))
    alone = [(str(shape), partial(_alone, context, *shape, four_bits=False)) for shape in _shapes(context)]
    invariant(context, "product bf16", alone)


def check_fused(context: Context) -> None:
    """Products in 4 bits, whose decoded weights are kept for what follows, fused products and experts."""
    compare(context, "product int4", _cases(context, _int4))
    few = [count for count in _rows(context) if count <= 16]
    compare(context, "product + residual + norm", [(f"{m} rows", partial(_fused, context, m)) for m in few])
    of_fp8 = [(f"{m} rows", partial(_fused_fp8, context, m)) for m in few]
    of_fp8.append(("1 row, all weights subnormal", partial(_fused_subnormal, context)))
    compare(context, "product fp8 + residual + norm", of_fp8)
    compare(context, "product int8 + residual + norm", [(f"{m} rows", partial(_fused_int8, context, m)) for m in few])
    of_int4 = [(f"{m} rows", partial(_fused_int4, context, m)) for m in few]
    of_int4.append(("1 row, most of it above 0", partial(_fused_int4, context, 1, mean=1.0)))
    compare(context, "product int4 + residual + norm", of_int4)
    tokens = [3] if context.rehearsal else [1, 9, 64]
    compare(context, "experts", [(f"{m} tokens", partial(_experts, context, m)) for m in tokens])
    alone = [(str(shape), partial(_alone, context, *shape, four_bits=True)) for shape in _shapes(context)]
    invariant(context, "product int4", alone)


def _shapes(context: Context) -> list[tuple[int, int]]:
    return [(40, 256)] if context.rehearsal else [(6144, 4096), (4096, 14336), (1024, 3072)]


def _rows(context: Context) -> list[int]:
    return [1, 3] if context.rehearsal else [1, 7, 16, 17, 64, 200]


def _cases(context: Context, make: Callable[[Context, int, int, int], Three]) -> Cases[Three]:
    shapes = _shapes(context)
    return [(f"{m} × {n} × {k}", partial(make, context, m, n, k)) for n, k in shapes for m in _rows(context)]


def _pair(context: Context, m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = normal(m, k, dtype=context.dtype, device=context.device)
    return x, normal(n, k, dtype=context.dtype, device=context.device, scale=k**-0.5)


def _product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.double() @ weight.double().T


def _plain(context: Context, m: int, n: int, k: int) -> Three:
    x, weight = _pair(context, m, n, k)
    return linear(x, weight), _product(x, weight), functional.linear(x, weight)


def _coded(context: Context, m: int, n: int, k: int, *, kind: str) -> Three:
    x, weight = _pair(context, m, n, k)
    packed = coded(kind, weight)
    assert not isinstance(packed, torch.Tensor), f"{kind} is no code"
    decoded = exact.dequantise(packed)
    return PRODUCTS[kind](x, packed), _product(x, decoded), functional.linear(x, decoded.to(x.dtype))


def _fp8_rows(context: Context, m: int, n: int, k: int) -> Three:
    x, weight = _pair(context, m, n, k)
    packed = pack_fp8(weight)
    values, scales = quantize_rows_fp8(x)
    ours = linear_fp8(values, packed, x_scales=scales, out_dtype=context.dtype)
    decoded = exact.dequantise(packed)
    wide = values.float() * scales
    return ours, _product(wide, decoded), functional.linear(wide.to(x.dtype), decoded.to(x.dtype))


def _int4(context: Context, m: int, n: int, k: int) -> Three:
    x, _ = _pair(context, m, n, k)
    packed, decoded = _int4_weight(context.dtype, context.device, n, k)
    return linear_int4(x, packed), _product(x, decoded), functional.linear(x, decoded.to(x.dtype))


@functools.cache
def _int4_weight(dtype: torch.dtype, device: torch.device, n: int, k: int) -> tuple[Int4Weight, torch.Tensor]:
    """Packed, and decoded column by column, which takes a second."""
    packed = pack_int4(normal(n, k, dtype=dtype, device=device, scale=k**-0.5), 128)
    return packed, exact.dequantise(packed)


def _fused_sizes(context: Context) -> tuple[int, int, int]:
    """Width of the stream, columns of the product that is added to it, gates."""
    return (32, 48, 40) if context.rehearsal else (4096, 4096, 14336)


def _fused(context: Context, m: int) -> Three:
    """A product added to the stream, its norm, a gated product: the tail of one layer and the head of the next."""
    weight, gates = _fused_weights(context)
    return _layer_tail(context, m, (weight, gates), (weight.float(), gates.float()))


def _fused_fp8(context: Context, m: int) -> Three:
    """The first with a scale for each row, the second with one for all."""
    weight, gates = _fused_weights(context)
    return _fused_coded(context, m, pack_fp8(weight), pack_fp8(gates, per_row=False))


def _fused_subnormal(context: Context) -> Three:
    """Numbers of e4m3 below 2^-6 alone. As operands of bfloat16 they are subnormal too, and a card whose matrix instructions
    took those for zeros would pass with any other weights: of normal ones they are one in some thousand, and the smallest."""
    width, columns, inner = _fused_sizes(context)

    def weight(rows: int, of_columns: int) -> Fp8Weight:
        codes = torch.randint(0, 8, (rows, of_columns), dtype=torch.uint8, device=context.device)
        codes |= torch.randint(0, 2, codes.shape, dtype=torch.uint8, device=context.device) << 7
        scale = 2.0 ** round(math.log2(of_columns**-0.5 / SUBNORMAL_DEVIATION))
        return Fp8Weight(codes.view(torch.float8_e4m3fn), torch.full((rows,), scale, device=context.device))

    return _fused_coded(context, 1, weight(width, columns), weight(2 * inner, width))


def _fused_int8(context: Context, m: int) -> Three:
    weight, gates = _fused_weights(context)
    return _fused_coded(context, m, pack_int8(weight), pack_int8(gates))


def _fused_coded(context: Context, m: int, weight: Int8Weight | Fp8Weight, gates: Int8Weight | Fp8Weight) -> Three:
    return _layer_tail(context, m, (weight, gates), (exact.dequantise(weight), exact.dequantise(gates)))


def _fused_weights(context: Context) -> tuple[torch.Tensor, torch.Tensor]:
    width, columns, inner = _fused_sizes(context)
    made = partial(normal, dtype=context.dtype, device=context.device)
    return made(width, columns, scale=columns**-0.5), made(2 * inner, width, scale=width**-0.5)


def _fused_int4(context: Context, m: int, *, mean: float = 0.0) -> Three:
    width, columns, inner = _fused_sizes(context)
    packed = [_int4_weight(context.dtype, context.device, n, k) for n, k in ((width, columns), (2 * inner, width))]
    (weight, exact_weight), (gates, exact_gates) = packed
    return _layer_tail(context, m, (weight, gates), (exact_weight, exact_gates), mean=mean)


def _layer_tail(
    context: Context,
    m: int,
    weights: tuple[Weight, Weight],
    exact_weights: tuple[torch.Tensor, torch.Tensor],
    *,
    mean: float = 0.0,
) -> Three:
    """With `weights` as they are served, with `exact_weights` in float32, and as torch does it in the type of the rows.
    mean: of what is multiplied first."""
    width, columns, inner = _fused_sizes(context)
    dtype, device = context.dtype, context.device
    x, residual = mean + normal(m, columns, dtype=dtype, device=device), normal(m, width, dtype=dtype, device=device)
    norm_weight = 1 + normal(width, dtype=dtype, device=device, scale=0.1)
    stream = linear_add(x, weights[0], residual, norm_weight)
    ours = [stream.total, normed_linear(stream, weights[1], EPS, gate="silu")]
    true = exact_fused.linear_add(x.float(), exact_weights[0], residual.float(), norm_weight)
    wide = [true.total, exact_fused.normed_linear(true, exact_weights[1], EPS, gate="silu")]
    plain, gates = (weight.to(dtype) for weight in exact_weights)
    total = residual + functional.linear(x, plain)
    both = functional.linear(functional.rms_norm(total, (width,), norm_weight, EPS), gates)
    return ours, wide, [total, functional.silu(both[:, :inner]) * both[:, inner:]]


def _experts(context: Context, m: int) -> Three:
    hidden, inner, count, chosen = (32, 24, 4, 2) if context.rehearsal else (2048, 768, 128, 8)
    dtype, device = context.dtype, context.device
    x = normal(m, hidden, dtype=dtype, device=device)
    gate_up = normal(count, 2 * inner, hidden, dtype=dtype, device=device, scale=hidden**-0.5)
    down = normal(count, hidden, inner, dtype=dtype, device=device, scale=inner**-0.5)
    likely, ids = torch.topk(torch.rand(m, count, device=device).softmax(-1), chosen)
    weights = (likely / likely.sum(-1, keepdim=True)).to(dtype)
    exact = exact_experts.mix_gated_experts(x.float(), weights.float(), ids, gate_up.float(), down.float())
    theirs = torch.zeros(m, hidden, dtype=dtype, device=device)
    for place in range(chosen):
        both = torch.einsum("tik,tk->ti", gate_up[ids[:, place]], x)
        gated = functional.silu(both[:, :inner]) * both[:, inner:]
        theirs += torch.einsum("tki,ti->tk", down[ids[:, place]], gated) * weights[:, place, None]
    mix = bind_experts(list(gate_up), list(down), "silu")
    assert mix is not None, "matrices of one kind"
    return mix(x, weights, ids), exact, theirs


def _alone(context: Context, n: int, k: int, *, four_bits: bool) -> Two:
    """Every row of a full tile of 16, by itself."""
    x, weight = _pair(context, 4 if context.rehearsal else 16, n, k)
    packed = pack_int4(weight, 128) if four_bits else None

    def multiply(rows: torch.Tensor) -> torch.Tensor:
        return linear(rows, weight) if packed is None else linear_int4(rows, packed)

    return torch.cat([multiply(x[row : row + 1]) for row in range(x.shape[0])]), multiply(x)
