"""Whether a model fits into a device's memory, and which changes would make it fit, in words. Knows no torch.

Changes are offered in the order of what they cost, each with the context that it leaves: a larger share of the card, which
other programs then lack; smaller fixed caches of the other models; fewer requests and tokens at a time and no captured steps,
which cost speed; a dtype of 16 bits, or fewer bits for output head, keys and values, or weights, which cost quality; and last,
all of them together.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from engine.formats import EIGHT_BITS, FOUR_BITS, Formats, unquantised
from engine.memory.needs import CONTEXT_BYTES, GIB, MemoryNeeds
from engine.memory.shape import Load, MemoryShape
from engine.options import BLOCK_SIZE_MAX

REMEDIES_MAX = 6
GAIN_MIN = 1.1
"""A change is offered only if it makes the context this much longer than cheaper changes do."""

FEW_SEATS = 32
FEW_TOKENS = 2048
"""Tokens of a step: enough for prompts to read the weights seldom, few enough for activations to stay at a few hundred MB."""

MIB = 1 << 20
LARGER_SHARE = 0.95
"""A share of a card's memory that leaves the rest for what was not predicted."""


class Remedy(NamedTuple):
    """A change that makes a model fit: what to do, in words, and the context that fits then. Beside other models this is
    approximate, because with the same change these may choose other numbers of seats."""

    words: str
    context_len: int
    is_approximate: bool = False

    def __str__(self) -> str:
        return f"{self.words}: max_model_len{' about ' if self.is_approximate else '='}{self.context_len}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFit:
    """A model that is to have `wanted_len` tokens of context in `usable_bytes` of a device that computes with fp8, or not.
    `memory_bytes`: all of a GPU's, of which an option sets the usable share. `others_bytes`: what is left to the
    engines of `others`, models that are served from the same GPU; `context_bytes` may include it. `fixed_kv_bytes`: the size
    of the cache, where it is not to take what is left; `required_len`: the context that an option demands of it, else 0."""

    model: MemoryShape
    formats: Formats
    load: Load
    usable_bytes: int
    context_bytes: int
    wanted_len: int
    draft: MemoryShape | None = None
    has_fp8: bool = True
    memory_bytes: int | None = None
    others: tuple[MemoryFit, ...] = ()
    others_bytes: int = 0
    fixed_kv_bytes: int | None = None
    required_len: int = 0

    @property
    def needs(self) -> MemoryNeeds:
        """What is needed with the context that fits."""
        return self._needs(self.context_len)

    def _needs(self, context_len: int) -> MemoryNeeds:
        context_bytes = self.context_bytes
        if self.others_bytes:  # taken yet or not
            context_bytes = max(context_bytes, CONTEXT_BYTES + self.others_bytes)
        return MemoryNeeds.of(
            self.model, self.formats, self.load, context_bytes=context_bytes, context_len=context_len, draft=self.draft
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
    def num_blocks(self) -> int:
        """Blocks of the cache: those of its fixed size, or as many as have room beside the rest."""
        needs = self.needs
        return needs.num_blocks(self.usable_bytes) if self.fixed_kv_bytes is None else self.fixed_kv_bytes // needs.block_bytes

    @property
    def kv_tokens(self) -> int:
        """Tokens whose keys and values fit into these blocks."""
        return self.num_blocks * self.load.block_size

    def remedies(self) -> list[Remedy]:
        """The changes that help, in the order of what they cost, each with the context that then fits: every single change
        with which the wanted one fits, and others where they leave more than all before them. Two changes at a time are
        offered only where neither is enough."""
        if self.fits:
            return []
        found = [Remedy("a shorter context", self.context_len)] if self.context_len else []
        for words, fit in changes_in_order(self):
            best = max((remedy.context_len for remedy in found), default=0)
            if best == self.wanted_len and len(words) > 1:
                continue
            length = fit.context_len
            if length == self.wanted_len or length > best * GAIN_MIN:
                found.append(Remedy((" with " if len(words) == 2 else ", ").join(words), length, bool(self.others)))
        while len(found) > REMEDIES_MAX:
            gains = [after.context_len / before.context_len for before, after in pairwise(found[:-1])]
            del found[1 + gains.index(min(gains))]
        return found

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
            ("device context", needs.context_bytes - self.others_bytes),
            ("the other models of this GPU", self.others_bytes),
            (f"keys and values of {self.wanted_len} tokens", needs.kv_bytes(self.wanted_len)),
        ]
        text = ", ".join(f"{name} {gib(num_bytes)}" for name, num_bytes in parts if num_bytes)
        needed, usable = format_distinct(self.needed_bytes, self.usable_bytes)
        text = f"needs {needed} ({text}), and {usable} may be used"
        if self.memory_bytes is not None:
            text += f" (gpu_memory_utilization={self.share:g} of {gib(self.memory_bytes)})"
        if self.fits:
            return text
        remedies = [str(remedy) for remedy in self.remedies()]
        if not remedies:
            return f"{text}; {self._smallest()}"
        text += "; what would make it fit, for all models of this GPU:" if self.others else "; what would make it fit:"
        return "\n  ".join([text, *remedies]) if in_lines else f"{text} {'; '.join(remedies)}"

    def _smallest(self) -> str:
        """What is needed after all changes, with room for one block."""
        fits = [self, *(fit for _, fit in changes_in_order(self))]
        least = min(fit.needs.fixed_bytes + fit.needs.block_bytes for fit in fits)
        return f"no possible change makes it fit: after all of them it needs {gib(least)} with a minimal context"


