"""Compiled CPU kernels are cached in a user's folder, or only for the process if that is impossible."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import pytest

from kernels.simd import compiling


@pytest.fixture(autouse=True)
def _unnamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the operator have named no folder."""
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)


def test_the_first_start_says_that_it_compiles_and_later_ones_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with caplog.at_level(logging.INFO, "gatehouse.engine"):
        folder = compiling._folder()
    assert folder.is_relative_to(tmp_path)
    assert "once" in caplog.text
    caplog.clear()
    (folder / "compiled").touch()
    with caplog.at_level(logging.INFO, "gatehouse.engine"):
        assert compiling._folder() == folder
    assert not caplog.text


def test_a_folder_that_the_operator_names_has_one_named_after_the_sources_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numba alone would run what it compiled before an upgrade, where only a function that others call has changed."""
    named = compiling._folder().name
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    assert compiling._folder() == tmp_path / named


def test_the_folder_is_named_after_the_constants_that_are_compiled_in_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(compiling, "__file__", str(tmp_path / "kernels" / "simd" / "compiling.py"))
    Path(compiling.__file__).parent.mkdir(parents=True)
    names = set()
    for farthest in (31, 32):
        (tmp_path / "kernels" / "gumbel.py").write_text(f"FARTHEST = {farthest}")
        names.add(compiling._folder().name)
    assert len(names) == 2


def test_a_folder_that_cannot_be_written_is_said_and_another_one_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "gatehouse").touch()  # no folder can be made below it
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = compiling._folder()
    assert folder.is_dir()
    assert not folder.is_relative_to(tmp_path / "gatehouse")
    assert "cannot be kept" in caplog.text


def test_folders_of_other_versions_are_removed_when_none_has_started_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    own = compiling._folder()
    unused, used, others = (tmp_path / name for name in (f"simd-{'a' * 16}", f"simd-{'b' * 16}", "simd-of-somebody"))
    for folder in (unused, used, others):
        folder.mkdir()
        (folder / "compiled").touch()
    long_ago = time.time() - compiling.UNUSED_S - 60
    for folder in (own, unused, others):
        os.utime(folder, (long_ago, long_ago))
    assert compiling._folder() == own
    assert sorted(tmp_path.iterdir()) == sorted((own, used, others))
    assert own.stat().st_mtime > time.time() - 600, "a start is a use"


def test_a_folder_that_cannot_be_removed_stops_no_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError("not yours")

    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    unused = tmp_path / f"simd-{'a' * 16}"
    unused.mkdir()
    os.utime(unused, (0, 0))
    monkeypatch.setattr(Path, "rename", refused)
    compiling._folder()
    assert unused.is_dir()
