"""Parts of messages for people: numbers with a noun, and suggestions for mistyped names."""

from __future__ import annotations

from collections.abc import Callable, Iterable


def counted(number: int, noun: str, *, plural: str | None = None) -> str:
    """Return such as `1 tenant` or `2 tenants`; `plural` is for nouns that do not just add an s."""
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"


SUGGESTION_CHARS_MAX = 100  # comparing a name takes time in proportion to its length


def did_you_mean(name: str, known: Iterable[str], *, spelled: Callable[[str], str] = str) -> str:
    """Return "; did you mean …?" with the known name that is closest to a mistyped one, nothing if none is close or the name
    has more than SUGGESTION_CHARS_MAX characters.

    `spelled` returns what to type for a known name.
    """
    if len(name) > SUGGESTION_CHARS_MAX:
        return ""
    import difflib

    return "".join(f"; did you mean {spelled(match)!r}?" for match in difflib.get_close_matches(name, list(known), n=1))
