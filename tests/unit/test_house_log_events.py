"""The operators' list of log events has every warning and error that gateway and engine can log, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
GUIDE = REPO / "docs" / "monitoring.md"
LEVELS = {"warning": "warning", "error": "error", "exception": "error", "critical": "error"}
PACKAGES = {"Gateway": ("appliance",), "Engine": ("engine", "kernels")}
LOGGERS = {"log", "_log"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def logged(packages: tuple[str, ...]) -> set[tuple[str, str]]:
    """Return the level and template of every event that is logged in `packages`, with `…` for what varies."""
    trees = [ast.parse(path.read_text("utf-8")) for package in packages for path in (REPO / package).rglob("*.py")]
    return {
        (level, re.sub(r"%[sd]", "…", template))
        for tree in trees
        for level, event, scope in calls(tree)
        for template in templates(event, scope, trees)
    }


def calls(tree: ast.AST, scope: ast.AST | None = None) -> Iterator[tuple[str, ast.expr, ast.AST]]:
    """Yield level, event and enclosing function of each call of a logger, and of each call that is given a logger's method
    and an event, as `Context.run` is."""
    for node in ast.iter_child_nodes(tree):
        inner = node if isinstance(node, FUNCTIONS) else scope
        if isinstance(node, ast.Call):
            callables = [node.func, *node.args]
            for method, event in zip(callables, node.args, strict=False):
                if isinstance(method, ast.Attribute) and method.attr in LEVELS and is_logger(method.value):
                    yield LEVELS[method.attr], event, inner or tree
        yield from calls(node, inner)


def is_logger(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in LOGGERS


def templates(event: ast.expr, scope: ast.AST, trees: list[ast.Module]) -> list[str]:
    """Return the texts that `event` may be: a constant, a choice between two, or a variable or argument with such a value."""
    if isinstance(event, ast.Constant) and isinstance(event.value, str):
        return [event.value]
    if isinstance(event, ast.IfExp):
        return templates(event.body, scope, trees) + templates(event.orelse, scope, trees)
    assert isinstance(event, ast.Name), f"line {event.lineno}: the event is computed, so the list cannot be checked"
    values = [
        (node.value, scope)
        for node in ast.walk(scope)
        if isinstance(node, ast.Assign) and any(isinstance(name, ast.Name) and name.id == event.id for name in node.targets)
    ]
    values = values or list(arguments(event.id, scope, trees))
    assert values, f"{event.id}: no value is found, so the list cannot be checked"
    return [text for value, place in values for text in templates(value, place, trees)]


def arguments(name: str, function: ast.AST, trees: list[ast.Module]) -> Iterator[tuple[ast.expr, ast.AST]]:
    """Yield what callers of `function` pass as keyword `name`, with the functions that pass it."""
    assert isinstance(function, FUNCTIONS)
    for caller in (node for tree in trees for node in ast.walk(tree) if isinstance(node, FUNCTIONS)):
        for call in (node for node in ast.walk(caller) if isinstance(node, ast.Call)):
            if isinstance(call.func, ast.Name) and call.func.id == function.name:
                yield from ((keyword.value, caller) for keyword in call.keywords if keyword.arg == name)


def listed(process: str) -> list[tuple[str, str]]:
    """Return level and event of each row of the table of a process."""
    events = GUIDE.read_text("utf-8").partition("\n## Log events\n")[2]
    table = events.partition(f"\n### {process}\n")[2].partition("\n#")[0]
    return re.findall(r"^\| (\w+) \| `([^`]+)` \| [^|]+ \| [^|]+ \|$", table, re.MULTILINE)


def test_every_event_of_the_gateway_is_listed() -> None:
    assert sorted(listed("Gateway")) == sorted(logged(PACKAGES["Gateway"]))


def test_every_event_of_the_engine_is_listed() -> None:
    assert sorted(listed("Engine")) == sorted(logged(PACKAGES["Engine"]))


def test_loggers_have_the_names_by_which_their_calls_are_found() -> None:
    misnamed = []
    for package in sum(PACKAGES.values(), ()):
        for path in (REPO / package).rglob("*.py"):
            for name in re.findall(r"^(\w+) = \w+\.get_?[lL]ogger\(", path.read_text("utf-8"), re.MULTILINE):
                if name not in LOGGERS:
                    misnamed.append((str(path.relative_to(REPO)), name))
    assert not misnamed


def test_alert_rules_quote_events_that_exist() -> None:
    events = {event for packages in PACKAGES.values() for _level, event in logged(packages)}
    rules = re.sub(r"\s+", " ", (REPO / "docs" / "prometheus" / "gatehouse.rules.yml").read_text("utf-8"))
    quoted = set(re.findall(r"`(?!gatehouse |systemctl )([a-z]+(?: [a-z;]+)+)`", rules))
    assert quoted
    assert quoted <= events
