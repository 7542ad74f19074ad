"""The rows that benches leave in bench/results: one JSON object a line, appended. Knows no bench."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def append_row(path: Path, row: Mapping[str, Any]) -> None:
    """Write `row` behind the rows that are there."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
