"""The data folder at a start: made private, and left as it was found when the start is refused. Knows what files are called."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from appliance.base.settings import UnusableData

LOCK_FILE = "gatehouse.lock"
PEPPER_FILE = "secret.key"
CONTROL_FILE = "control.json"
# What a start makes before anything that somebody could miss: database with its companions, lock, pepper, control file.
TRACES = ("gatehouse.db", LOCK_FILE, PEPPER_FILE, CONTROL_FILE)
_ANOTHER = "choose a folder of your own with --data-dir"


def make_data_folder(path: Path) -> bool:
    """Make the folder, for its owner alone; return whether it was not there. Raises UnusableData, which says what to do."""
    is_new = not os.path.lexists(path)
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise UnusableData(f"the data folder {path} cannot be made ({error.strerror}): {_ANOTHER}") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise UnusableData(f"the data folder {path} cannot be written by this user: {_ANOTHER}")
    return is_new


def sync_folder(path: Path) -> None:
    """Make the names of new files in a folder durable. Raises OSError."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@dataclass(slots=True)
class StartTraces:
    """What a start has made in the data folder so far. `keep` once it has succeeded."""

    folder: Path
    folder_is_new: bool
    before: frozenset[str]
    keep: bool = False

    @classmethod
    def begin(cls, folder: Path) -> StartTraces:
        """Make the folder if it is missing, and remember what lies in it. Raises UnusableData."""
        is_new = make_data_folder(folder)
        return cls(folder, is_new, frozenset(os.listdir(folder)))

    @contextlib.contextmanager
    def undone_when_refused(self) -> Iterator[None]:
        """Remove what the block has made when it raises. Enter it with the lock held: the files are then this start's own."""
        try:
            yield
        except BaseException:
            if not self.keep:
                self._undo()
            raise

    def _undo(self) -> None:
        new = set(os.listdir(self.folder)) - self.before
        if not all(name.startswith(TRACES) for name in new):
            return  # a login that waits to be shown, or something of somebody else's: all that belongs to it stays
        for name in new:
            (self.folder / name).unlink(missing_ok=True)
        if self.folder_is_new:
            with contextlib.suppress(OSError):  # something has come into it at this moment
                self.folder.rmdir()