class Changed(NamedTuple):
    """What was changed, in words, and the resulting fit."""

    words: str
    fit: MemoryFit


Change = Callable[[MemoryFit], Changed | None]
"""None where there is nothing to change."""


def raise_memory_share(fit: MemoryFit) -> Changed | None:
    usable_bytes = int((fit.memory_bytes or 0) * LARGER_SHARE)
    if usable_bytes <= fit.usable_bytes:
        return None
    words = f"a larger share of the card (gpu_memory_utilization={LARGER_SHARE:g})"
    return Changed(words, replace(fit, usable_bytes=usable_bytes))


def shrink_other_caches(fit: MemoryFit) -> Changed | None:
    """Smaller caches of the other models that have a fixed size, by as much as the wanted context needs. No cache becomes
    smaller than its part if none were fixed, or than the context that its own options require."""
    spare_bytes = _spare_kv_bytes(fit)
    most = sum(spare_bytes) // MIB
    if fit.fits or not most:
        return None
    less = bisect_left(range(most), True, key=lambda mib: _with_smaller_caches(fit, spare_bytes, mib * MIB).fits)
    several = sum(spare > 0 for spare in spare_bytes) > 1
    words = "smaller fixed caches of the other models" if several else "a smaller fixed cache of another model"
    words += f" (kv_cache_bytes {less} MiB less{' in all' if several else ''})"
    return Changed(words, _with_smaller_caches(fit, spare_bytes, less * MIB))


def _spare_kv_bytes(fit: MemoryFit) -> list[int]:
    """By how much the fixed cache of each of the other models may become smaller."""
    divided = [replace(other, fixed_kv_bytes=None) for other in fit.others]
    spare_bytes = []
    for other, part in zip(fit.others, divide_memory(fit.usable_bytes, [fit, *divided])[1:], strict=True):
        needs = other.needs
        part_kv_bytes = part - (needs.fixed_bytes - needs.context_bytes + CONTEXT_BYTES)
        least_bytes = max(part_kv_bytes, needs.kv_bytes(other.required_len or 1))
        spare_bytes.append(max(0, (other.fixed_kv_bytes or 0) - least_bytes))
    return spare_bytes


