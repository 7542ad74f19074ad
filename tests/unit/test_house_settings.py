"""The table of settings in docs/operations.md agrees with the code."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from appliance.base.setting_values import MIB
from appliance.base.settings import Settings

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "operations.md"
UNITS = {"h": 3600, "days": 86400, "MiB": MIB}
IN_WORDS = {
    "the platform's data folder": dataclasses.MISSING,
    "SQLite in the data directory": dataclasses.MISSING,
    "the demo model": (),
    "generated and shown once": None,
    "all cores but one": None,
    "chosen by the engine": None,
    "the model's": None,
    "the rest of the context": None,
    "as stored": None,
    "true unless standard error is a terminal": None,
    "off": None,
    "none": (),
    "not set": None,
    "no provider": None,
    "no mail": None,
    "true": True,
    "false": False,
}


def documented_defaults() -> dict[str, str]:
    """Return the text of the column `default` by setting."""
    found: dict[str, str] = {}
    section = GUIDE.read_text("utf-8").partition("## Settings")[2].partition("\n## ")[0]
    for line in filter(lambda line: line.startswith("|"), section.splitlines()):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        keys = re.findall(r"`(\w+)`", cells[0])
        defaults = cells[1].split(", ")
        found |= dict(zip(keys, defaults if len(defaults) == len(keys) else defaults * len(keys), strict=True))
    return found


def parsed_default(written: str) -> object:
    """Return the value that a documented default means."""
    if written in IN_WORDS:
        return IN_WORDS[written]
    number, _, unit = written.partition(" ")
    return float(number) * UNITS.get(unit, 1) if re.fullmatch(r"[\d.]+", number) and number.count(".") < 2 else written


def test_every_setting_is_documented_with_its_default() -> None:
    defaults = {field.name: field.default for field in dataclasses.fields(Settings)}
    assert {key: parsed_default(written) for key, written in documented_defaults().items()} == defaults
