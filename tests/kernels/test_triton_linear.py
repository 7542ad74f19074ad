"""Products with weights of 16 and 8 bits against exact ones: awkward sizes, poison around what may be read, split-K."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from kernels.operations import FUSED_ROWS_MAX
from kernels.quantised_weights import Fp8Weight, Int8Weight, pack_fp8, pack_int8
from kernels.reference import quantised as reference
from kernels.reference.fp8_rows import quantize_rows_fp8
from kernels.triton.launching.card_properties import CARDS, card
from kernels.triton.launching.card_properties import capability as capability_of
from kernels.triton.products import split_k
from kernels.triton.products.fp8 import _scaled_mm as scaled_mm_fp8
from kernels.triton.products.fp8 import check_fp8, linear_fp8
from kernels.triton.products.int8 import linear_int8
from kernels.triton.products.linear import linear, skinny_tiles
from kernels.triton.products.split_k import arrival_counters, choose_splits, split_cost
from kernels.triton.products.tiles import Tiles, byte_tiles, launch
from kernels.triton.sampling.greedy_head import head_tiles
from tests.support.interpreted_bf16 import correct_bf16
from tests.support.kernel_cases import Guarded, normal, padded_rows
from tests.support.kernel_tolerances import assert_near, assert_same

pytestmark = pytest.mark.usefixtures("poisoned_partial_sums")
FLOATS = (torch.float32, torch.float16)
SIZES = [(1, 5, 17), (3, 67, 1), (15, 16, 130), (16, 33, 300), (2, 130, 256)]  # M, N, K
LARGER = [(17, 5, 65), (64, 67, 130), (67, 131, 200)]


def rows(num_rows: int, num_columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Rows at multiples of 16 bytes, with NaN after each."""
    return padded_rows(normal(num_rows, num_columns, dtype=dtype, device=device), -(-num_columns // 8) * 8 + 8)


def int8_weight(num_rows: int, num_columns: int, device: torch.device) -> Int8Weight:
    """Rows with -128 after each, a code that packing never produces."""
    packed = pack_int8(normal(num_rows, num_columns, dtype=torch.float32, device=device, seed=1) * 0.1)
    return Int8Weight(padded_rows(packed.values, -(-num_columns // 16) * 16 + 16), packed.scales)


def fp8_weight(num_rows: int, num_columns: int, device: torch.device) -> Fp8Weight:
    packed = pack_fp8(normal(num_rows, num_columns, dtype=torch.float32, device=device, seed=1) * 0.1)
    values = torch.zeros(num_rows, -(-num_columns // 16) * 16 + 16, dtype=torch.uint8, device=device) + 0x7F  # NaN
    values[:, :num_columns] = packed.values.view(torch.uint8)
    return Fp8Weight(values.view(torch.float8_e4m3fn)[:, :num_columns], packed.scales)


def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    product = x.double() @ weight.double().T
    return (product if bias is None else product + bias.double()).to(x.dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_few_rows_times_a_weight_match_the_exact_product(
    sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    num_rows, num_outputs, num_columns = sizes
    x, weight = rows(num_rows, num_columns, dtype, device), rows(num_outputs, num_columns, dtype, device)
    bias = normal(num_outputs, dtype=dtype, device=device, seed=7)
    out = Guarded((num_rows, num_outputs), dtype, device)
    linear(x, weight, bias=bias, out=out.tensor)
    assert_near(out.check(), exact(x, weight, bias), "matmul", scale=math.sqrt(num_columns))


def test_many_rows_use_the_product_of_torch(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = rows(FUSED_ROWS_MAX + 1, 40, torch.float32, device), rows(9, 40, torch.float32, device)
    bias = normal(9, dtype=torch.float32, device=device)
    monkeypatch.setattr("kernels.triton.products.linear.launch", None)
    for out in (None, torch.empty(FUSED_ROWS_MAX + 1, 9, device=device)):
        assert_near(linear(x, weight, out=out), exact(x, weight), "matmul", scale=6.0)
        assert_near(linear(x, weight, bias=bias, out=out), exact(x, weight, bias), "matmul", scale=6.0)


def test_bfloat16_rows_times_a_16_bit_weight_match_the_exact_product(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device.type == "cpu":
        correct_bf16(monkeypatch)
    x, weight = rows(3, 300, torch.bfloat16, device), rows(33, 300, torch.bfloat16, device)
    bias = normal(33, dtype=torch.bfloat16, device=device, seed=7)
    out = Guarded((3, 33), torch.bfloat16, device)
    linear(x, weight, bias=bias, out=out.tensor)
    assert_near(out.check(), exact(x, weight, bias), "matmul", scale=math.sqrt(300))


@pytest.mark.parametrize("num_columns", [256, 1000])
def test_a_row_has_the_same_bits_in_every_small_batch(num_columns: int, device: torch.device) -> None:
    x, weight = rows(16, num_columns, torch.float16, device), rows(40, num_columns, torch.float16, device)
    together = linear(x, weight)
    for count in (1, 2, 7):
        assert_same(linear(x[3 : 3 + count], weight), together[3 : 3 + count])


@pytest.mark.parametrize("splits", [2, 4, 8])
@pytest.mark.parametrize(("num_rows", "num_outputs", "num_columns"), [(1, 33, 260), (5, 16, 512), (17, 40, 270)])
def test_partial_sums_of_divided_columns_are_added_in_order(
    splits: int, num_rows: int, num_outputs: int, num_columns: int, device: torch.device
) -> None:
    x, weight = rows(num_rows, num_columns, torch.float32, device), rows(num_outputs, num_columns, torch.float32, device)
    tiles = Tiles(16, 16, 32, num_warps=4, num_stages=3)
    out = Guarded((num_rows, num_outputs), torch.float32, device)
    split_product = launch(x, weight, tiles.with_splits(splits), out.tensor)
    out.check()
    assert_near(split_product, exact(x, weight), "matmul", scale=math.sqrt(num_columns))
    split_columns = math.ceil(math.ceil(num_columns / 32) / splits) * 32
    total = torch.zeros_like(split_product)
    for first in range(0, splits * split_columns, split_columns):
        single = torch.zeros_like(split_product)
        if first < num_columns:
            launch(x[:, first : first + split_columns], weight[:, first : first + split_columns], tiles, single)
        total += single
    assert_same(split_product, total)
    assert not arrival_counters(x.device).any(), "the counters are zero for the next launch"


def test_an_empty_column_split_adds_nothing(device: torch.device) -> None:
    x, weight = rows(2, 40, torch.float32, device), rows(16, 40, torch.float32, device)
    product = launch(x, weight, Tiles(16, 16, 32, 4, 3, splits=8), x.new_empty(2, 16))
    assert_near(product, exact(x, weight), "matmul", scale=6.0)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("sizes", SIZES + LARGER, ids=str)
def test_rows_times_an_8_bit_weight_match_the_reference(
    sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    num_rows, num_outputs, num_columns = sizes
    x, weight = rows(num_rows, num_columns, dtype, device), int8_weight(num_outputs, num_columns, device)
    bias = normal(num_outputs, dtype=dtype, device=device, seed=7)
    out = Guarded((num_rows, num_outputs), dtype, device)
    linear_int8(x, weight, bias=bias, out=out.tensor)
    assert_near(out.check(), reference.linear_int8(x, weight, bias=bias), "matmul", scale=math.sqrt(num_columns) * 0.3)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("sizes", [SIZES[0], SIZES[3], *LARGER], ids=str)
def test_float_rows_times_an_e4m3_weight_match_the_reference(
    sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    num_rows, num_outputs, num_columns = sizes
    x, weight = rows(num_rows, num_columns, dtype, device), fp8_weight(num_outputs, num_columns, device)
    out = Guarded((num_rows, num_outputs), dtype, device)
    linear_fp8(x, weight, out=out.tensor)
    assert_near(out.check(), reference.linear_fp8(x, weight), "matmul", scale=math.sqrt(num_columns) * 0.3)


@pytest.mark.parametrize("x_per_row", [True, False])
@pytest.mark.parametrize("sizes", [SIZES[0], SIZES[3], *LARGER], ids=str)
def test_e4m3_rows_times_an_e4m3_weight_match_the_reference(
    sizes: tuple[int, int, int], x_per_row: bool, device: torch.device
) -> None:
    num_rows, num_outputs, num_columns = sizes
    weight = fp8_weight(num_outputs, num_columns, device)
    values, scales = quantize_rows_fp8(normal(num_rows, num_columns, dtype=torch.float32, device=device))
    scales = scales if x_per_row else scales.amax().reshape(1)
    bias = normal(num_outputs, dtype=torch.float32, device=device, seed=7)
    out = Guarded((num_rows, num_outputs), torch.float32, device)
    linear_fp8(values, weight, x_scales=scales, bias=bias, out=out.tensor)
    expected = reference.linear_fp8(values, weight, x_scales=scales, bias=bias, out_dtype=torch.float32)
    assert_near(out.check(), expected, "matmul", scale=math.sqrt(num_columns) * 0.3)


@pytest.mark.parametrize("x_per_row", [True, False])
def test_many_rows_of_e4m3_use_the_product_of_torch(x_per_row: bool, device: torch.device) -> None:
    """Whether torch supports them depends on the card; here it is called as on a card that does."""
    if device.type == "cpu" and torch.__version__ < "2.13":
        pytest.skip("this torch supports scales per row on GPUs alone; 2.13 supports them on CPUs too")
    weight = pack_fp8(normal(48, 64, dtype=torch.float32, device=device, seed=1) * 0.1)
    values, scales = quantize_rows_fp8(normal(80, 64, dtype=torch.float32, device=device))
    scales = scales if x_per_row else scales.amax().reshape(1)
    for bias in (None, normal(48, dtype=torch.bfloat16, device=device, seed=2)):
        expected = reference.linear_fp8(values, weight, x_scales=scales, bias=bias, out_dtype=torch.bfloat16)
        out = Guarded((80, 48), torch.bfloat16, device)
        scaled_mm_fp8(values, weight, scales, bias, out.tensor)
        assert_near(out.check(), expected, "matmul")
        assert_near(scaled_mm_fp8(values, weight, scales, bias, None), expected, "matmul")


def test_rows_of_e4m3_need_scales_and_an_output_dtype(device: torch.device) -> None:
    weight = fp8_weight(8, 32, device)
    values, scales = quantize_rows_fp8(normal(2, 32, dtype=torch.float32, device=device))
    with pytest.raises(ValueError, match="without scales"):
        linear_fp8(values, weight, out_dtype=torch.float32)
    with pytest.raises(ValueError, match="with scales"):
        linear_fp8(values.float(), weight, x_scales=scales)
    with pytest.raises(ValueError, match="needs a type of its own"):
        linear_fp8(values, weight, x_scales=scales)


def test_a_gpu_without_e4m3_is_refused_with_the_reason(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.triton.products.fp8.capability", lambda _: 80)
    with pytest.raises(ValueError, match=r"compute capability 8\.9 or newer, this one has 8\.0: use int8"):
        check_fp8(device)


def test_no_rows_give_no_rows(device: torch.device) -> None:
    x = rows(1, 32, torch.float16, device)[:0]
    assert linear(x, rows(9, 32, torch.float16, device)).shape == (0, 9)
    assert linear_int8(x, int8_weight(9, 32, device)).shape == (0, 9)
    assert linear_fp8(x, fp8_weight(9, 32, device)).shape == (0, 9)


def test_columns_are_divided_if_the_gpu_would_be_idle_otherwise() -> None:
    count = partial(choose_splits, multiprocessors=132, step_bytes=16384)
    assert count(tiles=128, steps=16) == 1
    assert count(tiles=32, steps=64) == 8
    assert count(tiles=1, steps=64) == 8
    assert count(tiles=1, steps=2) == 1
    assert count(tiles=128, steps=56, occupancy=split_k.CONVERT) == 2
    assert count(tiles=32, steps=112, step_bytes=8192, occupancy=split_k.CONVERT) == 8
    assert choose_splits(split_k.NUM_COUNTERS + 1, 64, 10**6, 16384) == 1


def test_a_small_matrix_is_not_divided() -> None:
    assert choose_splits(tiles=64, steps=8, multiprocessors=132, step_bytes=8192) == 1


def test_one_wave_of_programs_is_preferred_to_two() -> None:
    one_wave, two_waves = split_cost(264, 64, 132, 8192, 1), split_cost(528, 32, 132, 8192, 1)
    assert one_wave + split_k.WAVE_BYTES == two_waves


@pytest.mark.parametrize(
    ("num_outputs", "num_columns"), [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (1024, 2048)]
)
def test_bytes_in_flight_cover_the_memory_latency(num_outputs: int, num_columns: int) -> None:
    tiles = skinny_tiles(num_outputs, num_columns, 90, 132)
    programs = min(2 * 132, -(-num_outputs // tiles.block_n) * tiles.splits)
    steps = min(tiles.num_stages - 1, math.ceil(num_columns / tiles.block_k / tiles.splits))
    needed = min(4 * 1024**2, num_outputs * num_columns)  # 4.8 TB/s for 0.9 µs, or half of a matrix that is as small
    assert programs * steps * tiles.block_n * tiles.block_k * 2 >= needed


@pytest.mark.parametrize("capability", CARDS)
def test_float32_loads_in_flight_fit_every_gpu(capability: int) -> None:
    for num_outputs in (1024, 4096, 151_936):
        tiles, head = skinny_tiles(num_outputs, 4096, capability, 132, 4), head_tiles(weight_bytes=4, capability=capability)
        assert head.num_stages == tiles.num_stages
        held = (tiles.num_stages - 1) * (tiles.block_m + tiles.block_n) * tiles.block_k * 4
        assert held <= CARDS[capability].shared_bytes_max


@pytest.mark.parametrize(
    ("major_minor", "chosen_for"), [((8, 0), 80), ((8, 7), 86), ((8, 9), 89), ((10, 3), 100), ((12, 1), 120), ((7, 5), 75)]
)
def test_an_unknown_gpu_gets_the_tiles_of_the_next_older_one(
    major_minor: tuple[int, int], chosen_for: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: major_minor)
    capability_of.cache_clear()
    assert capability_of(torch.device("cuda", 0)) == chosen_for
    capability_of.cache_clear()
    if chosen_for in CARDS:
        assert card(10 * major_minor[0] + major_minor[1]) == CARDS[chosen_for]


@pytest.mark.parametrize("capability", [80, 89, 90, 100])
def test_up_to_64_rows_get_the_smallest_tile_that_holds_them(capability: int) -> None:
    lows = [byte_tiles(num_rows, (4096, 4096), capability, 132).block_m for num_rows in (1, 16, 17, 32, 33, 64, 65)]
    assert lows == [16, 16, 32, 32, 64, 64, 128]


@pytest.mark.parametrize("num_rows", [1, 16, 17, 64, 65])
def test_tiles_for_rows_of_32_bits_times_8_bit_weights_fit_registers(num_rows: int) -> None:
    """No tensor core multiplies them: with the tiles for rows of 16 bits a thread spilled thousands of bytes."""
    tiles = byte_tiles(num_rows, (4096, 4096), 90, 132, row_bytes=4)
    assert tiles.block_m * tiles.block_n <= 32 * 64
