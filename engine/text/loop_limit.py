"""Bounds the work of a chat template: counts the iterations of its loops, and of filters that loop, while it renders.

The template's author chooses what it does with the messages, but any client chooses how many there are. A template that looks
at every pair of messages is quick for ten and takes minutes for ten thousand. So does one that builds a text message by message
and copies all of it each time: additions to long text with `+` and `~` therefore count as iterations too. Other ways to join
are not counted. Knows no message and no model.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.runtime import Context

LOOP_ITERATIONS_MAX = 1 << 22
"""Every pair of 2,048 messages: some three seconds if each iteration reads an attribute, a third of a second if it is empty."""

BYTES_PER_ITERATION = 512
"""Copied bytes of an addition that count as one iteration: about as slow when each copy needs new memory from the system."""

_FILTER = "counted turns"  # not identifiers, so no template can use them
_ADDEND_FILTER = "counted bytes"
_COUNTER = "turns left"
_LOOPING_FILTERS = frozenset(
    (
        "batch", "groupby", "join", "list", "map", "max", "min", "reject", "rejectattr", "select", "selectattr", "slice",
        "sort", "sum", "unique",
    )
)  # fmt: skip


class TooManyIterations(jinja2.TemplateError):
    """A template has exceeded LOOP_ITERATIONS_MAX."""


class _IterationBudget:
    """The iterations that remain in one rendering."""

    def __init__(self) -> None:
        self.remaining = LOOP_ITERATIONS_MAX

    def spend(self, iterations: int = 1) -> None:
        self.remaining -= iterations
        if self.remaining < 0:
            raise TooManyIterations(f"its loops take more than {LOOP_ITERATIONS_MAX} iterations for them")


class _CountedIterable:
    """An iterable; each of its items spends one iteration of the budget."""

    def __init__(self, iterable: Iterable[Any], budget: _IterationBudget) -> None:
        self._iterable = iterable
        self._budget = budget

    def __iter__(self) -> Iterator[Any]:
        for item in self._iterable:
            self._budget.spend()
            yield item

    def __bool__(self) -> bool:
        return bool(self._iterable)

    def __len__(self) -> int:
        """The length, for `loop.length`. Raises TypeError if there is none, as `len` does."""
        return len(self._iterable)  # type: ignore[arg-type]


def compile_counted(environment: jinja2.Environment, source: str) -> jinja2.Template:
    """`source` compiled so that its iterations are counted; adds the filters for that to `environment`. Raises what compiling
    raises."""
    environment.filters[_FILTER] = _counted
    environment.filters[_ADDEND_FILTER] = _counted_addend
    tree = environment.parse(source)
    loops = list(tree.find_all(nodes.For))
    recursive_calls = {
        id(call): call for loop in loops if loop.recursive for call in loop.find_all(nodes.Call) if _is_loop(call)
    }
    for loop in loops:
        loop.iter = _count_iterations(loop.iter)
    for call in recursive_calls.values():
        call.args[:1] = map(_count_iterations, call.args[:1])
    for looping in list(tree.find_all(nodes.Filter)):
        if looping.name in _LOOPING_FILTERS and looping.node is not None:
            looping.node = _count_iterations(looping.node)
    for addition in list(tree.find_all(nodes.Add)):
        addition.left, addition.right = _count_bytes(addition.left), _count_bytes(addition.right)
    for concat in list(tree.find_all(nodes.Concat)):
        concat.nodes = list(map(_count_bytes, concat.nodes))
    return environment.from_string(tree)


def iteration_budget() -> dict[str, Any]:
    """The variables that a rendering needs besides its values."""
    return {_COUNTER: _IterationBudget()}


def _is_loop(call: nodes.Call) -> bool:
    """Whether this is `loop(…)`, which in a recursive loop iterates over its argument."""
    return isinstance(call.node, nodes.Name) and call.node.name == "loop"


@jinja2.pass_context
def _counted(context: Context, iterable: Iterable[Any]) -> _CountedIterable:
    return _CountedIterable(iterable, context[_COUNTER])


@jinja2.pass_context
def _counted_addend(context: Context, value: Any) -> Any:
    """`value`; if it is a text or list, the bytes that an addition copies are counted."""
    if isinstance(value, str | list | tuple) and (iterations := sys.getsizeof(value) // BYTES_PER_ITERATION):
        context[_COUNTER].spend(iterations)
    return value


def _count_iterations(node: nodes.Node) -> nodes.Filter:
    assert isinstance(node, nodes.Expr), "what is iterated over is an expression"
    return nodes.Filter(node, _FILTER, [], [], None, None, lineno=node.lineno)


def _count_bytes(node: nodes.Expr) -> nodes.Expr:
    """`node` with its bytes counted, unless it is a constant of the template, because those are short."""
    if isinstance(node, nodes.Const | nodes.TemplateData):
        return node
    return nodes.Filter(node, _ADDEND_FILTER, [], [], None, None, lineno=node.lineno)
