"""Which grammar is compiled next, and which are kept. Knows no compiler and no thread: its owner locks.

Each tenant has its own line and its own cache. Lines take turns, and a tenant has one compile under way at a time. So texts
that use up their whole deadline delay only the tenant that sent them, as long as there is another worker. When no more may wait
or be kept, the tenant with the most gives way.
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
    """The error for a grammar that is not compiled now; the client may try again."""
    return EngineOverloaded(f"{spec.param} cannot be compiled now: {why}")


class Job(NamedTuple):
    """A compile that has begun."""

    tenant_id: str
    spec: GrammarSpec
    grammar: Future[CompiledGrammar]


@dataclass(slots=True)
class _Line:
    """One tenant's line. `known` has the most recent last: grammars compiled, refused, under way and waiting."""

    known: OrderedDict[GrammarSpec, Future[CompiledGrammar]] = field(default_factory=OrderedDict)
    waiting: deque[GrammarSpec] = field(default_factory=deque)
    num_served: int = 0

    @property
    def num_kept(self) -> int:
        """Grammars that neither wait nor are under way, and so may be forgotten."""
        return len(self.known) - len(self.waiting) - self.num_served


class CompileLines:
    """The lines of all tenants with any grammar here; the one whose turn is next comes first."""

    def __init__(self, *, waiting_max: int | None = WAITING_MAX, at_a_time: int = 1) -> None:
        """At most `waiting_max` compiles may wait, over all tenants (any number if None); `at_a_time` of each tenant may
        run."""
        self._waiting_max = waiting_max
        self._at_a_time = at_a_time
        self._lines: OrderedDict[str, _Line] = OrderedDict()

    @property
    def num_waiting(self) -> int:
        """Compiles that have not begun."""
        return sum(len(line.waiting) for line in self._lines.values())

    def find(self, tenant_id: str, spec: GrammarSpec) -> Future[CompiledGrammar] | None:
        """The future of a known grammar, which becomes the most recent one; None if it is unknown."""
        line = self._lines.get(tenant_id)
        if line is None or spec not in line.known:
            return None
        line.known.move_to_end(spec)
        return line.known[spec]

    def add(self, tenant_id: str, spec: GrammarSpec) -> Future[CompiledGrammar]:
        """Put an unknown grammar at the end of its tenant's line. Raises `EngineOverloaded` when too many wait, unless another
        tenant has at least two more waiting: then the last of those is refused instead."""
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
        """The next compile, of the tenant that has waited longest for its turn; None if none can begin now."""
        for tenant_id, line in self._lines.items():
            if line.waiting and line.num_served < self._at_a_time:
                line.num_served += 1
                self._lines.move_to_end(tenant_id)
                spec = line.waiting.popleft()
                return Job(tenant_id, spec, line.known[spec])
        return None

    def forget(self, job: Job) -> None:
        """Forget a grammar whose compile has begun: it is compiled again when it is next requested."""
        self._lines[job.tenant_id].known.pop(job.spec, None)

    def end(self, job: Job) -> None:
        """A compile is over: its tenant may have the next one."""
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
        """Keep CACHED_GRAMMARS_MAX. Grammars that wait or are under way are never forgotten, and displace none."""
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
