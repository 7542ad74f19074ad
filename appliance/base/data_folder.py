"""The data folder at startup: created private, and restored if the startup fails. Defines the names of its files."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from appliance.base.settings import UnusableData

LOCK_FILE = "gatehouse.lock"
PEPPER_FILE = "secret.key"
CONTROL_FILE = "control.json"
# Name prefixes of the files that a startup creates before anything worth keeping: the database with its companion
# files, the lock, the pepper and the control file.
REMOVABLE_PREFIXES = ("gatehouse.db", LOCK_FILE, PEPPER_FILE, CONTROL_FILE)
_ADVICE = "choose another folder with --data-dir"


def make_data_folder(path: Path) -> bool:
    """Create the folder if missing, accessible only to its owner, and return whether it was missing. Raises UnusableData."""
    is_new = not os.path.lexists(path)
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise UnusableData(f"cannot create the data folder {path} ({error.strerror}): {_ADVICE}") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise UnusableData(f"the data folder {path} is not writable by this user: {_ADVICE}")
    return is_new


def is_locked(path: Path) -> bool:
    """Return whether an appliance holds the lock of the folder. The check itself holds it for a moment."""
    try:
        with open(path / LOCK_FILE, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def sync_folder(path: Path) -> None:
    """Make new directory entries of a folder durable (fsync). Raises OSError."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@dataclass(slots=True)
class StartupFiles:
    """The files that a startup has created in the data folder so far. Set `keep` once the startup has succeeded."""

    folder: Path
    folder_is_new: bool
    before: frozenset[str]
    keep: bool = False

    @classmethod
    def begin(cls, folder: Path) -> StartupFiles:
        """Create the folder if it is missing, and record its current content. Raises UnusableData."""
        is_new = make_data_folder(folder)
        return cls(folder, is_new, frozenset(os.listdir(folder)))

    @contextlib.contextmanager
    def removed_on_failure(self) -> Iterator[None]:
        """Remove the new files if the block raises. Enter it with the lock held, so that no other process created them."""
        try:
            yield
        except BaseException:
            if not self.keep:
                self._remove_new_files()
            raise

    def _remove_new_files(self) -> None:
        new = set(os.listdir(self.folder)) - self.before
        if not all(name.startswith(REMOVABLE_PREFIXES) for name in new):
            return  # there are other files, such as a login that has not been shown yet: keep everything
        for name in new:
            (self.folder / name).unlink(missing_ok=True)
        if self.folder_is_new:
            with contextlib.suppress(OSError):  # another process has just created a file in it
                self.folder.rmdir()
