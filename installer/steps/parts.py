"""The parts in which the test suite runs: every test file, wherever it is, belongs to exactly one.

A part is one pytest process. Starting one costs a few seconds, so there are about a dozen; the longest begin first, so that no
processor is left waiting for the last one.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

# Areas of tests/unit, by the first word of a file's name, that are large enough to be parts of their own.
UNIT_AREAS = ("cli", "console", "engine", "metering")
# These mostly wait for processes that they start, which take a processor each: see tests/support/triton_jobs.py.
WAITING = {"test_compiled_kernels.py": "compiled kernels", "test_other_tritons.py": "other Tritons"}
LONGEST_FIRST = (
    "compiled kernels",
    "other Tritons",
    "kernels",
    "unit",
    "property",
    "ptx",
    "unit engine",
    "crash",
    "unit metering",
    "conformance",
    "browser",
    "unit cli",
    "unit console",
    "parity",
    "installer",
)


@dataclass(frozen=True)
class Part:
    """Some files of the suite, as paths relative to the clone."""

    name: str
    files: tuple[str, ...]


def parts(clone: Path) -> list[Part]:
    """Return the parts of the suite in the order in which they begin; parts not in LONGEST_FIRST come first."""
    files = defaultdict(list)
    for path in sorted((clone / "tests").rglob("test_*.py")):
        files[name_of(path.relative_to(clone / "tests"))].append(str(path.relative_to(clone)))
    order = {name: place for place, name in enumerate(LONGEST_FIRST)}
    return [Part(name, tuple(files[name])) for name in sorted(files, key=lambda name: order.get(name, -1))]


def name_of(path: Path) -> str:
    """Return the part of a test file; `path` is relative to the folder of the tests."""
    folder = path.parts[0] if len(path.parts) > 1 else "tests"
    if folder == "kernels" and path.name in WAITING:
        return WAITING[path.name]
    area = path.stem.split("_")[1]
    return f"unit {area}" if folder == "unit" and area in UNIT_AREAS else folder
