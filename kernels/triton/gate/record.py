"""The record of compiled machine code: bench/results/compiled_kernels.jsonl, a line for each configuration.

A line has an entry for each card and version of Triton: what was read from the machine code, under short names and without
USUAL values, and a key of all that determines the code (`compilation.source_key`). While the key is the same, so is the machine
code.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kernels.triton.gate.compilation import Compiled

SHORT = {
    "capability": "sm",
    "triton": "triton",
    "num_warps": "warps",
    "num_stages": "stages",
    "registers": "regs",
    "spill_bytes": "spill",
    "shared_bytes": "shared",
    "tensor_memory_columns": "tmem",
    "tensor_instructions": "mma",
    "programs": "programs",
    "touches_early": "early",
    "exponentials": "exponentials",
    "products_behind_load": "behind",
    "overwritten": "overwritten",
    "scalar_products": "scalar",
}


USUAL: dict[str, Any] = {
    "num_warps": 4,
    "num_stages": 3,
    "spill_bytes": 0,
    "shared_bytes": 0,
    "tensor_memory_columns": 0,
    "tensor_instructions": (),
    "programs": 0,
    "touches_early": False,
    "exponentials": 0,
    "products_behind_load": 0,
    "overwritten": 0,
    "scalar_products": 0,
}
"""Values that are left out of an entry."""


class Recorded(NamedTuple):
    """One entry."""

    key: str
    compiled: Compiled


Record = dict[tuple[str, str, int, str], Recorded]
"""By module, name of the configuration, capability and version of Triton."""


def read(path: Path) -> Record:
    """The record in a file; empty if there is no file."""
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    found: Record = {}
    for line in lines:
        configuration = json.loads(line)
        for entry in configuration["made"]:
            compiled = _compiled(configuration["name"], entry)
            found[configuration["module"], compiled.name, compiled.capability, compiled.triton] = Recorded(
                entry["key"], compiled
            )
    return found


def write(path: Path, record: Record) -> None:
    """Write `record` to a file, in its order of configurations; each one's entries are sorted by capability and version."""
    made: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for (module, name, *_), recorded in sorted(record.items(), key=lambda item: item[0][2:]):
        made.setdefault((module, name), []).append(_entry(recorded))
    lines = (_line({"module": module, "name": name, "made": made[module, name]}) for module, name in _configurations(record))
    path.write_text("".join(f"{line}\n" for line in lines), "utf-8")


def differences(before: Compiled, now: Compiled) -> list[str]:
    """The differences between two results, in words."""
    pairs = ((label, getattr(before, name), getattr(now, name)) for name, label in SHORT.items())
    return [f"the record has {label} {old}, compiled now it is {new}" for label, old, new in pairs if old != new]


def _configurations(record: Record) -> Iterable[tuple[str, str]]:
    return dict.fromkeys((module, name) for module, name, *_ in record)


def _entry(recorded: Recorded) -> dict[str, Any]:
    values = {name: getattr(recorded.compiled, name) for name in SHORT}
    return {SHORT[name]: value for name, value in values.items() if value != USUAL.get(name)} | {"key": recorded.key}


def _compiled(name: str, entry: Mapping[str, Any]) -> Compiled:
    values = USUAL | {field: entry[label] for field, label in SHORT.items() if label in entry}
    return Compiled(name=name, **(values | {"tensor_instructions": tuple(values["tensor_instructions"])}))


def _line(configuration: Mapping[str, Any]) -> str:
    return json.dumps(configuration, separators=(",", ":"))
