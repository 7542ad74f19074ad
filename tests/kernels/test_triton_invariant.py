"""Kernels of batch-invariant engines: correct, and bit-identical for a row at any position in any batch and chunk."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from engine.memory.splits import invariant_bytes
from kernels.attention_rows import AttentionShape
from kernels.quantised_weights import Fp8Weight, Int4Weight, Int8Weight, pack_fp8, pack_int4, pack_int8
from kernels.reference import attention as reference
from kernels.reference import quantised as exact
from kernels.reference.experts import route
from kernels.reference.fp8_rows import quantize_rows_fp8
from kernels.triton.invariant import attention
from kernels.triton.invariant import int4 as invariant_int4
from kernels.triton.invariant import linear as invariant_linear
from kernels.triton.invariant import table as invariant_table
from kernels.triton.products.tiles import Tiles
from kernels.triton.rows.norm import add_rms_norm, rms_norm
from kernels.triton.sampling.logprobs import token_logprobs
from tests.support.interpreted_rows import make_dot_row_invariant
from tests.support.kernel_cases import Guarded, fill_cache, normal, padded_rows, poisoned, scatter_block_tables, table_tensor
from tests.support.kernel_tolerances import assert_near, assert_same

# Other requests are NaN, whose maximum the interpreter computes.
pytestmark = [pytest.mark.filterwarnings("ignore:All-NaN slice encountered"), pytest.mark.usefixtures("poisoned_partial_sums")]

BLOCK = 16
SHAPE = AttentionShape(BLOCK, 4, 2, 16)
FP8 = torch.float8_e4m3fn
LENGTH = 71
BATCHES = (1, 2, 7, 16, 17, 33)


@pytest.fixture(autouse=True)
def _rows_are_alike(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.type == "cpu":
        make_dot_row_invariant(monkeypatch)


@pytest.fixture
def small_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits of 32 keys in tiles of 16, queries in tiles of 16 rows, so that short requests have many of each, and two programs
    for up to three splits."""
    monkeypatch.setattr(attention, "SPLIT", 32)
    monkeypatch.setattr(attention, "_num_programs", lambda _, splits, __: min(splits, 2))
    monkeypatch.setattr(attention, "rows_tiling", lambda *_: attention.RowsTiling(16, 16, 4, 2))


