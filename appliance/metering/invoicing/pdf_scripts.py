"""Converts text from reading order to drawing order, for right-to-left scripts. Pure; no fonts.

Arabic letters are replaced by their presentation forms (isolated, initial, medial, final), taken from Unicode's decompositions.
The direction of runs follows UAX #9 without explicit embeddings: enough for names and addresses.
"""

from __future__ import annotations

import unicodedata
from functools import cache

_MIRRORED = str.maketrans("()[]{}<>«»‹›", ")(][}{><»«›‹")
_RIGHT_TO_LEFT = ("R", "AL")
_STRONG = ("L", *_RIGHT_TO_LEFT)
_NUMBERS = ("EN", "AN")
_POSITIONS = {  # by whether a letter connects to the one before and to the one behind
    (False, False): "isolated",
    (False, True): "initial",
    (True, True): "medial",
    (True, False): "final",
}
_LAM, _ALEFS = "\u0644", "\u0622\u0623\u0625\u0627"


def drawn_order(text: str) -> str:
    """Return `text` with letters joined and in the order of drawing, from left to right."""
    text = unicodedata.normalize("NFC", text)
    if not any(unicodedata.bidirectional(character) in _RIGHT_TO_LEFT for character in text):
        return text
    joined = _joined(text)
    levels = _levels(joined)
    return "".join(_reordered(joined, levels))


@cache
def _forms() -> dict[tuple[str, str], str]:
    """Return the presentation form of each (letters, position)."""
    forms: dict[tuple[str, str], str] = {}
    for code in (*range(0xFB50, 0xFE00), *range(0xFE70, 0xFEFD)):
        position, *bases = unicodedata.decomposition(chr(code)).split() or [""]
        if position in ("<isolated>", "<initial>", "<medial>", "<final>"):
            letters = "".join(chr(int(base, 16)) for base in bases)
            forms.setdefault((letters, position[1:-1]), chr(code))
    return forms


def _joined(text: str) -> str:
    """Return `text` with Arabic letters in their presentation forms, and without vowel marks, as names are written."""
    forms = _forms()
    letters = [character for character in text if not (unicodedata.combining(character) and "\u0600" <= character <= "\u06ff")]
    made: list[str] = []
    index, joins = 0, False  # joins: the letter before connects to this one
    while index < len(letters):
        letter = letters[index]
        pair = letter + letters[index + 1] if letter == _LAM and index + 1 < len(letters) else ""
        if pair and pair[1] in _ALEFS:
            letter, index = pair, index + 1
        following = letters[index + 1] if index + 1 < len(letters) else ""
        goes_on = (letter, "initial") in forms and (following, "final") in forms
        reached = joins and (letter, "final") in forms
        made.append(forms.get((letter, _POSITIONS[reached, goes_on]), letter))
        joins = goes_on
        index += 1
    return "".join(made)


def _levels(text: str) -> list[int]:
    """Return the embedding level of each character: odd ones run from right to left."""
    kinds = _numbers_joined([unicodedata.bidirectional(character) for character in text])
    base = int(next(kind for kind in kinds if kind in _STRONG) != "L")
    leftward = _directions(kinds, base)
    return [_level(kind, leftward, index, base) for index, kind in enumerate(kinds)]


def _directions(kinds: list[str], base: int) -> list[bool | None]:
    """Return whether each character is read from right to left; None for a space or sign, which goes with its neighbours."""
    leftward: list[bool | None] = []
    current = base == 1
    for kind in kinds:
        if kind in _STRONG:
            current = kind != "L"
        leftward.append(current if kind in _STRONG or kind in _NUMBERS else None)
    return leftward


def _level(kind: str, leftward: list[bool | None], index: int, base: int) -> int:
    if leftward[index] is None:
        return _level_of_neutral(leftward, index, base)
    if kind in _RIGHT_TO_LEFT:
        return 1
    return 2 if kind in _NUMBERS and leftward[index] else 2 * base


def _numbers_joined(kinds: list[str]) -> list[str]:
    """Return the kinds with a sign between two digits, as in 12-34 and 1,5, counted as part of the number."""
    joined = list(kinds)
    for index in range(1, len(kinds) - 1):
        if kinds[index] in ("ES", "CS") and kinds[index - 1] == kinds[index + 1] == "EN":
            joined[index] = "EN"
    return joined


def _level_of_neutral(leftward: list[bool | None], index: int, base: int) -> int:
    """Return the level of a space or sign: that of its neighbours if they agree, else that of the text."""
    own = base == 1
    before = next((known for known in reversed(leftward[:index]) if known is not None), own)
    after = next((known for known in leftward[index + 1 :] if known is not None), own)
    if before != after:
        return base
    return 1 if before else 2 * base


def _reordered(text: str, levels: list[int]) -> list[str]:
    """Return the characters with each run of a level reversed, from the highest level down to 1 (UAX #9, L2 and L4)."""
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
