"""The operators' table of metrics agrees with what the appliance exports."""

from __future__ import annotations

import re
from pathlib import Path

from appliance.console.history import FINISH_REASONS
from tests.support.exported_metrics import ExportedMetric, exported_metrics

DOCS = Path(__file__).resolve().parents[2] / "docs"
ROW = re.compile(r"^\| `(gatehouse_\w+)` \| (\w+) \| ([^|]*)\| ([^|]+) \|$", re.MULTILINE)


def section() -> str:
    return (DOCS / "monitoring.md").read_text("utf-8").partition("\n## Metrics\n")[2].partition("\n## ")[0]


async def test_the_table_has_every_metric_with_its_type_labels_and_help_text() -> None:
    rows = [
        ExportedMetric(name, kind, tuple(re.findall(r"`(\w+)`", labels)), text)
        for name, kind, labels, text in ROW.findall(section())
    ]
    assert {row.name: row for row in rows} == await exported_metrics()
    assert len(rows) == len({row.name for row in rows})


def test_every_way_in_which_a_request_ends_is_listed() -> None:
    (row,) = re.findall(r"^\| `gatehouse_requests_total` \| how .*$", section(), re.MULTILINE)
    assert tuple(re.findall(r"`(\w+)`", row)[1:]) == FINISH_REASONS


async def test_no_page_names_a_metric_that_does_not_exist() -> None:
    known = {name for metric in (await exported_metrics()).values() for name in (metric.name, *metric.series)}
    unknown = set()
    for page in sorted(DOCS.glob("*.md")):
        for name in re.findall(r"`(gatehouse_[a-z_]+)(?![\w{])", page.read_text("utf-8")):
            if name not in known and not name.endswith("_"):
                unknown.add((page.name, name))
    assert not unknown
