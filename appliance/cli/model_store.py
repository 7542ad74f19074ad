"""Models added to the data folder: `<data_dir>/models/NAME`, each a folder or a symbolic link to one."""

from __future__ import annotations

import difflib
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from appliance.base.texts import did_you_mean
from appliance.cli.failure import CommandFailed, WrongUsage

FOLDER = "models"
_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")
_COPY_CHUNK_BYTES = 16 * 1024 * 1024
_NAMES_LISTED_MAX = 20
_NOT_FOUND = "not_a_model"


def added_models(data_dir: Path) -> list[Path]:
    """Return the added models, sorted by name."""
    folder = data_dir / FOLDER
    return sorted(path for path in folder.iterdir() if _NAME.match(path.name)) if folder.is_dir() else []


def names(data_dir: Path) -> list[str]:
    """Return the names by which models are found without a folder: the demo model's, and those of the added models."""
    from appliance.serving.model_builder import DEMO_MODEL

    return [DEMO_MODEL.name, *(path.name for path in added_models(data_dir))]


def locate(model: str, data_dir: Path) -> Path:
    """Resolve `model` to a folder: an existing path, else an added model, else the demo model. The result may not exist."""
    from appliance.serving.model_builder import DEMO_MODEL

    path = Path(model).expanduser()
    if path.exists() or not _NAME.match(model):
        return path.absolute()
    added = data_dir / FOLDER / model
    if added.exists():
        return added
    return DEMO_MODEL if model == DEMO_MODEL.name else path.absolute()


def locate_existing(model: str, data_dir: Path) -> Path:
    """As `locate`. Raises CommandFailed if the folder does not exist, with the closest one or the names of the added models."""
    path = locate(model, data_dir)
    if not _NAME.match(model):
        check_folder(path)
    if path.exists():
        return path
    link = data_dir / FOLDER / model
    if link.is_symlink():
        raise CommandFailed(f"the added model {model!r} is a link to {link.readlink()}, which does not exist", code=_NOT_FOUND)
    added = [known.name for known in added_models(data_dir)]
    hint = did_you_mean(model, [*names(data_dir), *_folders_in(path.parent)]) or list_added(added)
    raise CommandFailed(f"there is neither a folder {path} nor an added model named {model!r}{hint}", code=_NOT_FOUND)


def check_folder(path: Path) -> None:
    """Raise CommandFailed if `path` does not exist, with the closest folder beside it."""
    if not path.exists():
        hint = closest_folder(path)
        raise CommandFailed(f"there is no folder {path}, and nothing is downloaded{hint}", code=_NOT_FOUND)


def closest_folder(path: Path) -> str:
    """As `did_you_mean`, of the folders beside `path`."""
    closest = difflib.get_close_matches(path.name, _folders_in(path.parent), n=1)
    return "".join(f"; did you mean {str(path.parent / name)!r}?" for name in closest)


def _folders_in(folder: Path) -> list[str]:
    try:
        return [path.name for path in folder.iterdir() if path.is_dir()]
    except OSError:
        return []


def list_added(names: Sequence[str]) -> str:
    """Return the end of a message about an unknown model: the names of the added ones."""
    if not names:
        return "; no model has been added"
    more = len(names) - _NAMES_LISTED_MAX
    return f"; the added models are {', '.join(names[:_NAMES_LISTED_MAX])}{f' and {more} more' if more > 0 else ''}"


def new_model_path(name: str, data_dir: Path) -> Path:
    """Return the path for a new model with this name. Raises CommandFailed if the name is invalid or taken."""
    if not _NAME.match(name):
        raise WrongUsage(f"{name!r} is not a model name: use letters, digits, dots, dashes, underscores; 100 at most")
    path = data_dir / FOLDER / name
    if path.is_symlink() or path.exists():
        raise CommandFailed(f"there is already a model named {name!r}: remove it, or give another --name", code="name_taken")
    return path


def link(source: Path, path: Path) -> None:
    """Add `source` as a symbolic link. Nothing is copied, so the model depends on its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(source.resolve(), target_is_directory=True)


def copy(source: Path, path: Path, *, progress: Callable[[float], None]) -> None:
    """Add a copy of `source`, renamed into place once complete. Raises CommandFailed if there is not enough disk space."""
    files = [file for file in sorted(source.rglob("*")) if file.is_file()]
    total = sum(file.stat().st_size for file in files)
    path.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(path.parent).free
    if free < total:
        raise CommandFailed(f"not enough disk space at {path.parent}: {total} bytes needed, {free} free", code="disk_full")
    partial = path.parent / f".{path.name}.{os.getpid()}"
    try:
        done = 0
        for file in files:
            target = partial / file.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            with file.open("rb") as reader, target.open("wb") as writer:
                while chunk := reader.read(_COPY_CHUNK_BYTES):
                    writer.write(chunk)
                    done += len(chunk)
                    progress(done / max(1, total))
        partial.rename(path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def remove(path: Path) -> None:
    """Remove an added model: the link only, or the copied files."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)