class Request:
    """One request of LENGTH tokens with all of its queries, in a poisoned cache beside others, which are NaN throughout."""

    def __init__(
        self, shape: AttentionShape, device: torch.device, *, dtype: torch.dtype = torch.float32, kv_dtype: Any = None
    ) -> None:
        self.shape, self.device = shape, device
        tables, num_blocks = scatter_block_tables([LENGTH, 40, 3], shape.block_size)
        size = (num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
        self.cache = fill_cache(tables[:1], [LENGTH], size, dtype=kv_dtype or dtype, device=device)
        self.tables = table_tensor(tables, device)
        self.q = normal(LENGTH, shape.num_heads, shape.head_dim, dtype=dtype, device=device)
        self.kv_scales = torch.tensor((0.5, 3.0), device=device) if kv_dtype else None

    def ints(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def chunk(self, first: int, count: int, *, neighbours: tuple[int, int] = (0, 0), unused_rows: int = 0) -> torch.Tensor:
        """Queries first … first + count - 1 as a chunk, between chunks of `neighbours` queries of the NaN requests, after
        `unused_rows` rows of no request."""
        before, after = neighbours
        chunks = [(1, before, 40), (0, count, first + count), (2, after, 3)]
        rows = [each for each in chunks if each[1]]
        q = [self.q[first : first + count] if row == 0 else poisoned(
            many, *self.q.shape[1:], dtype=self.q.dtype, device=self.device) for row, many, _ in rows]  # fmt: skip
        q.insert(0, poisoned(unused_rows, *self.q.shape[1:], dtype=self.q.dtype, device=self.device))
        starts = self.ints([unused_rows + sum(each[1] for each in rows[:index]) for index in range(len(rows) + 1)])
        out = Guarded((int(starts[-1]), *self.q.shape[1:]), self.q.dtype, self.device)
        attention.paged_prefill(
            torch.cat(q), self.cache, self.tables[[row for row, *_ in rows]], starts, self.ints([each[2] for each in rows]),
            self.shape, max_query_len=max(each[1] for each in rows), kv_scales=self.kv_scales, out=out.tensor,
        )  # fmt: skip
        outputs = out.check()[unused_rows:]
        assert out.tensor[:unused_rows].isnan().all(), "unused rows were written"
        return outputs[before : before + count] if before else outputs[:count]

    def decode(self, position: int, batch: int) -> torch.Tensor:
        """The query as a decode, the last of `batch` requests, the others of which are NaN."""
        last = batch - 1
        q = poisoned(batch, *self.q.shape[1:], dtype=self.q.dtype, device=self.device)
        q[last] = self.q[position]
        tables = self.tables[[1] * last + [0]]
        lens = self.ints([0 if other % 3 == 2 else 40 for other in range(last)] + [position + 1])
        out = Guarded(tuple(q.shape), q.dtype, self.device)
        attention.paged_decode(q, self.cache, tables, lens, self.shape, kv_scales=self.kv_scales, out=out.tensor)
        return out.check()[last]

    def expected(self) -> torch.Tensor:
        return reference.paged_prefill(
            self.q, self.cache, self.tables[:1], self.ints([0, LENGTH]), self.ints([LENGTH]), self.shape,
            max_query_len=LENGTH, kv_scales=self.kv_scales,
        )  # fmt: skip


CASES: dict[str, Any] = {
    "float32": (SHAPE, {}),
    "float16": (SHAPE, {"dtype": torch.float16}),
    "an fp8 cache": (SHAPE, {"dtype": torch.float16, "kv_dtype": FP8}),
    "a window": (AttentionShape(BLOCK, 4, 2, 16, sliding_window=21), {}),
    "a window and a cap": (AttentionShape(BLOCK, 2, 2, 16, sliding_window=40, scale=0.4, softcap=1.5), {}),
    "three heads of 24": (AttentionShape(BLOCK, 3, 1, 24), {}),
}


@pytest.mark.usefixtures("small_splits")
@pytest.mark.parametrize("name", CASES)
def test_a_query_has_the_same_bits_in_any_chunk_and_as_a_decode(
    name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, options = CASES[name]
    request = Request(shape, device, **options)
    with monkeypatch.context() as patch:
        patch.setattr(attention, "WORKSPACE_BYTES_MAX", 0)  # one program computes all splits of its queries
        whole = request.chunk(0, LENGTH)
    assert_near(whole, request.expected(), "attention")
    for first, count in ((0, 5), (31, 2), (32, 39)):
        assert_same(request.chunk(first, count), whole[first : first + count])
    for first, count in ((0, 1), (3, 29), (63, 8)):
        assert_same(request.chunk(first, count, neighbours=(2, 3), unused_rows=70), whole[first : first + count])
    for position in (0, 31, 32, 70):
        assert_same(request.decode(position, 1), whole[position])


@pytest.mark.usefixtures("small_splits")
@pytest.mark.parametrize("batch", BATCHES)
def test_a_decode_has_the_same_bits_among_any_number_of_others(batch: int, device: torch.device) -> None:
    request = Request(SHAPE, device)
    assert_same(request.decode(70, batch), request.decode(70, 1))


@pytest.mark.usefixtures("small_splits")
def test_decodes_that_do_not_fit_the_workspace_are_computed_in_several_launches(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = Request(SHAPE, device)
    together = request.decode(70, 17)
    monkeypatch.setattr(attention, "WORKSPACE_BYTES_MAX", 5 * 4 * 3 * (16 + 2) * 4)
    assert_same(request.decode(70, 17), together)


def test_the_tiles_used_for_serving_match_the_reference(device: torch.device) -> None:
    request = Request(AttentionShape(BLOCK, 8, 2, 64), device)
    whole = request.chunk(0, LENGTH)
    assert_near(whole, request.expected(), "attention")
    assert_same(request.decode(70, 3), whole[70])


@pytest.fixture
def small_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns in four splits."""
    tiles = Tiles(32, 32, 32, num_warps=4, num_stages=2, splits=4)
    monkeypatch.setattr(invariant_linear, "invariant_tiles", lambda *_: tiles)
    tiles_for = invariant_int4.invariant_int4_tiles
    monkeypatch.setattr(invariant_int4, "invariant_int4_tiles", lambda *sizes: tiles_for(4096, 4096, 132) if sizes else None)


NUM_OUTPUTS, NUM_COLUMNS = 45, 300


def product(name: str, device: torch.device) -> tuple[invariant_table.InvariantProduct, torch.Tensor, torch.dtype]:
    """→ a product with a bias, its dequantised weight, and the dtype of its rows"""
    dtype = torch.float32 if name in ("float32", "static fp8 rows") else torch.float16
    weight = normal(NUM_OUTPUTS, NUM_COLUMNS, dtype=dtype, device=device, seed=1) * 0.1
    bias = normal(NUM_OUTPUTS, dtype=dtype, device=device, seed=7)
    packed: torch.Tensor | Int8Weight | Fp8Weight | Int4Weight = weight
    dequantised = weight
    if name == "int8":
        packed = pack_int8(weight)
        dequantised = exact.dequantise(packed)
    elif name.endswith(("fp8", "fp8 rows")):
        packed = pack_fp8(weight)
        dequantised = exact.dequantise(packed)
    elif name == "int4":
        packed = pack_int4(weight[:, :256], 32)
        dequantised = exact.dequantise(packed)
    return invariant_table.InvariantProduct(packed, bias), dequantised, dtype


def check_every_batch(multiply: Any, x: torch.Tensor) -> torch.Tensor:
    """→ the product of all rows, after a check that the rows of smaller batches, and beside NaN, have the same bits"""
    whole: torch.Tensor = multiply(x)
    for batch in BATCHES:
        for first in {0, 5, len(x) - batch}:
            assert_same(multiply(x[first : first + batch]), whole[first : first + batch])
    spoiled = x.clone()
    spoiled[::2] = math.nan
    assert_same(multiply(spoiled)[1::2], whole[1::2])
    return whole


@pytest.mark.usefixtures("small_products")
@pytest.mark.parametrize("name", ["float32", "float16", "int8", "fp8", "int4"])
def test_a_row_has_the_same_product_in_any_number_of_rows(
    name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    multiply, weight, dtype = product(name, device)
    columns = weight.shape[1]
    x = padded_rows(normal(70, columns, dtype=dtype, device=device), columns + 20)
    whole = check_every_batch(multiply, x)
    expected = x.double() @ weight.double().T + normal(NUM_OUTPUTS, dtype=dtype, device=device, seed=7).double()
    assert_near(whole, expected.to(dtype), "matmul", scale=math.sqrt(columns))
    for module in (invariant_linear, invariant_int4):
        monkeypatch.setattr(module, "programs_per_tile", lambda *_: 1)  # one program sums all splits of its columns
    assert_same(multiply(x), whole)


@pytest.mark.usefixtures("small_products")
def test_a_row_that_is_rounded_to_8_bits_has_the_same_product_in_any_number_of_rows(device: torch.device) -> None:
    weight = pack_fp8(normal(NUM_OUTPUTS, NUM_COLUMNS, dtype=torch.float32, device=device, seed=1) * 0.1)
    one = torch.tensor([0.25], device=device)

    def by_row(x: torch.Tensor) -> torch.Tensor:
        values, scales = quantize_rows_fp8(x)
        return invariant_linear.invariant_linear(values, weight, x_scales=scales, out_dtype=x.dtype)

    def by_one_scale(x: torch.Tensor) -> torch.Tensor:
        return invariant_linear.invariant_linear((x / one).to(FP8), weight, x_scales=one, out_dtype=x.dtype)

    x = normal(40, NUM_COLUMNS, dtype=torch.float32, device=device)
    values, scales = quantize_rows_fp8(x)
    rounded = {by_row: values.float() * scales, by_one_scale: (x / one).to(FP8).float() * one}
    for multiply, dequantised in rounded.items():
        whole = multiply(x)
        for batch in BATCHES:
            assert_same(multiply(x[4 : 4 + batch]), whole[4 : 4 + batch])
        assert_near(whole, dequantised @ exact.dequantise(weight).T, "matmul", scale=20.0)


@pytest.mark.parametrize("name", ["float16", "fp8", "int4"])
def test_a_token_has_the_same_mixture_of_experts_in_any_number_of_tokens(name: str, device: torch.device) -> None:
    """With 70 tokens, engines that choose tiles by the batch would choose another."""
    pack: Any = {"float16": lambda weight: weight, "fp8": pack_fp8, "int4": lambda weight: pack_int4(weight, 32)}[name]
    x = normal(70, 192, dtype=torch.float16, device=device)
    gate_ups = [pack(each) for each in normal(4, 64, 192, dtype=torch.float16, device=device, seed=1) * 0.3]
    downs = [pack(each) for each in normal(4, 192, 32, dtype=torch.float16, device=device, seed=2) * 0.3]
    weights, ids = route(normal(70, 4, dtype=torch.float32, device=device, seed=4), 2, normalised=True)
    bind = invariant_table.OPERATIONS.bind_experts
    assert bind is not None
    mix = bind(gate_ups, downs, "silu")
    assert mix is not None
    whole = mix(x, weights, ids)
    for part in (slice(0, 1), slice(33, 34), slice(4, 21), slice(60, 70)):
        assert_same(mix(x[part], weights[part], ids[part]), whole[part])
    spoiled = x.clone()
    spoiled[::2] = math.nan
    assert_same(mix(spoiled, weights, ids)[1::2], whole[1::2])


def test_norms_and_log_probabilities_are_computed_row_by_row(device: torch.device) -> None:
    x, weight = normal(33, 320, dtype=torch.float32, device=device), normal(320, dtype=torch.float32, device=device)
    ids = torch.arange(66, device=device).view(33, 2)
    logits = normal(33, 9000, dtype=torch.float32, device=device)
    check_every_batch(lambda rows: rms_norm(rows, weight, 1e-5), x)
    check_every_batch(lambda rows: add_rms_norm(rows, rows, weight, 1e-5)[1], x)
    whole = token_logprobs(logits, ids)
    for batch in BATCHES:
        for found, wanted in zip(token_logprobs(logits[:batch], ids[:batch]), whole, strict=True):
            assert_same(found, wanted[:batch])


def test_a_product_that_exposes_no_weight_is_refused() -> None:
    with pytest.raises(TypeError, match="exposes no weight"):
        invariant_table.row_invariant(lambda x: x)


@pytest.mark.parametrize("window", [None, 512])
def test_the_memory_plan_matches_the_workspace(window: int | None) -> None:
    for blocks, requests, head_dim in ((16, 256, 128), (17, 5, 96), (512, 256, 128), (8192, 256, 64), (8192, 1, 256)):
        shape = AttentionShape(BLOCK, 32, 8, head_dim, sliding_window=window)
        workspace = attention.decode_workspace(shape, requests, blocks, torch.float16, torch.device("meta"))
        allocated = 0 if workspace is None else workspace.partial_acc.nbytes + workspace.partial_stats.nbytes
        assert allocated == invariant_bytes(requests, BLOCK * blocks, 32, head_dim, window)
