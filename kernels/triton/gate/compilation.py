"""Compiles a kernel to machine code for an absent card, and reads its properties from the result.

Needs no GPU and no driver: Triton ships the assembler and `cuobjdump`. Must run in a process without TRITON_INTERPRET.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.runtime import jit

from kernels.triton.gate.machine_code import overwritten_operands
from kernels.triton.launching.card_properties import TENSOR_MEMORY_COLUMNS, card
from kernels.triton.launching.early_launch import CAPABILITY_MIN as EARLY_CAPABILITY

CAPABILITIES = (80, 89, 90, 100)
FP8_CAPABILITIES = (89, 90, 100)  # the others cannot convert to e4m3
TYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "i8": 1, "fp8e4nv": 1}
"""Bytes of an element, by the type's name in a signature."""
# PTX names of the matrix instructions of Ampere and Ada, of Hopper, of Blackwell.
TENSOR_INSTRUCTIONS = ("mma.sync", "wgmma.mma_async", "tcgen05.mma")
WAIT = "griddepcontrol.wait"
PRODUCTS_WAIT, EXPONENTIAL = "WARPGROUP.DEPBAR", "MUFU.EX2"  # in Hopper's machine code
PRODUCT, STREAMED_LOAD = "HMMA.", "LDG.E.EF.128"  # of mma.sync, and of 16 bytes with evict_first
_MEMORY = re.compile(r"\b(?:ld\.global(?!\.L1::evict_(?:first|last))|st\.global|cp\.async|atom\.|red\.global)")
_SCALAR_PRODUCT = re.compile(r"= tt\.dot .*-> tensor<[^>]*#blocked")  # in Triton's own form, `ttgir`
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


