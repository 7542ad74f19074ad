"""Why a model does not fit into a device's memory, and which changes would make it fit, in words. Knows no torch.

The changes are tried in the order of what they cost in quality: keys and values in 8 bits, weights in 8, both, weights in 4,
both. A shorter context is offered beside them wherever the fixed parts leave room for any.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from engine.memory_needs import EIGHT_BITS, FOUR_BITS, GIB, Formats, Load, MemoryNeeds, MemoryShape
from engine.protocol import MemoryPart

KV_8 = "keys and values in 8 bits (kv_cache_dtype=fp8)"
WEIGHTS_8 = "weights in 8 bits (quantization=int8 or fp8)"
WEIGHTS_4 = "weights in 4 bits (an AWQ or GPTQ checkpoint)"

TOLERANCE = 0.05
"""By which a part may be larger than predicted before the log warns of it."""


class Remedy(NamedTuple):
    """A change that makes a model fit: what to do, in words, and the context that fits then."""

    words: str
    context_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFit:
    """A model that is to have `wanted_len` tokens of context in `usable_bytes`."""

    model: MemoryShape
    formats: Formats
    load: Load
    usable_bytes: int
    context_bytes: int
    wanted_len: int
    draft: MemoryShape | None = None

    @property
    def needs(self) -> MemoryNeeds:
        """With the context that there will be."""
        return self._needs(self.context_len)

    def _needs(self, context_len: int) -> MemoryNeeds:
        context_bytes, draft = self.context_bytes, self.draft
        return MemoryNeeds.of(
            self.model, self.formats, self.load, context_bytes=context_bytes, context_len=context_len, draft=draft
        )

    def _needed_bytes(self, context_len: int) -> int:
        needs = self._needs(context_len)
        return needs.fixed_bytes + needs.kv_bytes(context_len)

    @property
    def needed_bytes(self) -> int:
        """With keys and values of one request of the wanted length."""
        return self._needed_bytes(self.wanted_len)

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.usable_bytes

    @property
    def context_len(self) -> int:
        """The longest request that fits, at most the wanted one, else whole blocks; 0 when not even one block does."""
        if self.fits:
            return self.wanted_len
        size = self.load.block_size
        return size * bisect_right(
            range(1, self.wanted_len // size + 1), self.usable_bytes, key=lambda n: self._needed_bytes(n * size)
        )

    def remedies(self) -> list[Remedy]:
        """Everything that helps: changes of formats that keep the wanted context, else with the context they leave."""
        if self.fits:
            return []
        shorter = (
            [Remedy(f"a shorter context (max_model_len={self.context_len})", self.context_len)] if self.context_len else []
        )
        changed = [(words, replace(self, formats=formats)) for words, formats in self._changes()]
        whole = [words for words, fit in changed if fit.fits]
        if whole:
            enough = [words for words in whole if not any(set(fewer) < set(words) for fewer in whole)]
            return [*(Remedy(" with ".join(words), self.wanted_len) for words in enough), *shorter]
        less = [(" with ".join(words), fit.context_len) for words, fit in changed if fit.context_len > self.context_len]
        return [*shorter, *(Remedy(f"{words} and max_model_len={length}", length) for words, length in less)]

    def explain(self) -> str:
        """What it needs, what there is, and what would make it fit."""
        needs = self._needs(self.wanted_len)
        parts = [
            ("weights", needs.weights_bytes),
            ("activations", needs.activations_bytes),
            ("graphs", needs.graphs_bytes),
            ("slots and batch-invariant attention" if self.load.batch_invariant else "slots", needs.slots_bytes),
            ("device context", needs.context_bytes),
            (f"keys and values of {self.wanted_len} tokens", needs.kv_bytes(self.wanted_len)),
        ]
        said = ", ".join(f"{name} {gib(num_bytes)}" for name, num_bytes in parts if num_bytes)
        said = f"needs {gib(self.needed_bytes)} ({said}), and {gib(self.usable_bytes)} may be used"
        if self.fits:
            return said
        helping = "; ".join(remedy.words for remedy in self.remedies())
        return f"{said}; " + (f"what makes it fit: {helping}" if helping else self._smallest())

    def _changes(self) -> list[tuple[tuple[str, ...], Formats]]:
        """Smaller formats, one or two changes at a time."""
        now = self.formats
        kv_8 = replace(now, kv_element_bytes=1)
        has_kv = now.kv_element_bytes > 1
        found: list[tuple[tuple[str, ...], Formats]] = [((KV_8,), kv_8)] if has_kv else []
        for words, weights in ((WEIGHTS_8, EIGHT_BITS), (WEIGHTS_4, FOUR_BITS)):
            if weights.bits < now.weights.bits:
                found.append(((words,), replace(now, weights=weights)))
                found += [((words, KV_8), replace(kv_8, weights=weights))] if has_kv else []
        return found

    def _smallest(self) -> str:
        """What the smallest formats need with room for one block."""
        tried = [self, *(replace(self, formats=formats) for _, formats in self._changes())]
        least = min(fit.needs.fixed_bytes + fit.needs.block_bytes for fit in tried)
        return f"no change here makes it fit: the smallest formats need {gib(least)} without a context to speak of"


def gib(num_bytes: int) -> str:
    """In GiB, as memory of devices is told; small amounts in MiB."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB // 2 else f"{num_bytes / (1 << 20):.1f} MiB"


def told(parts: Sequence[MemoryPart]) -> str:
    """For the log: `weights 15.0 GiB (predicted 15.1 GiB), …`."""
    words = [
        f"{part.name} predicted {gib(part.predicted_bytes)}"
        if part.measured_bytes is None
        else f"{part.name} {gib(part.measured_bytes)} (predicted {gib(part.predicted_bytes)})"
        for part in parts
        if part.predicted_bytes or part.measured_bytes
    ]
    return ", ".join(words)


def underestimated(parts: Sequence[MemoryPart]) -> list[MemoryPart]:
    """Those that took more than was predicted; the context holds what other processes took and is left out."""
    return [
        part
        for part in parts
        if part.name != "context"
        and part.measured_bytes is not None
        and part.measured_bytes > part.predicted_bytes * (1 + TOLERANCE)
    ]
