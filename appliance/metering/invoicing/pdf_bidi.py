"""Converts text from logical to visual order, for right-to-left scripts. Pure; knows no fonts.

Arabic letters are replaced by their presentation forms (isolated, initial, medial, final), taken from Unicode's decompositions.
The order follows UAX #9 without explicit embeddings: enough for names and addresses.
"""

from __future__ import annotations

import unicodedata
from functools import cache

_MIRRORED = str.maketrans("()[]{}<>«»‹›", ")(][}{><»«›‹")
_RIGHT_TO_LEFT = ("R", "AL")
_STRONG = ("L", *_RIGHT_TO_LEFT)
_NUMBERS = ("EN", "AN")
_POSITIONS = {  # by (joins the previous letter, joins the next letter)
    (False, False): "isolated",
    (False, True): "initial",
    (True, True): "medial",
    (True, False): "final",
}
_LAM, _ALEFS = "\u0644", "\u0622\u0623\u0625\u0627"


def to_visual_order(text: str) -> str:
    """Return `text` with Arabic letters joined, in the order in which it is drawn from left to right."""
    text = unicodedata.normalize("NFC", text)
    if not any(unicodedata.bidirectional(character) in _RIGHT_TO_LEFT for character in text):
        return text
    joined = _shape_arabic(text)
    levels = _levels(joined)
    return "".join(_reorder(joined, levels))


@cache
def _presentation_forms() -> dict[tuple[str, str], str]:
    """Return the presentation forms by (letters, position)."""
    forms: dict[tuple[str, str], str] = {}
    for code in (*range(0xFB50, 0xFE00), *range(0xFE70, 0xFEFD)):
        position, *bases = unicodedata.decomposition(chr(code)).split() or [""]
        if position in ("<isolated>", "<initial>", "<medial>", "<final>"):
            letters = "".join(chr(int(base, 16)) for base in bases)
            forms.setdefault((letters, position[1:-1]), chr(code))
    return forms


def _shape_arabic(text: str) -> str:
    """Replace Arabic letters by their presentation forms, and drop vowel marks, which names are written without."""
    forms = _presentation_forms()
    letters = [character for character in text if not (unicodedata.combining(character) and "\u0600" <= character <= "\u06ff")]
    shaped: list[str] = []
    index, previous_joins = 0, False  # previous_joins: the previous letter can join this one
    while index < len(letters):
        letter = letters[index]
        pair = letter + letters[index + 1] if letter == _LAM and index + 1 < len(letters) else ""
        if pair and pair[1] in _ALEFS:
            letter, index = pair, index + 1
        following = letters[index + 1] if index + 1 < len(letters) else ""
        joins_next = (letter, "initial") in forms and (following, "final") in forms
        joins_previous = previous_joins and (letter, "final") in forms
        shaped.append(forms.get((letter, _POSITIONS[joins_previous, joins_next]), letter))
        previous_joins = joins_next
        index += 1
    return "".join(shaped)


def _levels(text: str) -> list[int]:
    """Return the embedding level of each character; odd levels run from right to left."""
    bidi_classes = _merge_number_separators([unicodedata.bidirectional(character) for character in text])
    base = int(next(bidi_class for bidi_class in bidi_classes if bidi_class in _STRONG) != "L")
    is_rtl = _directions(bidi_classes, base)
    return [_level(bidi_class, is_rtl, index, base) for index, bidi_class in enumerate(bidi_classes)]


def _directions(bidi_classes: list[str], base: int) -> list[bool | None]:
    """Return whether each character runs from right to left; None for a neutral (space or punctuation)."""
    is_rtl: list[bool | None] = []
    current = base == 1
    for bidi_class in bidi_classes:
        if bidi_class in _STRONG:
            current = bidi_class != "L"
        is_rtl.append(current if bidi_class in _STRONG or bidi_class in _NUMBERS else None)
    return is_rtl


def _level(bidi_class: str, is_rtl: list[bool | None], index: int, base: int) -> int:
    if is_rtl[index] is None:
        return _neutral_level(is_rtl, index, base)
    if bidi_class in _RIGHT_TO_LEFT:
        return 1
    return 2 if bidi_class in _NUMBERS and is_rtl[index] else 2 * base


def _merge_number_separators(bidi_classes: list[str]) -> list[str]:
    """Make a separator between two digits, as in 12-34 and 1,5, part of the number (UAX #9, W4)."""
    joined = list(bidi_classes)
    for index in range(1, len(bidi_classes) - 1):
        if bidi_classes[index] in ("ES", "CS") and bidi_classes[index - 1] == bidi_classes[index + 1] == "EN":
            joined[index] = "EN"
    return joined


def _neutral_level(is_rtl: list[bool | None], index: int, base: int) -> int:
    """Return the level of a neutral: that of its neighbours if their directions agree, otherwise that of the text."""
    base_is_rtl = base == 1
    before = next((known for known in reversed(is_rtl[:index]) if known is not None), base_is_rtl)
    after = next((known for known in is_rtl[index + 1 :] if known is not None), base_is_rtl)
    if before != after:
        return base
    return 1 if before else 2 * base


def _reorder(text: str, levels: list[int]) -> list[str]:
    """Reverse each run of characters at or above a level, from the highest level down to 1 (UAX #9, L2 and L4)."""
    drawn = [character.translate(_MIRRORED) if level % 2 else character for character, level in zip(text, levels, strict=True)]
    for floor in range(max(levels), 0, -1):
        start = None
        for index in range(len(drawn) + 1):
            inside = index < len(drawn) and levels[index] >= floor
            if inside and start is None:
                start = index
            elif not inside and start is not None:
                drawn[start:index] = drawn[start:index][::-1]
                levels[start:index] = levels[start:index][::-1]
                start = None
    return drawn
