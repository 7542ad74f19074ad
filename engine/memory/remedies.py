"""Changes that make a model take less memory, in the order of what they cost. Knows no torch.

First what costs other programs: a larger share of a card. Then what costs speed alone: fewer requests and tokens at a time, no
captured steps. Then what costs quality: numbers in 16 bits, the head in 8, keys and values in 8, weights in 8, both, weights in
4, both; all of it at last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from engine.formats import EIGHT_BITS, FOUR_BITS, Formats, unquantised
from engine.memory.shape import Load

FEW_SEATS = 32
FEW_TOKENS = 2048
"""Of a step: so many that prompts still read the weights seldom, so few that activations are no more than a few hundred MB."""

LARGER_SHARE = 0.95
"""Of a card's memory: the rest is for what nobody foretold."""


class MemoryChoices(NamedTuple):
    """What changes are made to: how numbers are kept, what is held at a time, whether the device computes with fp8, and what
    may be used of how much memory it has, None where it is no card."""

    formats: Formats
    load: Load
    has_fp8: bool
    usable_bytes: int
    memory_bytes: int | None


class Changed(NamedTuple):
    """What was done, in words, and what came of it."""

    words: str
    choices: MemoryChoices


Change = Callable[[MemoryChoices], Changed | None]
"""None where there is nothing to change."""


def larger_share(choices: MemoryChoices) -> Changed | None:
    usable_bytes = int((choices.memory_bytes or 0) * LARGER_SHARE)
    if usable_bytes <= choices.usable_bytes:
        return None
    words = f"a larger share of the card (gpu_memory_utilization={LARGER_SHARE:g})"
    return Changed(words, choices._replace(usable_bytes=usable_bytes))


def fewer_at_a_time(choices: MemoryChoices) -> Changed | None:
    load = choices.load
    few = replace(load, num_seqs=min(load.num_seqs, FEW_SEATS), num_tokens=min(load.num_tokens, FEW_TOKENS))
    options = [
        *([f"max_num_seqs={few.num_seqs}"] if few.num_seqs < load.num_seqs else []),
        *([f"max_num_batched_tokens={few.num_tokens}"] if few.num_tokens < load.num_tokens else []),
    ]
    return Changed(f"fewer at a time ({', '.join(options)})", choices._replace(load=few)) if options else None


def no_captured_steps(choices: MemoryChoices) -> Changed | None:
    if not choices.load.has_slots:
        return None
    return Changed("no captured steps (enforce_eager)", choices._replace(load=replace(choices.load, has_slots=False)))


def numbers_16(choices: MemoryChoices) -> Changed | None:
    if not choices.load.on_gpu or choices.formats.element_bytes <= 2:
        return None
    return Changed("numbers in 16 bits (dtype=bfloat16)", choices._replace(formats=_in_16_bits(choices.formats)))


def head_8(choices: MemoryChoices) -> Changed | None:
    weights = choices.formats.weights
    if weights.bits > 8 or weights.head_bits:
        return None
    formats = replace(choices.formats, weights=weights._replace(head_bits=8))
    return Changed("the output head in 8 bits (head_quantization=int8)", choices._replace(formats=formats))


def kv_8(choices: MemoryChoices) -> Changed | None:
    if not choices.has_fp8 or choices.formats.kv_element_bytes == 1:
        return None
    formats = replace(choices.formats, kv_element_bytes=1)
    return Changed("keys and values in 8 bits (kv_cache_dtype=fp8)", choices._replace(formats=formats))


def weights_8(choices: MemoryChoices) -> Changed | None:
    if choices.formats.weights.bits <= 8:
        return None
    formats = replace(choices.formats, weights=EIGHT_BITS)
    named = "int8 or fp8" if choices.has_fp8 else "int8"
    return Changed(f"weights in 8 bits (quantization={named})", choices._replace(formats=formats))


def weights_4(choices: MemoryChoices) -> Changed | None:
    """A GPU has kernels for 4 bits where it computes in 16."""
    if choices.formats.weights.bits <= 4:
        return None
    formats = _in_16_bits(choices.formats) if choices.load.on_gpu else choices.formats
    return Changed(
        "weights in 4 bits (an AWQ or GPTQ checkpoint)", choices._replace(formats=replace(formats, weights=FOUR_BITS))
    )


IN_ORDER: tuple[tuple[Change, ...], ...] = (
    (larger_share,),
    (fewer_at_a_time,),
    (no_captured_steps,),
    (fewer_at_a_time, no_captured_steps),
    (numbers_16,),
    (head_8,),
    (kv_8,),
    (numbers_16, kv_8),
    (weights_8,),
    (weights_8, kv_8),
    (weights_4,),
    (weights_4, kv_8),
)
EVERYTHING: tuple[tuple[Change, ...], ...] = (
    (larger_share, fewer_at_a_time, no_captured_steps, weights_8, kv_8),
    (larger_share, fewer_at_a_time, no_captured_steps, weights_4, kv_8),
)


def changes_in_order(choices: MemoryChoices) -> list[tuple[list[str], MemoryChoices]]:
    """What can be changed, alone or two at a time; at the end all at once, without what is done already."""
    found = [made for changes in IN_ORDER if len((made := _make(changes, choices))[0]) == len(changes)]
    return found + [made for changes in EVERYTHING if len((made := _make(changes, choices))[0]) > 1]


def _make(changes: Sequence[Change], choices: MemoryChoices) -> tuple[list[str], MemoryChoices]:
    words = []
    for change in changes:
        changed = change(choices)
        if changed is not None:
            words.append(changed.words)
            choices = changed.choices
    return words, choices


def _in_16_bits(formats: Formats) -> Formats:
    """Weights too, where they are kept as they are computed with."""
    size = min(2, formats.element_bytes)
    weights = unquantised(size) if formats.weights.bits > 8 else formats.weights
    return Formats(weights=weights, element_bytes=size, kv_element_bytes=min(size, formats.kv_element_bytes))
