"""Sets of Unicode code points as sorted ranges, and the named classes of regular expressions. Knows no syntax."""

from __future__ import annotations

import functools
import re
import sys
import unicodedata

CharSet = tuple[tuple[int, int], ...]
"""Inclusive ranges, sorted, disjoint and not adjacent. Surrogates (U+D800 … U+DFFF) are in none: they are no characters."""

LAST = sys.maxunicode
NONE: CharSet = ()
ANY: CharSet = ((0, 0xD7FF), (0xE000, LAST))


def chars(*ranges: tuple[int, int]) -> CharSet:
    """The set of any ranges, in any order and overlapping."""
    merged: list[list[int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1][1] = max(merged[-1][1], high)
        else:
            merged.append([low, high])
    return intersect(tuple((low, high) for low, high in merged), ANY)


@functools.lru_cache(maxsize=4096)
def of(text: str) -> CharSet:
    """The set of the characters of a text."""
    return chars(*((ord(character), ord(character)) for character in text))


def union(*sets: CharSet) -> CharSet:
    return chars(*(part for inner in sets for part in inner))


def intersect(left: CharSet, right: CharSet) -> CharSet:
    ranges, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        low, high = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if low <= high:
            ranges.append((low, high))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return tuple(ranges)


def complement(inner: CharSet) -> CharSet:
    starts = (0, *(high + 1 for _, high in inner))
    ends = (*(low - 1 for low, _ in inner), LAST)
    return intersect(tuple(zip(starts, ends, strict=True)), ANY)  # without the empty gaps


def contains(inner: CharSet, character: str) -> bool:
    return any(low <= ord(character) <= high for low, high in inner)


DIGIT = of("0123456789")
WORD = union(DIGIT, chars((65, 90), (97, 122)), of("_"))
# ECMA-262 and Python disagree on these few white-space characters.
_SPACE_EVERYWHERE = union(of("\t\n\v\f\r \xa0\u1680\u2028\u2029\u202f\u205f\u3000"), chars((0x2000, 0x200A)))
_SPACE_SOMEWHERE = union(_SPACE_EVERYWHERE, chars((0x1C, 0x1F)), of("\x85\ufeff"))
NEWLINE_EVERYWHERE = of("\n")
NEWLINE_SOMEWHERE = of("\n\r\u2028\u2029")


@functools.cache
def _unicode_class(expression: str) -> CharSet:
    everything = "".join(map(chr, range(LAST + 1)))
    return chars(*((run.start(), run.end() - 1) for run in re.finditer(f"{expression}+", everything)))


def named(letter: str, *, wide: bool) -> CharSet:
    """`\\d \\w \\s`. ECMA-262 reads them as ASCII, Python as all of Unicode. `wide`: the union of both readings, otherwise
    their intersection."""
    if letter == "s":
        return _SPACE_SOMEWHERE if wide else _SPACE_EVERYWHERE
    if wide:
        return _unicode_class(rf"\{letter}")
    return DIGIT if letter == "d" else WORD


@functools.cache
def category(name: str) -> CharSet | None:
    """`\\p{name}` for a general category of Unicode (`L`, `Lu`, `Nd` …); None when there is none of that name."""
    if not re.fullmatch("[CLMNPSZ][a-z]?", name):
        return None
    points = [point for point in range(LAST + 1) if unicodedata.category(chr(point)).startswith(name)]  # 0.1 to 0.3 s
    return chars(*((point, point) for point in points)) or None
