"""The header Allow, which names every method of a path (RFC 9110, section 10.2.1), in the words of API and console alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def allow(methods: Iterable[str]) -> str:
    """Return the value of Allow for a path whose handlers take `methods`: HEAD goes wherever GET goes."""
    answered = set(methods)
    return ", ".join(sorted(answered | {"HEAD"} if "GET" in answered else answered))


def with_whole_allow(headers: Mapping[str, str] | None) -> dict[str, str]:
    """Return the headers of an error of the framework, whose Allow leaves out HEAD and is in no order."""
    return {name: allow(value.split(", ")) if name == "allow" else value for name, value in (headers or {}).items()}
