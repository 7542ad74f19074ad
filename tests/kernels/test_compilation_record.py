"""The record of compiled kernels: what it saves, and that no change goes undetected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from kernels.triton.gate import __main__ as gate
from kernels.triton.gate.compilation import CAPABILITIES, Compilation, Compiled, make_keys_reproducible, source_key
from kernels.triton.gate.declared import declared
from kernels.triton.gate.record import Record, Recorded, differences, read, write
from tests.support.triton_jobs import MODULES, locked_versions

MODULE = "rows.norm"
Compile = Callable[[Compilation, int], Compiled]


def result(compilation: Compilation, capability: int) -> Compiled:
    registers = 30 + len(compilation.name)
    return Compiled(compilation.name, capability, triton.__version__, 4, 3, registers, 0, 512, 0, (), 4)


def key(compilation: Compilation, capability: int) -> str:
    return f"{compilation.name} {capability}"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What the gate compiles, with a compiler that answers at once: here kernels are interpreted, and have no key."""
    asked: list[tuple[str, int]] = []

    def compile_at_once(compilation: Compilation, capability: int) -> Compiled:
        asked.append((compilation.name, capability))
        return result(compilation, capability)

    monkeypatch.setattr(gate, "compile_kernel", compile_at_once)
    monkeypatch.setattr(gate, "source_key", key)
    return asked


def pairs() -> list[tuple[Compilation, int]]:
    return [(compilation, capability) for compilation in declared(MODULE) for capability in compilation.capabilities]


def whole_record() -> Record:
    return {
        (MODULE, each.name, capability, triton.__version__): Recorded(key(each, capability), result(each, capability))
        for each, capability in pairs()
    }


def test_without_a_record_everything_is_compiled(compiled: list[tuple[str, int]]) -> None:
    rows = list(gate.rows_of_module(MODULE, {}))
    assert compiled == [(compilation.name, capability) for compilation, capability in pairs()]
    assert not any(row["is_recorded"] or row["faults"] for row in rows)


def test_every_kernel_is_compiled_by_every_supported_triton_and_for_every_gpu() -> None:
    had: set[tuple[str, int]] = set()
    for module in MODULES:
        for kernel, cards in gate.cards_of(declared(module)).items():
            turns = [gate.card_in_turn(kernel, cards, version) for version in locked_versions()]
            assert len(set(turns)) == min(len(turns), len(cards)), kernel
            had.update(zip(locked_versions(), turns, strict=True))
    assert had == set(product(locked_versions(), CAPABILITIES))


def test_of_recorded_kernels_each_is_compiled_for_one_gpu_in_rotation(
    compiled: list[tuple[str, int]],
) -> None:
    rows = list(gate.rows_of_module(MODULE, whole_record()))
    kernels = gate.cards_of(declared(MODULE)).items()
    names = {compilation.name: compilation.kernel.__name__ for compilation, _ in pairs()}
    assert [(names[name], capability) for name, capability in compiled] == [
        (kernel, gate.card_in_turn(kernel, cards, triton.__version__)) for kernel, cards in kernels
    ]
    assert len(rows) == len(pairs())
    assert all(row["is_recorded"] and row["registers"] and not row["faults"] for row in rows)


def test_changed_kernels_are_compiled(compiled: list[tuple[str, int]]) -> None:
    record = whole_record()
    list(gate.rows_of_module(MODULE, record))
    sample = set(compiled)
    place = next(place for place in record if place[1:3] not in sample)
    record[place] = record[place]._replace(key="another")
    compiled.clear()
    (changed,) = [row for row in gate.rows_of_module(MODULE, record) if not row["is_recorded"]]
    assert (changed["name"], changed["capability"]) == place[1:3]
    assert set(compiled) == sample | {place[1:3]}


def test_a_wrong_record_is_detected(compiled: list[tuple[str, int]]) -> None:
    record = whole_record()
    list(gate.rows_of_module(MODULE, record))
    place, recorded = next((place, entry) for place, entry in record.items() if place[1:3] in compiled)
    record[place] = recorded._replace(compiled=replace(recorded.compiled, registers=20))
    (row,) = [row for row in gate.rows_of_module(MODULE, record) if row["faults"]]
    assert row["faults"] == [f"the record has regs 20, compiled now it is {recorded.compiled.registers}"]


