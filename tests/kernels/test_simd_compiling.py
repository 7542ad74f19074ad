"""The directory of compiled kernels: in the user's cache, or one for this process only if that cannot be written."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import pytest

from kernels.simd import compiling


@pytest.fixture(autouse=True)
def _without_numba_cache_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator has not chosen a directory."""
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)


def test_the_first_start_logs_that_it_compiles_and_later_ones_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with caplog.at_level(logging.INFO, "gatehouse.engine"):
        directory = compiling.cache_directory()
    assert directory.is_relative_to(tmp_path)
    assert "once" in caplog.text
    caplog.clear()
    (directory / "compiled").touch()
    with caplog.at_level(logging.INFO, "gatehouse.engine"):
        assert compiling.cache_directory() == directory
    assert not caplog.text


def test_the_operators_directory_gets_a_subdirectory_named_after_the_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numba alone would run code compiled before an upgrade if only a called function has changed."""
    name = compiling.cache_directory().name
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    assert compiling.cache_directory() == tmp_path / name


def test_the_directory_name_depends_on_constants_that_are_compiled_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(compiling, "__file__", str(tmp_path / "kernels" / "simd" / "compiling.py"))
    Path(compiling.__file__).parent.mkdir(parents=True)
    names = set()
    for farthest in (31, 32):
        (tmp_path / "kernels" / "gumbel.py").write_text(f"FARTHEST = {farthest}")
        names.add(compiling.cache_directory().name)
    assert len(names) == 2


def test_an_unwritable_directory_is_logged_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "gatehouse").touch()  # no directory can be created below it
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    directory = compiling.cache_directory()
    assert directory.is_dir()
    assert not directory.is_relative_to(tmp_path / "gatehouse")
    assert "cannot be kept" in caplog.text


def test_directories_of_versions_not_started_for_long_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    current = compiling.cache_directory()
    unused, used, others = (tmp_path / name for name in (f"simd-{'a' * 16}", f"simd-{'b' * 16}", "simd-of-somebody"))
    for directory in (unused, used, others):
        directory.mkdir()
        (directory / "compiled").touch()
    long_ago = time.time() - compiling.UNUSED_S - 60
    for directory in (current, unused, others):
        os.utime(directory, (long_ago, long_ago))
    assert compiling.cache_directory() == current
    assert sorted(tmp_path.iterdir()) == sorted((current, used, others))
    assert current.stat().st_mtime > time.time() - 600, "a start is a use"


def test_a_directory_that_cannot_be_removed_does_not_stop_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError("not yours")

    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    unused = tmp_path / f"simd-{'a' * 16}"
    unused.mkdir()
    os.utime(unused, (0, 0))
    monkeypatch.setattr(Path, "rename", refused)
    compiling.cache_directory()
    assert unused.is_dir()
