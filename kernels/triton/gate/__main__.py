"""`python -m kernels.triton.gate [--only 90] [--full 90] [MODULE …]` compiles every configuration of these files of kernels, or
of all, and prints one JSON line for each and each compute capability.

A line holds what was read from the machine code and what is wrong with it (`faults`). Used by the tests and by
bench/compiled_kernels.py, in processes without TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from triton import __version__

from kernels.triton.gate.compilation import Compilation, compile_kernel, faults
from kernels.triton.gate.declared import declared, module_names


def compile_module(module: str, only: int | None = None, full: int | None = None) -> Iterator[dict[str, Any]]:
    """One row for each configuration and capability of `module`, in their order; of one capability where `only` names it.
    Where `full` names a capability, others get one configuration of each kernel and set of element types."""
    seen = set()
    for compilation in declared(module):
        for capability in compilation.capabilities:
            form = compilation.kernel.__name__, frozenset(compilation.signature.values()), capability
            if only in (None, capability) and (full in (None, capability) or form not in seen):
                seen.add(form)
                yield _row(module, compilation, capability)


def _row(module: str, compilation: Compilation, capability: int) -> dict[str, Any]:
    row = {"module": module, "name": compilation.name, "capability": capability, "triton": __version__}
    try:
        compiled = compile_kernel(compilation, capability)
    # Whatever Triton or its assembler cannot do is this row's fault; the other rows are still compiled.
    except Exception as error:  # noqa: BLE001
        return {**row, "faults": [f"does not compile: {type(error).__name__}: {error}"]}
    return {**row, **asdict(compiled), "faults": faults(compilation, compiled)}


def main(arguments: Sequence[str]) -> None:
    """Print the rows as they are made."""
    parser = argparse.ArgumentParser(description="Compile kernels for cards that are not here.")
    parser.add_argument("--only", type=int, help="one compute capability: 80, 89, 90 or 100")
    parser.add_argument("--full", type=int, help="for others one configuration of each kernel and set of types")
    parser.add_argument("modules", nargs="*", help="as norm")
    options = parser.parse_args(arguments)
    for module in options.modules or module_names():
        for row in compile_module(module, options.only, options.full):
            print(json.dumps(row), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1:])