def test_recorded_results_are_checked_against_the_current_limits(compiled: list[tuple[str, int]]) -> None:
    record = whole_record()
    spilling = {place: entry._replace(compiled=replace(entry.compiled, spill_bytes=4096)) for place, entry in record.items()}
    rows = list(gate.rows_of_module(MODULE, spilling))
    assert len(rows) > len(compiled)
    assert all("4096" in row["faults"][0] for row in rows)


def copied(source: tl.tensor, out: tl.tensor, BLOCK: tl.constexpr) -> None:
    index = tl.arange(0, BLOCK)
    tl.store(out + index, tl.load(source + index))


def keyed(kernel: Any, capability: int = 90, kind: str = "*bf16", block: int = 64, **options: Any) -> str:
    return source_key(Compilation("k", kernel, {"source": kind, "out": kind}, {"BLOCK": block}, **options), capability)


def test_a_key_depends_on_kernel_types_options_and_gpu() -> None:
    def made(*arguments: Any, **options: Any) -> str:
        return keyed(JITFunction(copied), *arguments, **options)

    same = made()
    assert len(same) == 16
    assert made() == same
    others = [made(80), made(kind="*fp32"), made(block=32), made(num_warps=8), made(num_stages=2), made(registers_max=64)]
    assert len({same, *others, made(fp_fusion=False)}) == 8


def as_given(block: int) -> int:
    return block


places = triton.constexpr_function(as_given)


def copied_with_a_constant(source: tl.tensor, out: tl.tensor, BLOCK: tl.constexpr) -> None:
    index = tl.arange(0, places(BLOCK))
    tl.store(out + index, tl.load(source + index))


def test_a_key_does_not_depend_on_the_line_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    below, above = JITFunction(copied), JITFunction(copied)
    below.starting_line_number += 1000
    monkeypatch.setattr(f"kernels.triton.{MODULE}.below", below, raising=False)
    monkeypatch.setattr(f"kernels.triton.{MODULE}.above", above, raising=False)
    make_keys_reproducible()
    assert keyed(below) == keyed(above)


def test_a_key_does_not_depend_on_the_line_of_a_called_function(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for line in (1, 1000):
        constant = triton.constexpr_function(as_given)
        constant.starting_line_number = line
        monkeypatch.setattr(f"{__name__}.places", constant)
        monkeypatch.setattr(f"kernels.triton.{MODULE}.places", constant, raising=False)
        make_keys_reproducible()
        found.append(keyed(JITFunction(copied_with_a_constant)))
    assert found[0] == found[1]


FACTOR = tl.constexpr(2)


def doubled(values: tl.tensor) -> tl.tensor:
    return values * FACTOR


twice = JITFunction(doubled)


def copied_twice(source: tl.tensor, out: tl.tensor, BLOCK: tl.constexpr) -> None:
    index = tl.arange(0, BLOCK)
    tl.store(out + index, twice(tl.load(source + index)))


def test_a_key_does_not_depend_on_which_functions_had_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    make_keys_reproducible()
    found = []
    for had_one in (False, True):
        called = JITFunction(doubled)
        monkeypatch.setattr(f"{__name__}.twice", called)
        if had_one:
            assert called.cache_key
        found.append(keyed(JITFunction(copied_twice)))
    assert found[0] == found[1]


def test_a_record_is_read_back_unchanged(tmp_path: Path) -> None:
    long = Compiled("b, grammar", 90, "3.9.0", 8, 2, 128, 24, 4096, 512, ("mma.sync", "wgmma.mma_async"), 2, True, 128)
    short = Compiled("a", 80, "3.6.0", 4, 3, 32, 0, 0, 0, (), 16)
    record: Record = {("rows.norm", "b, grammar", 90, "3.9.0"): Recorded("0123", long)}
    record |= {("rows.fp8", "a", number, "3.6.0"): Recorded("4567", replace(short, capability=number)) for number in (89, 80)}
    path = tmp_path / "record.jsonl"
    assert read(path) == {}
    write(path, record)
    assert read(path) == record
    assert len(path.read_text("utf-8").splitlines()) == 2, "a line for each configuration"


def test_a_difference_is_reported_with_both_results() -> None:
    before: Any = Compiled("a", 80, "3.6.0", 4, 3, 32, 0, 0, 0, (), 16)
    assert differences(before, before) == []
    assert differences(before, replace(before, spill_bytes=8)) == ["the record has spill 0, compiled now it is 8"]
