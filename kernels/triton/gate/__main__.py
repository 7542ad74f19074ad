"""`python -m kernels.triton.gate [--only 90] [--record FILE] [MODULE …]` checks every configuration of these kernel modules, or
of all, against the limits for its machine code, and prints one JSON line per configuration and compute capability.

A line holds what was read from the machine code and what is wrong with it (`faults`). Configurations in a record (`record.py`)
are not compiled again, except one configuration of each kernel on one card, another for each version of Triton
(`card_in_turn`). Used by the tests and bench/compiled_kernels.py, in processes without TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from triton import __version__

from kernels.triton.gate.compilation import Compilation, compile_kernel, faults, make_keys_reproducible, source_key
from kernels.triton.gate.declared import declared, module_names
from kernels.triton.gate.record import Record, Recorded, differences, read

Row = dict[str, Any]


def rows_of_module(module: str, record: Record, only: int | None = None) -> Iterator[Row]:
    """One row per configuration and capability of `module`, in order; only for the capability `only`, if given.

    `is_recorded`: the record holds this machine code. The first such configuration of each kernel for the card in turn is
    compiled anyway, and a difference is a fault.
    """
    compilations = declared(module)
    make_keys_reproducible()
    to_compile = {(kernel, card_in_turn(kernel, cards, __version__)) for kernel, cards in cards_of(compilations).items()}
    for compilation in compilations:
        for capability in compilation.capabilities:
            if only not in (None, capability):
                continue
            key, kernel = source_key(compilation, capability), (compilation.kernel.__name__, capability)
            before = record.get((module, compilation.name, capability, __version__))
            if before is not None and before.key != key:
                before = None
            row = {"module": module, "name": compilation.name, "capability": capability, "triton": __version__}
            row |= {"key": key, "is_recorded": before is not None}
            if before is not None and kernel not in to_compile:
                yield row | asdict(before.compiled) | {"faults": faults(compilation, before.compiled)}
            else:
                to_compile.discard(kernel)
                yield row | _compiled(compilation, capability, before)


def cards_of(compilations: Sequence[Compilation]) -> Mapping[str, Sequence[int]]:
    """The capabilities of each kernel, by its name."""
    found: dict[str, set[int]] = {}
    for compilation in compilations:
        found.setdefault(compilation.kernel.__name__, set()).update(compilation.capabilities)
    return {kernel: sorted(cards) for kernel, cards in found.items()}


def card_in_turn(kernel: str, cards: Sequence[int], version: str) -> int:
    """The card for which this version of Triton compiles a kernel although it is recorded. It follows from the kernel's name,
    so that each card gets its share of kernels, and changes with every second version."""
    return cards[(zlib.crc32(kernel.encode()) + int(version.split(".")[1]) // 2) % len(cards)]


def _compiled(compilation: Compilation, capability: int, before: Recorded | None) -> Row:
    try:
        compiled = compile_kernel(compilation, capability)
    # Whatever Triton or its assembler cannot do is a fault of this row; the other rows are still compiled.
    except Exception as error:  # noqa: BLE001
        return {"faults": [f"does not compile: {type(error).__name__}: {error}"]}
    found = [] if before is None else differences(before.compiled, compiled)
    return {**asdict(compiled), "faults": found + faults(compilation, compiled)}


def main(arguments: Sequence[str]) -> None:
    """Print the rows as they are computed."""
    parser = argparse.ArgumentParser(description="Compile kernels for cards that are not here.")
    parser.add_argument("--only", type=int, help="one compute capability: 80, 89, 90 or 100")
    parser.add_argument("--record", type=Path, help="what was compiled before; without it all is compiled")
    parser.add_argument("modules", nargs="*", help="as rows.norm")
    options = parser.parse_args(arguments)
    record = {} if options.record is None else read(options.record)
    gc.freeze()  # imported objects are permanent: keep the collector from searching them for a compiler's garbage
    for module in options.modules or module_names():
        for row in rows_of_module(module, record, options.only):
            print(json.dumps(row), flush=True)  # noqa: T201
    gc.unfreeze()  # or the compiler's library complains about leaks


if __name__ == "__main__":
    main(sys.argv[1:])
