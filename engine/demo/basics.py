"""Reads basics.txt, the hand-written conversations of the demo model: who it is, first steps in Python, small programs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("basics.txt")


@dataclass(frozen=True)
class Basic:
    """section: topic, howto, program or talk. names: ways to ask for it. answers: one, except for talk. code: may be empty."""

    section: str
    names: tuple[str, ...]
    answers: tuple[str, ...]
    code: str


def _entry(section: str, lines: list[str]) -> Basic:
    names = tuple(part.strip() for part in lines[0].removeprefix("? ").split(" | "))
    code = [line[4:] for line in lines[1:] if line.startswith("    ") or not line]
    answer_lines = [line for line in lines[1:] if line and not line.startswith("    ")]
    if section == "talk":
        return Basic(section, names, tuple(line.replace("|", "\n") for line in answer_lines), "")
    return Basic(section, names, (" ".join(answer_lines),), "\n".join(code).strip("\n"))


def read(path: Path = SOURCE) -> Iterator[Basic]:
    """The entries of a file in the format of basics.txt: '= section', then '? names' with the answer and code below."""
    section, lines = "", list[str]()
    for line in [*path.read_text(encoding="ascii").splitlines(), "= end"]:
        if line.startswith(("? ", "= ")):
            if lines:
                yield _entry(section, lines)
            lines = [line] if line.startswith("? ") else []
        elif lines:
            lines.append(line)
        if line.startswith("= "):
            section = line.removeprefix("= ")
