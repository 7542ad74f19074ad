"""Splits the test suite into parts, each run by one pytest process. Every test file belongs to exactly one part.

Starting a process costs a few seconds, so there are only about a dozen parts. The longest start first, so that no processor
idles at the end.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

# Areas of tests/unit (first word of the file name) that are large enough for a part of their own.
UNIT_AREAS = ("cli", "console", "engine", "metering")
# These mostly wait for subprocesses, which use a processor each: see tests/support/triton_jobs.py.
SUBPROCESS_HEAVY = {"test_compiled_kernels.py": "compiled kernels", "test_other_tritons.py": "other Tritons"}
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
    """Test files that run in one process, as paths relative to the clone."""

    name: str
    files: tuple[str, ...]


def suite_parts(clone: Path) -> list[Part]:
    """Return the parts of the suite in their starting order; parts not in LONGEST_FIRST come first."""
    files = defaultdict(list)
    for path in sorted((clone / "tests").rglob("test_*.py")):
        files[part_name(path.relative_to(clone / "tests"))].append(str(path.relative_to(clone)))
    order = {name: position for position, name in enumerate(LONGEST_FIRST)}
    return [Part(name, tuple(files[name])) for name in sorted(files, key=lambda name: order.get(name, -1))]


def part_name(path: Path) -> str:
    """Return the name of the part of a test file; `path` is relative to the tests folder."""
    folder = path.parts[0] if len(path.parts) > 1 else "tests"
    if folder == "kernels" and path.name in SUBPROCESS_HEAVY:
        return SUBPROCESS_HEAVY[path.name]
    area = path.stem.split("_")[1]
    return f"unit {area}" if folder == "unit" and area in UNIT_AREAS else folder
