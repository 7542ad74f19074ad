"""`python -m kernels.triton.gate [--only 90] [--record FILE] [MODULE …]` holds every configuration of these files of kernels,
or of all, to what its machine code may be, and prints one JSON line for each and each compute capability.

A line holds what was read from the machine code and what is wrong with it (`faults`). What a record (`record.py`) holds is not
compiled again, but for one configuration of each kernel on every second card, by versions of Triton in turn (`in_turn`). Used
by the tests and by bench/compiled_kernels.py, in processes without TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from triton import __version__

from kernels.triton.gate.compilation import CAPABILITIES, Compilation, compile_kernel, faults, forget_lines, source_key
from kernels.triton.gate.declared import declared, module_names
from kernels.triton.gate.record import Record, Recorded, differences, read

Row = dict[str, Any]


def rows_of_module(module: str, record: Record, only: int | None = None) -> Iterator[Row]:
    """One row for each configuration and capability of `module`, in their order; of one capability where `only` names it.

    `is_recorded` says that the record holds this machine code. The first such configuration of each kernel on each card whose
    turn it is is compiled all the same, and a difference is a fault.
    """
    compilations = declared(module)
    forget_lines()
    kernels = list(dict.fromkeys(compilation.kernel.__name__ for compilation in compilations))
    sample = {
        (kernel, capability)
        for number, kernel in enumerate(kernels)
        for capability in CAPABILITIES
        if not in_turn(number, capability, __version__)
    }
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
            if before is not None and kernel in sample:
                yield row | asdict(before.compiled) | {"faults": faults(compilation, before.compiled)}
            else:
                sample.add(kernel)
                yield row | _compiled(compilation, capability, before)


def in_turn(number: int, capability: int, version: str) -> bool:
    """Whether this version of Triton is the one that compiles the kernel of that place in its file for that card, though it is
    recorded: every second version is, for half of the cards, and the others for the other half."""
    return (number + CAPABILITIES.index(capability) + int(version.split(".")[1])) % 2 == 0


def _compiled(compilation: Compilation, capability: int, before: Recorded | None) -> Row:
    try:
        compiled = compile_kernel(compilation, capability)
    # Whatever Triton or its assembler cannot do is this row's fault; the other rows are still compiled.
    except Exception as error:  # noqa: BLE001
        return {"faults": [f"does not compile: {type(error).__name__}: {error}"]}
    found = [] if before is None else differences(before.compiled, compiled)
    return {**asdict(compiled), "faults": found + faults(compilation, compiled)}


def main(arguments: Sequence[str]) -> None:
    """Print the rows as they are made."""
    parser = argparse.ArgumentParser(description="Compile kernels for cards that are not here.")
    parser.add_argument("--only", type=int, help="one compute capability: 80, 89, 90 or 100")
    parser.add_argument("--record", type=Path, help="what was compiled before; without it all is compiled")
    parser.add_argument("modules", nargs="*", help="as norm")
    options = parser.parse_args(arguments)
    record = {} if options.record is None else read(options.record)
    gc.freeze()  # what is imported stays: a compiler's garbage is looked for among its own
    for module in options.modules or module_names():
        for row in rows_of_module(module, record, options.only):
            print(json.dumps(row), flush=True)  # noqa: T201
    gc.unfreeze()  # or the compiler's library complains of what is left


if __name__ == "__main__":
    main(sys.argv[1:])
