"""The data folder at the start: permissions, errors, and the removal of new files after a refused start."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from appliance.base.data_folder import StartupFiles, make_data_folder
from appliance.base.settings import UnusableData


def test_the_folder_is_created_with_its_parents_and_mode_0700(tmp_path: Path) -> None:
    folder = tmp_path / "some" / "where"
    assert make_data_folder(folder) is True
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert make_data_folder(folder) is False


@pytest.mark.parametrize("path", ["/proc/nothing", "file/below"])
def test_a_folder_that_cannot_be_created_is_named_with_advice(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UnusableData, match=r"cannot create the data folder .* \(.*\): choose .* --data-dir"):
        make_data_folder(tmp_path / path)


def fail_start(startup_files: StartupFiles, *names: str, keep: bool = False) -> None:
    def start() -> None:
        with startup_files.removed_on_failure():
            for name in names:
                (startup_files.folder / name).touch()
            startup_files.keep = keep
            raise UnusableData("the database does not answer")

    with pytest.raises(UnusableData):
        start()


def test_a_refused_start_leaves_no_new_folder(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    names = ("gatehouse.lock", "gatehouse.db", "gatehouse.db-wal", "gatehouse.db.claim", "secret.key")
    fail_start(StartupFiles.begin(folder), *names)
    assert not folder.exists()


def test_a_refused_start_keeps_existing_files(tmp_path: Path) -> None:
    for name in ("gatehouse.db", "secret.key", "gatehouse.toml"):
        (tmp_path / name).write_text("old")
    fail_start(StartupFiles.begin(tmp_path), "gatehouse.lock", "gatehouse.db-wal", "gatehouse.db")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gatehouse.db", "gatehouse.toml", "secret.key"]


@pytest.mark.parametrize("name", ["first-login-pending", "gatehouse.toml"])
def test_a_refused_start_keeps_all_files_beside_a_pending_login_or_a_foreign_file(tmp_path: Path, name: str) -> None:
    fail_start(StartupFiles.begin(tmp_path / "data"), "gatehouse.db", "secret.key", name)
    assert {path.name for path in (tmp_path / "data").iterdir()} == {"gatehouse.db", "secret.key", name}


def test_a_successful_start_keeps_its_files(tmp_path: Path) -> None:
    fail_start(StartupFiles.begin(tmp_path / "data"), "gatehouse.lock", "gatehouse.db", keep=True)
    assert (tmp_path / "data" / "gatehouse.db").exists()
