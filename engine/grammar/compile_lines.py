"""Whose grammar is compiled next, and whose are kept. Knows no compiler and no thread: its owner locks.

Each tenant has a line of its own and a cache of its own. Lines take turns, and a tenant has one compile under way at a time, so
that texts which take all of their deadline delay nobody but the tenant that sent them while another worker is there. Where no
more may wait or be kept, the tenant with the most gives way.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.errors import EngineOverloaded
from engine.grammar.matcher import CompiledGrammar
from engine.grammar.spec import GrammarSpec

CACHED_GRAMMARS_MAX = 128
WAITING_MAX = 512
NO_THREAD = "the system starts no more threads"
NO_PROCESS = "the system starts no more processes"


def overloaded(spec: GrammarSpec, why: str) -> EngineOverloaded:
    """Why a grammar is not compiled, which may be asked for again."""
    return EngineOverloaded(f"{spec.param} cannot be compiled now: {why}")


class Job(NamedTuple):
    """A compile that was begun."""

    tenant_id: str
    spec: GrammarSpec
    grammar: Future[CompiledGrammar]


@dataclass(slots=True)
class _Line:
    """Of one tenant. `known` holds the latest last: what was compiled or refused, what is under way and what waits."""

    known: OrderedDict[GrammarSpec, Future[CompiledGrammar]] = field(default_factory=OrderedDict)
    waiting: deque[GrammarSpec] = field(default_factory=deque)
    num_served: int = 0

    @property
    def num_kept(self) -> int:
        """What neither waits nor is under way, which may be forgotten."""
        return len(self.known) - len(self.waiting) - self.num_served


class CompileLines:
    """The lines of all tenants that have anything here, the one whose turn is next first."""

    def __init__(self, *, waiting_max: int | None = WAITING_MAX, at_a_time: int = 1) -> None:
        """Of all tenants `waiting_max` may wait, any number if None; of each `at_a_time` are compiled."""
        self._waiting_max = waiting_max
        self._at_a_time = at_a_time
        self._lines: OrderedDict[str, _Line] = OrderedDict()

    @property
    def num_waiting(self) -> int:
        """Compiles that were not begun."""
        return sum(len(line.waiting) for line in self._lines.values())

    def find(self, tenant_id: str, spec: GrammarSpec) -> Future[CompiledGrammar] | None:
        """What is known of this grammar, which makes it the latest one."""
        line = self._lines.get(tenant_id)
        if line is None or spec not in line.known:
            return None
        line.known.move_to_end(spec)
        return line.known[spec]

    def add(self, tenant_id: str, spec: GrammarSpec) -> Future[CompiledGrammar]:
        """Put a grammar that is not known at the end of its tenant's line. Raises `EngineOverloaded` when too many wait, unless
        another tenant has more of them by two: then the last of those is refused in its place."""
        line = self._lines.get(tenant_id) or _Line()
        if self._waiting_max is not None and self.num_waiting >= self._waiting_max:
            longest = max(self._lines.values(), key=lambda each: len(each.waiting), default=line)
            if len(longest.waiting) < len(line.waiting) + 2:
                raise self._overloaded(spec)
            refused = longest.waiting.pop()
            longest.known.pop(refused).set_exception(self._overloaded(refused))
        self._lines.setdefault(tenant_id, line)
        line.waiting.append(spec)
        line.known[spec] = grammar = Future[CompiledGrammar]()
        return grammar

    def begin(self) -> Job | None:
        """The next compile, of the tenant that waits for its turn the longest; None if there is none to begin now."""
        for tenant_id, line in self._lines.items():
            if line.waiting and line.num_served < self._at_a_time:
                line.num_served += 1
                self._lines.move_to_end(tenant_id)
                spec = line.waiting.popleft()
                return Job(tenant_id, spec, line.known[spec])
        return None

    def forget(self, job: Job) -> None:
        """Nothing is known of a grammar whose compile was begun: it is compiled when it is asked for again."""
        self._lines[job.tenant_id].known.pop(job.spec, None)

    def end(self, job: Job) -> None:
        """A compile that was begun is over: its tenant may have the next one."""
        self._lines[job.tenant_id].num_served -= 1
        self._drop_if_empty(job.tenant_id)
        self._forget_oldest()

    def cancel(self) -> None:
        """Cancel all that waits."""
        for line in self._lines.values():
            for spec in line.waiting:
                line.known[spec].cancel()
            line.waiting.clear()

    def _forget_oldest(self) -> None:
        """Keep CACHED_GRAMMARS_MAX. What waits or is under way is never forgotten, and drives out nobody's."""
        surplus = sum(line.num_kept for line in self._lines.values()) - CACHED_GRAMMARS_MAX
        for _ in range(surplus):
            tenant_id, line = max(self._lines.items(), key=lambda item: item[1].num_kept)
            del line.known[next(spec for spec, grammar in line.known.items() if grammar.done())]
            self._drop_if_empty(tenant_id)

    def _drop_if_empty(self, tenant_id: str) -> None:
        line = self._lines[tenant_id]
        if not line.known and not line.num_served:
            del self._lines[tenant_id]

    def _overloaded(self, spec: GrammarSpec) -> EngineOverloaded:
        return overloaded(spec, f"{self._waiting_max} grammars are already waiting")
