"""The lock files: exact versions of all packages, parsed without pip."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace
from pathlib import Path

from steps.paths import REQUIREMENTS

_PIN = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^\s;#]+)\s*(?:;\s*(?P<marker>[^#]*?))?\s*(?:#.*)?$")


@dataclass(frozen=True)
class Pin:
    """One line of a lock file: a package at one version, for machines that match its marker (empty: all)."""

    name: str
    version: str
    marker: str = ""


@dataclass(frozen=True)
class Lock:
    """One lock file. `profile` is cpu, gpu, test or triton; `digest` changes with every byte of the file."""

    profile: str
    pins: tuple[Pin, ...]
    digest: str

    def version(self, name: str) -> str:
        """Return the locked public version (no local part) of `name`. Raises KeyError if it is not locked."""
        for pin in self.pins:
            if pin.name == name:
                return pin.version.partition("+")[0]
        raise KeyError(name)


def parse(text: str) -> tuple[Pin, ...]:
    """Return the pins of a lock file. Raises ValueError on a line that is neither a comment nor an exact pin."""
    pins = []
    for line in text.splitlines():
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _PIN.match(line.strip())
        if match is None:
            raise ValueError(f"not an exact pin: {line.strip()!r}")
        pins.append(Pin(normalised(match["name"]), match["version"], (match["marker"] or "").strip()))
    return tuple(pins)


def read_lock(profile: str, folder: Path = REQUIREMENTS) -> Lock:
    """Read `<folder>/<profile>.txt`."""
    content = (folder / f"{profile}.txt").read_bytes()
    return Lock(profile, parse(content.decode("utf-8")), hashlib.sha256(content).hexdigest())


def read_test_lock(folder: Path = REQUIREMENTS) -> Lock:
    """Read the lock of the test packages; its digest also covers the versions of Triton installed with them."""
    lock, tritons = read_lock("test", folder), read_lock("triton", folder)
    return replace(lock, digest=hashlib.sha256(f"{lock.digest} {tritons.digest}".encode()).hexdigest())


def normalised(name: str) -> str:
    """Return the normalised form of a package name (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()
