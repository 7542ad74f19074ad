"""Which grammar is compiled next, and which are cached. Knows no compiler and no thread: its owner locks.

Each tenant has its own queue and its own cache. Tenants are served round robin, each with one compile running at a time. So
texts that use up their whole deadline delay only the tenant that sent them, as long as there is another worker. When too many
wait or are cached, an entry of the tenant with the most is dropped; when the cached ones take too much memory, one of the
tenant whose grammars take the most. Requests that use a dropped grammar keep it until they end.
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
CACHED_BYTES_MAX = 1024**3
WAITING_MAX = 512
NO_THREAD = "the system starts no more threads"
NO_PROCESS = "the system starts no more processes"


def overloaded(spec: GrammarSpec, reason: str) -> EngineOverloaded:
    """The error for a grammar that is not compiled now; the client may try again."""
    return EngineOverloaded(f"{spec.param} cannot be compiled now: {reason}")


class Job(NamedTuple):
    """A compile that has begun."""

    tenant_id: str
    spec: GrammarSpec
    grammar: Future[CompiledGrammar]


@dataclass(slots=True)
class _TenantQueue:
    """One tenant's queue. `futures` has the most recent last: grammars compiled, refused, running and waiting."""

    futures: OrderedDict[GrammarSpec, Future[CompiledGrammar]] = field(default_factory=OrderedDict)
    waiting: deque[GrammarSpec] = field(default_factory=deque)
    num_running: int = 0

    @property
    def num_cached(self) -> int:
        """Grammars that neither wait nor run, and so may be evicted."""
        return len(self.futures) - len(self.waiting) - self.num_running

    @property
    def num_bytes(self) -> int:
        """Memory of the compiled grammars."""
        return sum(grammar.result().num_bytes for grammar in self.futures.values() if _is_compiled(grammar))

    def evict_oldest(self, *, is_compiled: bool) -> None:
        """Drop the least recently used grammar, of the compiled ones only or of the refused and cancelled ones too."""
        may_drop = _is_compiled if is_compiled else Future.done
        del self.futures[next(spec for spec, grammar in self.futures.items() if may_drop(grammar))]


def _is_compiled(grammar: Future[CompiledGrammar]) -> bool:
    return grammar.done() and not grammar.cancelled() and grammar.exception() is None


class CompileQueue:
    """The queues of all tenants that have a grammar; the one served next comes first."""

    def __init__(self, *, waiting_max: int | None = WAITING_MAX, running_max: int = 1) -> None:
        """At most `waiting_max` compiles may wait, over all tenants (any number if None); `running_max` of each tenant may
        run."""
        self._waiting_max = waiting_max
        self._running_max = running_max
        self._queues: OrderedDict[str, _TenantQueue] = OrderedDict()

    @property
    def num_waiting(self) -> int:
        """Compiles that have not begun."""
        return sum(len(queue.waiting) for queue in self._queues.values())

    def find(self, tenant_id: str, spec: GrammarSpec) -> Future[CompiledGrammar] | None:
        """The future of a known grammar, which becomes the most recent one; None if it is unknown or used up."""
        queue = self._queues.get(tenant_id)
        if queue is None or spec not in queue.futures:
            return None
        grammar = queue.futures[spec]
        compiled = grammar.result() if _is_compiled(grammar) else None
        if compiled is not None and compiled.is_used_up:
            del queue.futures[spec]
            self._drop_if_empty(tenant_id)
            return None
        queue.futures.move_to_end(spec)
        if compiled is not None and compiled.table_number:  # it has grown since it was compiled
            self._evict()
        return grammar

    def add(self, tenant_id: str, spec: GrammarSpec) -> Future[CompiledGrammar]:
        """Append an unknown grammar to its tenant's queue. Raises `EngineOverloaded` when too many wait, unless another tenant
        has at least two more waiting: then the last of those is refused instead."""
        queue = self._queues.get(tenant_id) or _TenantQueue()
        if self._waiting_max is not None and self.num_waiting >= self._waiting_max:
            longest = max((queue, *self._queues.values()), key=lambda tenant_queue: len(tenant_queue.waiting))
            if len(longest.waiting) < len(queue.waiting) + 2:
                raise self._overloaded(spec)
            refused = longest.waiting.pop()
            longest.futures.pop(refused).set_exception(self._overloaded(refused))
        self._queues.setdefault(tenant_id, queue)
        queue.waiting.append(spec)
        queue.futures[spec] = grammar = Future[CompiledGrammar]()
        return grammar

    def start_next(self) -> Job | None:
        """Start the next compile, of the first tenant in turn that has one waiting and may run one more; None if there is none.
        A tenant that was just served comes last, as a new one does."""
        for tenant_id, queue in self._queues.items():
            if queue.waiting and queue.num_running < self._running_max:
                queue.num_running += 1
                self._queues.move_to_end(tenant_id)
                spec = queue.waiting.popleft()
                return Job(tenant_id, spec, queue.futures[spec])
        return None

    def discard(self, job: Job) -> None:
        """Discard a grammar whose compile has started: it is compiled again when it is next requested."""
        self._queues[job.tenant_id].futures.pop(job.spec, None)

    def finish(self, job: Job) -> None:
        """Record that a compile is over: its tenant may start the next one."""
        self._queues[job.tenant_id].num_running -= 1
        self._drop_if_empty(job.tenant_id)
        self._evict()

    def cancel_waiting(self) -> None:
        """Cancel all waiting compiles."""
        for queue in self._queues.values():
            for spec in queue.waiting:
                queue.futures[spec].cancel()
            queue.waiting.clear()

    def _evict(self) -> None:
        """Keep CACHED_GRAMMARS_MAX with CACHED_BYTES_MAX. Grammars that wait or run are never evicted, and evict none."""
        while sum(queue.num_cached for queue in self._queues.values()) > CACHED_GRAMMARS_MAX:
            self._evict_from(max(self._queues, key=lambda tenant_id: self._queues[tenant_id].num_cached), is_compiled=False)
        while sum(queue.num_bytes for queue in self._queues.values()) > CACHED_BYTES_MAX:
            self._evict_from(max(self._queues, key=lambda tenant_id: self._queues[tenant_id].num_bytes), is_compiled=True)

    def _evict_from(self, tenant_id: str, *, is_compiled: bool) -> None:
        self._queues[tenant_id].evict_oldest(is_compiled=is_compiled)
        self._drop_if_empty(tenant_id)

    def _drop_if_empty(self, tenant_id: str) -> None:
        queue = self._queues[tenant_id]
        if not queue.futures and not queue.num_running:
            del self._queues[tenant_id]

    def _overloaded(self, spec: GrammarSpec) -> EngineOverloaded:
        return overloaded(spec, f"{self._waiting_max} grammars are already waiting")