@dataclass(frozen=True, kw_only=False)
class Compilation:
    """One kernel in one configuration that serving uses.

    `signature` names the types of the arguments that are passed at a launch (`*bf16`, `*fp8e4nv`, `i32`, `fp32` …), None for a
    tensor that is absent; pointers are assumed to be aligned to 16 bytes, as torch's are. `constexprs` holds the values of all
    other arguments: tile sizes, 1 for an integer that is 1 (a launch specialises it). `divisible` names the integers that are
    multiples of 16. A kernel's EARLY (`kernels.triton.launching.early_launch`) is set as a launch on that card sets it.

    `tensor_cores`: the card's own kind of matrix instruction must be used: mma.sync on 80 and 89, wgmma on 90, tcgen05 on 100;
    and no product of the kernel may be computed without matrix instructions.
    `small_tile`: the tile has fewer than 64 rows, for which every card has mma.sync alone, or 64 that Triton may transpose for
    it: either kind is accepted. `fp_fusion`: whether the launch allows fusing products with sums, as all do unless every
    rounding matters. `registers_max`: the limit of registers per thread (`maxnreg`), None for no limit. `programs`: how many of
    its programs each multiprocessor must hold at a time. `exponentials_min`: how many exponentials a thread must compute at
    least while products of its loop are in flight. `products_behind_load_min`: how many products (`mma.sync`) of its loop must
    come after the first load of the next turn's weights.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str | None]
    constexprs: Mapping[str, object]
    num_warps: int = 4
    num_stages: int = 3
    capabilities: tuple[int, ...] = CAPABILITIES
    tensor_cores: bool = False
    spill_bytes_max: int = 0
    divisible: tuple[str, ...] = ()
    small_tile: bool = False
    fp_fusion: bool = True
    registers_max: int | None = None
    programs: int = 1
    exponentials_min: int = 0
    products_behind_load_min: int = 0

    def __post_init__(self) -> None:
        names = set(self.kernel.arg_names) - {"EARLY"}
        declared = [*self.signature, *self.constexprs]
        assert len(declared) == len(set(declared)), f"{self.name}: an argument is both passed and constant"
        assert set(declared) == names, f"{self.name}: missing {names - set(declared)}, unknown {set(declared) - names}"
        assert set(self.divisible) <= set(self.passed), f"{self.name}: divisible names what is not passed"

    @property
    def passed(self) -> dict[str, str]:
        """The types of the arguments that are passed."""
        return {name: kind for name, kind in self.signature.items() if kind is not None}

    @property
    def constants(self) -> dict[str, object]:
        """The values of the arguments that are compiled in: None for an absent tensor."""
        return {**{name: None for name, kind in self.signature.items() if kind is None}, **self.constexprs}


@dataclass(frozen=True)
class Compiled:
    """Properties of the assembled kernel. `spill_bytes` per thread; `programs` that one multiprocessor holds at a time;
    `touches_early`: before it waits for the previous kernel, it writes, or reads data not marked as unchanged by that kernel
    (`kernels.triton.launching.early_launch`); `exponentials` that overlap with products, and `products_behind_load`, both
    counted if a configuration requires some; `scalar_products`: products of tiles without matrix instructions, counted if a
    configuration requires these; `overwritten`: on Hopper, instructions that write registers which products in flight still
    read."""

    name: str
    capability: int
    triton: str
    num_warps: int
    num_stages: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    tensor_memory_columns: int
    tensor_instructions: tuple[str, ...]
    programs: int
    touches_early: bool = False
    exponentials: int = 0
    products_behind_load: int = 0
    overwritten: int = 0
    scalar_products: int = 0


def source_key(compilation: Compilation, capability: int) -> str:
    """A hash of all that determines the machine code, as 16 hexadecimal digits: the text of the kernel and of all functions it
    calls, types, constants, options, the card and the version of Triton. Call `make_keys_reproducible` first."""
    source = _source(compilation, capability).hash()
    text = f"{triton.__version__} {capability} {source} {sorted(_options(compilation).items())}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class _CalledFirst(jit.DependenciesFinder):
    """Hashes a called function before its captured constants are added to those of its caller. Triton 3.6 adds them first:
    none, unless another caller had a key before."""

    def _update_hash(self, func: jit.JITCallable) -> None:
        _ = func.cache_key  # a property that computes what it returns once
        super()._update_hash(func)


def make_keys_reproducible() -> None:
    """Makes keys independent of what Triton's own depend on: the line numbers of kernels in the imported modules and of the
    functions they call, including those that compute constants, and in 3.6 the kernels that had a key before."""
    jit.DependenciesFinder = _CalledFirst
    for name, module in list(sys.modules.items()):
        if name.startswith("kernels."):
            for function in vars(module).values():
                if isinstance(function, jit.JITCallable):
                    function.starting_line_number = 0


def compile_kernel(compilation: Compilation, capability: int) -> Compiled:
    """Compiles for one compute capability. Raises whatever Triton raises if the kernel cannot be compiled for it."""
    target = GPUTarget("cuda", capability, 32)
    kernel = triton.compile(_source(compilation, capability), target=target, options=_options(compilation))
    registers, spill_bytes = _resources(kernel.asm["cubin"])
    num_warps = int(kernel.metadata.num_warps)
    has_wgmma = TENSOR_INSTRUCTIONS[1] in kernel.asm["ptx"]
    is_read = has_wgmma or compilation.exponentials_min or compilation.products_behind_load_min
    sass = _cuobjdump(kernel.asm["cubin"], "-sass") if is_read else ""
    return Compiled(
        name=compilation.name,
        capability=capability,
        triton=triton.__version__,
        num_warps=num_warps,
        num_stages=compilation.num_stages,
        registers=registers,
        spill_bytes=spill_bytes,
        shared_bytes=int(kernel.metadata.shared),
        tensor_memory_columns=int(getattr(kernel.metadata, "tmem_size", None) or 0),
        tensor_instructions=tuple(name for name in TENSOR_INSTRUCTIONS if name in kernel.asm["ptx"]),
        programs=card(capability).programs(registers, int(kernel.metadata.shared), num_warps),
        touches_early=_is_early(compilation, capability) and touches_early(kernel.asm["ptx"]),
        exponentials=exponentials_beside_products(sass) if compilation.exponentials_min else 0,
        products_behind_load=products_behind_load(sass) if compilation.products_behind_load_min else 0,
        overwritten=overwritten_operands(sass),
        scalar_products=len(_SCALAR_PRODUCT.findall(kernel.asm["ttgir"])) if compilation.tensor_cores else 0,
    )


def touches_early(ptx: str) -> bool:
    """Whether a kernel that may be launched early reads or writes memory before it waits, or never waits. Reads with an
    eviction policy of first or last are exempt: it marks data that the previous kernel does not write."""
    before, wait, _ = ptx.partition(WAIT)
    return not wait or _MEMORY.search(before) is not None


def exponentials_beside_products(sass: str) -> int:
    """The number of exponentials between a kernel's first wait for products and its second. The assembler may have moved them
    before the wait, which PTX does not show."""
    parts = sass.split(PRODUCTS_WAIT)
    return parts[1].count(EXPONENTIAL) if len(parts) > 2 else 0


def products_behind_load(sass: str) -> int:
    """The number of products after the first load of streamed weights in a kernel's loop, which begins with a product. The
    assembler may have moved the loads to the loop's end, so that none is in flight while products are computed; PTX does not
    show that."""
    _, _, loop = sass.partition(PRODUCT)
    _, _, behind = loop.partition(STREAMED_LOAD)
    return behind.count(PRODUCT)


def _is_early(compilation: Compilation, capability: int) -> bool:
    return "EARLY" in compilation.kernel.arg_names and capability >= EARLY_CAPABILITY


def faults(compilation: Compilation, compiled: Compiled) -> list[str]:
    """What is wrong with the result, in words; empty if it may be served."""
    found = []
    limits = card(compiled.capability)
    if compiled.spill_bytes > compilation.spill_bytes_max:
        found.append(f"spills {compiled.spill_bytes} bytes a thread, {compilation.spill_bytes_max} allowed")
    if compiled.shared_bytes > limits.shared_bytes_max:
        found.append(f"takes {compiled.shared_bytes} bytes of shared memory, the card has {limits.shared_bytes_max}")
    if compiled.tensor_memory_columns > TENSOR_MEMORY_COLUMNS:
        found.append(f"takes {compiled.tensor_memory_columns} columns of tensor memory, the card has {TENSOR_MEMORY_COLUMNS}")
    required, native = _required_instruction(compilation, compiled.capability), _native_instruction(compiled.capability)
    if compilation.tensor_cores and not {required, native}.intersection(compiled.tensor_instructions):
        present = ", ".join(compiled.tensor_instructions) or "none"
        found.append(f"lacks {required} (matrix instructions: {present})")
    if compiled.scalar_products:
        found.append(f"computes {compiled.scalar_products} products without matrix instructions")
    if compiled.touches_early:
        found.append("reads or writes memory before it waits for the kernel in front of it")
    if compiled.exponentials < compilation.exponentials_min:
        found.append(f"takes {compiled.exponentials} exponentials beside products, not {compilation.exponentials_min}")
    if compiled.products_behind_load < compilation.products_behind_load_min:
        least = compilation.products_behind_load_min
        found.append(f"computes {compiled.products_behind_load} products behind the next loads, not {least}")
    if compiled.overwritten:
        found.append(f"{compiled.overwritten} instructions write registers that products under way still read")
    if compiled.programs == 0:
        found.append("does not fit a multiprocessor")
    elif compiled.programs < compilation.programs:
        found.append(f"a multiprocessor holds {compiled.programs} programs, the grid is made for {compilation.programs}")
    return found


def _required_instruction(compilation: Compilation, capability: int) -> str:
    return TENSOR_INSTRUCTIONS[0] if compilation.small_tile else _native_instruction(capability)


def _native_instruction(capability: int) -> str:
    older, hopper, blackwell = TENSOR_INSTRUCTIONS
    if capability < 90 or capability >= 120:
        return older
    return hopper if capability < 100 else blackwell


def _options(compilation: Compilation) -> dict[str, object]:
    return {
        "num_warps": compilation.num_warps,
        "num_stages": compilation.num_stages,
        "enable_fp_fusion": compilation.fp_fusion,
        "maxnreg": compilation.registers_max,
    }


def _source(compilation: Compilation, capability: int) -> Any:
    names = compilation.kernel.arg_names
    passed, constants = compilation.passed, compilation.constants
    if "EARLY" in names:
        constants["EARLY"] = _is_early(compilation, capability)
    signature = {name: passed.get(name, "constexpr") for name in names}
    any_alignment = {param.name for param in compilation.kernel.params if param.do_not_specialize_on_alignment}
    aligned = {name for name, kind in passed.items() if kind.startswith("*")} - any_alignment
    aligned |= set(compilation.divisible)
    attributes = {(index,): [["tt.divisibility", 16]] for index, name in enumerate(names) if name in aligned}
    language = GluonASTSource if isinstance(compilation.kernel, GluonJITFunction) else ASTSource
    return language(fn=compilation.kernel, signature=signature, constexprs=constants, attrs=attributes)


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and spilled bytes per thread."""
    text = _cuobjdump(cubin, "-res-usage")
    match = _USAGE.search(text)
    assert match is not None, f"cuobjdump says nothing of registers:\n{text}"
    registers, stack, _, local = (int(number) for number in match.groups())
    return registers, max(stack, local)


def _cuobjdump(cubin: bytes, option: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
