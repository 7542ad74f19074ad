"""Writes the output of a run: one JSON document, and the logs of its parts in a directory or in one archive."""

from __future__ import annotations

import json
import tarfile
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ARCHIVES = (".tgz", ".tar.gz")


class ResultFiles:
    """The files are rewritten after each part, so that an interrupted run leaves its results so far. `logs`: a directory, or
    an archive if its suffix is one of ARCHIVES."""

    def __init__(self, result: Path | None, logs: Path | None) -> None:
        self.result = result
        self._archive = logs if logs is not None and logs.name.endswith(ARCHIVES) else None
        self._stack = ExitStack()
        self.logs = logs
        if self._archive is not None:
            self.logs = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self._archive_logs()
        self._stack.close()

    def write(self, report: dict[str, Any]) -> None:
        """Write the files, each atomically."""
        if self.result is not None:
            self.result.parent.mkdir(parents=True, exist_ok=True)
            beside = self.result.with_name(f"{self.result.name}.part")
            beside.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
            beside.replace(self.result)
        self._archive_logs()

    def _archive_logs(self) -> None:
        if self._archive is not None and self.logs is not None:
            self._archive.parent.mkdir(parents=True, exist_ok=True)
            beside = self._archive.with_name(f"{self._archive.name}.part")
            with tarfile.open(beside, "w:gz") as archive:
                for path in sorted(self.logs.iterdir()):
                    archive.add(path, arcname=path.name)
            beside.replace(self._archive)
