"""The operators' table of settings agrees with the code."""

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


def table() -> dict[str, str]:
    """Return every key of the table with what stands under `default`."""
    found: dict[str, str] = {}
    section = GUIDE.read_text("utf-8").partition("## Settings")[2].partition("\n## ")[0]
    for line in filter(lambda line: line.startswith("|"), section.splitlines()):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        keys = re.findall(r"`(\w+)`", cells[0])
        defaults = cells[1].split(", ")
        found |= dict(zip(keys, defaults if len(defaults) == len(keys) else defaults * len(keys), strict=True))
    return found


def value(written: str) -> object:
    """Return the default that the words of the table mean."""
    if written in IN_WORDS:
        return IN_WORDS[written]
    number, _, unit = written.partition(" ")
    return float(number) * UNITS.get(unit, 1) if re.fullmatch(r"[\d.]+", number) and number.count(".") < 2 else written


def test_every_setting_is_in_the_table_with_its_default() -> None:
    defaults = {field.name: field.default for field in dataclasses.fields(Settings)}
    assert {key: value(written) for key, written in table().items()} == defaults
