"""The compile gate itself, on kernels made to be rejected."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from kernels.triton.attention.splits import decode_tiling
from kernels.triton.gate.compilation import (
    Compilation,
    Compiled,
    exponentials_beside_products,
    faults,
    products_behind_load,
    touches_early,
)
from kernels.triton.gate.declared import declared, module_names
from kernels.triton.gate.machine_code import overwritten_operands
from kernels.triton.launching.card_properties import CARDS, card, power_of_two
from tests.support.triton_jobs import KERNEL_FILES


class Kernel:
    """Fake of a compiled function, of which only the argument names are read."""

    arg_names = ("x", "n", "BLOCK")


GOOD = Compiled(
    name="k",
    capability=90,
    triton="3.9.0",
    num_warps=4,
    num_stages=3,
    registers=64,
    spill_bytes=0,
    shared_bytes=1000,
    tensor_memory_columns=0,
    tensor_instructions=("wgmma.mma_async",),
    programs=8,
)


def declared_configuration(**options: Any) -> Compilation:
    return Compilation("k", Kernel(), {"x": "*bf16", "n": "i32"}, {"BLOCK": 64}, **options)


def test_a_kernel_within_all_limits_passes_the_gate() -> None:
    assert faults(declared_configuration(tensor_cores=True), GOOD) == []


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"spill_bytes": 8}, "spills 8 bytes"),
        ({"shared_bytes": CARDS[90].shared_bytes_max + 1}, "shared memory"),
        ({"tensor_memory_columns": 513}, "tensor memory"),
        ({"programs": 0}, "does not fit"),
        ({"touches_early": True}, "before it waits"),
        ({"overwritten": 1}, "products under way still read"),
        ({"tensor_instructions": ("mma.sync",)}, "lacks wgmma"),
        ({"scalar_products": 1}, "computes 1 products without matrix instructions"),
        ({"capability": 80}, "lacks mma.sync"),
        ({"capability": 100}, "lacks tcgen05"),
    ],
)
def test_a_kernel_beyond_a_limit_is_refused_with_the_reason(wrong: dict[str, Any], word: str) -> None:
    (found,) = faults(declared_configuration(tensor_cores=True), replace(GOOD, **wrong))
    assert word in found


def test_a_kernel_with_too_few_resident_programs_is_refused() -> None:
    assert faults(declared_configuration(programs=3), replace(GOOD, programs=3)) == []
    assert faults(declared_configuration(programs=3), replace(GOOD, programs=2)) == [
        "a multiprocessor holds 2 programs, the grid is made for 3"
    ]


def test_exponentials_beside_products_are_counted_and_too_few_refused() -> None:
    begun = "HGMMA.64x128x16 ; HGMMA.64x128x16 gsb0 ; WARPGROUP.DEPBAR.LE gsb0, 0x1 ; FMNMX ; "
    kept = exponentials_beside_products(begun + "MUFU.EX2 ; MUFU.EX2 ; WARPGROUP.DEPBAR.LE gsb0, 0x0 ; FMUL ; MUFU.EX2 ;")
    moved = exponentials_beside_products(begun + "WARPGROUP.DEPBAR.LE gsb0, 0x0 ; FMNMX ; MUFU.EX2 ; MUFU.EX2 ; MUFU.EX2 ;")
    assert (kept, moved, exponentials_beside_products("MUFU.EX2 ;")) == (2, 0, 0)
    assert faults(declared_configuration(exponentials_min=2), replace(GOOD, exponentials=kept)) == []
    (found,) = faults(declared_configuration(exponentials_min=2), replace(GOOD, exponentials=moved))
    assert found == "takes 0 exponentials beside products, not 2"


def test_products_after_the_next_loads_are_counted_and_too_few_refused() -> None:
    before, load, product = "LDG.E.EF.128 R8 ; LDG.E.128 R4 ; HMMA.16816 ; ", "@P1 LDG.E.EF.128 R8 ; ", "HMMA.16816.F32 ; "
    kept = products_behind_load(before + load + product + load + product + "@P0 BRA ;")
    moved = products_behind_load(before + product + product + load + load + "@P0 BRA ;")
    assert (kept, moved, products_behind_load("")) == (2, 0, 0)
    assert faults(declared_configuration(products_behind_load_min=2), replace(GOOD, products_behind_load=kept)) == []
    (found,) = faults(declared_configuration(products_behind_load_min=2), replace(GOOD, products_behind_load=moved))
    assert found == "computes 0 products behind the next loads, not 2"


WAITS = "WARPGROUP.DEPBAR.LE gsb0, 0x0"
PRODUCTS = (
    "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT, gsb0",
    "HGMMA.64x64x16.F32.BF16 R88, R152, gdesc[UR8], R88, gsb0",
)
"""Of two tiles in shared memory, and of registers 152 to 155 with one."""


@pytest.mark.parametrize(
    ("instructions", "num_wrong"),
    [
        ((*PRODUCTS, "F2FP.BF16.F32.PACK_AB R151, R3, R2", "MUFU.EX2 R156, R3", WAITS, "MOV R152, R1"), 0),
        ((*PRODUCTS, "F2FP.BF16.F32.PACK_AB R155, R3, R2", WAITS), 1),
        ((*PRODUCTS, "@!P1 LDG.E.128 R149, desc[UR4][R2.64]", "IMAD.WIDE R151, R2, 0x2, R4", "CS2R R150, SRZ", WAITS), 2),
        ((*PRODUCTS, "STG.E desc[UR4][R152.64], R153", "ISETP.GE.AND P0, PT, R152, R3, PT", "FADD R9, R152, R3", WAITS), 0),
        ((*PRODUCTS, "SHFL.BFLY PT, R153, R9, 0x1, 0x1f", WAITS), 1),
        ((*PRODUCTS, "WARPGROUP.DEPBAR.LE gsb0, 0x1", "MOV R152, R1", WAITS), 1),  # waits for the first alone
        ((*reversed(PRODUCTS), "WARPGROUP.DEPBAR.LE gsb0, 0x1", "MOV R152, R1", WAITS), 0),
        (("MOV R153, R1", WAITS, *PRODUCTS, "@P0 BRA 0x0000"), 1),  # under way into the next turn of a loop
        ((WAITS, "MOV R153, R1", *PRODUCTS, "@P0 BRA 0x0000"), 0),
    ],
)
def test_overwritten_operands_of_products_in_flight_are_counted(instructions: tuple[str, ...], num_wrong: int) -> None:
    lines = (f"        /*{16 * place:04x}*/    {code} ;  /* 0x0000 */" for place, code in enumerate(instructions))
    assert overwritten_operands("\n".join(lines)) == num_wrong


def test_a_tile_of_few_rows_needs_an_instruction_that_every_gpu_has() -> None:
    small = declared_configuration(tensor_cores=True, small_tile=True)
    assert faults(small, replace(GOOD, tensor_instructions=("mma.sync",))) == []
    assert faults(small, replace(GOOD, tensor_instructions=())) != []


@pytest.mark.parametrize(
    ("ptx", "touches"),
    [
        ("ld.global.L1::evict_last.L2::cache_hint.b32 { %r1 }, [ %rd1 + 0 ], %rd2;\ngriddepcontrol.wait;\n", False),
        (
            "ld.global.L1::evict_first.L2::cache_hint.v2.b64 { %rd3, %rd4 }, [ %rd1 + 0 ], %rd2;\ngriddepcontrol.wait;\n"
            "@%p1 ld.global.b32 { %r1 }, [ %rd1 + 0 ];",
            False,
        ),
        ("@%p1 ld.global.b32 { %r1 }, [ %rd1 + 0 ];\ngriddepcontrol.wait;", True),
        ("cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, 0x10;\ngriddepcontrol.wait;", True),
        ("@%p1 atom.global.gpu.acq_rel.add.s32 %r1, [ %rd1 + 0 ], %r2;\ngriddepcontrol.wait;", True),
        ("createpolicy.fractional.L2::evict_first.b64 %rd2, 1.0;\nst.global.b32 [ %rd1 + 0 ], { %r1 };", True),
    ],
)
def test_a_kernel_launched_early_accesses_memory_only_after_its_wait(ptx: str, touches: bool) -> None:
    assert touches_early(ptx) is touches


def test_every_launch_of_a_kernel_with_an_early_variant_selects_the_variant() -> None:
    for module in module_names():
        tree = ast.parse(source(module))
        early = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and _has_early(node)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript) and isinstance(node.func.value, ast.Name):
                told = any(keyword.arg is None and "early_launch(" in ast.unparse(keyword.value) for keyword in node.keywords)
                imported = node.func.value.id == "merge_kernel"
                assert told == (node.func.value.id in early or imported), f"{module}: {node.func.value.id}"


def _has_early(function: ast.FunctionDef) -> bool:
    is_kernel = any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)
    return is_kernel and any(argument.arg == "EARLY" for argument in function.args.args)


@pytest.mark.parametrize("module", KERNEL_FILES)
def test_a_loop_carried_sum_has_one_product_per_iteration(module: str) -> None:
    """With two, Triton 3.6 to 3.8 starts the first product of an iteration before the second of the previous one has ended, on
    Blackwell with tiles of 64 rows or more (triton-lang/triton, issue 10821). Sums reset in each iteration are not carried."""
    for loop in ast.walk(ast.parse(source(module))):
        if isinstance(loop, ast.For) and not _is_unrolled(loop):
            begun = {name for statement in loop.body for name in _begun_at_zero(statement)}
            assert all(number <= 1 or name in begun for name, number in _products(loop.body).items()), ast.unparse(loop)


def test_chained_products_are_detected_in_unrolled_loops_and_in_branches() -> None:
    in_turn = "s = tl.dot(a, b, s)\ns = tl.dot(c, d, s)"
    unrolled = "for run in tl.static_range(4):\n    s = tl.dot(a, b, s)"
    branches = "if x:\n    s = tl.dot(a, b, s)\nelse:\n    s = tl.dot(c, d, s)"
    assert [_products(ast.parse(text).body) for text in (in_turn, unrolled, branches)] == [{"s": 2}, {"s": 2}, {"s": 1}]


def _products(statements: list[ast.stmt]) -> Counter[str]:
    """Return the number of products that one iteration adds to each sum; those in an unrolled loop count twice."""
    found: Counter[str] = Counter()
    for statement in statements:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=ast.Attribute(attr="dot"), args=[_, _, before])):
                found[name] += name in ast.unparse(before)
            case ast.For() if _is_unrolled(statement):
                found += _products(statement.body * 2)
            case ast.If():
                found += _products(statement.body) | _products(statement.orelse)
    return found


def _begun_at_zero(statement: ast.stmt) -> list[str]:
    if not isinstance(statement, ast.Assign) or not ast.unparse(statement.value).startswith("tl.zeros("):
        return []
    return [ast.unparse(target) for target in statement.targets]


def _is_unrolled(loop: ast.For) -> bool:
    return ast.unparse(loop.iter).startswith("tl.static_range(")


def test_register_spills_up_to_the_declared_number_are_accepted() -> None:
    assert faults(declared_configuration(spill_bytes_max=16), replace(GOOD, spill_bytes=16)) == []


@pytest.mark.parametrize(
    ("signature", "constexprs"),
    [({"x": "*bf16"}, {"BLOCK": 64}), ({"x": "*bf16", "n": "i32", "m": "i32"}, {"BLOCK": 64}), ({"x": "*bf16"}, {"x": 1})],
)
def test_a_configuration_names_each_argument_once(signature: dict[str, str], constexprs: dict[str, object]) -> None:
    with pytest.raises(AssertionError):
        Compilation("k", Kernel(), signature, constexprs)


def test_an_unknown_newer_gpu_is_treated_as_the_newest_known_older_one() -> None:
    assert card(103) is CARDS[100]
    assert card(87) is CARDS[86]
    with pytest.raises(ValueError, match=r"compute capability 7\.5 is older than 8\.0"):
        card(75)


def test_gpus_are_classified_as_small_by_their_shared_memory() -> None:
    assert [number for number in (80, 86, 89, 90, 100, 103, 120, 121) if card(number).is_small] == [86, 89, 120, 121]


@pytest.mark.parametrize("number", CARDS)
def test_decode_tiles_of_all_resident_programs_fit_shared_memory(number: int) -> None:
    for head_dim, kv_bytes, rows in product((64, 96, 128, 256), (1, 2), (16, 32, 64)):
        tiling = decode_tiling(head_dim, kv_bytes, rows, number)
        loaded_bytes = 4 * tiling.tile * power_of_two(head_dim) * kv_bytes
        assert card(number).programs(64, loaded_bytes, 4) >= tiling.programs, (head_dim, kv_bytes, rows)


@pytest.mark.parametrize(("registers", "programs"), [(64, 8), (65, 7), (128, 4), (255, 2), (16, 16)])
def test_the_number_of_resident_programs_depends_on_registers(registers: int, programs: int) -> None:
    assert card(90).programs(registers, 0, 4) == programs


@pytest.mark.parametrize(
    ("number", "shared_kib", "programs"), [(90, 113, 2), (90, 114, 1), (80, 81, 2), (80, 82, 1), (86, 49, 2), (120, 50, 1)]
)
def test_resident_programs_share_the_memory_of_a_multiprocessor(number: int, shared_kib: int, programs: int) -> None:
    """The system reserves one KiB for each."""
    assert card(number).programs(16, shared_kib << 10, 4) == programs


@pytest.mark.parametrize(("number", "num_warps", "programs"), [(80, 4, 16), (86, 4, 12), (120, 8, 6), (90, 1, 32)])
def test_resident_programs_have_at_most_the_warps_of_a_multiprocessor(number: int, num_warps: int, programs: int) -> None:
    assert card(number).programs(16, 0, num_warps) == programs


@pytest.mark.parametrize(("size", "power"), [(0, 1), (1, 1), (2, 2), (3, 4), (128, 128), (129, 256)])
def test_a_size_is_rounded_up_to_a_power_of_two(size: int, power: int) -> None:
    assert power_of_two(size) == power


def source(module: str) -> str:
    return KERNEL_FILES[module].read_text("utf-8")


def launches(module: str) -> Iterator[tuple[str, bool]]:
    """Return every launch in a module: the name of the kernel, and whether it fuses products with sums."""
    for node in ast.walk(ast.parse(source(module))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript) and isinstance(node.func.value, ast.Name):
            yield node.func.value.id, not any(keyword.arg == "enable_fp_fusion" for keyword in node.keywords)


@pytest.mark.parametrize("module", module_names())
def test_the_gate_compiles_kernels_with_the_fp_fusion_of_their_launch(module: str) -> None:
    compiled = {(each.kernel.__name__, each.fp_fusion) for each in declared(module)}
    launched = {found for found in launches(module) if found[0] in {name for name, _ in compiled}}
    assert launched <= compiled
    if "kernels.triton.sampling.gumbel" in source(module):
        assert not all(fused for _, fused in launched), "Gumbel-max noise counts every rounding"
