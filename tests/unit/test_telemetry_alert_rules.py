"""The alert rules for Prometheus use metrics and labels that exist, and lead to sections that exist."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from appliance.base.errors import GatehouseError
from appliance.console.history import FINISH_REASONS
from appliance.serving import alerting
from appliance.telemetry.metrics import _codes
from tests.support.exported_metrics import ExportedMetric, exported_metrics

REPO = Path(__file__).resolve().parents[2]
RULES = REPO / "docs" / "prometheus" / "gatehouse.rules.yml"
GUIDE = REPO / "docs" / "monitoring.md"

OF_COUNTERS = {"rate", "increase"}
FUNCTIONS = {"histogram_quantile", "max_over_time", *OF_COUNTERS}
AGGREGATIONS = {"sum", "max", "min", "avg"}
WORDS = {"by", "on", "and", "or", "unless"}
OF_ALERTS = {"alertname", "alertstate"}
OF_PROMETHEUS = {"up": {"job", "instance"}, "ALERTS": OF_ALERTS | {"model"}}  # the series that Prometheus itself records
OF_TARGETS = {"job", "instance"}
DURATION = re.compile(r"\d+(s|m|h|d)")
TOKEN = re.compile(r'"[^"]*"|\[[^\]]*\]|[A-Za-z_]\w*|\d+(?:\.\d+)?(?:e\d+)?|==|!=|=~|!~|>=|<=|[-+*/(){},=<>]|\s+')


class Rule(msgspec.Struct, forbid_unknown_fields=True, rename={"wait": "for"}):
    """One alert rule as Prometheus reads it."""

    alert: str
    expr: str
    labels: dict[str, str]
    annotations: dict[str, str]
    wait: str = "0m"


class Group(msgspec.Struct, forbid_unknown_fields=True):
    """A group of rules."""

    name: str
    rules: list[Rule]


class RulesFile(msgspec.Struct, forbid_unknown_fields=True):
    """The whole file."""

    groups: list[Group]


ALL_RULES = [rule for group in msgspec.yaml.decode(RULES.read_bytes(), type=RulesFile).groups for rule in group.rules]
each_rule = pytest.mark.parametrize("rule", ALL_RULES, ids=lambda rule: rule.alert)


def tokens(expression: str) -> list[str]:
    """Split an expression; a character that PromQL does not know fails."""
    found = TOKEN.findall(expression)
    assert "".join(found) == expression
    return [token for token in found if not token.isspace()]


def names(expression: str) -> list[str]:
    """Return the names in an expression outside of strings, `{…}` and the lists of `by` and `on`."""
    bare = re.sub(r'"[^"]*"', '""', expression)
    bare = re.sub(r"\b(?:by|on) \([^)]*\)|\{[^}]*\}|\[[^\]]*\]|\b[\d.]+e\d+\b", " ", bare)
    return re.findall(r"[A-Za-z_]\w*", bare)


def series_of(metrics: dict[str, ExportedMetric]) -> dict[str, set[str]]:
    """Return every series of the appliance and of Prometheus with its labels."""
    return {name: labels for metric in metrics.values() for name, labels in metric.series.items()} | OF_PROMETHEUS


@each_rule
def test_the_expression_is_balanced_and_calls_known_functions(rule: Rule) -> None:
    found = tokens(rule.expr)
    for left, right in ("()", "{}"):
        depth = 0
        for token in found:
            depth += (token == left) - (token == right)
            assert depth >= 0
        assert depth == 0
    called = {name for name, after in pairwise(found) if name[0].isalpha() and after == "("}
    assert called <= FUNCTIONS | AGGREGATIONS | WORDS
    assert DURATION.fullmatch(rule.wait)
    assert all(DURATION.fullmatch(token[1:-1]) for token in found if token[0] == "[")


@each_rule
async def test_every_series_exists(rule: Rule) -> None:
    used = set(names(rule.expr)) - FUNCTIONS - AGGREGATIONS - WORDS
    assert used
    assert used <= set(series_of(await exported_metrics()))


@each_rule
async def test_every_label_exists(rule: Rule) -> None:
    series = series_of(await exported_metrics())
    for name, matchers in re.findall(r"(\w+)\{([^}]*)\}", rule.expr):
        assert set(re.findall(r'(\w+)(?:=~|!~|!=|=)"', matchers)) <= series[name]
    used = [series[name] for name in names(rule.expr) if name in series]
    kept: set[str] = set.union(*used) | OF_TARGETS
    for word, labels in re.findall(r"\b(by|on) \(([^)]*)\)", rule.expr):
        listed = {label.strip() for label in labels.split(",")}
        assert all(listed <= of_series | OF_TARGETS for of_series in used)
        if word == "by":
            kept = listed
    assert set(re.findall(r"\$labels\.(\w+)", " ".join(rule.annotations.values()))) <= kept - {"le"} - OF_ALERTS


@each_rule
async def test_growth_is_that_of_counters_over_a_time(rule: Rule) -> None:
    metrics = await exported_metrics()
    growing = {name for metric in metrics.values() if metric.kind != "gauge" for name in metric.series}
    over_time = re.findall(r"(\w+)\((\w+)(?:\{[^}]*\})?\[", rule.expr)
    assert len(over_time) == rule.expr.count("[") == len(re.findall(r"\b(?:rate|increase|max_over_time)\(", rule.expr))
    for function, name in over_time:
        assert (function in OF_COUNTERS) == (name in growing)


@each_rule
def test_a_rule_that_other_rules_refer_to_exists(rule: Rule) -> None:
    named = set(re.findall(r'alertname="(\w+)"', rule.expr))
    assert named <= {other.alert for other in ALL_RULES} - {rule.alert}


def test_an_engine_that_is_reported_as_down_is_not_reported_for_its_restarts_too() -> None:
    (down,) = (rule for rule in ALL_RULES if rule.alert == "GatehouseEngineDown")
    (restarts,) = (rule for rule in ALL_RULES if rule.alert == "GatehouseEngineRestarts")
    _, _, excluded = restarts.expr.partition(" unless on (job, instance, model) ")
    assert excluded == f'max_over_time(ALERTS{{alertname="{down.alert}", alertstate="firing"}}[30m])'
    assert restarts.wait == down.wait


def test_a_ledger_that_fails_with_its_database_is_not_reported_for_itself_too() -> None:
    (database,) = (rule for rule in ALL_RULES if rule.alert == "GatehouseDatabaseDown")
    (ledger,) = (rule for rule in ALL_RULES if rule.alert == "GatehouseLedgerDown")
    _, _, excluded = ledger.expr.partition(" unless on (job, instance) ")
    assert excluded == database.expr
    assert ledger.wait == database.wait


@each_rule
def test_every_value_of_reason_exists(rule: Rule) -> None:
    senders = "".join(path.read_text("utf-8") for path in Path(alerting.__path__[0]).glob("*.py"))
    reasons = {
        "gatehouse_requests_total": set(FINISH_REASONS),
        "gatehouse_requests_rejected_total": _codes(GatehouseError),
        "gatehouse_alert_attempts_failed_total": set(re.findall(r'SendFailed\(\s*"(\w+)"', senders)),
    }
    for name, values in re.findall(r'(\w+)\{reason=~?"([^"]*)"\}', rule.expr):
        assert set(values.split("|")) <= reasons[name]


@each_rule
async def test_a_quantile_is_compared_with_a_bound_of_a_bucket(rule: Rule) -> None:
    """A quantile within a bucket is interpolated: only at a bound is it exact."""
    if "histogram_quantile" not in rule.expr:
        return
    from appliance.telemetry.metrics import LATENCY_BUCKETS_S

    assert float(rule.expr.rpartition(">")[2]) in LATENCY_BUCKETS_S


@each_rule
def test_a_rule_says_what_to_do_and_where_to_read_on(rule: Rule) -> None:
    assert set(rule.annotations) == {"summary", "description", "docs"}
    assert rule.labels["severity"] in ("critical", "warning")
    path, _, anchor = rule.annotations["docs"].partition("#")
    headings = re.findall(r"^#+ (.+)$", (REPO / path).read_text("utf-8"), re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert anchor in anchors | {""}


def test_the_guide_lists_the_rules() -> None:
    listed = re.findall(r"^\| `(Gatehouse\w+)` \| (\w+) \|", GUIDE.read_text("utf-8"), re.MULTILINE)
    assert listed == [(rule.alert, rule.labels["severity"]) for rule in ALL_RULES]


def test_the_scrape_configuration_of_the_guide_fits_the_rules() -> None:
    example = re.search(r"```yaml\n(scrape_configs:.*?)```", GUIDE.read_text("utf-8"), re.DOTALL)
    assert example
    configuration: dict[str, Any] = msgspec.yaml.decode(example[1])
    (job,) = configuration["scrape_configs"]
    assert job["job_name"] in {name for rule in ALL_RULES for name in re.findall(r'job="(\w+)"', rule.expr)}
    assert configuration["rule_files"] == [RULES.name]
