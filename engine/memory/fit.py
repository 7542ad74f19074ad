"""Why a model does not fit into a device's memory, and which changes would make it fit, in words. Knows no torch.

What helps is told in the order of what it costs (`remedies`), each change with the context that it leaves.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from engine.formats import Formats
from engine.memory.needs import GIB, MemoryNeeds
from engine.memory.remedies import MemoryChoices, changes_in_order
from engine.memory.shape import Load, MemoryShape
from engine.protocol import MemoryPart

REMEDIES_MAX = 6
GAIN_MIN = 1.1
"""By which a change must lengthen the context over what costs less, to be worth a line."""

TOLERANCE = 0.05
"""By which a part may be larger than predicted before the log warns of it."""


class Remedy(NamedTuple):
    """A change that makes a model fit: what to do, in words, and the context that fits then."""

    words: str
    context_len: int

    def __str__(self) -> str:
        return f"{self.words}: max_model_len={self.context_len}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFit:
    """A model that is to have `wanted_len` tokens of context in `usable_bytes` of a device that computes with fp8, or not.
    `memory_bytes`: all of a GPU's, of which an option says the share that is usable."""

    model: MemoryShape
    formats: Formats
    load: Load
    usable_bytes: int
    context_bytes: int
    wanted_len: int
    draft: MemoryShape | None = None
    has_fp8: bool = True
    memory_bytes: int | None = None

    @property
    def needs(self) -> MemoryNeeds:
        """What is needed with the context that fits."""
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
        """Bytes that are needed for one request of the wanted length."""
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

    @property
    def kv_tokens(self) -> int:
        """How many tokens have room for their keys and values beside the rest."""
        return self.needs.num_blocks(self.usable_bytes) * self.load.block_size

    def remedies(self) -> list[Remedy]:
        """The changes that help, in the order of what they cost, each with the context that then fits: every single change
        with which the wanted one fits, and others where they leave more than all before them. Two changes at a time are
        offered only where neither is enough."""
        if self.fits:
            return []
        found = [Remedy("a shorter context", self.context_len)] if self.context_len else []
        for words, choices in changes_in_order(self._choices):
            best = max((remedy.context_len for remedy in found), default=0)
            if best == self.wanted_len and len(words) > 1:
                continue
            length = self._with(choices).context_len
            if length == self.wanted_len or length > best * GAIN_MIN:
                found.append(Remedy((" with " if len(words) == 2 else ", ").join(words), length))
        while len(found) > REMEDIES_MAX:
            gains = [after.context_len / before.context_len for before, after in pairwise(found[:-1])]
            del found[1 + gains.index(min(gains))]
        return found

    @property
    def _choices(self) -> MemoryChoices:
        return MemoryChoices(self.formats, self.load, self.has_fp8, self.usable_bytes, self.memory_bytes)

    def _with(self, choices: MemoryChoices) -> MemoryFit:
        return replace(self, formats=choices.formats, load=choices.load, usable_bytes=choices.usable_bytes)

    @property
    def share(self) -> float | None:
        """The usable share of a GPU's memory, as the option `gpu_memory_utilization` counts it; None on a CPU."""
        return None if self.memory_bytes is None else round(self.usable_bytes / self.memory_bytes, 4)

    def explain(self, *, in_lines: bool = False) -> str:
        """What the model needs, what there is, and what would make it fit: in one line, or with a line for each change."""
        needs = self._needs(self.wanted_len)
        parts = [
            ("weights", needs.weights_bytes),
            ("activations", needs.activations_bytes),
            ("graphs", needs.graphs_bytes),
            ("slots and batch-invariant attention" if self.load.batch_invariant else "slots", needs.slots_bytes),
            ("rotary tables", needs.rotary_bytes),
            ("device context", needs.context_bytes),
            (f"keys and values of {self.wanted_len} tokens", needs.kv_bytes(self.wanted_len)),
        ]
        said = ", ".join(f"{name} {gib(num_bytes)}" for name, num_bytes in parts if num_bytes)
        needed, usable = format_distinct(self.needed_bytes, self.usable_bytes)
        said = f"needs {needed} ({said}), and {usable} may be used"
        if self.memory_bytes is not None:
            said += f" (gpu_memory_utilization={self.share:g} of {gib(self.memory_bytes)})"
        if self.fits:
            return said
        remedies = [str(remedy) for remedy in self.remedies()]
        if not remedies:
            return f"{said}; {self._smallest()}"
        return f"{said}; what would make it fit:" + ("\n  " + "\n  ".join(remedies) if in_lines else f" {'; '.join(remedies)}")

    def _smallest(self) -> str:
        """What is needed after all changes, with room for one block."""
        tried = [self, *(self._with(choices) for _, choices in changes_in_order(self._choices))]
        least = min(fit.needs.fixed_bytes + fit.needs.block_bytes for fit in tried)
        return f"no possible change makes it fit: after all of them it needs {gib(least)} with a minimal context"


def gib(num_bytes: int, digits: int = 1) -> str:
    """An amount of memory in words: in GiB, small ones in MiB."""
    return f"{num_bytes / GIB:.{digits}f} GiB" if num_bytes >= GIB // 2 else f"{num_bytes / (1 << 20):.{digits}f} MiB"


def format_distinct(one: int, other: int) -> tuple[str, str]:
    """Two amounts with as many digits as it takes to see which is larger."""
    for digits in (1, 2, 3):
        words = gib(one, digits), gib(other, digits)
        if words[0] != words[1]:
            return words
    return f"{one} bytes", f"{other} bytes"


def format_parts(parts: Sequence[MemoryPart]) -> str:
    """The parts in words: `weights 15.0 GiB (predicted 15.1 GiB), graphs 0.1 GiB of 9 (predicted 1.0 GiB of 91), …`."""
    return ", ".join(_said(part) for part in parts if part.predicted_bytes or part.measured_bytes)


def _said(part: MemoryPart) -> str:
    predicted = f"predicted {gib(part.predicted_bytes)}{_of(part.num_predicted)}"
    if part.measured_bytes is None:
        return f"{part.name} {predicted}"
    return f"{part.name} {gib(part.measured_bytes)}{_of(part.num_measured)} ({predicted})"


def _of(number: int | None) -> str:
    return "" if number is None else f" of {number}"


def underestimated(parts: Sequence[MemoryPart]) -> list[MemoryPart]:
    """The parts that took more than predicted. The device context is left out, as memory of other processes counts in it."""
    return [
        part
        for part in parts
        if part.name != "device_context"
        and part.measured_bytes is not None
        and part.measured_bytes > part.predicted_bytes * (1 + TOLERANCE)
    ]
