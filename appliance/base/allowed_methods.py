"""The Allow header, which lists the methods of a path (RFC 9110, section 10.2.1). Shared by API and console."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def allow_header(methods: Iterable[str]) -> str:
    """Return the Allow header of a path with handlers for `methods`. A path that supports GET also supports HEAD."""
    supported = set(methods)
    return ", ".join(sorted(supported | {"HEAD"} if "GET" in supported else supported))


def with_complete_allow(headers: Mapping[str, str] | None) -> dict[str, str]:
    """Return the headers of a framework error with a complete, sorted Allow: the framework omits HEAD."""
    return {name: allow_header(value.split(", ")) if name == "allow" else value for name, value in (headers or {}).items()}
