"""What a container or a service may use of its machine: the limits of this process' control groups. Knows no torch.

A process is in a group of version 2, or in one for each controller of version 1, and a limit of a group holds for all below it.
Inside a container the path to the group may be the one outside; then the root of the mount is the container's own group. What
cannot be read limits nothing, and other systems than Linux have no groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def cores() -> float | None:
    """Cores whose time the process may use, by the least quota; None is all."""
    quotas = [_quota(folder) for folder in _folders("cpu")]
    return min((quota for quota in quotas if quota is not None), default=None)


def memory_bytes() -> int | None:
    """Main memory that the process may take, with all others of its groups; None is all."""
    limits: list[int] = []
    for folder in _folders("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            limits += _numbers(folder / name)
    return min(limits, default=None)


def _folders(controller: str) -> Iterator[Path]:
    """The folders of the process' groups under this controller, from the innermost one to the root."""
    for line in _text(MEMBERSHIP).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = MOUNT / controller if controllers else MOUNT
        folder = root / path.lstrip("/")
        yield from (parent for parent in (folder, *folder.parents) if parent.is_relative_to(root))


def _quota(folder: Path) -> float | None:
    """Version 2 writes time and period on one line, version 1 in two files."""
    numbers = _numbers(folder / "cpu.max") or [*_numbers(folder / "cpu.cfs_quota_us"), *_numbers(folder / "cpu.cfs_period_us")]
    return numbers[0] / numbers[1] if len(numbers) == 2 and min(numbers) > 0 else None


def _numbers(path: Path) -> list[int]:
    """The numbers in a file; none where there is no limit, which version 2 writes as `max` and version 1 as -1."""
    words = _text(path).split()
    return [int(word) for word in words] if words and all(map(str.isdecimal, words)) else []


def _text(path: Path) -> str:
    try:
        return path.read_text("ascii")
    except (OSError, UnicodeDecodeError):
        return ""