def _with_smaller_caches(fit: MemoryFit, spare_bytes: Sequence[int], less_bytes: int) -> MemoryFit:
    """`fit` beside caches that are smaller by `less_bytes` in all, each by the same share of what it can spare."""
    smaller = []
    for other, spare in zip(fit.others, spare_bytes, strict=True):
        if spare:
            other = replace(other, fixed_kv_bytes=(other.fixed_kv_bytes or 0) - spare * less_bytes // sum(spare_bytes))
            other = replace(other, wanted_len=min(other.wanted_len, other.kv_tokens))
        smaller.append(other)
    return _beside(fit, smaller)


def shrink_batch(fit: MemoryFit) -> Changed | None:
    load = fit.load
    few = replace(load, num_seqs=min(load.num_seqs, FEW_SEATS), num_tokens=min(load.num_tokens, FEW_TOKENS))
    options: list[str] = []
    if few.num_seqs < load.num_seqs:
        options.append(f"max_num_seqs={few.num_seqs}")
    if few.num_tokens < load.num_tokens:
        options.append(f"max_num_batched_tokens={few.num_tokens}")
    return Changed(f"fewer at a time ({', '.join(options)})", replace(fit, load=few)) if options else None


def disable_graphs(fit: MemoryFit) -> Changed | None:
    if not fit.load.has_slots:
        return None
    return Changed("no captured steps (enforce_eager)", replace(fit, load=replace(fit.load, has_slots=False)))


def dtype_16_bit(fit: MemoryFit) -> Changed | None:
    if not fit.load.on_gpu or fit.formats.element_bytes <= 2:
        return None
    return Changed("numbers in 16 bits (dtype=bfloat16)", replace(fit, formats=_in_16_bits(fit.formats)))


def head_8_bit(fit: MemoryFit) -> Changed | None:
    weights = fit.formats.weights
    if weights.bits > 8 or weights.head_bits:
        return None
    formats = replace(fit.formats, weights=weights._replace(head_bits=8))
    return Changed("the output head in 8 bits (head_quantization=int8)", replace(fit, formats=formats))


def kv_8_bit(fit: MemoryFit) -> Changed | None:
    """A model that gives embeddings alone keeps no keys and values, and refuses a format for them."""
    if not fit.model.kv_token or not fit.has_fp8 or fit.formats.kv_element_bytes == 1:
        return None
    formats = replace(fit.formats, kv_element_bytes=1)
    return Changed("keys and values in 8 bits (kv_cache_dtype=fp8)", replace(fit, formats=formats))


def weights_8_bit(fit: MemoryFit) -> Changed | None:
    if fit.formats.weights.bits <= 8:
        return None
    formats = replace(fit.formats, weights=EIGHT_BITS)
    named = "int8 or fp8" if fit.has_fp8 else "int8"
    return Changed(f"weights in 8 bits (quantization={named})", replace(fit, formats=formats))


def weights_4_bit(fit: MemoryFit) -> Changed | None:
    """A GPU has kernels for 4 bits where it computes in 16."""
    if fit.formats.weights.bits <= 4:
        return None
    formats = _in_16_bits(fit.formats) if fit.load.on_gpu else fit.formats
    return Changed("weights in 4 bits (an AWQ or GPTQ checkpoint)", replace(fit, formats=replace(formats, weights=FOUR_BITS)))


CHANGES_BY_COST: tuple[tuple[Change, ...], ...] = (
    (raise_memory_share,),
    (shrink_other_caches,),
    (shrink_batch,),
    (disable_graphs,),
    (shrink_batch, disable_graphs),
    (dtype_16_bit,),
    (head_8_bit,),
    (kv_8_bit,),
    (dtype_16_bit, kv_8_bit),
    (weights_8_bit,),
    (weights_8_bit, kv_8_bit),
    (weights_4_bit,),
    (weights_4_bit, kv_8_bit),
)
COMBINED_CHANGES: tuple[tuple[Change, ...], ...] = (
    (raise_memory_share, shrink_batch, disable_graphs, weights_8_bit, kv_8_bit, shrink_other_caches),
    (raise_memory_share, shrink_batch, disable_graphs, weights_4_bit, kv_8_bit, shrink_other_caches),
    (raise_memory_share, shrink_batch, disable_graphs, weights_4_bit, head_8_bit, kv_8_bit, shrink_other_caches),
)


def changes_in_order(fit: MemoryFit) -> list[tuple[list[str], MemoryFit]]:
    """What can be changed, alone or two at a time; at the end all at once, without what is done already."""
    found: list[tuple[list[str], MemoryFit]] = []
    for changes in (*CHANGES_BY_COST, *COMBINED_CHANGES):
        words, changed = _apply_changes(changes, fit)
        if len(words) >= (2 if changes in COMBINED_CHANGES else len(changes)):
            found.append((words, changed))
    return found


def _apply_changes(changes: Sequence[Change], fit: MemoryFit) -> tuple[list[str], MemoryFit]:
    words = []
    for change in changes:
        changed = change(fit)
        if changed is not None:
            words.append(changed.words)
            fit = _change_others(change, changed.fit)
    return words, fit


def _change_others(change: Change, fit: MemoryFit) -> MemoryFit:
    """`fit` with the same change of the other models, where they have room for it, and the GPU divided anew."""
    if not fit.others:
        return fit
    return _beside(fit, [other if (changed := change(other)) is None else changed.fit for other in fit.others])


def _beside(fit: MemoryFit, others: Sequence[MemoryFit]) -> MemoryFit:
    """`fit` beside these other models, with the GPU divided anew."""
    return replace(fit, others=tuple(others), others_bytes=sum(divide_memory(fit.usable_bytes, [fit, *others])[1:]))


def divide_memory(usable_bytes: int, fits: Sequence[MemoryFit]) -> list[int]:
    """The bytes of a GPU that each of these engines has, each with a driver's context of its own: what it needs besides keys
    and values, and its cache. What caches of fixed sizes leave is divided so that all others hold the same number of tokens."""
    needs = [fit.needs for fit in fits]
    fixed_bytes = [
        need.fixed_bytes - need.context_bytes + CONTEXT_BYTES + (fit.fixed_kv_bytes or 0)
        for fit, need in zip(fits, needs, strict=True)
    ]
    left_bytes = max(0, usable_bytes - sum(fixed_bytes))
    kv_bytes = [
        need.kv_bytes(BLOCK_SIZE_MAX) if fit.fixed_kv_bytes is None else 0 for fit, need in zip(fits, needs, strict=True)
    ]
    return [fixed + left_bytes * kv // max(1, sum(kv_bytes)) for fixed, kv in zip(fixed_bytes, kv_bytes, strict=True)]


def _in_16_bits(formats: Formats) -> Formats:
    """Weights too, where they are kept as they are computed with."""
    weights = unquantised(2) if formats.weights.bits > 8 else formats.weights
    return Formats(weights=weights, element_bytes=2, kv_element_bytes=min(2, formats.kv_element_bytes))


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
