"""Draws, measures and wraps text of any script on a PDF page: chooses a font for each character.

Latin, Greek, Cyrillic, Hebrew, Arabic, Armenian and Georgian use the fonts next to this file, which are embedded. Chinese,
Japanese and Korean use the standard fonts supplied by PDF readers. A character in no font is drawn as U+FFFD, so that its
absence is visible.
"""

from __future__ import annotations

import unicodedata
from functools import cache, lru_cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from appliance.metering.invoicing.pdf_bidi import to_visual_order

if TYPE_CHECKING:
    from reportlab.pdfgen.canvas import Canvas

Align = Literal["left", "right", "center"]

REGULAR, BOLD = "DejaVuSans", "DejaVuSans-Bold"
JAPANESE, CHINESE, KOREAN = "HeiseiKakuGo-W5", "STSong-Light", "HYGothic-Medium"
MISSING = "\ufffd"
_FONTS = Path(__file__).parent / "fonts"
_HAN = (
    (0x2E80, 0x2FDF),
    (0x3000, 0x303F),
    (0x3100, 0x312F),
    (0x3200, 0x4DBF),
    (0x4E00, 0x9FFF),
    (0xF900, 0xFAFF),
    (0xFE30, 0xFE4F),
)
_KANA = ((0x3040, 0x30FF), (0x31F0, 0x31FF))
_HANGUL = ((0x1100, 0x11FF), (0x3130, 0x318F), (0xAC00, 0xD7A3))
_FULL_WIDTH = ((0xFF00, 0xFFEF),)


@cache
def _embedded_code_points() -> frozenset[int]:
    """Register all fonts, once, and return the code points that the embedded fonts have glyphs for."""
    from reportlab.pdfbase import pdfmetrics
    from reportlab.pdfbase.cidfonts import UnicodeCIDFont
    from reportlab.pdfbase.ttfonts import TTFont

    embedded = [TTFont(name, str(_FONTS / f"{name}.ttf")) for name in (REGULAR, BOLD)]
    for font in (*embedded, *(UnicodeCIDFont(name) for name in (JAPANESE, CHINESE, KOREAN))):
        pdfmetrics.registerFont(font)
    regular, bold = ({code for code, glyph in font.face.charToGlyph.items() if glyph} for font in embedded)
    return frozenset(regular & bold)


def font_runs(text: str, *, bold: bool = False) -> list[tuple[str, str]]:
    """Split `text` into runs of one font: (font, characters), in visual order."""
    own, covered = BOLD if bold else REGULAR, _embedded_code_points()
    if text.isascii() and text.isprintable():
        return [(own, text)]
    east_asian = _east_asian_font(text)
    placements: list[tuple[str, str]] = []
    for character in to_visual_order(text):
        if _own_east_asian_font(character) is not None:
            placements.append((east_asian or own, character))
        elif not _is_invisible(character):
            placements.append((own, character if ord(character) in covered else MISSING))
    return [
        (font, "".join(character for _, character in group)) for font, group in groupby(placements, key=lambda item: item[0])
    ]


def text_width(text: str, size: float, *, bold: bool = False) -> float:
    """Return the width of one line in points."""
    from reportlab.pdfbase.pdfmetrics import stringWidth

    return float(sum(stringWidth(characters, font, size) for font, characters in font_runs(text, bold=bold)))


def draw(canvas: Canvas, x: float, y: float, text: str, size: float, *, bold: bool = False, align: Align = "left") -> None:
    """Draw one line with its baseline at `y`; `x` is its left end, right end or centre, according to `align`."""
    from reportlab.pdfbase.pdfmetrics import stringWidth

    offset = {"left": 0.0, "right": 1.0, "center": 0.5}[align]
    x -= offset * text_width(text, size, bold=bold)
    for font, characters in font_runs(text, bold=bold):
        canvas.setFont(font, size)
        canvas.drawString(x, y, characters)
        x += float(stringWidth(characters, font, size))


def wrap(text: str, size: float, width: float, *, bold: bool = False) -> list[str]:
    """Wrap `text` into lines of at most `width` points, breaking between words. A word longer than a line is broken
    after a hyphen or a slash, or anywhere if it has none."""
    lines: list[str] = []
    line = ""
    for word in text.split():
        longer = f"{line} {word}" if line else word
        if text_width(longer, size, bold=bold) <= width:
            line = longer
            continue
        lines += [line] if line else []
        *full, line = _split_word(word, size, width, bold=bold)
        lines += full
    return [*lines, line] if line or not lines else lines


def _split_word(word: str, size: float, width: float, *, bold: bool) -> list[str]:
    pieces = [""]
    for character in word:
        while pieces[-1] and text_width(pieces[-1] + character, size, bold=bold) > width:
            end = max(pieces[-1].rfind(mark) for mark in "-/") + 1 or len(pieces[-1])
            pieces[-1:] = [pieces[-1][:end], pieces[-1][end:]]
        pieces[-1] += character
    return pieces


def _east_asian_font(text: str) -> str | None:
    """Return the font for all East Asian characters of a text: kana indicate Japanese, hangul Korean."""
    fonts = {_own_east_asian_font(character) for character in text}
    return next((font for font in (JAPANESE, KOREAN, CHINESE) if font in fonts), None)


@lru_cache(maxsize=4096)
def _own_east_asian_font(character: str) -> str | None:
    """Return the font that an East Asian character indicates; None for other characters."""
    if _in_ranges(character, _KANA):
        return JAPANESE
    if _in_ranges(character, _HANGUL):
        return KOREAN
    return CHINESE if _in_ranges(character, (*_HAN, *_FULL_WIDTH)) else None


def _in_ranges(character: str, ranges: tuple[tuple[int, int], ...]) -> bool:
    return any(first <= ord(character) <= last for first, last in ranges)


def _is_invisible(character: str) -> bool:
    """Return whether a character has no glyph: joiners, direction marks, variation selectors."""
    return unicodedata.category(character) in ("Cf", "Cc") or "\ufe00" <= character <= "\ufe0f" or ord(character) >= 0xE0000
